"""Gradient synchronisation over accumulated micro-batches, as Fabric asks for it."""

from __future__ import annotations

from contextlib import AbstractContextManager

from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import nn
from typing_extensions import override

from lightning_verl.parallel.fsdp import no_gradient_sync


class SyncControl(_BackwardSyncControl):
    """Lightning's own leaves gradient synchronisation off after ``no_backward_sync(enabled=False)``."""

    @override
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return no_gradient_sync(module, enabled)
