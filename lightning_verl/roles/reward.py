"""A reward model: a transformers model with one scalar for a sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_verl.data.experience import RolloutBatch
from lightning_verl.models.load import ModelSource, load_model
from lightning_verl.models.modes import deterministic
from lightning_verl.rewards.functions import Scores, refuse_lora
from lightning_verl.roles.base import LoraSource, Role


class Reward(Role):
    """A frozen model with a scalar head, read at the last token of each sequence.

    Args:
        source: A hub name or folder of a sequence classifier with one label, a config, or such a module.
        lora_config: Refused, with the reason.

    Raises:
        ValueError: ``lora_config`` was given.
    """

    role = "reward"
    trainable = False

    def __init__(self, source: ModelSource, *, lora_config: LoraSource = None, **options: Any) -> None:
        refuse_lora(type(self).__name__, lora_config)
        super().__init__(load_model(source, "score", self.role), **options)
        self.requires_grad_(False)

    def forward(self, batch: RolloutBatch) -> Tensor:
        """The score of each sequence, float32 ``[N]``."""
        return self.model.score(self.last_states(batch)).float().squeeze(-1)  # type: ignore[no-any-return]

    @torch.no_grad()
    def score(self, batch: RolloutBatch) -> Scores:
        """Score a batch; also one without rows, for the sake of the other ranks of a sharded model."""
        with deterministic(self):
            values = self.forward(batch)
        return Scores(values, torch.ones_like(values, dtype=torch.bool), components={})
