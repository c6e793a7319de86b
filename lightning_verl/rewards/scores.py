"""Joins the scores of several micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_verl.data.experience import RolloutBatch
from lightning_verl.rewards.functions import Scores
from lightning_verl.strategies.dispatch import Receipt


@dataclass
class Scoring:
    """A batch that the reward role scores, or has scored, see ``HybridDataFlow.start_scoring``."""

    batch: RolloutBatch
    """This rank's rows."""
    role: str
    """The role in whose layout they are scored: the reward's, or the actor's where functions run beside it."""
    receipt: Receipt
    """How the scores come back."""
    scores: Scores | None = None
    """What this rank scored."""
    error: Exception | None = None
    """What went wrong meanwhile."""
    seconds: float = 0.0
    """How long it took."""


def join_scores(parts: Sequence[Scores], order: Sequence[int] | None = None) -> Scores:
    """Join scores row after row, on the CPU.

    Args:
        parts: At least one; all from the same role.
        order: The row of the batch that each joined row belongs to; None: they are in order.
    """
    total = sum(len(part.values) for part in parts)
    place = torch.tensor(range(total) if order is None else order, dtype=torch.long).argsort()

    def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensor.cpu() for tensor in tensors])[place]

    disagreements = [part.disagreement for part in parts if part.disagreement is not None]
    return Scores(
        values=joined([part.values for part in parts]),
        valid=joined([part.valid for part in parts]),
        components={name: joined([part.components[name] for part in parts]) for name in parts[0].components},
        disagreement=joined(disagreements) if disagreements else None,
        fallbacks=sum(part.fallbacks for part in parts),
    )
