"""``RewardEMA``: a moving mean and standard deviation of the scores, for the log or to normalise them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_verl.models.compat import all_gather_flat

if TYPE_CHECKING:
    from lightning_verl.data.experience import Experience
    from lightning_verl.trainer import RLTrainer


class RewardEMA:
    """Logs an exponential moving mean and deviation of the scores, ``reward/ema_mean`` and ``reward/ema_std``.

    The statistics are those of all scores so far, where a batch that lies k batches back weighs ``decay ** k``,
    whatever its number of rows. With ``W_n = decay * W_(n-1) + 1 - decay`` (``W_0 = 0``), ``a_n = (1 - decay) / W_n``,
    and the mean ``b_n`` and the variance ``s_n`` (over the number of rows) of batch n::

        mean_n     = mean_(n-1) + a_n * (b_n - mean_(n-1))
        variance_n = (1 - a_n) * (variance_(n-1) + a_n * (b_n - mean_(n-1)) ** 2) + a_n * s_n

    ``mean_n`` is the moving mean from zero with Adam's bias correction (Kingma and Ba, 2015, arXiv:1412.6980, section
    3): the first one is the first batch's mean. ``variance_n`` is the variance of the same weighted mixture (West,
    1979, doi:10.1145/359146.359153), without the cancellation of E[x^2] - E[x]^2.

    A batch is the valid rows of all ranks, each row once: numbers are exchanged over the actor's data axis, where the
    tensor ranks, which repeat the same rows, do not meet. A batch without a valid row changes nothing, nor does an
    algorithm that has no reward (``SFT``).

    Args:
        decay: Weight of the past, in [0, 1).
        normalize: Replace the scores of valid rows by ``(score - mean) / max(std, eps)``, with the statistics that
            include their own batch. ``reward/mean`` in the log stays the mean of the raw scores.
        eps: Smallest standard deviation to divide by, so that equal scores become 0.

    Raises:
        ValueError: ``decay`` or ``eps`` is out of its range.
    """

    def __init__(self, decay: float = 0.995, normalize: bool = False, eps: float = 1e-6) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"RewardEMA got decay={decay}; it takes a weight of the past in [0, 1), such as 0.995.")
        if not eps > 0:
            raise ValueError(f"RewardEMA got eps={eps}; it must be above 0, it is the smallest deviation to divide by.")
        self.decay = decay
        self.normalize = normalize
        self.eps = eps
        self.mean = 0.0
        """Moving mean; 0 before the first batch."""
        self.variance = 0.0
        """Moving variance; 0 before the first batch."""
        self._weight = 0.0

    @property
    def std(self) -> float:
        """Moving standard deviation."""
        return math.sqrt(self.variance)

    def on_rewards_computed(self, trainer: RLTrainer, experience: Experience) -> None:
        """Take in a batch of scores and, if asked for, normalise it (a collective call of the actor's data axis)."""
        if not trainer.algorithm.needs_reward:
            return
        count, mean, variance = _batch_statistics(
            experience.scores[experience.valid], trainer.dataflow.strategy.group("actor", "scores")
        )
        if count:
            self._update(mean, variance)
        if self.normalize:
            normalized = (experience.scores.double() - self.mean) / max(self.std, self.eps)
            experience.scores = torch.where(experience.valid, normalized.to(experience.scores.dtype), experience.scores)

    def on_step_end(self, metrics: dict[str, float]) -> None:
        """Add the statistics to the log."""
        if self._weight:
            metrics["reward/ema_mean"] = self.mean
            metrics["reward/ema_std"] = self.std

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs."""
        return {"weight": self._weight, "mean": self.mean, "variance": self.variance}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Take up where ``state_dict`` was called."""
        self._weight, self.mean, self.variance = state["weight"], state["mean"], state["variance"]

    def _update(self, mean: float, variance: float) -> None:
        self._weight = self.decay * self._weight + 1 - self.decay
        share = (1 - self.decay) / self._weight
        shift = mean - self.mean
        self.mean += share * shift
        self.variance = (1 - share) * (self.variance + share * shift * shift) + share * variance


def _batch_statistics(scores: Tensor, group: dist.ProcessGroup | None) -> tuple[float, float, float]:
    """Count, mean and variance over the ranks of a group, the same to the last bit on each of them.

    The ranks' own are joined pairwise (Chan, Golub and LeVeque, 1983, doi:10.1080/00031305.1983.10483115), which does
    not cancel as sums of squares do.
    """
    scores = scores.double()
    count, mean, squares = float(scores.numel()), 0.0, 0.0
    if count:
        mean = scores.mean().item()
        squares = (scores - mean).square().sum().item()
    if group is not None and group.size() > 1:
        own = torch.tensor([count, mean, squares], dtype=torch.float64, device=scores.device)
        gathered = own.new_empty(group.size() * 3)
        all_gather_flat(gathered, own, group)
        count, mean, squares = 0.0, 0.0, 0.0
        for other_count, other_mean, other_squares in gathered.view(-1, 3).tolist():
            if other_count:
                total, shift = count + other_count, other_mean - mean
                squares += other_squares + shift * shift * count * other_count / total
                mean += shift * other_count / total
                count = total
    return count, mean, squares / count if count else 0.0
