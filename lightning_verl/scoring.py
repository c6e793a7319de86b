"""What is known of a batch while its reward is computed, and rewards that are computed while others are sampled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from lightning_verl.data.experience import PromptBatch, RolloutBatch
from lightning_verl.rewards.early import EarlyScores
from lightning_verl.rewards.functions import Scores
from lightning_verl.rollout.batch import response_texts
from lightning_verl.strategies.dispatch import Receipt
from lightning_verl.strategies.hybrid import HybridStrategy


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


class EarlyScoring:
    """Lets reward functions see samples that have ended while a rollout goes on.

    Args:
        strategy: Knows the layouts.
        modules: The roles.
    """

    def __init__(self, strategy: HybridStrategy, modules: Mapping[str, nn.Module]) -> None:
        self._strategy, self._modules = strategy, modules
        self._is_open = False
        self._watches: list[EarlyScores] = []

    @contextmanager
    def open(self) -> Iterator[None]:
        """Let the rollouts in this context be watched; what they make is scored afterwards."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False
            for watch in self._watches:
                watch.end()
            self._watches = []

    def watch(
        self, engine: Any, prompts: PromptBatch, samples: int, tokenizer: PreTrainedTokenizerBase, skip_special: bool
    ) -> EarlyScores | None:
        """What watches a rollout, on the rank that scores its rows.

        None where rows are scored elsewhere than they are sampled, where the reward is no function for one sample,
        where the engine reports nothing before the end, and where functions would have neither threads nor a device to
        run beside.

        Args:
            engine: What generates.
            prompts: The rows of its prompts.
            samples: Samples a prompt.
            tokenizer: Decodes responses.
            skip_special: Whether special tokens are left out of the text.
        """
        module: Any = self._modules.get("reward")
        begin = getattr(module, "watch", None)
        if not self._is_open or begin is None or not getattr(engine, "reports_samples", False):
            return None
        actor, reward = self._strategy.layout("actor"), self._strategy.layout("reward")
        if reward.apart_from(actor) or not actor.lies_like(self._strategy.layout("rollout")):
            return None
        if not actor.speaks(self._strategy.global_rank):
            return None
        if not (module.policy.workers or self._strategy.root_device.type == "cuda"):
            return None
        watch: EarlyScores | None = begin(
            prompts, samples, lambda response: response_texts([response], tokenizer, skip_special)[0]
        )
        if watch is not None:
            self._watches.append(watch)
        return watch
