"""Where resharded weights go: a second module that generates with them and gives them back at the end."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from lightning_verl.models.quantize import is_quantized, plain_linear, whole_shape


@dataclass(frozen=True)
class MergedAdapter:
    """A LoRA adapter that is added to the weight it belongs to: ``W + scale x B A``."""

    weight: str
    """The weight's name in the rollout module."""
    a: str
    """The name of A in the trained module, ``[r, in]``."""
    b: str
    """The name of B in the trained module, ``[out, r]``."""
    scale: float
    """``alpha / r``, or what the variant of LoRA makes of them."""
    transposed: bool
    """Whether the layer keeps its weight as ``[in, out]``."""


class RolloutModule:
    """A skeleton of a model, without weights but while it generates.

    It is a copy of the model's modules whose parameters are on the meta device; buffers (rotary frequencies) are
    shared. LoRA layers are replaced by what they wrap. Tied parameters stay tied.

    Args:
        model: The model before anything is cut, wrapped or checkpointed.

    Raises:
        ValueError: It has adapters that cannot be merged into a weight.
    """

    def __init__(self, model: nn.Module) -> None:
        self.adapters = mergeable_adapters(model)
        memo: dict[int, Any] = {id(parameter): _without_data(parameter) for parameter in model.parameters()}
        memo.update((id(buffer), buffer) for buffer in model.buffers())
        self.module: Any = _without_adapters(copy.deepcopy(model, memo))
        self.module.requires_grad_(False)
        self._empty = dict(self.module.named_parameters())
        self._filled: dict[str, nn.Parameter] = {}
        names = {id(parameter): name for name, parameter in self._empty.items()}
        self._places = [
            (owner._parameters, key, names[id(parameter)])
            for owner in self.module.modules()
            for key, parameter in owner._parameters.items()
            if parameter is not None
        ]
        self.shapes = {name: tuple(parameter.shape) for name, parameter in self.module.named_parameters()}
        """The whole shapes of the parameters; tied ones once, by their first name."""

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Put this rank's weights in.

        Args:
            tensors: One for each name in ``shapes``.
        """
        for name, tensor in tensors.items():
            if name in self._filled:
                self._filled[name].data = tensor
            else:  # one of another device cannot take the memory in
                self._filled[name] = nn.Parameter(tensor, requires_grad=False)
                self._nothing = tensor.new_empty(0)
        self._put(self._filled)

    def drop(self) -> None:
        """Give the weights back: the parameters are on the meta device again."""
        for parameter in self._filled.values():
            parameter.data = self._nothing
        self._put(self._empty)

    def _put(self, parameters: Mapping[str, nn.Parameter]) -> None:
        for places, key, name in self._places:
            places[key] = parameters[name]


def plain_name(name: str) -> str:
    """The name of a parameter in a model without adapters."""
    return name.replace(".base_layer.", ".")


def mergeable_adapters(model: nn.Module) -> list[MergedAdapter]:
    """The active LoRA adapters of a model.

    Raises:
        ValueError: An adapter is more than plain LoRA on a linear layer.
    """
    found: list[MergedAdapter] = []
    for name, layer in model.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        for adapter in layer.active_adapters if isinstance(layer, LoraLayer) else [""]:
            if not _is_plain_lora(layer, adapter):
                raise ValueError(
                    f"The adapter {adapter!r} on {name} ({type(layer).__name__}) is more than plain LoRA on a linear "
                    "layer, so it cannot be merged for the rollout. Roll out in the update layout: "
                    "HybridStrategy(enable_3d_hybrid=False)."
                )
            found.append(
                MergedAdapter(
                    weight=f"{name}.weight",
                    a=f"{name}.lora_A.{adapter}.weight",
                    b=f"{name}.lora_B.{adapter}.weight",
                    scale=float(layer.scaling[adapter]),  # type: ignore[attr-defined]
                    transposed=bool(getattr(layer, "fan_in_fan_out", False)),
                )
            )
    return found


def merge(weight: Tensor, a: Tensor, b: Tensor, adapter: MergedAdapter) -> None:
    """Add an adapter to a weight, in place; all three are this rank's parts of them. Computed in the dtype of A and B.

    Args:
        weight: ``[out, in]``, or ``[in, out]`` where the layer keeps it so; not shared with the trained module.
        a: ``[r, in]``.
        b: ``[out, r]``.
        adapter: Its scale and orientation.
    """
    delta = adapter.scale * (b @ a)
    weight.copy_(weight.to(delta.dtype) + (delta.T if adapter.transposed else delta))


def _is_plain_lora(layer: Any, adapter: str) -> bool:
    if not isinstance(layer, LoraLayer) or adapter not in layer.lora_A:
        return False
    halves = (layer.lora_A[adapter], layer.lora_B[adapter])
    variant = adapter in getattr(layer, "lora_variant", {})
    return all(type(half) is nn.Linear and half.bias is None for half in halves) and not variant


def _without_data(parameter: nn.Parameter) -> nn.Parameter:
    dtype = torch.get_default_dtype() if is_quantized(parameter) else parameter.dtype
    return nn.Parameter(torch.empty(whole_shape(parameter), dtype=dtype, device="meta"), requires_grad=False)


def _without_adapters(module: Any) -> Any:
    if isinstance(module, LoraLayer):
        module = module.base_layer
    if type(module).__name__ == "Linear4bit":
        return plain_linear(module)
    for name, child in list(module.named_children()):
        plain = _without_adapters(child)
        if plain is not child:
            setattr(module, name, plain)
    if getattr(module, "_hf_peft_config_loaded", False):
        module._hf_peft_config_loaded = False
    return module
