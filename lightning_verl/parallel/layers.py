"""How the decoder layers of a role run while it trains: what is recomputed, and whether they are compiled."""

from __future__ import annotations

from torch import nn

from lightning_verl.parallel.checkpointing import ActivationCheckpointing, apply_activation_checkpointing
from lightning_verl.parallel.compiling import compile_layers


def prepare_layers(module: nn.Module, checkpointing: ActivationCheckpointing, compiles: bool) -> None:
    """Put it all in place, before FSDP2 cuts the layers. The order matters: each runs inside of what comes after it.

    Args:
        module: The role.
        checkpointing: See ``apply_activation_checkpointing``.
        compiles: Whether to compile.
    """
    apply_activation_checkpointing(module, checkpointing)
    if compiles:
        compile_layers(module)
