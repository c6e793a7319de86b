"""From the config of a run to its plan: layouts, memory of a rank, traffic, batches. No weights, no launch, no GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_verl.algorithms.base import Algorithm
from lightning_verl.config import (
    ConfigError,
    TrainConfig,
    check_model,
    make_algorithm,
    role_sources,
    trained_role_options,
)
from lightning_verl.parallel.compiling import compiling_problem
from lightning_verl.parallel.expert import check_experts
from lightning_verl.parallel.tensor import tensor_parallel_problems
from lightning_verl.pipeline.order import chunks_of, micro_batches_kept, rows_problem
from lightning_verl.pipeline.stages import staging_problems
from lightning_verl.planning.batch import BatchSizes, RoleBatch
from lightning_verl.planning.budget import MOST_TOKENS
from lightning_verl.planning.memory import RESHARDING, Item, Moment, Phase, RoleMemory
from lightning_verl.planning.model import RoleModel, build_on_meta, describe, model_config
from lightning_verl.planning.shards import Placement, same_grid
from lightning_verl.planning.traffic import HOST_RANKS
from lightning_verl.roles.actor import Actor
from lightning_verl.roles.critic import Critic
from lightning_verl.roles.reference import Reference
from lightning_verl.rollout.sampling import SamplingParams
from lightning_verl.strategies.codes import check_codes
from lightning_verl.strategies.layout import RoleLayout, check_config, resolve_layouts
from lightning_verl.strategies.mesh import DeviceMesh
from lightning_verl.strategies.precision import HybridPrecision

ASSUMED_PROMPT_TOKENS = 1024
"""The longest prompt that is planned for where the config sets no limit."""
USABLE = 0.9
"""The part of a GPU's memory that tensors may take; CUDA's context, NCCL's buffers and fragmentation take the rest."""


@dataclass(frozen=True)
class Hardware:
    """What is planned for."""

    memory_gib: float = 80.0
    """Memory of a GPU, in GiB."""
    link: float | None = None
    """Bandwidth of a GPU's link to the others, in GB/s; None: see ``planning.traffic``."""

    @property
    def usable_bytes(self) -> int:
        """Bytes that tensors may take."""
        return int(self.memory_gib * USABLE * 2**30)


@dataclass(frozen=True)
class RankMemory:
    """What ranks that hold the same roles need."""

    ranks: tuple[int, ...]
    """The ranks, ascending."""
    roles: tuple[str, ...]
    """The roles with weights on them."""
    stages: dict[str, int]
    """The pipeline stage of each of them."""
    phases: tuple[Phase, ...]
    """What the phases take there."""

    @property
    def worst(self) -> Phase:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: phase.peak.bytes)


@dataclass(frozen=True)
class Plan:
    """What a run would do."""

    config: TrainConfig
    """The run."""
    algorithm: Algorithm
    """Its algorithm."""
    world_size: int
    """Ranks."""
    hardware: Hardware
    """GPUs."""
    layouts: dict[str, RoleLayout]
    """By role, and of the actor while it generates (``"rollout"``); reward functions run on the actor's ranks."""
    sizes: BatchSizes
    """Batches."""
    roles: dict[str, RoleMemory]
    """The roles with weights."""
    as_written: dict[str, str]
    """Those whose decoder layers do not run compiled, and why."""
    memory: tuple[RankMemory, ...]
    """Kinds of ranks."""
    received: tuple[int, ...]
    """Bytes that each rank of the actor receives on the way to the rollout; empty without one."""

    def role_on(self, role: str, kind: RankMemory) -> RoleMemory:
        """A role as a kind of ranks has it: of a pipeline, their stage."""
        return _on_stage(self.config, self.roles[role], kind.stages[role])


def make_plan(config: TrainConfig, ranks: int | None = None, hardware: Hardware | None = None) -> Plan:
    """Plan a run.

    Args:
        config: The run.
        ranks: Ranks to plan for; None: ``devices``, or the ranks of one mesh, or 1.
        hardware: What it runs on; None: 80 GiB a GPU.

    Raises:
        ConfigError: Sizes that do not fit, all of them in one message; or a model without a config here.
    """
    algorithm = make_algorithm(config.algorithm)
    check_model(config)
    sources = role_sources(config, algorithm)
    world_size = ranks if ranks is not None else default_ranks(config)
    layouts = _layouts(config, world_size)
    sizes = _sizes(config, algorithm)
    precision = HybridPrecision(config.precision)
    modules = {role: _on_meta(role, source, config, precision) for role, source in sources.items()}
    _check_models(modules, layouts, sizes, chunks_of(config.strategy.pipeline_schedule))
    as_written = _as_written(config, modules, layouts)
    models = {role: _describe(module, config, precision, role not in as_written) for role, module in modules.items()}
    roles = {}
    for role, model in models.items():
        layout, as_the_actor = layouts[role], same_grid(layouts["actor"], layouts[role])
        if layout.pipeline > 1:
            model = model.in_stages(layout.pipeline, chunks_of(config.strategy.pipeline_schedule))
        roles[role] = RoleMemory(
            model,
            Placement(layout, layouts["rollout"] if role == "actor" and algorithm.needs_reward else None),
            RoleBatch.of(sizes, layout.data_size, as_the_actor, layout.pipeline),
            adapter_is_reference=role == "actor" and config.model.lora is not None and "reference" not in models,
        )
    return Plan(
        config=config,
        algorithm=algorithm,
        world_size=world_size,
        hardware=hardware or Hardware(),
        layouts=layouts,
        sizes=sizes,
        roles=roles,
        as_written=as_written,
        memory=_memory(config, algorithm, sizes, roles),
        received=tuple(roles["actor"].received) if algorithm.needs_reward else (),
    )


def default_ranks(config: TrainConfig) -> int:
    """Ranks that the config speaks of: ``devices``, the ranks of one mesh and those that roles claim, or 1."""
    if str(config.devices).isdecimal() and int(config.devices) > 0:
        return int(config.devices)
    strategy = config.strategy
    claimed = {rank for entry in strategy.parallelism_config.values() for rank in _claimed(entry)}
    return math.prod(strategy.mesh_shape or (1,)) + len(claimed)


def _claimed(entry: Mapping[str, Any]) -> list[Any]:
    """The ranks that a role claims; whether they are any is checked with the rest."""
    return list(ranks) if isinstance(ranks := entry.get("ranks"), list | tuple) else []


def check_pipelines(config: TrainConfig, world_size: int) -> None:
    """Refuse a run whose roles cannot be cut into their stages, before anything is launched.

    A model whose config is not here yet is left to its role's set-up.

    Args:
        config: The run.
        world_size: Ranks.

    Raises:
        ConfigError: The sizes do not fit, a model cannot be cut, or there are fewer rows than stages.
    """
    strategy = config.strategy
    of_roles = [entry.get("pp", 1) for entry in strategy.parallelism_config.values()]
    if all(size == 1 for size in [(strategy.mesh_shape or (1, 1, 1, 1))[2], *of_roles]):
        return
    algorithm = make_algorithm(config.algorithm)
    modules = {}
    for role, source in role_sources(config, algorithm).items():
        try:
            modules[role] = _on_meta(role, source, config, HybridPrecision())
        except ConfigError:
            continue
    if "actor" in modules:
        chunks = chunks_of(strategy.pipeline_schedule)
        _check_models(modules, _layouts(config, world_size), _sizes(config, algorithm), chunks)


# ---- checks ----------------------------------------------------------------------------------------------------------


def _layouts(config: TrainConfig, world_size: int) -> dict[str, RoleLayout]:
    strategy = config.strategy
    entries, engine = strategy.parallelism_config, strategy.hybrid_engine_config
    refusal = _refusal(entries, engine, world_size, strategy.mesh_shape)
    if refusal:
        problems = layout_problems(world_size, strategy.mesh_shape, entries, engine)
        raise ConfigError("\n".join(problems or [refusal]))
    mesh = None if strategy.mesh_shape is None else DeviceMesh.of(strategy.mesh_shape)
    return resolve_layouts(world_size, mesh, entries, engine, HOST_RANKS)


def layout_problems(
    world_size: int,
    mesh_shape: tuple[int, int, int, int] | None,
    entries: Mapping[str, Mapping[str, Any]],
    engine: Mapping[str, Any],
) -> list[str]:
    """Everything that ``resolve_layouts`` has against a config, where it would stop at the first.

    Each role is tried alone; of the others only the ranks that they claim are kept.

    Args:
        world_size: Ranks there are.
        mesh_shape: The mesh, or None.
        entries: Sizes for each role.
        engine: The hybrid engine's sizes.
    """
    claims = {role: {"dp": len(ranks), "ranks": ranks} for role, entry in entries.items() if (ranks := _claimed(entry))}
    claims = {role: claim for role, claim in claims.items() if not _refusal({role: claim}, {})}
    problems: dict[str, None] = {}
    for tried in entries or {"actor": {}}:
        alone = {**claims, tried: entries[tried]} if entries else {}
        with_engine = tried == "actor" or "actor" not in entries
        refusal = _refusal(alone, engine if with_engine else {}, world_size, mesh_shape)
        if refusal:
            problems[refusal] = None
    return list(problems)


def _refusal(
    entries: Mapping[str, Mapping[str, Any]],
    engine: Mapping[str, Any],
    world_size: int | None = None,
    mesh_shape: tuple[int, int, int, int] | None = None,
) -> str | None:
    """The first reason against a config; without a world size, of those that need none."""
    try:
        check_config(entries, engine)
        if world_size is not None:
            resolve_layouts(world_size, None if mesh_shape is None else DeviceMesh.of(mesh_shape), entries, engine)
    except ValueError as error:
        return str(error)
    return None


def _on_stage(config: TrainConfig, memory: RoleMemory, stage: int) -> RoleMemory:
    """A role on the ranks of one of its stages."""
    ranks = memory.layout.pipeline
    if ranks == 1:
        return memory
    kept = micro_batches_kept(config.strategy.pipeline_schedule, stage, ranks, max(memory.batch.micro_batches, ranks))
    return replace(memory, stage=stage, waiting=kept)


def _check_models(
    modules: Mapping[str, Any], layouts: Mapping[str, RoleLayout], sizes: BatchSizes, chunks: int
) -> None:
    """Refuse models that an axis cannot cut or does not get enough rows for; all reasons at once."""
    wanted = {role: (layouts[role].tensor, module.model) for role, module in modules.items()}
    wanted["rollout"] = (layouts["rollout"].tensor, modules["actor"].model)
    problems = [
        f"{role}: {problem}"
        for role, (tensor, model) in wanted.items()
        for problem in (tensor_parallel_problems(model, tensor) if tensor > 1 else ())
    ]
    for role, module in modules.items():
        layout = layouts[role]
        if (stages := layout.pipeline * chunks) > chunks:
            prompts, samples = sizes.update_batch_size, sizes.samples_per_prompt
            rows = rows_problem(role, prompts, samples, layout.data_size, stages) if role != "reference" else None
            found = [*staging_problems(module, stages), *([] if rows is None else [rows])]
            problems += [f"{role}: {problem}" for problem in found]
        try:
            check_experts(module, layout.expert, layout.tensor, layout.shards)
            check_codes(module, layout)
        except ValueError as error:
            problems.append(f"{role}: {error}")
    if problems:
        raise ConfigError("\n".join(problems))


def _sizes(config: TrainConfig, algorithm: Algorithm) -> BatchSizes:
    batch = config.batch
    samples = algorithm.samples_per_prompt if batch.samples_per_prompt is None else batch.samples_per_prompt
    tokens = batch.max_tokens_per_micro_batch
    sizes = BatchSizes(
        rollout_batch_size=batch.rollout_batch_size,
        update_batch_size=batch.rollout_batch_size if batch.update_batch_size is None else batch.update_batch_size,
        samples_per_prompt=samples,
        epochs=batch.epochs,
        max_tokens_per_micro_batch=MOST_TOKENS if tokens is None else tokens,
        prompt_tokens=config.data.max_prompt_length or ASSUMED_PROMPT_TOKENS,
        response_tokens=config.sampling.max_new_tokens,
        packing=batch.packing,
    )
    problems = [
        f"batch: {name}={value}; it takes a whole number of at least 1."
        for name, value in vars(sizes).items()
        if isinstance(value, int) and value < 1
    ]
    if sizes.update_batch_size > sizes.rollout_batch_size:
        problems.append(
            f"batch: update_batch_size={sizes.update_batch_size} > rollout_batch_size={sizes.rollout_batch_size}; a "
            "mini-batch is a part of the rollout batch. Lower update_batch_size."
        )
    if problems:
        raise ConfigError("\n".join(problems))
    return sizes


# ---- parts -----------------------------------------------------------------------------------------------------------


def _on_meta(role: str, source: str, config: TrainConfig, precision: HybridPrecision) -> Any:
    try:
        shapes = model_config(source)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.{role}: {source!r} is neither a folder with a config.json nor in the local cache of models: "
            f"{str(error).splitlines()[0]}"
        ) from error
    kinds = {"actor": Actor, "critic": Critic, "reference": Reference}
    options = {} if role == "reference" else trained_role_options(config)
    return build_on_meta(lambda: kinds[role](shapes, **options), precision)


def _as_written(config: TrainConfig, modules: Mapping[str, Any], layouts: Mapping[str, RoleLayout]) -> dict[str, str]:
    """The roles whose decoder layers do not run compiled on GPUs, and why."""
    if config.strategy.compile_layers is False:
        return dict.fromkeys(modules, "strategy.compile_layers=false")
    problems = {role: compiling_problem(module, layouts[role].tensor > 1) for role, module in modules.items()}
    return {role: problem for role, problem in problems.items() if problem is not None}


def _describe(module: Any, config: TrainConfig, precision: HybridPrecision, compiled: bool) -> RoleModel:
    """The shapes of a role, and how it runs on GPUs."""
    checkpointing = getattr(module, "activation_checkpointing", None)
    model = describe(module, precision, checkpointing, config.optimizer.name)
    offloads = config.strategy.activation_offload and model.is_trained
    return replace(model, compiled=compiled, fused=True, offloads=offloads)


def _memory(
    config: TrainConfig,
    algorithm: Algorithm,
    sizes: BatchSizes,
    roles: Mapping[str, RoleMemory],
) -> tuple[RankMemory, ...]:
    """The phases on each kind of rank: ranks that hold the same stages of the same roles."""
    kinds: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank in sorted({rank for memory in roles.values() for rank in memory.layout.ranks}):
        held = tuple((role, m.layout.stage(rank)) for role, m in roles.items() if m.layout.holds(rank))
        kinds.setdefault(held, []).append(rank)
    sampling = _sampling_kind(config.sampling)
    offload = bool(config.strategy.hybrid_engine_config.get("offload_to_cpu"))
    result = []
    for held, ranks in kinds.items():
        here = {role: _on_stage(config, roles[role], stage) for role, stage in held}
        work = _work(here, algorithm, sizes, config.sampling.temperature)
        if "actor" in here and algorithm.needs_reward:
            work = {"rollout": here["actor"].rollout(sizes, sampling), **work}
        always = tuple(item for memory in here.values() for item in memory.held())
        generating = tuple(item for item in always if item.what != "optimizer state") if offload else always
        phases = []
        for name, moments in work.items():
            during = {
                moment: generating if name == "rollout" and moment != RESHARDING else always for moment in moments
            }
            parts = tuple(Moment(moment, (*during[moment], *items)) for moment, items in moments.items())
            phases.append(Phase(name, parts))
        result.append(RankMemory(tuple(ranks), tuple(here), dict(held), tuple(phases)))
    return tuple(result)


def _sampling_kind(sampling: SamplingParams) -> str:
    """The key of ``SAMPLE_BYTES``."""
    kind = "greedy" if sampling.temperature == 0 else "top_p" if sampling.top_p < 1 else "sampled"
    adjusted = sampling.logit_bias or sampling.repetition_penalty != 1 or sampling.min_new_tokens
    return f"{kind}, adjusted" if adjusted else kind


def _work(
    here: Mapping[str, RoleMemory], algorithm: Algorithm, sizes: BatchSizes, temperature: float
) -> dict[str, dict[str, tuple[Item, ...]]]:
    """What roles need while they work, by phase and moment, the rollout left out."""
    updates = sizes.epochs * -(-sizes.rollout_batch_size // sizes.update_batch_size)
    old_logprobs = algorithm.needs_reward and (updates > 1 or algorithm.needs_old_logprobs)
    scored = {
        "actor": old_logprobs or (algorithm.needs_reference and "reference" not in here),
        "reference": True,
        "critic": True,
    }
    scoring = {
        f"{role}, {moment}": items
        for role, memory in here.items()
        if scored[role]
        for moment, items in memory.scoring(temperature).items()
    }
    updated = {f"{role}_update": memory.update() for role in ("critic", "actor") if (memory := here.get(role))}
    return {"scoring": scoring, **updated} if scoring else dict(updated)
