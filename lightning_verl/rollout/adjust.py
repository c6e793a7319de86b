"""What changes a model's logits before a token is sampled from them: bias, repetition penalty, minimum length.

Every engine that samples by itself runs its logits through :class:`LogitAdjuster`, and then through
:func:`~lightning_verl.rollout.sampling.sample_tokens`.

Shape letters: N rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_verl.rollout.sampling import SamplingParams


class LogitAdjuster:
    """Bias, repetition penalty and minimum length, applied to logits before sampling, in this order.

    A call reads no tensor's value on the host and has no shape that depends on data, so a CUDA graph may hold it.

    Args:
        params: ``logit_bias``, ``repetition_penalty``, ``min_new_tokens`` and ``stop_token_ids``; the rest is not read.
        end_token_ids: The model's own end tokens; those of ``stop_token_ids`` are added to them.
        vocabulary: V, the tokens that have a logit. End tokens out of it cannot be sampled anyway and are left out.
        device: Where the logits are.

    Raises:
        ValueError: A bias is for a token out of the vocabulary, or no token is left that could be sampled.
    """

    active: bool
    """Whether a call changes anything; where it does not, it returns its input."""
    needs_seen: bool
    """Whether a call needs ``seen``: there is a repetition penalty."""

    def __init__(
        self, params: SamplingParams, end_token_ids: Sequence[int], vocabulary: int, device: torch.device
    ) -> None:
        ends = {token for token in (*end_token_ids, *params.stop_token_ids) if 0 <= token < vocabulary}
        _check_tokens(params, ends, vocabulary)
        self._penalty = params.repetition_penalty
        self._min_new_tokens = params.min_new_tokens if ends else 0
        self._bias = _vector(params.logit_bias, vocabulary, device) if params.logit_bias else None
        self._ends = _vector(dict.fromkeys(ends, 1.0), vocabulary, device).bool()
        self.needs_seen = self._penalty != 1
        self.active = self._bias is not None or self.needs_seen or self._min_new_tokens > 0

    def __call__(self, logits: Tensor, produced: Tensor | int, seen: Tensor | None = None) -> Tensor:
        """Return the logits to sample from.

        Args:
            logits: ``[N, V]``, any float type, not modified.
            produced: Tokens that the response has so far: one number for all rows, or int64 ``[N]``.
            seen: Tokens that the prompt and the response so far hold, bool ``[N, V]``; see :func:`seen_tokens`. Only
                read where ``needs_seen``.

        Returns:
            float32 ``[N, V]``, -inf where a token cannot be sampled; ``logits`` itself where not ``active``.

        Raises:
            ValueError: There is a repetition penalty but no ``seen``.
        """
        if not self.active:
            return logits
        logits = logits.float()
        if self._bias is not None:
            logits = logits + self._bias
        if self.needs_seen:
            if seen is None:
                raise ValueError(
                    f"LogitAdjuster: repetition_penalty={self._penalty!r} is about the tokens of prompt and response, "
                    "but seen is None; make it with seen_tokens() and add every sampled token."
                )
            penalised = torch.where(logits < 0, logits * self._penalty, logits / self._penalty)
            logits = torch.where(seen, penalised, logits)
        if isinstance(produced, Tensor):
            too_early = (produced < self._min_new_tokens)[:, None]
            return logits.masked_fill(too_early & self._ends, -math.inf)
        return logits.masked_fill(self._ends, -math.inf) if produced < self._min_new_tokens else logits


def seen_tokens(ids: Tensor, real: Tensor, vocabulary: int) -> Tensor:
    """Return which tokens each row holds, for the repetition penalty.

    After each step, ``seen.scatter_(1, tokens[:, None], True)`` adds what was sampled.

    Args:
        ids: Token ids, int64 ``[N, T]``, each below ``vocabulary``.
        real: False where a token is padding, which does not count, bool ``[N, T]``.
        vocabulary: V.

    Returns:
        bool ``[N, V]``, on the ids' device.
    """
    # One column more takes the padding: written as False, it could undo a real token of the same id.
    seen = torch.zeros(len(ids), vocabulary + 1, dtype=torch.bool, device=ids.device)
    return seen.scatter_(1, ids.masked_fill(~real, vocabulary), True)[:, :vocabulary]


def _check_tokens(params: SamplingParams, ends: set[int], vocabulary: int) -> None:
    unknown = sorted(token for token in params.logit_bias if token >= vocabulary)
    if unknown:
        raise ValueError(
            f"LogitAdjuster: logit_bias names the token ids {unknown}, but the vocabulary has {vocabulary} tokens, so "
            f"ids go from 0 to {vocabulary - 1}; take them out of SamplingParams.logit_bias."
        )
    forbidden = {token for token, bias in params.logit_bias.items() if bias == -math.inf}
    early = ends if params.min_new_tokens else set()
    if len(forbidden | early) == vocabulary:
        raise ValueError(
            f"LogitAdjuster: logit_bias forbids {len(forbidden)} tokens and min_new_tokens={params.min_new_tokens} the "
            f"end tokens {sorted(early)}, which leaves none of the vocabulary's {vocabulary}; allow one more token."
        )


def _vector(values: Mapping[int, float], vocabulary: int, device: torch.device) -> Tensor:
    vector = torch.zeros(vocabulary)
    vector[list(values)] = torch.tensor(list(values.values()), dtype=torch.float32)
    return vector.to(device)
