"""Supervised fine-tuning on the same actor, so that SFT and RL are one run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_verl.algorithms.base import Algorithm, DataFlow, Metrics
from lightning_verl.algorithms.losses import Aggregation, Normalizer, aggregate
from lightning_verl.data.experience import Experience, PromptBatch, RolloutBatch

if TYPE_CHECKING:
    from lightning_verl.rollout.sampling import SamplingParams


class SFT(Algorithm):
    """Maximum likelihood of given responses.

    Args:
        response_field: The field of a data row that holds the response, a string; the end token is added to it.
        aggregation: The loss's denominator, see ``losses.aggregate``.
    """

    needs_reward = False

    def __init__(self, *, response_field: str = "response", aggregation: Aggregation = "token-mean") -> None:
        super().__init__()
        self.response_field = response_field
        self.aggregation = aggregation

    @override
    def collect(self, flow: DataFlow, prompts: PromptBatch, sampling: SamplingParams, step: int) -> RolloutBatch:
        return flow.demonstrations(prompts, self.response_field)

    @override
    def compute_advantages(self, experience: Experience, group: dist.ProcessGroup | None) -> Metrics:
        experience.advantages = torch.ones_like(experience.rollout.rollout_logprobs) * experience.mask
        return {}

    @override
    def actor_loss(
        self, logprobs: Tensor, entropy: Tensor, experience: Experience, normalizer: Normalizer
    ) -> tuple[Tensor, Metrics]:
        return aggregate(-logprobs, experience.mask, self.aggregation, normalizer=normalizer), {}
