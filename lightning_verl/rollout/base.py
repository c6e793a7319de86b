"""What a rollout engine is: token ids in, token ids and log-probs out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from torch import Tensor

from lightning_verl.data.experience import PromptBatch
from lightning_verl.rollout.sampling import SamplingParams


class FinishReason(StrEnum):
    """Why a response ended."""

    EOS = "eos"
    """An end token, of the model or of ``SamplingParams.stop_token_ids``; it is the last token of the response."""
    STOP_STRING = "stop_string"
    """A stop string appeared in the text; the token that completed it is the last token of the response."""
    LENGTH = "length"
    """``max_new_tokens`` was reached."""

    def is_truncated(self) -> bool:
        """Whether the response was cut, rather than ended by the policy."""
        return self is FinishReason.LENGTH


@dataclass
class Rollouts:
    """What an engine returns: N = prompts x n responses, the n samples of one prompt adjacent."""

    response_ids: Tensor
    """Sampled token ids, int64 ``[N, R]``, right-padded with the pad id."""
    lengths: Tensor
    """Tokens produced, the end token included, int64 ``[N]``."""
    logprobs: Tensor
    """Log-prob of each sampled token under the distribution that it was sampled from (after every step of
    ``SamplingParams``; when greedy, that of temperature 1), float32 ``[N, R]``, 0 at padding."""
    finish_reasons: list[FinishReason]
    """One a row."""
    prompt_rows: Tensor
    """The row of the prompt that each response belongs to, int64 ``[N]``."""
    weight_version: int
    """The version of the weights that produced them."""


class SampleWatch(Protocol):
    """What ``generate`` tells of samples on their way, where an engine ``reports_samples``."""

    def finished(self, row: int, response: Sequence[int]) -> None:
        """A sample has ended: its row in ``Rollouts``, and its token ids."""
        ...

    def meanwhile(self, busy: Callable[[], bool]) -> None:
        """The device has work for a while; the host may do something else while ``busy()``."""
        ...


@runtime_checkable
class RolloutEngine(Protocol):
    """The protocol that every engine follows."""

    weight_version: int

    def generate(
        self,
        prompts: PromptBatch | Sequence[Sequence[int]],
        sampling: SamplingParams | None = None,
        *,
        step: int = 0,
        prompt_indices: Sequence[int] | None = None,
    ) -> Rollouts:
        """Sample ``sampling.n`` responses for each prompt.

        Args:
            prompts: A prompt batch, or plain lists of token ids.
            sampling: How to sample; None takes ``SamplingParams()``.
            step: The training step; with the prompt's index and the sample's number it gives each response its own
                seed.
            prompt_indices: The index of each prompt; None takes ``PromptBatch.indices``, or 0, 1, 2... for plain lists.

        Returns:
            The responses, on the engine's device.
        """
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take new weights as ``(name, tensor)`` pairs; engines on the trainer's own weights only take the version."""
        ...

    def release(self) -> None:
        """Give back the memory that only a rollout needs."""
        ...
