"""How a role's parameters lie on the ranks, for training and for the rollout, and the way from one to the other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lightning_verl.parallel.expert import shard_dim
from lightning_verl.planning.model import ParameterShape, RoleModel
from lightning_verl.resharding.planner import Cut, Grid, Region, TensorLayout, intersect, volume
from lightning_verl.strategies.layout import EXPERT_CUTS, RoleLayout


@dataclass(frozen=True)
class Placement:
    """The layout of one role, and if it is the actor, how it is rolled out."""

    layout: RoleLayout
    """The layout in training."""
    rollout: RoleLayout | None = None
    """The layout of the rollout; None: it is not rolled out."""

    @cached_property
    def _grids(self) -> dict[tuple[bool, tuple[int, ...]], Grid]:
        return {}

    def _grid(self, parameter: ParameterShape) -> Grid:
        """The ranks that have a parameter: of its stages, on the axes of experts or on those of all else."""
        key = parameter.expert, parameter.stages
        if key not in self._grids:
            self._grids[key] = self.layout.grid(experts=parameter.expert, stages=parameter.stages)
        return self._grids[key]

    @cached_property
    def _rollout_grid(self) -> Grid:
        return self.generating.grid()

    @property
    def generating(self) -> RoleLayout:
        """The layout of the rollout.

        Raises:
            RuntimeError: There is none.
        """
        if self.rollout is None:
            raise RuntimeError(f"Placement: the {self.layout.role} is not rolled out.")
        return self.rollout

    def gathered(self, parameter: ParameterShape) -> TensorLayout:
        """A parameter while its FSDP2 unit is gathered: cut by the tensor and the expert axis only."""
        if parameter.expert:
            return TensorLayout(self._grid(parameter), EXPERT_CUTS)
        if parameter.codes:
            return TensorLayout(self._grid(parameter))
        tensor = () if parameter.tensor_dim is None else (Cut("tensor", parameter.tensor_dim),)
        return TensorLayout(self._grid(parameter), tensor)

    def held(self, parameter: ParameterShape) -> TensorLayout:
        """A parameter as it is held: FSDP2 cuts what the other axes left over the shards.

        It cuts dim 0; in an actor whose rollout is cut finer than its training the dim that the rollout cuts, where
        that divides evenly.
        """
        gathered = self.gathered(parameter)
        if parameter.codes:
            return gathered
        if parameter.expert and self.layout.expert * self.layout.tensor > 1:
            dim = shard_dim(parameter.shape, self.layout.expert * self.layout.tensor, self.layout.shards) or 0
            return TensorLayout(gathered.grid, (*gathered.cuts, Cut("expert_shard", dim)))
        axis = "expert_shard" if parameter.expert else "shard"
        dim = 0
        finer = self.rollout is not None and self.rollout.tensor > self.layout.tensor
        if finer and parameter.rollout_cut is not None and not parameter.adapter:
            dim = parameter.rollout_cut.dim
            tensor = self.layout.tensor if parameter.tensor_dim == dim else 1
            if parameter.shape[dim] % (tensor * gathered.grid.size(axis)):
                dim = 0
        return TensorLayout(gathered.grid, (*gathered.cuts, Cut(axis, dim)))

    def rolled_out(self, parameter: ParameterShape) -> TensorLayout:
        """A parameter in the rollout: one copy on each tensor axis of the rollout."""
        cut = parameter.rollout_cut
        if parameter.expert:
            return TensorLayout(self.generating.grid(experts=True), EXPERT_CUTS)
        return TensorLayout(self._rollout_grid, () if cut is None else (Cut("tensor", cut.dim),))


def same_grid(a: RoleLayout, b: RoleLayout) -> bool:
    """Whether rows lie alike in two layouts, so that none has to move."""
    return a.lies_like(b) and a.data_size == b.data_size


def numel_on(parameter: ParameterShape, layout: TensorLayout, rank: int) -> int:
    """Elements of a parameter on a rank, none where another stage has it.

    FSDP2 pads each part to the size of the first: the first rank's number is what every rank allocates.
    """
    return volume(layout.region(parameter.shape, rank)) if layout.grid.holds(rank) else 0


_Kind = tuple[tuple[int, ...], TensorLayout, TensorLayout]
"""A whole shape, how it is held, and how the rollout wants it. The layers of a model share theirs."""


def received_bytes(model: RoleModel, place: Placement) -> list[int]:
    """Bytes that each of an actor's ranks receives when its weights go to the rollout, in the order of its layout.

    It is what the rollout wants on a rank, less what the rank holds of it: nothing can get by with less. What travels
    has the compute dtype already; adapters have their own.

    Args:
        model: The actor.
        place: Where it lies.
    """
    kinds: dict[_Kind, int] = {}
    for parameter in model.parameters:
        itemsize = parameter.itemsize if parameter.adapter else model.compute_bytes
        _add(kinds, parameter, place, itemsize)

    def received(kind: _Kind, rank: int) -> int:
        held, wanted = _regions(kind, rank)
        return volume(wanted) - volume(intersect(wanted, held))

    return [sum(size * received(kind, rank) for kind, size in kinds.items()) for rank in place.layout.ranks]


def rollout_bytes(model: RoleModel, place: Placement) -> list[int]:
    """Bytes that the rollout's weights take on each of an actor's ranks, in the order of its layout.

    Where a rank holds just what the rollout wants, in the dtype that it wants, nothing is taken, unless an adapter is
    merged into it. Adapters themselves are gone by then.

    Args:
        model: The actor.
        place: Where it lies.
    """
    copied: dict[_Kind, int] = {}
    shared: dict[_Kind, int] = {}
    for parameter in model.parameters:
        same_dtype = parameter.itemsize == model.compute_bytes and not parameter.adapted
        if not parameter.adapter:
            _add(shared if same_dtype else copied, parameter, place, model.compute_bytes)

    def taken(kind: _Kind, rank: int, may_share: bool) -> int:
        held, wanted = _regions(kind, rank)
        return 0 if may_share and held == wanted else volume(wanted)

    return [
        sum(size * taken(kind, rank, False) for kind, size in copied.items())
        + sum(size * taken(kind, rank, True) for kind, size in shared.items())
        for rank in place.layout.ranks
    ]


def _add(kinds: dict[_Kind, int], parameter: ParameterShape, place: Placement, itemsize: int) -> None:
    kind = (parameter.shape, place.held(parameter), place.rolled_out(parameter))
    kinds[kind] = kinds.get(kind, 0) + itemsize


def _regions(kind: _Kind, rank: int) -> tuple[Region, Region]:
    shape, held, wanted = kind
    return held.region(shape, rank) if held.grid.holds(rank) else (), wanted.region(shape, rank)
