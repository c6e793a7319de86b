"""GRPO (Shao et al., 2024, arXiv:2402.03300): advantages relative to the prompt's other samples, no critic."""

from __future__ import annotations

from typing import Literal

import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_verl.algorithms.advantages import group_advantages
from lightning_verl.algorithms.base import Metrics
from lightning_verl.algorithms.clipped import ClippedAlgorithm
from lightning_verl.algorithms.kl import AdaptiveKL, FixedKL
from lightning_verl.algorithms.losses import Aggregation, Normalizer
from lightning_verl.data.experience import Experience


class GRPO(ClippedAlgorithm):
    """Clipped policy updates with group-relative advantages. The samples of a prompt always stay on one data rank.

    Args:
        scale: ``"std"`` divides by the group's unbiased standard deviation; ``"none"`` only subtracts the mean (Liu et
            al., 2025, arXiv:2503.20783).
        clip: How far the ratio may fall below and rise above 1.
        dual_clip: Bound on the ratio where the advantage is negative; None: none.
        kl: Coefficient of the KL penalty (k3) in the loss, or its controller; 0: no penalty and no reference.
        aggregation: The loss's denominator, see ``losses.aggregate``.

    Raises:
        ValueError: ``scale`` is unknown.
    """

    samples_per_prompt = 8

    def __init__(
        self,
        *,
        scale: Literal["std", "none"] = "std",
        clip: tuple[float, float] = (0.2, 0.2),
        dual_clip: float | None = None,
        kl: float | FixedKL | AdaptiveKL = 0.0,
        aggregation: Aggregation = "token-mean",
    ) -> None:
        super().__init__(clip, dual_clip, kl, aggregation)
        if scale not in ("std", "none"):
            raise ValueError(f"GRPO got scale={scale!r}; it takes 'std' or 'none'.")
        self.scale: Literal["std", "none"] = scale

    @override
    def compute_advantages(self, experience: Experience, group: dist.ProcessGroup | None) -> Metrics:
        groups = experience.rollout.group_ids
        by_sequence = group_advantages(experience.scores, groups, valid=experience.valid, scale=self.scale)
        experience.advantages = by_sequence[:, None] * experience.mask
        return {"informative": (by_sequence != 0).float()}

    @override
    def actor_loss(
        self, logprobs: Tensor, entropy: Tensor, experience: Experience, normalizer: Normalizer
    ) -> tuple[Tensor, Metrics]:
        loss, metrics = self.clipped_loss(logprobs, experience, normalizer)
        if self.needs_reference:
            penalty, more = self.kl_loss(logprobs, experience, normalizer)
            loss, metrics = loss + penalty, {**metrics, **more}
        return loss, metrics
