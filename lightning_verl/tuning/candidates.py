"""What ``lightning-verl tune`` tries: one function for each setting, in order from the harmless on.

A new setting is a function from ``Start`` to candidates, and a line in ``KNOBS``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from lightning_verl.config import ConfigError, TrainConfig
from lightning_verl.planning.budget import LEAST_TOKENS
from lightning_verl.planning.plan import Hardware, Plan, make_plan
from lightning_verl.planning.traffic import HOST_RANKS, Traffic
from lightning_verl.strategies.layout import RoleLayout

_LARGEST_TOKENS = 65_536
"""Micro-batches of more are not tried."""
_CUTS = (1, 2, 4)
"""Micro-batches that a mini-batch is cut into."""
_MESHES = 4
"""Meshes that are tried: of those that fit the ones with the fewest bytes between ranks."""
_RATIOS = (1, 2, 4)
"""Mini-batches that a rollout feeds."""
LORA: dict[str, Any] = {"r": 16, "alpha": 32, "target_modules": "all-linear"}
"""The adapter that is tried."""


@dataclass(frozen=True)
class Candidate:
    """A config that may be better, and what is new about it."""

    name: str
    config: TrainConfig


@dataclass(frozen=True)
class Start:
    """Where the search stands."""

    config: TrainConfig
    """The best config so far."""
    ranks: int
    """Processes."""
    hardware: Hardware
    """Memory of a rank."""
    tokens: int = LEAST_TOKENS
    """Of a micro-batch, where the config leaves it to the memory that is free."""
    wanted_tokens: int | None = None
    """Tokens of the smallest micro-batch that did not fit before."""

    def plan_of(self, config: TrainConfig) -> Plan:
        """The plan of a config. ConfigError where it cannot run."""
        if config.batch.max_tokens_per_micro_batch is None:
            config = _with_tokens(config, self.tokens)
        return make_plan(config, self.ranks, self.hardware)

    @property
    def plan(self) -> Plan:
        """The plan of the best config."""
        return self.plan_of(self.config)


@dataclass(frozen=True)
class Knob:
    """One setting."""

    name: str
    """On the command line and in the table."""
    alters_learning: bool
    """Whether a policy learns something else with it; else results are the same up to rounding."""
    candidates: Callable[[Start], Iterator[Candidate]]
    """What to try."""


# ---- batches ---------------------------------------------------------------------------------------------------------


def micro_batches(start: Start) -> Iterator[Candidate]:
    """The actor's mini-batch in one, two and four micro-batches."""
    plan = start.plan
    sizes, rows = plan.sizes, plan.roles["actor"].batch.minibatch_rows[1]
    shared = sizes.packing == "shared"
    prompts = math.ceil(rows / sizes.samples_per_prompt) if shared else rows
    whole = prompts * sizes.prompt_tokens + rows * sizes.response_tokens
    tried = {min(sizes.max_tokens_per_micro_batch, whole)}
    for cuts in _CUTS:
        # Rows are not cut: with one row to spare they go into no more micro-batches than this.
        tokens = whole if cuts == 1 else math.ceil(whole / cuts) + sizes.row_tokens
        if tokens <= _LARGEST_TOKENS and min(tokens, whole) not in tried:
            tried.add(tokens)
            yield Candidate(f"{tokens:,} tokens", _with_tokens(start.config, tokens))


def ratios(start: Start) -> Iterator[Candidate]:
    """More or fewer mini-batches of the same size from one rollout."""
    batch = start.config.batch
    size = batch.update_batch_size or batch.rollout_batch_size
    for ratio in _RATIOS:
        if ratio * size != batch.rollout_batch_size:
            changed = replace(batch, rollout_batch_size=ratio * size, update_batch_size=size)
            yield Candidate(f"{ratio} x {size} prompts", replace(start.config, batch=changed))


# ---- layouts ---------------------------------------------------------------------------------------------------------


def meshes(start: Start) -> Iterator[Candidate]:
    """Meshes of data x tensor ranks, and their copies; of the roles' own layouts only claimed ranks stay."""
    strategy = start.config.strategy
    claims = {role: entry for role, entry in strategy.parallelism_config.items() if "ranks" in entry}
    ranks = start.ranks - len({rank for entry in claims.values() for rank in entry["ranks"]})
    pipeline, experts = (strategy.mesh_shape or (1, 1, 1, 1))[2:]
    engine = {key: value for key, value in strategy.hybrid_engine_config.items() if key != "update_dp"}
    given = _layouts(start.plan)
    fitting: list[tuple[int, Candidate]] = []
    others: list[Candidate] = []
    for tensor in _divisors(min(ranks, HOST_RANKS)):
        for data in _divisors(ranks):
            shape = (data, tensor, pipeline, experts)
            layout = replace(strategy, mesh_shape=shape, parallelism_config=claims, hybrid_engine_config=engine)
            config = replace(start.config, strategy=layout)
            plan = _plan_or_none(start, config) if ranks % math.prod(shape) == 0 else None
            if plan is None or _layouts(plan) == given:
                continue
            copies = ranks // math.prod(shape)
            candidate = Candidate(f"data {data} x tensor {tensor}" + (f", {copies} copies" * (copies > 1)), config)
            if overflow(plan) is None:
                fitting.append((_moved_bytes(plan), candidate))
            else:
                others.append(candidate)
    yield from (candidate for _, candidate in sorted(fitting, key=lambda pair: pair[0])[:_MESHES])
    yield from others


def rollout_tensors(start: Start) -> Iterator[Candidate]:
    """Ranks that cut the actor while it generates."""
    plan, strategy = start.plan, start.config.strategy
    for tensor in _divisors(min(len(plan.layouts["actor"].ranks), HOST_RANKS)):
        if tensor != plan.layouts["rollout"].tensor and plan.received:
            engine = {**strategy.hybrid_engine_config, "rollout_tp": tensor}
            changed = replace(strategy, hybrid_engine_config=engine)
            yield Candidate(f"rollout tensor {tensor}", replace(start.config, strategy=changed))


def _plan_or_none(start: Start, config: TrainConfig) -> Plan | None:
    try:
        return start.plan_of(config)
    except ConfigError:
        return None


def _layouts(plan: Plan) -> dict[str, RoleLayout]:
    """Of the roles that there are."""
    return {role: plan.layouts[role] for role in (*plan.roles, "rollout")}


def _moved_bytes(plan: Plan) -> int:
    """Bytes that a rank of the actor receives for a micro-batch, gradients between copies included."""
    actor = plan.roles["actor"]
    copies = actor.layout.replicas
    traffic = Traffic.of(actor, plan.sizes, None)
    between = 2 * actor.trained * (copies - 1) // copies
    return between + (0 if traffic is None else traffic.parameter_bytes + traffic.tensor_bytes)


def overflow(plan: Plan) -> str | None:
    """Why a plan does not fit into memory; None where it does."""
    for kind in plan.memory:
        needed = kind.worst.peak.bytes
        if needed > plan.hardware.usable_bytes:
            usable = plan.hardware.usable_bytes / 2**30
            return f"planned {needed / 2**30:.2f} GiB in {kind.worst.name}, {usable:.2f} usable"
    return None


# ---- memory ----------------------------------------------------------------------------------------------------------


def checkpointings(start: Start) -> Iterator[Candidate]:
    """Activations recomputed, with the micro-batch as it is and with the one that did not fit before."""
    for mode in ("selective", "full"):
        if mode == start.config.model.activation_checkpointing:
            continue
        config = replace(start.config, model=replace(start.config.model, activation_checkpointing=mode))
        yield Candidate(mode, config)
        if start.wanted_tokens is not None:
            name = f"{mode}, {start.wanted_tokens:,} tokens"
            yield Candidate(name, _with_tokens(config, start.wanted_tokens))


def kv_offloads(start: Start) -> Iterator[Candidate]:
    """Keys and values of samples that step back go to host memory; the native engine's."""
    engine = start.config.engine
    if not start.plan.algorithm.needs_reward:  # nothing is generated
        return
    if engine.name in ("auto", "native") and not engine.options.get("offload_kvcache"):
        changed = replace(engine, options={**engine.options, "offload_kvcache": True})
        yield Candidate("offload_kvcache", replace(start.config, engine=changed))


def loras(start: Start) -> Iterator[Candidate]:
    """An adapter in place of all weights, where there is none."""
    if start.config.model.lora is None:
        yield Candidate(f"r {LORA['r']}", replace(start.config, model=replace(start.config.model, lora=LORA)))


KNOBS = (
    Knob("micro-batch", False, micro_batches),
    Knob("mesh", False, meshes),
    Knob("rollout-tensor", False, rollout_tensors),
    Knob("ratio", True, ratios),
    Knob("checkpointing", False, checkpointings),
    Knob("kv-offload", False, kv_offloads),
    Knob("lora", True, loras),
)
"""In the order in which they are tried."""


def _with_tokens(config: TrainConfig, tokens: int) -> TrainConfig:
    return replace(config, batch=replace(config.batch, max_tokens_per_micro_batch=tokens))


def _divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]
