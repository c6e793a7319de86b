"""Callbacks for ``Fabric(callbacks=[...])``: plain classes whose methods are named after the hooks of ``RLTrainer``.

Fabric calls them in the order of the list and hands each method only the arguments that it names. Everything is loaded
on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "Checkpoint": "checkpoint",
    "NCCLGroupIsolation": "nccl_group_isolation",
    "PrefetchLoader": "prefetch_loader",
    "ProgressBar": "progress_bar",
    "RewardEMA": "reward_ema",
    "Throughput": "throughput",
}

__all__ = [*_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'lightning_verl.callbacks' has no attribute {name!r}")
    return getattr(importlib.import_module(f"lightning_verl.callbacks.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
