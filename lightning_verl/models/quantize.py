"""Frozen linear layers in 4 bits under LoRA adapters (QLoRA), on bitsandbytes.

A layer keeps its weight as NF4 codes, two to a byte, with a scale for 64 elements that is itself held in 8 bits, and
expands it for each matrix product. Codes and scales take 0.52 bytes an element.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

Quantization = Literal["nf4"]
"""``"nf4"``: the 4-bit data type of Dettmers et al. 2023, "QLoRA", with scales that are quantised too."""

BLOCK = 64
"""Elements that share a scale."""
SCALES = 256
"""Scales that share a scale of their own."""
_CODES = "Params4bit"


def check_quantization(owner: str, name: str | None, has_adapter: bool) -> None:
    """Refuse what cannot be quantised, before anything is loaded.

    Args:
        owner: The class that was given it, for messages.
        name: One of ``Quantization``; None for none.
        has_adapter: Whether an adapter is trained.

    Raises:
        ValueError: There is no such quantisation, or no adapter.
        ImportError: bitsandbytes is missing.
    """
    if name is None:
        return
    if name not in get_args(Quantization):
        raise ValueError(f"{owner} got quantization={name!r}; it takes {', '.join(get_args(Quantization))}, or None.")
    if not has_adapter:
        raise ValueError(
            f"{owner} got quantization={name!r} without lora_config: weights of 4 bits cannot be trained, only an "
            'adapter on them can. Give lora_config={"r": 16, "alpha": 32, "target_modules": ["q_proj", "v_proj"]}, or '
            "leave quantization out."
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ImportError(
            f"{owner}: quantization={name!r} needs bitsandbytes, which is not installed. Install it with "
            "pip install 'lightning-verl[4bit]', or leave quantization out."
        )


def quantize(model: Any) -> None:
    """Put the linear layers of a model's body into 4 bits, in place, and freeze them; embedding and head stay.

    Args:
        model: A transformers model without adapters, on any device; on torch's meta device codes have a shape only.
    """
    for module in list(model.base_model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, _in_4_bits(child))
    model.is_loaded_in_4bit = True  # peft asks for it before it chooses its layers


def _in_4_bits(linear: nn.Linear) -> nn.Module:
    import bitsandbytes as bnb

    weight, options = linear.weight.data, {"quant_type": "nf4", "compress_statistics": True, "blocksize": BLOCK}
    with torch.device("meta"):  # its weight is replaced at once
        layer = bnb.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, quant_type="nf4")
    if weight.is_meta:
        codes = weight.new_empty(-(-weight.numel() // 2), 1, dtype=torch.uint8)
        state = bnb.functional.QuantState(codes[:0], weight.shape, blocksize=BLOCK, quant_type="nf4")
        layer.weight = bnb.nn.Params4bit(codes, requires_grad=False, quant_state=state, bnb_quantized=True, **options)
    else:
        layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, **options).to(weight.device)
    layer.bias = linear.bias
    layer.support_avx512bf16_for_cpu = False  # it would repack codes in place, in eval mode on some CPUs
    return layer  # type: ignore[no-any-return]


def is_quantized(parameter: Tensor) -> bool:
    """Whether a parameter holds codes of 4 bits. By name: bitsandbytes may not be installed."""
    return type(parameter).__name__ == _CODES


def quantized_parameters(module: nn.Module) -> dict[str, Any]:
    """The parameters of a module that hold codes, by name."""
    return {name: parameter for name, parameter in module.named_parameters() if is_quantized(parameter)}


def scales(parameter: Any) -> Iterator[Tensor]:
    """What expands the codes of a parameter, besides them: scales, their scales, and the offset."""
    state = parameter.quant_state
    yield state.absmax
    if state.nested:
        yield state.state2.absmax
        yield state.offset


def code_bytes(numel: int) -> int:
    """Bytes of ``numel`` elements: a half for each, one for the scale of 64, 4 for 256 of these, 4 for their offset."""
    blocks = -(-numel // BLOCK)
    return -(-numel // 2) + blocks + 4 * -(-blocks // SCALES) + 4


def expanded(parameter: Any, dtype: torch.dtype) -> Tensor:
    """The weight that the codes of a parameter stand for, ``[out, in]``."""
    from bitsandbytes.functional import dequantize_4bit

    weight: Tensor = dequantize_4bit(parameter.data, parameter.quant_state)
    return weight.to(dtype)


def whole_shape(parameter: Any) -> tuple[int, ...]:
    """The shape of the weight that a parameter holds or stands for."""
    return tuple(parameter.quant_state.shape if is_quantized(parameter) else parameter.shape)


def plain_linear(layer: Any) -> nn.Linear:
    """A linear layer with the parameters of a layer in 4 bits, whose weight has been replaced by a plain one."""
    with torch.device("meta"):
        linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    linear.weight, linear.bias = layer.weight, layer.bias
    return linear
