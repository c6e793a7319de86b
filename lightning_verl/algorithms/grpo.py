"""GRPO (Shao et al., 2024, arXiv:2402.03300): advantages relative to the prompt's other samples, no critic."""

from __future__ import annotations

from typing import Literal

import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_verl.algorithms.advantages import group_advantages
from lightning_verl.algorithms.base import Algorithm, Metrics, old_logprobs_of
from lightning_verl.algorithms.kl import AdaptiveKL, FixedKL, capped_fraction, kl_estimate
from lightning_verl.algorithms.losses import Aggregation, Normalizer, aggregate, metric_mean, policy_loss
from lightning_verl.data.experience import Experience


class GRPO(Algorithm):
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
        super().__init__(kl)
        if scale not in ("std", "none"):
            raise ValueError(f"GRPO got scale={scale!r}; it takes 'std' or 'none'.")
        self.scale: Literal["std", "none"] = scale
        self.clip, self.dual_clip = clip, dual_clip
        self.aggregation = aggregation

    @override
    def compute_advantages(self, experience: Experience, group: dist.ProcessGroup | None) -> Metrics:
        groups = experience.rollout.group_ids
        by_sequence = group_advantages(experience.scores, groups, valid=experience.valid, scale=self.scale)
        experience.advantages = by_sequence[:, None] * experience.mask
        metrics: Metrics = {"informative": (by_sequence != 0).float()}
        if self.needs_reference and experience.ref_logprobs is not None:
            old = experience.old_logprobs
            policy = experience.rollout.rollout_logprobs if old is None else old
            metrics["kl"] = kl_estimate(policy, experience.ref_logprobs, "k3", experience.mask)[experience.mask]
        return metrics

    @override
    def actor_loss(
        self, logprobs: Tensor, entropy: Tensor, experience: Experience, normalizer: Normalizer
    ) -> tuple[Tensor, Metrics]:
        mask = experience.mask
        loss, metrics = policy_loss(
            logprobs,
            old_logprobs_of(experience, logprobs),
            experience.need("advantages"),
            mask,
            clip=self.clip,
            dual_clip=self.dual_clip,
            aggregation=self.aggregation,
            normalizer=normalizer,
        )
        if self.needs_reference:
            reference = experience.need("ref_logprobs")
            penalty = kl_estimate(logprobs, reference, "k3", mask)
            loss = loss + self.kl.value * aggregate(penalty, mask, self.aggregation, normalizer=normalizer)
            metrics["kl"] = metric_mean(penalty, mask, normalizer=normalizer)
            metrics["kl_capped"] = capped_fraction(logprobs, reference, "k3", mask, tokens=normalizer.tokens)
        return loss, metrics
