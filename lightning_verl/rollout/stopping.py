"""When a response ends: the one rule that every engine which samples by itself follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lightning_verl.rollout.base import FinishReason
from lightning_verl.rollout.sampling import SamplingParams


class Decoder(Protocol):
    """The part of a tokenizer that stop strings need."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = ...) -> str:
        """Return the text of the tokens."""
        ...


class StopRule:
    """Tells whether a response has ended with its last token, and why.

    An end token wins over a stop string, and both win over the length limit. Stop strings are looked for in the text of
    the response alone, special tokens included, not across the border to the prompt; one that is complete within
    the first ``min_new_tokens`` tokens does not count.

    Args:
        sampling: Gives ``max_new_tokens``, ``min_new_tokens``, ``stop_token_ids`` and ``stop_strings``. That no end
            token comes too early is up to :class:`~lightning_verl.rollout.adjust.LogitAdjuster`.
        eos_token_ids: The model's own end tokens.
        tokenizer: Decodes the response; only stop strings need it.

    Raises:
        ValueError: There are stop strings but no tokenizer.
    """

    def __init__(
        self, sampling: SamplingParams, eos_token_ids: Sequence[int], tokenizer: Decoder | None = None
    ) -> None:
        if sampling.stop_strings and tokenizer is None:
            raise ValueError(
                f"StopRule: stop_strings={sampling.stop_strings!r} are looked for in the decoded response, but the "
                "engine has no tokenizer; give it tokenizer=..., or use stop_token_ids."
            )
        self._max_new_tokens = sampling.max_new_tokens
        self._min_new_tokens = sampling.min_new_tokens
        self._end_token_ids = frozenset(eos_token_ids) | frozenset(sampling.stop_token_ids)
        self._stop_strings = sampling.stop_strings
        self._tokenizer = tokenizer

    def reason(self, response: list[int]) -> FinishReason | None:
        """Return why the response ended with its last token, or None if it goes on.

        Args:
            response: The tokens sampled so far, at least one.
        """
        if response[-1] in self._end_token_ids:
            return FinishReason.EOS
        if self._has_stop_string(response):
            return FinishReason.STOP_STRING
        return FinishReason.LENGTH if len(response) >= self._max_new_tokens else None

    def cut(self, response: list[int], drawn: Sequence[int]) -> tuple[int, FinishReason | None]:
        """Return how many of the tokens drawn next belong to the response, and why it ended there, if it did.

        Args:
            response: The tokens before them.
            drawn: Tokens that were drawn one after the other, at least one.
        """
        left = self._max_new_tokens - len(response)
        if not self._stop_strings and len(drawn) < left and self._end_token_ids.isdisjoint(drawn):
            return len(drawn), None
        text = [*response]
        for count, token in enumerate(drawn, 1):
            text.append(token)
            reason = self.reason(text)
            if reason is not None:
                return count, reason
        return len(drawn), None

    def _has_stop_string(self, response: list[int]) -> bool:
        if not self._stop_strings or self._tokenizer is None or len(response) <= self._min_new_tokens:
            return False
        text, early = self._tokenizer.decode(response, skip_special_tokens=False), ""
        if self._min_new_tokens:  # a stop string that ends in the text of these tokens was complete too early
            early = self._tokenizer.decode(response[: self._min_new_tokens], skip_special_tokens=False)
            early = early.rstrip("\ufffd")  # stands for a character whose last bytes come with the next token
        return any(text.find(stop, max(0, len(early) - len(stop) + 1)) >= 0 for stop in self._stop_strings)
