"""Roles with weights of 4 bits: which layouts they can have, and what makes their ranks equal."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lightning_verl.models.quantize import is_quantized, quantized_parameters, scales
from lightning_verl.strategies.layout import RoleLayout


def check_codes(module: nn.Module, layout: RoleLayout) -> None:
    """Refuse a layout that would have to cut codes.

    Raises:
        ValueError: The role has weights of 4 bits, and a tensor, a pipeline or an expert axis.
    """
    if layout.tensor * layout.pipeline * layout.expert > 1 and quantized_parameters(module):
        raise ValueError(
            f"{type(module).__name__} has weights of 4 bits, which no axis cuts, but its layout has tp x pp x ep = "
            f"{layout.tensor} x {layout.pipeline} x {layout.expert}. Give the {layout.role} tp=1, pp=1 and ep=1 in "
            "parallelism_config (its codes are then whole on every rank, adapters are sharded), or leave quantization "
            "out."
        )


def expand_to(module: nn.Module, dtype: torch.dtype) -> None:
    """Have the codes of a role expand to what it computes in."""
    for parameter in quantized_parameters(module).values():
        parameter.quant_state.dtype = dtype


def to_meta(module: nn.Module) -> None:
    """Leave names and shapes of a module, without memory. Codes cannot go there as they are."""
    for owner in module.modules():
        for key, parameter in owner._parameters.items():
            if parameter is not None and is_quantized(parameter):
                codes = torch.empty_like(parameter.data, device="meta")
                owner._parameters[key] = nn.Parameter(codes, requires_grad=False)
    module.to("meta")


def all_scales(module: nn.Module) -> Iterator[Tensor]:
    """What expands the codes of a module; it is no parameter or buffer of it."""
    for parameter in quantized_parameters(module).values():
        yield from scales(parameter)
