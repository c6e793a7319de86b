"""What PPO and its kin share: the clipped policy loss and a KL penalty in the loss."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_verl.algorithms.base import Algorithm, Metrics
from lightning_verl.algorithms.kl import AdaptiveKL, FixedKL, capped_fraction, kl_estimate
from lightning_verl.algorithms.losses import Aggregation, Normalizer, aggregate, metric_mean, policy_loss
from lightning_verl.data.experience import Experience


class ClippedAlgorithm(Algorithm):
    """An algorithm whose actor takes clipped steps.

    Args:
        clip: How far the ratio may fall below and rise above 1.
        dual_clip: Bound on the ratio where the advantage is negative; None: none.
        kl: Coefficient of the KL penalty, or its controller; 0: no penalty and no reference.
        aggregation: The loss's denominator, see ``losses.aggregate``.

    Raises:
        ValueError: An option is out of its range.
    """

    def __init__(
        self,
        clip: tuple[float, float],
        dual_clip: float | None,
        kl: float | FixedKL | AdaptiveKL,
        aggregation: Aggregation,
    ) -> None:
        super().__init__(kl)
        # An option out of its range is to fail here and not in the first update.
        nothing = torch.zeros(1, 1)
        policy_loss(nothing, nothing, nothing, nothing, clip=clip, dual_clip=dual_clip, aggregation=aggregation)
        self.clip, self.dual_clip = clip, dual_clip
        self.aggregation: Aggregation = aggregation

    def clipped_loss(self, logprobs: Tensor, experience: Experience, normalizer: Normalizer) -> tuple[Tensor, Metrics]:
        """The clipped policy loss; where no old log-probs were computed, the update's own stand for them."""
        old = experience.old_logprobs
        return policy_loss(
            logprobs,
            logprobs.detach() if old is None else old,
            experience.need("advantages"),
            experience.mask,
            clip=self.clip,
            dual_clip=self.dual_clip,
            aggregation=self.aggregation,
            normalizer=normalizer,
        )

    def kl_loss(self, logprobs: Tensor, experience: Experience, normalizer: Normalizer) -> tuple[Tensor, Metrics]:
        """The KL penalty (k3) times its coefficient, and how large it is and how often its cap is hit."""
        reference, mask = experience.need("ref_logprobs"), experience.mask
        penalty = kl_estimate(logprobs, reference, "k3", mask)
        metrics = {
            "kl": metric_mean(penalty, mask, normalizer=normalizer),
            "kl_capped": capped_fraction(logprobs, reference, "k3", mask, tokens=normalizer.tokens),
        }
        return self.kl.value * aggregate(penalty, mask, self.aggregation, normalizer=normalizer), metrics
