"""The run that a config describes: its strategy, roles, data and trainer."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_verl.algorithms.base import Algorithm
from lightning_verl.config import (
    ConfigError,
    TrainConfig,
    check_model,
    make_algorithm,
    role_sources,
    trained_role_options,
)
from lightning_verl.roles.optimizers import check_optimizer
from lightning_verl.strategies.layout import ROLES

if TYPE_CHECKING:
    from lightning.fabric import Fabric

    from lightning_verl.data.prompts import AsyncRolloutDataset
    from lightning_verl.dataflow import HybridDataFlow
    from lightning_verl.trainer import RLTrainer


def run_training(config: TrainConfig) -> dict[str, float]:
    """Train, and leave logs, checkpoints and the trained model in ``config.output``.

    Returns:
        The metrics of the last step.

    Raises:
        ConfigError: ``output`` holds another run, a reward is missing or not found, or the library of the engine or
            of the optimizer is.
    """
    from lightning_verl.callbacks import Checkpoint

    check_libraries(config)
    latest = Checkpoint.latest(Path(config.output) / "checkpoints")
    if latest is not None and not config.resume:
        raise ConfigError(
            f"output: {config.output} holds the run of {latest.name}; set resume: true, or another output."
        )
    fabric = make_fabric(config)
    trainer = make_trainer(config, fabric)
    metrics = trainer.fit(config.steps, resume_from=latest)
    trainer.dataflow.save_pretrained(Path(config.output) / "model")
    fabric.logger.finalize("success")
    return metrics


def check_libraries(config: TrainConfig) -> None:
    """Refuse a config whose engine, optimizer or model needs a library that is not there, before anything is made.

    Raises:
        ConfigError: With the name of the library; or 4-bit weights without an adapter.
    """
    from lightning_verl.rollout.engines import check_engine

    try:
        check_engine("engine", config.engine.name, config.engine.options)
    except ImportError as error:
        raise ConfigError(f"engine: {error}") from error
    try:
        check_optimizer("optimizer.name", config.optimizer.name)
    except ImportError as error:
        raise ConfigError(str(error)) from error
    check_model(config)


def make_trainer(config: TrainConfig, fabric: Fabric) -> RLTrainer:
    """Launch Fabric, unless that was done, and make the trainer of a run.

    Args:
        config: The run.
        fabric: From ``make_fabric``.

    Raises:
        ConfigError: A reward is missing or not found, or a role cannot be cut into the stages that were asked for.
    """
    from lightning_verl.planning.plan import check_pipelines
    from lightning_verl.trainer import RLTrainer

    layouts = [fabric.strategy.layout(role) for role in ROLES]  # type: ignore[attr-defined]
    check_pipelines(config, len({rank for layout in layouts for rank in layout.ranks}))
    if os.environ.get("LT_CLI_USED") != "1":  # Fabric's own launcher has done it, and forbids to do it again
        fabric.launch()
    fabric.seed_everything(config.seed)
    algorithm = make_algorithm(config.algorithm)
    with fabric.init_module():
        dataflow = make_dataflow(config, algorithm)
    return RLTrainer(
        fabric,
        dataflow,
        algorithm,
        make_data(config, dataflow),
        rollout_batch_size=config.batch.rollout_batch_size,
        update_batch_size=config.batch.update_batch_size,
        samples_per_prompt=config.batch.samples_per_prompt,
        epochs=config.batch.epochs,
        sampling=config.sampling,
        learning_rates=config.optimizer.learning_rates,
        warmup_steps=config.optimizer.warmup_steps,
        decay_steps=config.optimizer.decay_steps,
    )


def make_fabric(config: TrainConfig, callbacks: list[Any] | None = None) -> Fabric:
    """Make the Fabric of a run, not launched yet.

    Args:
        config: The run.
        callbacks: Callbacks in place of a run's own; then nothing is logged, and no checkpoint written.
    """
    from lightning.fabric import Fabric
    from lightning.fabric.loggers import CSVLogger

    from lightning_verl.callbacks import Checkpoint, ProgressBar, Throughput
    from lightning_verl.quickstart.progress import ProgressLines
    from lightning_verl.strategies.hybrid import HybridStrategy

    output = Path(config.output)
    layouts = config.strategy
    strategy = HybridStrategy(
        layouts.mesh_shape,
        layouts.parallelism_config,
        layouts.hybrid_engine_config,
        activation_offload=layouts.activation_offload,
        compile_layers=layouts.compile_layers,
        pipeline_schedule=layouts.pipeline_schedule,
    )
    own = [Throughput(), ProgressBar(), ProgressLines(), Checkpoint(output / "checkpoints", config.checkpoint_every)]
    return Fabric(
        accelerator=config.accelerator,
        devices=config.devices,
        precision=config.precision,
        strategy=strategy,
        loggers=[CSVLogger(output, name="logs", flush_logs_every_n_steps=1)] if callbacks is None else [],
        callbacks=own if callbacks is None else callbacks,
    )


def make_dataflow(config: TrainConfig, algorithm: Algorithm) -> HybridDataFlow:
    """Make the roles that an algorithm needs.

    Raises:
        ConfigError: The algorithm needs a reward and there is none.
    """
    from lightning_verl.dataflow import HybridDataFlow
    from lightning_verl.roles.actor import Actor
    from lightning_verl.roles.critic import Critic
    from lightning_verl.roles.reference import Reference
    from lightning_verl.roles.reward_function import RewardFunction

    rewards, options = config.rewards, {**trained_role_options(config), "optimizer": config.optimizer.name}
    sources, engine = role_sources(config, algorithm), config.engine
    functions = [import_function(path) for path in rewards.functions]
    return HybridDataFlow(
        actor=Actor(sources["actor"], engine=engine.name, engine_options=engine.options, **options),
        critic=Critic(sources["critic"], **options) if "critic" in sources else None,
        reward=RewardFunction(functions, weights=rewards.weights, time_limit=rewards.time_limit) if functions else None,
        reference=Reference(sources["reference"]) if "reference" in sources else None,
        max_tokens_per_micro_batch=config.batch.max_tokens_per_micro_batch,
        packing=config.batch.packing,
        max_grad_norm=config.optimizer.max_grad_norm,
    )


def import_function(path: str) -> Callable[..., Any]:
    """Import a function by name.

    Args:
        path: ``package.module:function``.

    Raises:
        ConfigError: The path is not of this form, or there is no such module or function.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name.isidentifier()):
        raise ConfigError(f"rewards.functions: {path!r} must be of the form 'package.module:function'.")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports something that is not
        raise ConfigError(
            f"rewards.functions: there is no module {error.name!r} for {path!r}; it must be installed, or lie beside "
            "the config."
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        known = ", ".join(sorted(key for key, value in vars(module).items() if inspect.isroutine(value))) or "none"
        raise ConfigError(f"rewards.functions: module {module_name!r} has no function {name!r}; it has {known}.")
    return function  # type: ignore[no-any-return]


def make_data(config: TrainConfig, dataflow: HybridDataFlow) -> AsyncRolloutDataset:
    """Make the data set."""
    from lightning_verl.data.prompts import AsyncRolloutDataset

    data = config.data
    return AsyncRolloutDataset(
        data.source,
        tokenizer=dataflow.tokenizer,
        max_prompt_length=data.max_prompt_length,
        overlong=data.overlong,
        prompt_field=data.prompt_field,
        shuffle=data.shuffle,
        seed=config.seed,
        prefetch_factor=data.prefetch_factor,
        num_workers=data.num_workers,
    )
