"""PPO with a critic (Schulman et al., 2017, arXiv:1707.06347), for language models (Ziegler et al., 2019).

The reward of a token is the penalty of arXiv:1909.08593; the score of the sequence is added at its last token.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_verl.algorithms.advantages import gae, whiten
from lightning_verl.algorithms.base import Metrics, last_token
from lightning_verl.algorithms.clipped import ClippedAlgorithm
from lightning_verl.algorithms.kl import AdaptiveKL, FixedKL, kl_estimate
from lightning_verl.algorithms.losses import Aggregation, Normalizer, aggregate, value_loss
from lightning_verl.data.experience import Experience


class PPO(ClippedAlgorithm):
    """Clipped policy updates with advantages from a critic.

    Args:
        gamma: Discount of a token.
        lam: GAE's lambda (Schulman et al., 2015, arXiv:1506.02438).
        clip: How far the ratio may fall below and rise above 1.
        dual_clip: Bound on the ratio where the advantage is negative; None: none.
        value_clip: How far a value may move in one update, in units of reward; None: no bound.
        kl: Coefficient of the KL penalty, or its controller; 0: no penalty and no reference.
        kl_in: ``"reward"`` subtracts the penalty (k1) from each token's reward; ``"loss"`` adds it (k3) to the loss.
        entropy_coef: Weight of an entropy bonus.
        whiten_advantages: Whether advantages get mean 0 and variance 1 over all ranks' tokens.
        aggregation: The loss's denominator, see ``losses.aggregate``.

    Raises:
        ValueError: ``kl_in`` is unknown.
    """

    needs_critic = True

    def __init__(
        self,
        *,
        gamma: float = 1.0,
        lam: float = 0.95,
        clip: tuple[float, float] = (0.2, 0.2),
        dual_clip: float | None = 3.0,
        value_clip: float | None = 0.5,
        kl: float | FixedKL | AdaptiveKL = 0.0,
        kl_in: Literal["reward", "loss"] = "reward",
        entropy_coef: float = 0.0,
        whiten_advantages: bool = True,
        aggregation: Aggregation = "token-mean",
    ) -> None:
        super().__init__(clip, dual_clip, kl, aggregation)
        if kl_in not in ("reward", "loss"):
            raise ValueError(f"PPO got kl_in={kl_in!r}; it takes 'reward' or 'loss'.")
        self.gamma, self.lam = gamma, lam
        self.value_clip = value_clip
        self.kl_in = kl_in
        self.entropy_coef = entropy_coef
        self.whiten_advantages = whiten_advantages

    @property
    @override
    def needs_old_logprobs(self) -> bool:
        return self.needs_reference and self.kl_in == "reward"

    @override
    def compute_advantages(self, experience: Experience, group: dist.ProcessGroup | None) -> Metrics:
        mask = experience.mask
        rewards = torch.where(last_token(mask), experience.scores[:, None], 0.0)
        metrics: Metrics = {}
        if self.needs_reference and self.kl_in == "reward":
            penalty = kl_estimate(experience.need("old_logprobs"), experience.need("ref_logprobs"), "k1", mask)
            rewards = rewards - self.kl.value * penalty
            metrics["kl"] = penalty[mask]
        advantages, returns = gae(rewards, experience.need("values"), mask, gamma=self.gamma, lam=self.lam)
        experience.returns = returns
        experience.advantages = whiten(advantages, mask, group=group) if self.whiten_advantages else advantages
        return {**metrics, "advantage": advantages[mask], "return": returns[mask]}

    @override
    def actor_loss(
        self, logprobs: Tensor, entropy: Tensor, experience: Experience, normalizer: Normalizer
    ) -> tuple[Tensor, Metrics]:
        loss, metrics = self.clipped_loss(logprobs, experience, normalizer)
        if self.needs_reference and self.kl_in == "loss":
            penalty, more = self.kl_loss(logprobs, experience, normalizer)
            loss, metrics = loss + penalty, {**metrics, **more}
        if self.entropy_coef:
            bonus = aggregate(entropy, experience.mask, self.aggregation, normalizer=normalizer)
            loss = loss - self.entropy_coef * bonus
        return loss, metrics

    @override
    def critic_loss(self, values: Tensor, experience: Experience, normalizer: Normalizer) -> tuple[Tensor, Metrics]:
        loss, metrics = value_loss(
            values,
            experience.need("values"),
            experience.need("returns"),
            experience.mask,
            clip=self.value_clip,
            aggregation=self.aggregation,
            normalizer=normalizer,
        )
        return loss, {"loss": loss.detach() / normalizer.data_parallel_size, **metrics}
