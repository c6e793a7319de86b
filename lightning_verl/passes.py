"""Passes of one role over the micro-batches of a batch, whatever the role's layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from lightning.fabric import Fabric
from torch import Tensor

from lightning_verl.algorithms.base import Loss, Metrics
from lightning_verl.algorithms.losses import Normalizer
from lightning_verl.data.experience import Experience, RolloutBatch
from lightning_verl.pipeline.passes import StagedPasses
from lightning_verl.strategies.hybrid import HybridStrategy

TakeExperience = Callable[[int], Experience]
"""A micro-batch of a mini-batch, by its number."""
TakeRollout = Callable[[int], RolloutBatch]
"""A micro-batch of a batch, by its number."""


class Passes(Protocol):
    """How a role runs micro-batches. All ranks of the role call the same, with equally many micro-batches."""

    def count(self, micro_batches: int) -> int:
        """How many micro-batches to run in place of so many; empty ones fill up."""
        ...

    def limit(self, total: int, limit: int) -> int:
        """Most tokens of a micro-batch.

        Args:
            total: Tokens of the batch on this data rank.
            limit: The most that memory or the user allows.
        """
        ...

    def train(self, take: TakeExperience, count: int, loss: Loss, normalizer: Normalizer) -> list[Metrics]:
        """Add up the gradients of a mini-batch.

        Returns:
            The metrics of the micro-batches; nothing on ranks without the outputs.
        """
        ...

    def forward(self, take: TakeRollout, count: int, run: Callable[[Any, RolloutBatch], Tensor]) -> list[Tensor]:
        """Run a pass without gradients; returns the results by micro-batch, nothing on ranks without the outputs."""
        ...

    def share(self, result: Tensor) -> None:
        """Put the results of the ranks with outputs in place of this rank's, float32 of any shape."""
        ...

    def idle_share(self) -> Tensor | None:
        """The share of the last ``train`` that this rank waited for other stages; None where there are none."""
        ...


class WholePasses:
    """The passes of a role that has all its layers on every rank: one micro-batch after the other.

    Args:
        fabric: Runs backward passes.
        module: The role, as Fabric wrapped it.
        defers_sync: Whether gradients are reduced once, in the last micro-batch.
    """

    def __init__(self, fabric: Fabric, module: Any, defers_sync: bool) -> None:
        self._fabric, self._module, self._defers_sync = fabric, module, defers_sync

    def count(self, micro_batches: int) -> int:
        """As many."""
        return micro_batches

    def limit(self, total: int, limit: int) -> int:
        """As given."""
        return limit

    def train(self, take: TakeExperience, count: int, loss: Loss, normalizer: Normalizer) -> list[Metrics]:
        """Forward and backward pass of one micro-batch after the other."""
        found = []
        for number in range(count):
            held = self._defers_sync and number < count - 1
            with self._fabric.no_backward_sync(self._module, enabled=held):
                value, metrics = loss(self._module, take(number), normalizer)
                self._fabric.backward(value)
            found.append({name: figure.detach() for name, figure in metrics.items()})
        return found

    def forward(self, take: TakeRollout, count: int, run: Callable[[Any, RolloutBatch], Tensor]) -> list[Tensor]:
        """Forward pass of one micro-batch after the other."""
        with torch.no_grad():
            return [run(self._module, take(number)) for number in range(count)]

    def share(self, result: Tensor) -> None:
        """Every rank has its results."""

    def idle_share(self) -> Tensor | None:
        """There are no stages."""
        return None


def make_passes(fabric: Fabric, role: str, wrapped: Any) -> Passes:
    """The passes that a role's layout asks for.

    Args:
        fabric: With a ``HybridStrategy``.
        role: The role, set up.
        wrapped: Its module, as Fabric wrapped it.
    """
    strategy: HybridStrategy = fabric.strategy  # type: ignore[assignment]
    staged, group = strategy.staged(role), strategy.group(role, "pipeline")
    if staged is None or group is None:
        return WholePasses(fabric, wrapped, strategy.defer_gradient_sync)
    return StagedPasses(
        wrapped.module,
        staged,
        strategy.pipeline_schedule,
        group,
        strategy.group(role, "ends"),
        strategy.root_device,
        strategy.hybrid_precision.compute_dtype,
        strategy.defer_gradient_sync,
    )
