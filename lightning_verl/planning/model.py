"""The shapes of a role's parameters, from its config alone: modules on the meta device, which has no memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from lightning_verl.callbacks.throughput import UpdateCost
from lightning_verl.models.quantize import code_bytes, is_quantized, whole_shape
from lightning_verl.parallel.checkpointing import ActivationCheckpointing
from lightning_verl.parallel.rollout import RolloutCut, rollout_cuts
from lightning_verl.parallel.structure import decoder_layers
from lightning_verl.parallel.tensor import cut_dims
from lightning_verl.parallel.vocabulary import vocabulary_ends
from lightning_verl.pipeline.cut import Costs, cut_layers
from lightning_verl.pipeline.stages import stage_costs
from lightning_verl.resharding.sinks import RolloutModule, plain_name
from lightning_verl.roles.optimizers import OptimizerName
from lightning_verl.strategies.layout import is_trainable
from lightning_verl.strategies.precision import HybridPrecision


@dataclass(frozen=True)
class ParameterShape:
    """One parameter of a role."""

    name: str
    """Its name in the role."""
    shape: tuple[int, ...]
    """The whole parameter's shape."""
    itemsize: int
    """Bytes of an element as the role holds it."""
    trained: bool
    """Whether it gets gradients and optimizer state."""
    layer: int | None
    """The number of its decoder layer, a unit of FSDP2; None: it belongs to the root unit."""
    tensor_dim: int | None
    """The dim that a tensor axis cuts in training; None: whole on each of its ranks."""
    rollout_cut: RolloutCut | None = None
    """How the rollout's tensor axis cuts it; None: whole on each of its ranks."""
    expert: bool = False
    """Whether dim 0 counts experts, which an expert axis divides."""
    adapter: bool = False
    """Whether it is half of a LoRA adapter, which is merged into its target for the rollout."""
    adapted: bool = False
    """Whether it is such a target."""
    end: Literal["first", "last", "both"] = "last"
    """Which stages of a pipeline have it, if it belongs to no layer; both: a head that is tied to the embedding."""
    stages: tuple[int, ...] = (0,)
    """The pipeline ranks that have it, see ``RoleModel.in_stages``."""

    codes: bool = False
    """Whether it is held in codes of 4 bits, whole on every rank; ``shape`` is that of the weight."""

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    def held_bytes(self, numel: int) -> int:
        """Bytes that so many elements of it take as it is held."""
        return code_bytes(numel) if self.codes else numel * self.itemsize


@dataclass(frozen=True)
class Decoder:
    """The sizes that activations and caches depend on."""

    layers: int
    """Decoder layers."""
    hidden: int
    """Width of the residual stream."""
    heads: int
    """Attention heads."""
    kv_heads: int
    """Key-value heads."""
    head_dim: int
    """Width of a head."""
    inner: int
    """Width of the feed-forward part that a token passes; of a mixture, of all experts that it is sent to."""
    vocabulary: int
    """Tokens there are."""
    qk_norm: bool
    """Whether queries and keys have norms of their own."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> Decoder:
        """The sizes of a transformers model, by what the config calls them."""
        config: Any = model.config.get_text_config()
        heads = config.num_attention_heads
        chosen = getattr(config, "num_experts_per_tok", None)
        inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * config.hidden_size
        if chosen is not None:
            inner = chosen * (getattr(config, "moe_intermediate_size", None) or inner)
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            inner=inner,
            vocabulary=config.vocab_size,
            qk_norm=any(name.endswith("q_norm.weight") for name, _ in model.named_parameters()),
        )


@dataclass(frozen=True)
class RoleModel:
    """A role's parameters and sizes."""

    role: str
    """The role's name."""
    architecture: str
    """The class of its transformers model."""
    parameters: tuple[ParameterShape, ...]
    """Each once, tied ones too."""
    decoder: Decoder
    """What activations depend on."""
    compute_bytes: int
    """Bytes of an element in the forward pass."""
    checkpointing: ActivationCheckpointing
    """What is recomputed in the backward pass."""
    has_head: bool
    """Whether it makes logits."""
    cost: UpdateCost | None = None
    """FLOPs of training it; None where they are not known."""
    optimizer: OptimizerName = "adamw"
    """What trains it."""
    cuts_vocabulary: bool = False
    """Whether a tensor axis cuts embedding and head."""
    compiled: bool = False
    """Whether its decoder layers run compiled."""
    fused: bool = False
    """Whether its log-probs come from logits in compiled kernels, as on CUDA."""
    offloads: bool = False
    """Whether what its decoder layers keep for their backward pass lies in host memory meanwhile."""
    costs: Costs = Costs(())
    """What its parts cost, for a cut into stages."""
    stage_layers: tuple[int, ...] = ()
    """Layers on each pipeline rank; empty: all on each."""

    def in_stages(self, ranks: int, chunks: int = 1) -> RoleModel:
        """The same with every parameter on its pipeline ranks.

        Args:
            ranks: Ranks of the pipeline.
            chunks: Stages a rank.
        """
        owner = {
            layer: number % ranks
            for number, layers in enumerate(cut_layers(self.costs, ranks * chunks))
            for layer in layers
        }
        ends = {"first": (0,), "last": (ranks - 1,), "both": (0, ranks - 1)}
        parameters = tuple(
            replace(p, stages=ends[p.end] if p.layer is None else (owner[p.layer],)) for p in self.parameters
        )
        counts = [list(owner.values()).count(rank) for rank in range(ranks)]
        return replace(self, parameters=parameters, stage_layers=tuple(counts))

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    def tokens_on(self, tensor: int) -> int:
        """Tokens of the vocabulary that a rank of a tensor axis makes logits of in training."""
        return -(-self.decoder.vocabulary // tensor) if self.cuts_vocabulary else self.decoder.vocabulary

    @property
    def trained_numel(self) -> int:
        """Elements of the trained ones."""
        return sum(parameter.numel for parameter in self.parameters if parameter.trained)

    @property
    def is_trained(self) -> bool:
        """Whether the role has an optimizer."""
        return any(parameter.trained for parameter in self.parameters)


def model_config(source: str) -> PretrainedConfig:
    """The config of a model: of a folder, or of a hub name that is in the local cache. Reads no weights, no network.

    Raises:
        OSError: There is none.
        ValueError: It is of a kind that transformers does not know.
    """
    config: PretrainedConfig = AutoConfig.from_pretrained(source, local_files_only=True)
    return config


def build_on_meta(make: Callable[[], nn.Module], precision: HybridPrecision) -> nn.Module:
    """Build a role without memory for its weights, in the dtypes that it would be held in.

    Args:
        make: Makes the role.
        precision: Decides the dtypes.
    """
    with torch.device("meta"):
        module = make()
    if not is_trainable(module, str(module.role)):
        module.requires_grad_(False)
    return precision.convert_module(module)


def describe(
    module: nn.Module,
    precision: HybridPrecision,
    checkpointing: ActivationCheckpointing = None,
    optimizer: OptimizerName = "adamw",
) -> RoleModel:
    """Take the shapes of a role.

    Args:
        module: The role, on any device.
        precision: What it computes in.
        checkpointing: Its activation checkpointing.
        optimizer: What trains it, if anything does.
    """
    model: Any = module.model
    layer_of = {
        parameter: number for number, layer in enumerate(decoder_layers(module)) for parameter in layer.parameters()
    }
    dims = cut_dims(model)
    embeddings = {
        parameter
        for child in model.base_model.children()
        if isinstance(child, nn.Embedding)
        for parameter in child.parameters()
    }
    is_tied = model.base_model is not model and model.get_output_embeddings() is not None
    is_tied = is_tied and model.get_output_embeddings().weight in embeddings
    cuts, adapted = _rollout_of(model) if module.role == "actor" else ({}, set())
    parameters = [
        ParameterShape(
            name=name,
            shape=whole_shape(parameter),
            codes=is_quantized(parameter),
            itemsize=parameter.element_size(),
            trained=parameter.requires_grad,
            layer=layer_of.get(parameter),
            tensor_dim=dims.get(parameter),
            rollout_cut=cuts.get(plain_name(name).removeprefix("model.")),
            expert=parameter.ndim == 3 and ".experts." in name,
            adapter=".lora_" in name,
            adapted=plain_name(name).removeprefix("model.") in adapted,
            end="last" if parameter not in embeddings else "both" if is_tied else "first",
        )
        for name, parameter in module.named_parameters()
    ]
    head = model.get_output_embeddings()
    return RoleModel(
        role=str(module.role),
        architecture=type(model).__name__,
        parameters=tuple(parameters),
        decoder=Decoder.of(model),
        compute_bytes=precision.compute_dtype.itemsize,
        checkpointing=checkpointing,
        has_head=head is not None,
        cost=None if head is None else UpdateCost.of(model),
        optimizer=optimizer,
        cuts_vocabulary=bool(vocabulary_ends(model)),
        costs=stage_costs(model),
    )


def _rollout_of(model: Any) -> tuple[dict[str, RolloutCut], set[str]]:
    """How the rollout cuts the parameters of a model, and which of them an adapter is merged into, by name."""
    view = RolloutModule(model)
    cuts = rollout_cuts(view.module)
    for adapter in view.adapters:
        cut = cuts.get(adapter.weight)
        if cut is not None:  # column-wise B follows its target, row-wise A does
            cuts[adapter.b if cut.dim == 0 else adapter.a] = cut
    return cuts, {adapter.weight for adapter in view.adapters}
