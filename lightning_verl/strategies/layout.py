"""Rank arithmetic: from a world size, a mesh and a ``parallelism_config`` to the layout of every role. Pure Python."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from lightning_verl.resharding.planner import Cut, Grid
from lightning_verl.strategies.mesh import DeviceMesh

ROLES = ("actor", "critic", "reference", "reward")
EXPERT_CUTS = (Cut("expert", 0), Cut("expert_tensor", 0))
"""How packed experts lie on ``RoleLayout.grid(experts=True)``: divided whole, over both axes."""
_ENTRY_KEYS = ("dp", "tp", "pp", "ep", "ranks", "replicate")
_ENGINE_KEYS = ("rollout_tp", "update_dp", "offload_to_cpu")


@dataclass(frozen=True)
class RoleLayout:
    """How one role lies on the ranks: a grid of replicas x pipeline stages x shards x expert ranks x tensor ranks.

    Each coordinate of replicas, shards and expert ranks holds rows of its own; its pipeline and tensor ranks share
    them. Parameters outside of experts do not know the expert axis: FSDP2 cuts them over shards x expert ranks.
    """

    role: str
    """The role's name."""
    replicas: int
    """Whole copies of the role; gradients are averaged over them."""
    shards: int
    """Parts that FSDP2 cuts each stage of a copy into, on each expert rank."""
    tensor: int
    """Ranks that cut the matrices of one shard, and share its rows."""
    ranks: tuple[int, ...]
    """World ranks in the order of the grid, the tensor axis fastest."""
    expert: int = 1
    """Ranks that the experts of a mixture are divided over."""
    pipeline: int = 1
    """Stages that the layers of a copy are divided into."""
    exchange: tuple[int, ...] = ()
    """World ranks between which the actor's rows travel to the role and results back, the actor's own with them,
    ascending; none where rows have one place only."""

    @property
    def data_size(self) -> int:
        """Data ranks: coordinates that hold rows of their own."""
        return self.replicas * self.shards * self.expert

    @property
    def stage_size(self) -> int:
        """Ranks of one stage of one copy."""
        return self.shards * self.expert * self.tensor

    @cached_property
    def _places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.ranks)}

    @cached_property
    def speakers(self) -> tuple[int, ...]:
        """The rank of each data coordinate whose rows count: of its last stage, which has outputs and losses, the first
        of the tensor axis.
        """
        found = {self.data_rank(rank): rank for rank in self.ranks if self.speaks(rank)}
        return tuple(found[coordinate] for coordinate in range(self.data_size))

    def holds(self, rank: int) -> bool:
        """Whether a world rank has a part of the role."""
        return rank in self._places

    def speaks(self, rank: int) -> bool:
        """Whether a world rank's rows count, see ``speakers``."""
        return self.holds(rank) and self.tensor_rank(rank) == 0 and self.stage(rank) == self.pipeline - 1

    def apart_from(self, other: RoleLayout) -> bool:
        """Whether no rank has a part of both roles."""
        return set(self.ranks).isdisjoint(other.ranks)

    def lies_like(self, other: RoleLayout) -> bool:
        """Whether every rank holds the same rows in both roles."""
        return self._rows == other._rows

    @property
    def _rows(self) -> tuple[Any, ...]:
        """What decides who holds which rows: without stages, replicas and shards are one data axis."""
        return self.ranks, self.tensor, self.pipeline, self.replicas if self.pipeline > 1 else 1

    def data_rank(self, rank: int) -> int:
        """The data coordinate of a world rank; ValueError if it has no part of the role."""
        copy, place = divmod(self._place(rank), self.pipeline * self.stage_size)
        return (copy * self.stage_size + place % self.stage_size) // self.tensor

    def tensor_rank(self, rank: int) -> int:
        """The tensor coordinate of a world rank; ValueError if it has no part of the role."""
        return self._place(rank) % self.tensor

    def stage(self, rank: int) -> int:
        """The pipeline coordinate of a world rank; ValueError if it has no part of the role."""
        return self._place(rank) // self.stage_size % self.pipeline

    def stage_ranks(self, stage: int) -> tuple[int, ...]:
        """The world ranks of a stage, in the order of replicas x shards x expert ranks x tensor ranks."""
        return tuple(rank for rank in self.ranks if self.stage(rank) == stage)

    def _place(self, rank: int) -> int:
        if not self.holds(rank):
            raise ValueError(
                f"Rank {rank} has no part of the {self.role}, which lies on ranks {list(self.ranks)}; ask "
                f"strategy.layout({self.role!r}).holds(rank) first."
            )
        return self._places[rank]

    def coordinates(self, rank: int) -> tuple[int, int, int, int]:
        """Where a world rank is in its stage: replica, shard, expert and tensor coordinate."""
        data, tensor = self.data_rank(rank), self.tensor_rank(rank)
        data, expert = divmod(data, self.expert)
        replica, shard = divmod(data, self.shards)
        return replica, shard, expert, tensor

    def lines(self, axis: str) -> list[list[int]]:
        """The ranks that communicate along an axis, one list for each line of the grid.

        Args:
            axis: ``"replicate"``; ``"shard"`` (shards and expert ranks, over which FSDP2 cuts what is no expert);
                ``"expert_shard"`` (over which it cuts the experts); ``"expert"``; ``"tensor"``; ``"data"`` (the data
                ranks of one stage and tensor coordinate); ``"pipeline"``; ``"ends"`` (first and last stage; no lines
                without stages); ``"all"`` (one line of all ranks); or ``"exchange"`` (that of ``exchange``, if any).
        """
        if axis == "ends":
            return [[line[0], line[-1]] for line in self.lines("pipeline") if len(line) > 1]
        if axis == "exchange":
            return [list(self.exchange)] if self.exchange else []
        copy, inner = self.pipeline * self.stage_size, self.expert * self.tensor
        steps = {
            "all": [(len(self.ranks), 1)],
            "tensor": [(self.tensor, 1)],
            "expert": [(self.expert, self.tensor)],
            "expert_shard": [(self.shards, inner)],
            "shard": [(self.shards * self.expert, self.tensor)],
            "pipeline": [(self.pipeline, self.stage_size)],
            "replicate": [(self.replicas, copy)],
            "data": [(self.replicas, copy), (self.shards * self.expert, self.tensor)],
        }[axis]
        offsets = [0]
        for size, stride in steps:
            offsets = [offset + step * stride for offset in offsets for step in range(size)]
        starts = [i for i in range(len(self.ranks)) if all((i // stride) % size == 0 for size, stride in steps)]
        return [[self.ranks[start + offset] for offset in offsets] for start in starts]

    def grid(self, *, experts: bool = False, stages: tuple[int, ...] | None = None) -> Grid:
        """The ranks as a grid for the resharding planner.

        Args:
            experts: With the axes of expert weights, ``expert_replicate, expert_shard, expert, expert_tensor``; else
                those of all other tensors, ``replicate, shard, tensor``.
            stages: The stages that have the tensor; several hold it alike, on an axis ``stage``. None: all.
        """
        stages = tuple(range(self.pipeline)) if stages is None else stages
        ranks = tuple(rank for stage in stages for rank in self.stage_ranks(stage))
        axes: tuple[str, ...] = ("replicate", "shard", "tensor")
        shape: tuple[int, ...] = (self.replicas, self.shards * self.expert, self.tensor)
        if experts:
            axes = ("expert_replicate", "expert_shard", "expert", "expert_tensor")
            shape = (self.replicas, self.shards, self.expert, self.tensor)
        if len(stages) > 1:
            axes, shape = ("stage", *axes), (len(stages), *shape)
        return Grid(axes, shape, ranks)


def is_trainable(module: object, role: str) -> bool:
    """Whether a role's module is trained: what its ``trainable`` says, else whether it is an actor or a critic."""
    return bool(getattr(module, "trainable", role in ("actor", "critic")))


def check_names(owner: str, given: Iterable[str], known: Iterable[str], what: str) -> None:
    """Refuse an unknown name and offer the nearest known one.

    Args:
        owner: The class that took the name, for the message.
        given: Names as the user wrote them.
        known: Names that exist.
        what: What the names are, such as "role".

    Raises:
        ValueError: A name is not known.
    """
    known = tuple(known)
    for name in given:
        if name in known:
            continue
        near = difflib.get_close_matches(str(name), known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{owner} got an unknown {what} {name!r}; known are {', '.join(map(repr, known))}.{hint}")


def check_config(
    parallelism_config: Mapping[str, Mapping[str, Any]],
    engine: Mapping[str, Any],
    enable_3d_hybrid: bool = True,
    offload_parameters: bool = False,
) -> None:
    """Check names and values that need no world size.

    Raises:
        ValueError: An unknown role or key, a size that is not a positive whole number, or something not supported yet.
    """
    check_names("HybridStrategy(parallelism_config)", parallelism_config, ROLES, "role")
    for role, entry in parallelism_config.items():
        owner = f"HybridStrategy(parallelism_config[{role!r}])"
        check_names(owner, entry, _ENTRY_KEYS, "key")
        for key in ("dp", "tp", "pp", "ep"):
            _check_size(owner, key, entry.get(key, 1))
        if "ranks" in entry:
            _check_ranks(owner, role, entry["ranks"])
    owner = "HybridStrategy(hybrid_engine_config)"
    check_names(owner, engine, _ENGINE_KEYS, "key")
    for key in ("rollout_tp", "update_dp"):
        _check_size(owner, key, engine.get(key, 1))
    if not enable_3d_hybrid and "rollout_tp" in engine:
        raise ValueError(
            f"{owner} got rollout_tp={engine['rollout_tp']} with enable_3d_hybrid=False, which rolls out in the "
            "update layout. Leave one of them out."
        )
    if not isinstance(engine.get("offload_to_cpu", False), bool):
        raise ValueError(f"{owner} got offload_to_cpu={engine['offload_to_cpu']!r}; it takes True or False.")
    if offload_parameters and engine.get("offload_to_cpu"):
        raise ValueError(
            f"{owner} got offload_to_cpu=True with offload_parameters=True, which keeps optimizer states and gradients "
            "in host memory all the time. Leave one of them out."
        )


def _check_size(owner: str, key: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{owner} got {key}={value!r}; it takes a whole number of at least 1.")


def _check_ranks(owner: str, role: str, ranks: Any) -> None:
    if role == "actor":
        raise ValueError(
            f"{owner} got ranks={ranks!r}, but the actor lies on the mesh, and other roles claim ranks outside of it; "
            "leave its ranks out."
        )
    whole = isinstance(ranks, list | tuple) and all(type(rank) is int and rank >= 0 for rank in ranks)
    if not (whole and ranks and len(set(ranks)) == len(ranks)):
        raise ValueError(f"{owner} got ranks={ranks!r}; it takes a list of one or more different world ranks (>= 0).")
    if 0 in ranks:
        raise ValueError(
            f"{owner} got ranks={ranks!r}, but rank 0 writes logs and the trained model, so it must hold the actor; "
            "claim other ranks."
        )


def resolve_layouts(
    world_size: int,
    mesh: DeviceMesh | None,
    parallelism_config: Mapping[str, Mapping[str, Any]],
    engine: Mapping[str, Any],
    host_ranks: int | None = None,
) -> dict[str, RoleLayout]:
    """Derive the layout of every role, and of the actor while it generates (``"rollout"``).

    Ranks that a role claims with ``ranks`` lie outside the mesh. What remains is k whole meshes, which replicate the
    mesh k times along data. A role that is left out takes the mesh's own numbers. ``dp x tp x pp x ep`` of a role
    equals the ranks of one mesh; with ``replicate=True`` it may be a divisor of them, and copies of the role fill the
    mesh.
    ``{"dp": 1}`` is one whole copy on each rank.

    Args:
        world_size: Ranks there are.
        mesh: The mesh, or None for one whose data axis is all ranks that no role claims.
        parallelism_config: Sizes for each role, checked by ``check_config``.
        engine: The hybrid engine's sizes, checked by ``check_config``.
        host_ranks: Ranks of one host, which follow each other; None: all are on one.

    Raises:
        ValueError: The numbers do not fit; the message writes out the whole equation.
    """
    claimed = sorted({rank for entry in parallelism_config.values() for rank in entry.get("ranks") or ()})
    if claimed and claimed[-1] >= world_size:
        raise ValueError(
            f"HybridStrategy(parallelism_config): ranks {claimed} are claimed, but a world of {world_size} processes "
            f"has ranks 0 to {world_size - 1}. Start at least {claimed[-1] + 1} processes or claim other ranks."
        )
    free = [rank for rank in range(world_size) if rank not in claimed]
    mesh = mesh or DeviceMesh((max(len(free), 1), 1, 1, 1))
    copies, rest = divmod(len(free), mesh.size)
    if rest or copies == 0:
        raise ValueError(
            "HybridStrategy: world = k x (data x tensor x pipeline x expert) + claimed ranks does not hold: "
            f"{world_size} = k x ({mesh.equation()}) + {len(claimed)} has no whole k >= 1. Start {len(claimed)} plus "
            f"a multiple of {mesh.size} processes, or give a mesh_shape whose product divides {len(free)}."
        )
    ranks = tuple(free)
    layouts = {role: _layout(role, mesh, ranks, parallelism_config.get(role)) for role in ROLES}
    actor = layouts["actor"]
    if (update_dp := engine.get("update_dp", actor.shards)) != actor.shards:
        raise ValueError(
            f"HybridStrategy(hybrid_engine_config): update_dp={update_dp} differs from the actor's dp={actor.shards}. "
            "Leave update_dp out or make them agree."
        )
    rollout = rollout_layout(actor, engine.get("rollout_tp", actor.tensor), host_ranks)
    for role, layout in layouts.items():
        # The actor's rows go to where it generates, and between its own data ranks.
        others = rollout if role == "actor" else layout
        if actor.data_size > 1 or not others.lies_like(actor):
            layouts[role] = replace(layout, exchange=tuple(sorted({*actor.ranks, *layout.ranks})))
    return {**layouts, "rollout": rollout}


def _layout(role: str, mesh: DeviceMesh, ranks: tuple[int, ...], entry: Mapping[str, Any] | None) -> RoleLayout:
    names = (("dp", "data"), ("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert"))
    entry = entry or {axis: mesh.axis(name) for axis, name in names}
    own = entry.get("ranks")
    ranks = tuple(own) if own else ranks
    size = len(ranks) if own else mesh.size
    tensor, pipeline, expert = entry.get("tp", 1), entry.get("pp", 1), entry.get("ep", 1)
    shards = entry.get("dp", max(size // (tensor * pipeline * expert), 1))
    part = shards * tensor * pipeline * expert
    filled = bool(entry.get("replicate")) or (part == 1 and not own)
    if size % part if filled else size != part:
        there = f"its ranks {list(ranks)}, {size}" if own else f"the mesh's ranks, {mesh.equation()}"
        raise ValueError(
            f"HybridStrategy(parallelism_config[{role!r}]): dp x tp x pp x ep = {shards} x {tensor} x {pipeline} x "
            f"{expert} = {part} does not equal {there}. Make dp x tp x pp x ep = {size}, or set replicate=True with a "
            f"dp x tp x pp x ep that divides {size}."
        )
    return RoleLayout(role, len(ranks) // part, shards, tensor, ranks, expert, pipeline)


def rollout_layout(actor: RoleLayout, tensor: int, host_ranks: int | None = None) -> RoleLayout:
    """How the actor lies on its ranks while it generates: copies that are cut over ``tensor`` ranks only.

    The tensor ranks of a copy communicate in every layer of every decode step, so they lie on one host wherever the
    numbers allow. Within that, the order of the ranks lets each keep as much as it can of what it holds in the update
    layout: along the dim that the tensor axis cuts, tensor rank t and shard s of S hold chunk ``t x S + s``, and the
    rollout shard that contains this chunk (or that it contains) goes to that rank. Expert ranks stay what they are.

    Args:
        actor: The update layout.
        tensor: Ranks that cut one copy.
        host_ranks: Ranks of one host, which follow each other; None: all are on one.

    Raises:
        ValueError: ``tensor`` does not divide the actor's ranks.
    """
    group = len(actor.ranks) // actor.expert
    if group % tensor:
        whole = f"{len(actor.ranks)} / {actor.expert} expert ranks" if actor.expert > 1 else f"{group} ranks"
        raise ValueError(
            f"HybridStrategy: rollout_tp={tensor} does not divide the actor's {whole}; choose a divisor of {group}."
        )
    places = {rank: actor.coordinates(rank) for rank in actor.ranks}

    def members(host_ranks: int) -> dict[tuple[int, int], list[int]]:
        """The ranks of each host and expert coordinate."""
        found: dict[tuple[int, int], list[int]] = {}
        for rank in actor.ranks:
            found.setdefault((rank // host_ranks, places[rank][2]), []).append(rank)
        return found

    together = members(host_ranks or max(actor.ranks) + 1)
    if any(len(ranks) % tensor for ranks in together.values()):
        together = members(max(actor.ranks) + 1)
    copies: list[list[list[int]]] = [[] for _ in range(actor.expert)]
    for (_, expert), ranks in together.items():
        copies[expert] += _cut_copies(ranks, places, actor.shards, tensor)
    position = {rank: number for number, rank in enumerate(actor.ranks)}
    ordered = [sorted(of_expert, key=lambda copy: position[copy[0]]) for of_expert in copies]
    grid = zip(*ordered, strict=True)
    ranks_in_order = tuple(rank for experts in grid for copy in experts for rank in copy)
    return RoleLayout("rollout", group // tensor, 1, tensor, ranks_in_order, actor.expert)


def _cut_copies(
    ranks: list[int], places: Mapping[int, tuple[int, int, int, int]], shards: int, tensor: int
) -> list[list[int]]:
    """Copies of the rollout on ranks of one expert coordinate: the ranks of each, in the order of the tensor axis."""
    number = len(ranks) // tensor
    chunk = {rank: places[rank][3] * shards + places[rank][1] for rank in ranks}
    # Replicas hold the same chunk, so where the rollout cuts finer they divide it among them.
    by_chunk = sorted(ranks, key=lambda rank: (chunk[rank], places[rank][0]))
    parts = [by_chunk[t * number : (t + 1) * number] for t in range(tensor)]
    in_order = [sorted(part, key=lambda rank: (places[rank][0], chunk[rank])) for part in parts]
    return [list(copy) for copy in zip(*in_order, strict=True)]
