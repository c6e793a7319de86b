"""How the decoder layers of a role run while it trains: what is recomputed, compiled, held in host memory."""

from __future__ import annotations

from torch import nn

from lightning_verl.parallel.checkpointing import ActivationCheckpointing, apply_activation_checkpointing
from lightning_verl.parallel.compiling import compile_layers
from lightning_verl.parallel.offloading import offload_activations


def prepare_layers(
    module: nn.Module, checkpointing: ActivationCheckpointing, compiles: bool | None, offloads: bool
) -> None:
    """Put it all in place, before FSDP2 cuts the layers. The order matters: each runs inside of what comes after it.

    Args:
        module: The role.
        checkpointing: See ``apply_activation_checkpointing``; the role's own ``activation_checkpointing`` wins.
        compiles: Whether to compile; None: on CUDA.
        offloads: Whether what layers keep for their backward pass is held in host memory, where the role has one.
    """
    apply_activation_checkpointing(module, getattr(module, "activation_checkpointing", None) or checkpointing)
    if next(module.parameters()).is_cuda if compiles is None else compiles:
        compile_layers(module)
    if offloads and any(parameter.requires_grad for parameter in module.parameters()):
        offload_activations(module)
