"""Running modules without their randomness."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def deterministic(module: nn.Module) -> Iterator[None]:
    """Turn dropout off while the context is open, and restore the mode of every submodule afterwards.

    The log-probs of the rollout, of scoring and of the update must agree at unchanged weights, so all of them run like
    this.
    """
    training = [child for child in module.modules() if child.training]
    module.eval()
    try:
        yield
    finally:
        for child in training:
            child.training = True
