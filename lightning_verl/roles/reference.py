"""The reference: the frozen policy that the KL penalty measures from."""

from __future__ import annotations

from typing import Any

from lightning_verl.models.load import ModelSource
from lightning_verl.roles.actor import Actor


class Reference(Actor):
    """A frozen policy. Its log-probs are computed like the actor's; it is never trained and never rolled out.

    Args:
        source: A hub name, a folder, a config, or a causal model of transformers.
        options: ``activation_checkpointing`` has no effect on it; ``tokenizer`` is not needed.
    """

    role = "reference"
    trainable = False

    def __init__(self, source: ModelSource, **options: Any) -> None:
        super().__init__(source, **options)
        self.requires_grad_(False)
