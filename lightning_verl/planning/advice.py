"""Advice on a plan: each line has the numbers and the change to make."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from lightning_verl.planning.batch import RoleBatch
from lightning_verl.planning.memory import RESHARDING, Item, Phase, RoleMemory
from lightning_verl.planning.plan import Plan, RankMemory
from lightning_verl.planning.shards import numel_on, same_grid
from lightning_verl.planning.traffic import HOST_RANKS, Traffic, hosts
from lightning_verl.strategies.layout import RoleLayout, rollout_layout

PLENTY = 0.25
"""Of a GPU's memory: from here on what is left over is worth using."""
LEAST_PADDING = 2**20
"""Bytes of padding a rank that are worth a line."""


@dataclass(frozen=True)
class Advice:
    """One line."""

    topic: str
    """fit, memory, traffic, ratio or divisibility."""
    text: str
    """What is the matter, and what to change."""


def advise(plan: Plan) -> list[Advice]:
    """Everything there is to say about a plan; what cannot run first."""
    return [*_fit(plan), *_memory_left(plan), *_traffic(plan), *_ratio(plan), *_divisibility(plan)]


# ---- memory ----------------------------------------------------------------------------------------------------------


def _fit(plan: Plan) -> Iterator[Advice]:
    usable = plan.hardware.usable_bytes
    for kind in plan.memory:
        for phase in kind.phases:
            over = phase.peak.bytes - usable
            if over <= 0:
                continue
            changes = sorted(_remedies(plan, kind, phase), reverse=True)
            listed = "; ".join(f"{text} (-{gib(saved)} GiB)" for saved, text in changes if saved > 0)
            yield Advice(
                "fit",
                f"{phase.name} does not fit on {ranges(kind.ranks)}: {gib(phase.peak.bytes)} GiB at its "
                f"{phase.peak.name}, {gib(over)} more than the {gib(usable)} usable. Largest savings first: {listed}.",
            )


def _remedies(plan: Plan, kind: RankMemory, phase: Phase) -> Iterator[tuple[int, str]]:
    """What would make a phase smaller, with the bytes that it saves at the peak."""
    items = phase.peak.items
    for role in kind.roles:
        memory, layout = plan.role_on(role, kind), plan.layouts[role]
        kept = _total(items, role, ("parameters", "optimizer state", "gradients", "adapter of step 0"))
        yield kept // 2, f"{role}: dp={2 * layout.shards} for dp={layout.shards}, {_ranks_for_shards(layout)}"
        if role != "actor" and len(kind.roles) > 1:
            yield _total(items, role), f"{role}: ranks of its own"
        if memory.model.is_trained and plan.config.model.lora is None:
            yield _total(items, role, ("optimizer state", "gradients")), f"{role}: model.lora, almost all of it"
    if plan.config.optimizer.name == "adamw":
        yield sum(_saved_by_8_bits(plan.role_on(role, kind), items) for role in kind.roles), "optimizer.name=adamw8bit"
    activations = _total(items, None, ("activations",))
    if phase.name.endswith("_update"):
        yield from _update_remedies(plan, plan.role_on(phase.name.removesuffix("_update"), kind))
    elif phase.name == "rollout":
        states = _total(items, None, ("optimizer state",))
        resharding = phase.peak.bytes - next(m.bytes for m in phase.moments if m.name == RESHARDING)
        if not _offloads(plan):
            yield min(states, resharding), "strategy.hybrid_engine_config.offload_to_cpu=true"
        rows = activations + _total(items, None, ("key-value cache", "logits"))
        yield rows // 2, f"batch.rollout_batch_size={plan.sizes.rollout_batch_size // 2}"
        actor = plan.roles["actor"]
        tensor = 2 * actor.place.generating.tensor
        if actor.model.decoder.kv_heads % tensor == 0 and len(actor.layout.ranks) % tensor == 0:
            finer = replace(actor, place=replace(actor.place, rollout=rollout_layout(actor.layout, tensor, HOST_RANKS)))
            weights = _total(items, None, ("rollout weights",))
            yield weights - finer.rollout_weights, f"strategy.hybrid_engine_config.rollout_tp={tensor}"
    else:
        tokens = plan.sizes.max_tokens_per_micro_batch // 2
        yield activations // 2, f"batch.max_tokens_per_micro_batch={tokens}"


def _saved_by_8_bits(memory: RoleMemory, items: Iterable[Item]) -> int:
    """What 8-bit moments of a role would save, where its optimizer state is there."""
    smaller = replace(memory, model=replace(memory.model, optimizer="adamw8bit"))
    return max(0, _total(items, memory.model.role, ("optimizer state",)) - smaller.optimizer)


def _update_remedies(plan: Plan, memory: RoleMemory) -> Iterator[tuple[int, str]]:
    """Ways to keep fewer activations; what they save is the difference of the peaks, which may be at other moments."""

    def peak(changed: RoleMemory) -> int:
        return max(sum(item.bytes for item in items) for items in changed.update().values())

    if memory.model.checkpointing != "full":
        recomputed = replace(memory, model=replace(memory.model, checkpointing="full"))
        yield peak(memory) - peak(recomputed), "model.activation_checkpointing=full"
    if not memory.model.offloads:
        offloaded = replace(memory, model=replace(memory.model, offloads=True))
        yield peak(memory) - peak(offloaded), "strategy.activation_offload=true"
    rows, sizes = memory.batch.micro_batch_tokens // plan.sizes.row_tokens, plan.sizes
    if rows > 1:
        tokens = -(-rows // 2) * sizes.row_tokens
        fewer = replace(sizes, max_tokens_per_micro_batch=tokens)
        as_the_actor = same_grid(memory.layout, plan.layouts["actor"])
        smaller = replace(
            memory, batch=RoleBatch.of(fewer, memory.layout.data_size, as_the_actor, memory.layout.pipeline)
        )
        yield peak(memory) - peak(smaller), f"batch.max_tokens_per_micro_batch={tokens}"


def _ranks_for_shards(layout: RoleLayout) -> str:
    if layout.replicas > 1 and layout.replicas % 2 == 0:
        return f"{layout.replicas // 2} copies for {layout.replicas}"
    return f"on {2 * len(layout.ranks)} ranks"


def _total(items: Iterable[Item], role: str | None, names: tuple[str, ...] | None = None) -> int:
    return sum(
        item.bytes for item in items if (role is None or item.role == role) and (names is None or item.what in names)
    )


def _memory_left(plan: Plan) -> Iterator[Advice]:
    usable = plan.hardware.usable_bytes
    for kind in plan.memory:
        left = usable - kind.worst.peak.bytes
        if left < PLENTY * plan.hardware.memory_gib * 2**30 or "actor" not in kind.roles:
            continue
        changes = list(_uses(plan, kind))
        if plan.layouts["actor"].tensor > 1:
            changes.append("a smaller tp of the actor, for more data ranks")
        if changes:
            yield Advice(
                "memory",
                f"{gib(left)} GiB are left on {ranges(kind.ranks)} even in {kind.worst.name}: use them for more data, "
                f"with {', or '.join(changes)}.",
            )


def _uses(plan: Plan, kind: RankMemory) -> Iterator[str]:
    """Larger batches that still fit."""
    sizes, actor, usable = plan.sizes, plan.roles["actor"], plan.hardware.usable_bytes
    phases = {phase.name: phase.peak for phase in kind.phases}
    if actor.batch.micro_batches > 1:
        tokens = min(
            _grown(role.batch.micro_batch_tokens, sum(role.activations()), usable - phases[f"{name}_update"].bytes)
            for name, role in plan.roles.items()
            if f"{name}_update" in phases
        )
        tokens = min(tokens, actor.batch.minibatch_rows[1] * sizes.row_tokens) // 1024 * 1024
        if tokens > sizes.max_tokens_per_micro_batch:
            yield f"batch.max_tokens_per_micro_batch up to {tokens:,}"
    if "rollout" in phases:
        peak = phases["rollout"]
        rows = _total(peak.items, None, ("key-value cache", "logits", "activations"))
        prompts = _grown(sizes.rollout_batch_size, rows, usable - peak.bytes)
        prompts = prompts // sizes.update_batch_size * sizes.update_batch_size
        if prompts > sizes.rollout_batch_size:
            yield f"batch.rollout_batch_size up to {prompts:,}"


def _grown(size: int, taken: int, left: int) -> int:
    """How far a size may grow if it takes so many bytes now, and so many are left."""
    return size * (taken + left) // max(taken, 1)


# ---- traffic ---------------------------------------------------------------------------------------------------------


def _offloads(plan: Plan) -> bool:
    return bool(plan.config.strategy.hybrid_engine_config.get("offload_to_cpu"))


def _traffic(plan: Plan) -> Iterator[Advice]:
    yield from _gather_bound(plan)
    for name, layout in (("rollout", plan.roles["actor"].place.rollout), ("actor", plan.layouts["actor"])):
        if layout is not None and layout.tensor <= HOST_RANKS:
            yield from _scattered(name, layout)


def _scattered(name: str, layout: RoleLayout) -> Iterator[Advice]:
    """The line on a tensor axis that would fit on a host and does not lie on one."""
    line = max(layout.lines("tensor"), key=lambda ranks: len(hosts(ranks)))
    if len(hosts(line)) > 1:
        key = "parallelism_config.actor.tp" if name == "actor" else "hybrid_engine_config.rollout_tp"
        yield Advice(
            "traffic",
            f"the tensor axis of the {name} lies on {len(hosts(line))} hosts of {HOST_RANKS} ranks, such as "
            f"{line}: in each layer it waits for the network. A mesh_shape of {HOST_RANKS} ranks keeps it on one host; "
            f"or lower {key}.",
        )


def _gather_bound(plan: Plan) -> Iterator[Advice]:
    traffic = Traffic.of(plan.roles["actor"], plan.sizes, plan.hardware.link)
    if traffic is None or not traffic.is_bound:
        return
    actor = plan.roles["actor"]
    text = (
        f"gather-bound: a micro-batch of {actor.batch.micro_batch_tokens:,} tokens computes for "
        f"{milliseconds(traffic.matmul_seconds)}, its gathers and reductions of {gigabytes(traffic.parameter_bytes)} "
        f"take {milliseconds(traffic.parameter_seconds)}"
    )
    if actor.layout.tensor > 1:
        text += f", all-reduces of the tensor axis {milliseconds(traffic.tensor_seconds)}"
    changes = [*_hide_gathers(plan, traffic), *_other_layouts(plan)]
    yield Advice("traffic", f"{text}. Change: {'; or '.join(changes)}.")


def _hide_gathers(plan: Plan, traffic: Traffic) -> Iterator[str]:
    """The micro-batch whose matmuls take as long as the gathers, whose size does not depend on it."""
    actor, sizes = plan.roles["actor"], plan.sizes
    tokens = actor.batch.micro_batch_tokens
    free = traffic.matmul_seconds - traffic.tensor_seconds
    if free > 0:
        each = tokens / (actor.batch.micro_batch_responses // sizes.response_tokens)  # with its share of a prompt
        rows = math.ceil(tokens * traffic.parameter_seconds / free / each)
        change = f"batch.max_tokens_per_micro_batch={max(math.ceil(rows * each), sizes.max_tokens_per_micro_batch)}"
        if rows > actor.batch.minibatch_rows[1]:
            prompts = math.ceil(rows / sizes.samples_per_prompt) * actor.layout.data_size
            change += f" with batch.update_batch_size={prompts}"
        yield f"{change}, which hides the gathers"


def _other_layouts(plan: Plan) -> Iterator[str]:
    """Layouts with less traffic."""
    actor, layout = plan.roles["actor"], plan.layouts["actor"]
    if layout.tensor > 1:
        tensor, shards = layout.tensor // 2, 2 * layout.shards
        yield f"less tensor and finer sharding, tp={tensor} and dp={shards}, with smaller all-reduces"
    ranks = layout.shards * layout.expert * layout.tensor
    if ranks > HOST_RANKS and HOST_RANKS % (layout.tensor * layout.expert) == 0:
        held = actor.parameters + actor.optimizer + actor.trained
        more, away = held * ranks // HOST_RANKS - held, actor.optimizer * ranks // HOST_RANKS
        yield (
            f"shards within a host, a mesh of {HOST_RANKS} ranks with "
            f"dp={HOST_RANKS // (layout.tensor * layout.expert)}, for {gib(more)} GiB more a rank"
            + ("" if _offloads(plan) else f", {gib(away)} of which offload_to_cpu takes away during rollouts")
        )


# ---- batches ---------------------------------------------------------------------------------------------------------


def _ratio(plan: Plan) -> Iterator[Advice]:
    ratio, data_ranks = plan.sizes.ratio, plan.layouts["actor"].data_size
    if plan.algorithm.needs_reward and ratio not in (4, data_ranks):
        wanted = max(1, plan.sizes.rollout_batch_size // 4)
        yield Advice(
            "ratio",
            f"one rollout batch feeds {ratio:g} update batches ({plan.sizes.rollout_batch_size} / "
            f"{plan.sizes.update_batch_size}); 4, or the actor's data ranks ({data_ranks}), usually keeps both phases "
            f"busy: batch.update_batch_size={wanted}.",
        )


def _divisibility(plan: Plan) -> Iterator[Advice]:
    sizes = plan.sizes
    for role, memory in plan.roles.items():
        ranks, batch = memory.layout.data_size, memory.batch
        if role != "actor" and same_grid(memory.layout, plan.layouts["actor"]):
            continue  # what is to be said of its rows is said of the actor's
        if memory.model.is_trained and batch.minibatch_rows[0] != batch.minibatch_rows[1]:
            yield _uneven("update_batch_size", sizes.update_batch_size, role, ranks, batch.minibatch_rows)
        elif sizes.rollout_batch_size % ranks and batch.rows[0] != batch.rows[1]:
            yield _uneven("rollout_batch_size", sizes.rollout_batch_size, role, ranks, batch.rows)
    last = sizes.rollout_batch_size % sizes.update_batch_size
    if last:
        less = sizes.rollout_batch_size - last
        yield Advice(
            "divisibility",
            f"batch.rollout_batch_size={sizes.rollout_batch_size} in mini-batches of {sizes.update_batch_size} leaves "
            f"a last one of {last} prompts, whose step weighs as much as the others. Make it {less} or "
            f"{less + sizes.update_batch_size}.",
        )
    yield from _padding(plan)


def _uneven(name: str, prompts: int, role: str, ranks: int, rows: tuple[int, int]) -> Advice:
    """The line on a batch that the data ranks of a role do not divide."""
    multiple = -(-prompts // ranks) * ranks
    return Advice(
        "divisibility",
        f"batch.{name}={prompts} over the {ranks} data ranks of the {role}: some have {rows[0]} rows and some "
        f"{rows[1]}, and the fewer wait. A multiple of {ranks}, such as {multiple}, is even.",
    )


def _padding(plan: Plan) -> Iterator[Advice]:
    """Parameters that the shards do not divide: each part is padded to the size of the first."""
    for role, memory in plan.roles.items():
        held = {p: memory.place.held(p) for p in memory.model.parameters}
        lost = {
            p: (numel_on(p, here, here.grid.ranks[0]) - numel_on(p, here, here.grid.ranks[-1])) * p.itemsize
            for p, here in held.items()
        }
        uneven = [parameter for parameter, size in lost.items() if size]
        if sum(lost.values()) >= LEAST_PADDING:
            worst = max(uneven, key=lost.__getitem__)
            shards = memory.layout.shards * memory.layout.expert
            yield Advice(
                "divisibility",
                f"{len(uneven)} parameters of the {role} are padded, most of all {worst.name} with "
                f"{worst.shape[0]} rows over {shards} shards: {sum(lost.values()) / 2**20:.1f} MiB on the last rank"
                + (", and as much for each of gradients and two optimizer moments." if memory.trained else "."),
            )


# ---- text ------------------------------------------------------------------------------------------------------------


def gib(size: int) -> str:
    """Bytes in GiB."""
    return f"{size / 2**30:.2f}"


def mib(size: int) -> str:
    """Bytes in MiB, for what may be small."""
    return f"{size / 2**20:,.1f} MiB"


def gigabytes(size: int) -> str:
    """Bytes in GB, as links are measured."""
    return f"{size / 1e9:.2f} GB"


def milliseconds(seconds: float) -> str:
    """Seconds in ms."""
    return f"{seconds * 1000:.3g} ms"


def ranges(ranks: Iterable[int]) -> str:
    """Ranks as text, those that follow each other as a range: ``ranks 0-3, 6``."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][-1] + 1:
            found[-1] = [found[-1][0], rank]
        else:
            found.append([rank])
    parts = ["-".join(map(str, part)) for part in found]
    return ("rank " if parts and len(found) == 1 and len(found[0]) == 1 else "ranks ") + ", ".join(parts)
