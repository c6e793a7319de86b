"""Precision through FSDP2's policy, with no autocast.

Autocast over fp32 masters gives attention its queries and keys in fp32 and its values in bf16, and one device would
compute something else than many. Here the parameters are cast when they are gathered, on one device as on many.
"""

from __future__ import annotations

import warnings
from typing import Literal, get_args

import torch
from lightning.fabric.plugins.precision import Precision
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from typing_extensions import override

from lightning_verl.models.quantize import is_quantized

PrecisionName = Literal["32-true", "bf16-mixed", "bf16-true"]


class HybridPrecision(Precision):
    """How parameters are held and what they are computed in.

    ===========  ==================  =================  =======
    name         trained parameters  frozen parameters  compute
    ===========  ==================  =================  =======
    32-true      fp32                fp32               fp32
    bf16-mixed   fp32 (masters)      bf16               bf16
    bf16-true    bf16                bf16               bf16
    ===========  ==================  =================  =======

    Gradients are reduced in fp32 in every mode. ``bf16-true`` warns: near 1 the spacing of bf16 is 0.0078, so the small
    updates of RL learning rates round away.

    Raises:
        ValueError: Another name.
    """

    def __init__(self, precision: str = "32-true") -> None:
        if precision not in get_args(PrecisionName):
            raise ValueError(
                f"HybridPrecision got precision={precision!r}; HybridStrategy takes "
                f"{', '.join(get_args(PrecisionName))}. "
                "Choose 'bf16-mixed' for fp32 masters with bf16 compute."
            )
        self.precision: PrecisionName = precision  # type: ignore[assignment]
        if precision == "bf16-true":
            warnings.warn(
                "precision='bf16-true' holds trained weights in bf16: updates smaller than 1/256 of a weight are lost. "
                "RL learning rates are that small; 'bf16-mixed' keeps fp32 masters.",
                stacklevel=3,
            )

    @property
    def compute_dtype(self) -> torch.dtype:
        """What the forward pass computes in."""
        return torch.float32 if self.precision == "32-true" else torch.bfloat16

    @property
    def trained_dtype(self) -> torch.dtype:
        """What trained parameters and their optimizer states are held in."""
        return torch.bfloat16 if self.precision == "bf16-true" else torch.float32

    @property
    def needs_policy(self) -> bool:
        """Whether compute differs from what is held, so that FSDP2 must cast, also on one rank."""
        return self.compute_dtype != self.trained_dtype

    def policy(self) -> MixedPrecisionPolicy:
        """FSDP2's policy for every unit; outputs keep the dtype they have (log-probs are computed in fp32 inside)."""
        return MixedPrecisionPolicy(param_dtype=self.compute_dtype, reduce_dtype=torch.float32)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Cast floating-point parameters to what they are held in; buffers (rotary frequencies) are left alone."""
        for parameter in module.parameters():
            if parameter.is_floating_point() and not is_quantized(parameter):  # codes may lie in any dtype
                dtype = self.trained_dtype if parameter.requires_grad else self.compute_dtype
                parameter.data = parameter.data.to(dtype)
        return module
