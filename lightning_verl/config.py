"""The config of ``lightning-verl train``: a YAML file, typed and checked.

Paths in it are relative to the folder that the command runs in; modules with rewards may lie beside the file. The
smallest one::

    model: {actor: path/to/model}
    data: {source: prompts.jsonl}
    rewards: {functions: ["my_rewards:score"]}
    algorithm: {name: grpo}
    steps: 200
    output: runs/first
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from lightning_verl.algorithms.base import Algorithm
from lightning_verl.algorithms.grpo import GRPO
from lightning_verl.algorithms.ppo import PPO
from lightning_verl.algorithms.sft import SFT
from lightning_verl.data.microbatches import Packing
from lightning_verl.models.quantize import Quantization, check_quantization
from lightning_verl.pipeline.order import PipelineSchedule
from lightning_verl.roles.optimizers import OptimizerName
from lightning_verl.rollout.sampling import SamplingParams
from lightning_verl.strategies.layout import check_names
from lightning_verl.strategies.precision import PrecisionName

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser


ALGORITHMS: dict[str, type[Algorithm]] = {"grpo": GRPO, "ppo": PPO, "sft": SFT}
"""The names that ``algorithm: {name: ...}`` takes."""


class ConfigError(ValueError):
    """A mistake in a config."""


@dataclass(frozen=True)
class ModelConfig:
    """Where the models of the roles come from: folders, or names on a model hub."""

    actor: str
    """The policy, with its tokenizer."""
    critic: str | None = None
    """The critic; None starts it from the actor's weights. Only used where the algorithm needs one."""
    reference: str | None = None
    """What a KL penalty measures from; None takes the actor as it starts. Only used where there is a penalty."""
    lora: dict[str, Any] | None = None
    """An adapter for actor and critic, such as ``{r: 8, alpha: 16, target_modules: [q_proj, v_proj]}``."""
    quantization: Quantization | None = None
    """``nf4``: hold the linear layers below the adapters in 4 bits; needs bitsandbytes."""
    activation_checkpointing: Literal["selective", "full"] | None = None
    """What is recomputed in the backward pass."""


@dataclass(frozen=True)
class DataConfig:
    """The prompts; see ``AsyncRolloutDataset``."""

    source: str
    """A JSONL file."""
    prompt_field: str = "prompt"
    """The key of the prompt in a row; the other keys reach the rewards."""
    max_prompt_length: int | None = None
    """Most tokens of a prompt."""
    overlong: Literal["error", "filter", "left", "right"] = "error"
    """What happens to longer ones."""
    shuffle: bool = True
    """Whether each epoch has an order of its own."""
    num_workers: int = 0
    """Processes that tokenise."""
    prefetch_factor: int = 4
    """Batches that are ready in advance."""


@dataclass(frozen=True)
class RewardConfig:
    """The reward: a weighted sum of functions; see ``RewardFunction``."""

    functions: list[str] = field(default_factory=list)
    """``package.module:function``, each called with what its parameters name."""
    weights: list[float] | None = None
    """One a function; None gives each 1."""
    time_limit: float | None = None
    """Seconds that a sample may take."""


@dataclass(frozen=True)
class EngineConfig:
    """What generates; see ``Actor``."""

    name: Literal["auto", "native", "transformers", "vllm"] = "auto"
    """Which engine."""
    options: dict[str, Any] = field(default_factory=dict)
    """Its own options, such as ``{kv_cache_dtype: fp8}``."""

    def __post_init__(self) -> None:
        from lightning_verl.rollout.engines import check_engine_options

        check_engine_options("engine", self.name, self.options)


@dataclass(frozen=True)
class BatchConfig:
    """Sizes; see ``RLTrainer``. Prompts are counted over all ranks."""

    rollout_batch_size: int = 128
    """Prompts of a step."""
    update_batch_size: int | None = None
    """Prompts of a mini-batch; None: one update a step."""
    samples_per_prompt: int | None = None
    """Samples of a prompt; None: the algorithm's."""
    epochs: int = 1
    """Passes over the samples of a step."""
    max_tokens_per_micro_batch: int | None = None
    """Tokens that one forward pass may hold on a rank; null: up to 16,384, as memory allows. Changes no result."""
    packing: Packing = "shared"
    """``shared``: without padding, and the prompt of samples once; ``rows``: without padding; ``padded``. Changes no
    result."""


@dataclass(frozen=True)
class OptimizerConfig:
    """What trains the roles, and how fast."""

    name: OptimizerName = "adamw"
    """Of actor and critic; "adamw8bit" holds moments in 8 bits and needs torchao, the extra ``8bit``."""
    learning_rates: dict[str, float] = field(default_factory=lambda: {"actor": 1e-6, "critic": 1e-5})
    """By role."""
    warmup_steps: int = 0
    """Steps over which they rise from 0."""
    decay_steps: int | None = None
    """Steps after which they have fallen to 0, those of the rise included; null keeps them."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""


@dataclass(frozen=True)
class StrategyConfig:
    """How the roles lie on the ranks; see ``HybridStrategy``."""

    mesh_shape: tuple[int, int, int, int] | None = None
    """Ranks of the axes data, tensor, pipeline, expert; None: data = all."""
    parallelism_config: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Sizes of single roles, such as ``{actor: {dp: 2, tp: 2}}``."""
    hybrid_engine_config: dict[str, Any] = field(default_factory=dict)
    """How the actor is rolled out, such as ``{rollout_tp: 2}``."""
    activation_offload: bool = False
    """Hold what decoder layers keep for their backward pass in host memory until then."""
    compile_layers: bool | None = None
    """Whether decoder layers run compiled while they train and score; None: on CUDA."""
    pipeline_schedule: PipelineSchedule = "1f1b"
    """The order of micro-batches in a pipeline: 1f1b, interleaved or gpipe."""


@dataclass(frozen=True)
class TrainConfig:
    """A run."""

    model: ModelConfig
    """Where the weights come from."""
    data: DataConfig
    """The prompts."""
    algorithm: dict[str, Any]
    """``name``, one of grpo, ppo and sft, and options of its class, such as ``{name: ppo, kl: 0.01, lam: 0.95}``."""
    steps: int
    """Steps in all, those before a resume included."""
    output: str
    """Folder for logs, checkpoints and the trained model."""
    rewards: RewardConfig = field(default_factory=RewardConfig)
    """The reward; ``sft`` needs none."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """How responses are sampled; ``n`` is ``batch.samples_per_prompt``."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """What generates."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    """Sizes."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Learning rates."""
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    """Layouts."""
    accelerator: str = "auto"
    """Fabric's: "auto", "cpu" or "cuda"."""
    devices: int | str = "auto"
    """Processes on this machine; under torchrun it is torchrun that decides."""
    precision: PrecisionName = "32-true"
    """See ``HybridPrecision``."""
    seed: int = 0
    """Seed of new weights and of the order of the prompts."""
    checkpoint_every: int = 50
    """Steps from one checkpoint to the next."""
    resume: bool = False
    """Go on from the last checkpoint in ``output``, if there is one."""


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_config(words: Sequence[str]) -> TrainConfig:
    """Read a YAML file, and options such as ``--steps 3`` or ``--model.actor FOLDER`` that go before it.

    Args:
        words: The file's path, then the options.

    Raises:
        ConfigError: There is no such file, it is not YAML, a key is unknown or missing, or a value is of another type.
        SystemExit: ``--help`` stands in place of the file.
    """
    import yaml
    from jsonargparse import ArgumentError

    parser = _parser()
    if not words or words[0].startswith("-"):
        if "--help" in words or "-h" in words:
            parser.parse_args(["--help"])
        raise ConfigError("the first word must be the path of a YAML file, as in `lightning-verl train run.yaml`.")
    path = Path(words[0])
    try:
        values = yaml.safe_load(path.read_text())
        _check_keys(TrainConfig, values, "the config")
        options = parser.parse_args(["--config", str(path), *words[1:]])
        parts = parser.instantiate(options)
        config = TrainConfig(**{entry.name: parts[entry.name] for entry in fields(TrainConfig)})
        make_algorithm(config.algorithm)
    except (OSError, ValueError, ArgumentError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return config


def _parser() -> ArgumentParser:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        prog="lightning-verl train",
        usage="lightning-verl train CONFIG.yaml [--key value] [--part.key value] ...",
        description="Train what a YAML file describes. Options go before what the file says.",
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="the YAML file, as the first word")
    parser.add_class_arguments(TrainConfig)
    return parser


def _check_keys(kind: type, values: Any, where: str) -> None:
    """Refuse keys that a dataclass does not have, and name the nearest one."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} must be a mapping of keys to values, got {values!r}.")
    kinds = get_type_hints(kind)
    check_names(where, values, [entry.name for entry in fields(kind)], "key")
    for name, value in values.items():
        if is_dataclass(kinds[name]):
            _check_keys(kinds[name], value, name)


# ---- making ----------------------------------------------------------------------------------------------------------


def make_algorithm(options: Mapping[str, Any]) -> Algorithm:
    """Make an algorithm from its name and options.

    Args:
        options: ``name``, and arguments of the class in ``ALGORITHMS``. A KL controller is given as
            ``{class_path: lightning_verl.AdaptiveKL, init_args: {...}}``.

    Raises:
        ConfigError: The name or an option is unknown, or a value is of another type.
        ValueError: The class refuses a value.
    """
    from jsonargparse import ArgumentError, ArgumentParser

    given = dict(options)
    name = str(given.pop("name", None))
    check_names("algorithm", [name], ALGORITHMS, "name")
    kind = ALGORITHMS[name]
    check_names(f"algorithm {name}", given, inspect.signature(kind).parameters, "option")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind)
    try:
        return kind(**vars(parser.instantiate(parser.parse_object(given))))
    except ArgumentError as error:
        raise ConfigError(f"algorithm {name}: {error}") from error


def role_sources(config: TrainConfig, algorithm: Algorithm) -> dict[str, str]:
    """The roles with weights that a run has, and where these come from.

    Raises:
        ConfigError: The algorithm needs a reward and there is none.
    """
    model = config.model
    if algorithm.needs_reward and not config.rewards.functions:
        raise ConfigError(f"algorithm {config.algorithm['name']} needs a reward; add rewards: {{functions: [...]}}.")
    sources = {"actor": model.actor}
    if algorithm.needs_critic:
        sources["critic"] = model.critic or model.actor
    if algorithm.needs_reference and (model.reference is not None or model.lora is None):
        sources["reference"] = model.reference or model.actor
    return sources


def trained_role_options(config: TrainConfig) -> dict[str, Any]:
    """What shapes actor and critic, besides their weights."""
    model = config.model
    return {
        "lora_config": model.lora,
        "quantization": model.quantization,
        "activation_checkpointing": model.activation_checkpointing,
    }


def check_model(config: TrainConfig) -> None:
    """Refuse models that cannot be built as they are asked for.

    Raises:
        ConfigError: Quantisation without an adapter, or its library is missing.
    """
    try:
        check_quantization("model", config.model.quantization, config.model.lora is not None)
    except (ValueError, ImportError) as error:
        raise ConfigError(str(error).replace("lora_config", "lora", 1)) from error
