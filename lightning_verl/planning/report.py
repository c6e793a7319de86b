"""The text of a plan."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from lightning_verl.pipeline.cut import cut_layers, describe
from lightning_verl.pipeline.order import bubble_share, chunks_of, count_for
from lightning_verl.planning.advice import advise, gib, gigabytes, mib, milliseconds, ranges
from lightning_verl.planning.plan import ASSUMED_PROMPT_TOKENS, USABLE, Plan, RankMemory
from lightning_verl.planning.traffic import Traffic
from lightning_verl.strategies.layout import RoleLayout

GROUPS_SHOWN = 4
"""Groups of a line and lines of a drawing up to which nothing is left out."""
WIDTH = 110
"""Columns of advice."""


def report(plan: Plan) -> str:
    """The whole report, which ends in a line break."""
    parts = [_head, _layouts, _batches, _pipelines, _layers, _training, _memory, _traffic, _advice]
    texts = ["\n".join(part(plan)) for part in parts]
    return "\n\n".join(filter(None, texts)) + "\n"


def _head(plan: Plan) -> Iterator[str]:
    config, hardware = plan.config, plan.hardware
    name = type(plan.algorithm).__name__
    yield f"Plan: {name} on {plan.world_size:,} ranks, {config.precision}, {hardware.memory_gib:g} GiB a GPU"
    for role, memory in plan.roles.items():
        model = memory.model
        line = f"  {role:<10} {model.architecture}, {model.numel:,} parameters"
        yield line + (f", {model.trained_numel:,} trained" if model.is_trained else ", frozen")


def _layouts(plan: Plan) -> Iterator[str]:
    yield "Layouts: replicas x shards x expert x tensor; [ ] are the ranks of one tensor axis"
    for role, memory in plan.roles.items():
        yield from draw(role, memory.layout)
    if plan.received:
        yield from draw("rollout", plan.layouts["rollout"])
    if "reward" not in plan.roles and plan.algorithm.needs_reward:
        yield "  reward     functions, on the first rank of each tensor axis of the actor"


def draw(name: str, layout: RoleLayout) -> Iterator[str]:
    """A layout as text: its sizes, then its copies, each the shards with their tensor ranks.

    Args:
        name: What is in front.
        layout: The layout.
    """
    sizes = f"{layout.replicas} x {layout.shards} x {layout.expert} x {layout.tensor}"
    if layout.pipeline > 1:
        sizes += f" in {layout.pipeline} stages"
    yield f"  {name:<10} {sizes}: {layout.data_size} data ranks, {ranges(sorted(layout.ranks))}"
    copies = [
        _copy(layout, layout.ranks[start : start + layout.stage_size])
        for start in range(0, len(layout.ranks), layout.stage_size)
    ]
    if layout.pipeline > 1:
        copies = [f"stage {number % layout.pipeline}: {line}" for number, line in enumerate(copies)]
    elif layout.shards * layout.expert == 1:  # every copy is one tensor axis
        copies = [" ".join(_shortened(copies))]
    for line in _shortened(copies):
        yield f"{'':<13}{line}"


def _copy(layout: RoleLayout, ranks: Sequence[int]) -> str:
    """The ranks of one copy: a bracket for each tensor axis, ( ) around the expert ranks of a shard."""
    groups = [_group(ranks[start : start + layout.tensor]) for start in range(0, len(ranks), layout.tensor)]
    if layout.expert > 1:
        groups = [f"({' '.join(groups[i : i + layout.expert])})" for i in range(0, len(groups), layout.expert)]
    return " ".join(_shortened(groups))


def _group(ranks: Sequence[int]) -> str:
    follow = list(ranks) == list(range(ranks[0], ranks[0] + len(ranks)))
    return f"[{ranks[0]}-{ranks[-1]}]" if follow and len(ranks) > 2 else f"[{' '.join(map(str, ranks))}]"


def _shortened(parts: Sequence[str]) -> list[str]:
    return list(parts) if len(parts) <= GROUPS_SHOWN else [*parts[: GROUPS_SHOWN - 1], "...", parts[-1]]


def _batches(plan: Plan) -> Iterator[str]:
    sizes = plan.sizes
    yield (
        f"Batches: {sizes.rollout_batch_size} prompts x {sizes.samples_per_prompt} samples a step, mini-batches of "
        f"{sizes.update_batch_size} prompts (ratio {sizes.ratio:g}), {sizes.epochs} epoch(s)"
    )
    yield (
        f"  rows of at most {sizes.prompt_tokens} + {sizes.response_tokens} = {sizes.row_tokens} tokens"
        + (
            ""
            if plan.config.data.max_prompt_length
            else f" (data.max_prompt_length is not set, {ASSUMED_PROMPT_TOKENS} assumed)"
        )
    )
    for role, memory in plan.roles.items():
        batch = memory.batch
        line = f"  {role:<10} {_span(batch.rows)} rows a data rank"
        if memory.model.is_trained:
            line += (
                f"; {batch.minibatches} mini-batches of {_span(batch.minibatch_rows)} rows, each in up to "
                f"{batch.micro_batches} micro-batches of {batch.micro_batch_tokens:,} tokens"
            )
        yield line


def _span(numbers: tuple[int, int]) -> str:
    least, most = numbers
    return str(least) if least == most else f"{least} to {most}"


def _pipelines(plan: Plan) -> Iterator[str]:
    schedule = plan.config.strategy.pipeline_schedule
    staged = {role: memory for role, memory in plan.roles.items() if memory.layout.pipeline > 1}
    if not staged:
        return
    yield f"Pipelines ({schedule}): layers of each stage, head and norm on the last"
    for role, memory in staged.items():
        ranks, chunks = memory.layout.pipeline, chunks_of(schedule)
        yield f"  {role:<10} {describe(cut_layers(memory.model.costs, ranks * chunks))}"
        hidden = memory.batch.micro_batch_tokens * memory.model.decoder.hidden * memory.model.compute_bytes
        if memory.model.is_trained:
            count = count_for(schedule, memory.batch.micro_batches, ranks)
            bubble = bubble_share(ranks, count, chunks)
            yield (
                f"{'':<13}{count} micro-batches of a mini-batch, of each {gigabytes(hidden)} each way between stages; "
                f"the bubble is {bubble:.0%} at least"
            )


def _layers(plan: Plan) -> Iterator[str]:
    yield "On GPUs (log-probs come from logits in compiled kernels), decoder layers run"
    for role in plan.roles:
        reason = plan.as_written.get(role)
        line = f"  {role:<10} " + ("compiled" if reason is None else f"as they are written: {reason}")
        on_host = max(plan.role_on(role, kind).on_host for kind in plan.memory if role in kind.roles)
        yield line + (f"; {gib(on_host)} GiB of activations in host memory" if on_host else "")


def _training(plan: Plan) -> Iterator[str]:
    yield "Gradients and optimizer state of a rank"
    for role in plan.roles:
        kinds = {kind.stages[role]: kind for kind in plan.memory if role in kind.roles}
        for stage, kind in sorted(kinds.items(), key=lambda found: found[0]):
            memory = plan.role_on(role, kind)
            if memory.model.is_trained:
                bits = ", moments in 8 bits" if memory.model.optimizer == "adamw8bit" else ""
                where = f" (stage {stage})" if len(kinds) > 1 else ""
                yield f"  {role:<10} {mib(memory.trained)} and {mib(memory.optimizer)}{bits}{where}"


def _memory(plan: Plan) -> Iterator[str]:
    for number, kind in enumerate(plan.memory):
        if number:
            yield ""
        yield from _table(plan, kind)


def _table(plan: Plan, kind: RankMemory) -> Iterator[str]:
    yield (
        f"Memory of a rank at the peak of each phase, GiB ({ranges(kind.ranks)}{_stages(plan, kind)}; "
        f"{gib(plan.hardware.usable_bytes)} usable, {USABLE:.0%})"
    )
    names = [phase.name for phase in kind.phases]
    rows: dict[tuple[str, str], dict[str, int]] = {}
    for phase in kind.phases:
        for item in phase.peak.items:
            rows.setdefault((item.role, item.what), {})[phase.name] = item.bytes
    yield f"  {'':<32}" + "".join(f"{name:>15}" for name in names)
    for (role, what), cells in rows.items():
        line = "".join(f"{gib(cells[name]) if name in cells else '':>15}" for name in names)
        yield f"  {role + ' ' + what:<32}{line}".rstrip()
    yield f"  {'total':<32}" + "".join(f"{gib(phase.peak.bytes):>15}" for phase in kind.phases)
    yield f"  {'peak at':<10}" + "; ".join(f"{phase.name}: {phase.peak.name}" for phase in kind.phases)


def _stages(plan: Plan, kind: RankMemory) -> str:
    """Which stages a kind of ranks has, where there are several."""
    numbers = {role: stage for role, stage in kind.stages.items() if plan.layouts[role].pipeline > 1}
    if len(set(numbers.values())) == 1:
        return f", stage {next(iter(numbers.values()))}"
    return "".join(f", {role} stage {stage}" for role, stage in numbers.items())


def _traffic(plan: Plan) -> Iterator[str]:
    yield "Traffic of a rank"
    if plan.received:
        most, least = max(plan.received), min(plan.received)
        whole = plan.roles["actor"].model.numel * plan.roles["actor"].model.compute_bytes
        yield (
            f"  training -> rollout: {gigabytes(most)} received at most, {gigabytes(least)} at least; the whole model "
            f"has {gigabytes(whole)}"
        )
    traffic = Traffic.of(plan.roles["actor"], plan.sizes, plan.hardware.link)
    if traffic is not None:
        yield (
            f"  a micro-batch of the actor: gathers and reductions {gigabytes(traffic.parameter_bytes)}, "
            f"{milliseconds(traffic.parameter_seconds)} at {traffic.shard_link:g} GB/s; tensor all-reduces "
            f"{gigabytes(traffic.tensor_bytes)}, {milliseconds(traffic.tensor_seconds)}; matmuls "
            f"{milliseconds(traffic.matmul_seconds)}"
        )


def _advice(plan: Plan) -> Iterator[str]:
    lines = advise(plan)
    yield "Advice" if lines else "Advice: none"
    for line in lines:
        yield textwrap.fill(line.text, WIDTH, initial_indent=f"  {line.topic + ':':<14}", subsequent_indent=" " * 16)
