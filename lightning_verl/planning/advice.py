"""Advice on a plan: each line has the numbers and the change to make."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from lightning_verl.planning.memory import Item, Phase
from lightning_verl.planning.plan import Plan, RankMemory
from lightning_verl.planning.traffic import HOST_RANKS, Traffic
from lightning_verl.strategies.layout import RoleLayout

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
        memory, layout = plan.roles[role], plan.layouts[role]
        kept = _total(items, role, ("parameters", "optimizer state", "gradients", "adapter of step 0"))
        yield kept // 2, f"{role}: dp={2 * layout.shards} for dp={layout.shards}, {_ranks_for_shards(layout)}"
        if role != "actor" and len(kind.roles) > 1:
            yield _total(items, role), f"{role}: ranks of its own"
        if memory.model.is_trained and plan.config.model.lora is None:
            yield _total(items, role, ("optimizer state", "gradients")), f"{role}: model.lora, almost all of it"
    activations = _total(items, None, ("activations",))
    if phase.name.endswith("_update"):
        yield from _activation_remedies(plan, phase, activations)
    elif phase.name == "rollout":
        rows = activations + _total(items, None, ("key-value cache", "logits"))
        yield rows // 2, f"batch.rollout_batch_size={plan.sizes.rollout_batch_size // 2}"
        tensor = 2 * plan.rollout_tensor
        if plan.roles["actor"].model.decoder.kv_heads % tensor == 0 and len(plan.layouts["actor"].ranks) % tensor == 0:
            weights = _total(items, None, ("rollout weights",))
            yield weights - plan.roles["actor"].rollout_weights(tensor), f"rollout_tp={tensor}"
    else:
        yield activations // 2, _half_micro_batch(plan)


def _activation_remedies(plan: Plan, phase: Phase, activations: int) -> Iterator[tuple[int, str]]:
    memory = plan.roles[phase.name.removesuffix("_update")]
    if activations and memory.model.checkpointing != "full":
        recomputed = replace(memory, model=replace(memory.model, checkpointing="full"))
        yield activations - sum(recomputed.activations()), "model.activation_checkpointing=full"
    if plan.sizes.rows_per_micro_batch > 1:
        yield activations // 2, _half_micro_batch(plan)


def _half_micro_batch(plan: Plan) -> str:
    return f"batch.max_tokens_per_micro_batch={plan.sizes.max_tokens_per_micro_batch // 2}"


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
        tokens = min(tokens, actor.batch.minibatch_rows * sizes.row_tokens) // 1024 * 1024
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


def _traffic(plan: Plan) -> Iterator[Advice]:
    traffic = Traffic.of(plan.roles["actor"], plan.sizes, plan.hardware.link)
    if traffic is None or not traffic.is_bound:
        return
    actor = plan.roles["actor"]
    layout, tokens = actor.layout, actor.batch.micro_batch_tokens
    text = (
        f"gather-bound: a micro-batch of {tokens:,} tokens computes for {milliseconds(traffic.matmul_seconds)}, its "
        f"gathers and reductions of {gigabytes(traffic.parameter_bytes)} take {milliseconds(traffic.parameter_seconds)}"
    )
    if layout.tensor > 1:
        text += f", all-reduces of the tensor axis {milliseconds(traffic.tensor_seconds)}"
    changes = []
    free = traffic.matmul_seconds - traffic.tensor_seconds
    if actor.batch.micro_batches > 1 and free > 0:
        enough = -(-int(tokens * traffic.parameter_seconds / free) // 1024) * 1024
        changes.append(f"batch.max_tokens_per_micro_batch={enough}, which hides the gathers")
    if layout.tensor > 1:
        tensor, shards = layout.tensor // 2, 2 * layout.shards
        changes.append(f"less tensor and finer sharding, tp={tensor} and dp={shards}, whose all-reduces are smaller")
    ranks = layout.shards * layout.expert * layout.tensor
    if ranks > HOST_RANKS and plan.hardware.link is None:
        held = actor.parameters + actor.optimizer
        more = held * (ranks // HOST_RANKS - 1)
        shards = HOST_RANKS // layout.tensor
        if shards >= 1:
            changes.append(
                f"shards within a host, a mesh of {HOST_RANKS} ranks with dp={shards}, for {gib(more)} GiB more a rank"
            )
    changes.append("offload_to_cpu, which frees the memory that fewer shards need")
    yield Advice("traffic", f"{text}. Change: {'; or '.join(changes)}.")


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
        ranks = memory.layout.data_size
        for name in ("rollout_batch_size", "update_batch_size"):
            prompts = getattr(sizes, name)
            if prompts % ranks:
                least, most = prompts // ranks, -(-prompts // ranks)
                yield Advice(
                    "divisibility",
                    f"batch.{name}={prompts} over the {ranks} data ranks of the {role} leaves some with {least} prompts "
                    f"and some with {most}: {1 - prompts / (most * ranks):.0%} of the ranks' time is idle. Make it a "
                    f"multiple of {ranks}, such as {most * ranks}.",
                )
    last = sizes.rollout_batch_size % sizes.update_batch_size
    if last:
        yield Advice(
            "divisibility",
            f"batch.rollout_batch_size={sizes.rollout_batch_size} in mini-batches of {sizes.update_batch_size} leaves "
            f"a last one of {last} prompts, whose step weighs as much as the others. Make it "
            f"{sizes.rollout_batch_size - last} or {sizes.rollout_batch_size - last + sizes.update_batch_size}.",
        )
    yield from _padding(plan)


def _padding(plan: Plan) -> Iterator[Advice]:
    """Parameters whose dim 0 the shards do not divide."""
    for role, memory in plan.roles.items():
        shards = memory.layout.shards * memory.layout.expert
        needed = sum(p.numel * p.itemsize for p in memory.model.parameters)
        uneven = [p for p in memory.model.parameters if p.shape[0] % shards and not p.expert]
        lost = memory.parameters * shards * memory.layout.tensor - needed
        if uneven and memory.layout.tensor == 1 and lost // shards >= LEAST_PADDING:
            largest = max(uneven, key=lambda p: p.numel)
            yield Advice(
                "divisibility",
                f"{len(uneven)} parameters of the {role} are padded, such as {largest.name} with {largest.shape[0]} "
                f"rows over {shards} shards: {gib(lost // shards)} GiB a rank, twice that again for the optimizer.",
            )


# ---- text ------------------------------------------------------------------------------------------------------------


def gib(size: int) -> str:
    """Bytes in GiB."""
    return f"{size / 2**30:.2f}"


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
