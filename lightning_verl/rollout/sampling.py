"""How tokens are sampled, and the seeds that make a sample independent of its batch mates.

Every engine samples with the pure functions below: one response has one seed, one response token has one uniform
number, and both are hashes of counters. So a response depends on its weights, prompt, step and sample number only: not
on the batch it is in, on the device's random generator, or on how many tokens were sampled before it. Cumulative sums
are taken over integers, which makes them exact and the same in every order of summation; a kernel of the native engine
(``native/draw.py``) takes them over parts of the vocabulary in floats first, which moves borders by their rounding.

Shape letters: N rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """How to sample a response.

    Logits go through these steps, in this order: ``logit_bias``, ``repetition_penalty``, ``min_new_tokens``;
    ``temperature``, ``top_k``, ``top_p``, ``min_p``. The log-probs of a rollout are those of the distribution at the
    end of them, the one that was sampled from.

    Training recomputes log-probs from the model's own logits at ``temperature`` and knows none of the other steps, so
    wherever these change a distribution, the two differ by design: the ratio of training to rollout probability is the
    importance ratio between two policies, not numerical noise, and ``actor/rollout_gap_max`` is large. Keep
    ``old_logprobs`` of the trainer at "auto" or "recompute" then, so that the clipped ratio compares training with
    training; samples still come from another policy than the trained one, so keep such options mild in training.

    Raises:
        ValueError: A value is out of its range.
    """

    n: int = 1
    """Samples for each prompt, at least 1."""
    max_new_tokens: int = 256
    """Longest response, in tokens, the end token included, at least 1."""
    min_new_tokens: int = 0
    """Tokens before the one that may end a response, from 0 to ``max_new_tokens``: as long as there are fewer, no end
    token (the model's or of ``stop_token_ids``) can be sampled, and the next token completes no stop string."""
    temperature: float = 1.0
    """Logits are divided by it before the softmax; 0 means greedy (then log-probs are those of temperature 1)."""
    top_k: int | None = None
    """Keep only the k likeliest tokens; None keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probability reaches it, in (0, 1]; applied after top-k."""
    min_p: float = 0.0
    """Keep the tokens whose probability is at least this times the largest one, in [0, 1]; applied after top-p. 0 keeps
    all, 1 only the likeliest and those equal to it. Greedy sampling does not read it."""
    repetition_penalty: float = 1.0
    """Logits of tokens that the prompt or the response holds already are divided by it where positive and multiplied
    by it where negative (CTRL, Keskar et al. 2019), above 0; 1 changes nothing, more discourages repetition."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """What is added to the logits of single tokens, by token id: finite numbers, or -inf for a token that must never be
    sampled. Copied; the default adds nothing."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response, besides the model's own end tokens."""
    stop_strings: tuple[str, ...] = ()
    """Strings that end a response as soon as its text contains one of them."""
    seed: int = 0
    """Base seed of the run."""

    def __post_init__(self) -> None:
        for name in ("n", "max_new_tokens"):
            if not _is_int(getattr(self, name), at_least=1):
                raise _invalid(name, getattr(self, name), "an integer of at least 1")
        if not (_is_int(self.min_new_tokens, at_least=0) and self.min_new_tokens <= self.max_new_tokens):
            rule = f"an integer from 0 to max_new_tokens ({self.max_new_tokens})"
            raise _invalid("min_new_tokens", self.min_new_tokens, rule)
        if not (_is_finite(self.temperature) and self.temperature >= 0):
            raise _invalid("temperature", self.temperature, "a finite number of at least 0 (0 is greedy)")
        if self.top_k is not None and not _is_int(self.top_k, at_least=1):
            raise _invalid("top_k", self.top_k, "an integer of at least 1, or None to keep all tokens")
        if not (_is_finite(self.top_p) and 0 < self.top_p <= 1):
            raise _invalid("top_p", self.top_p, "a number in (0, 1] (1 keeps all tokens)")
        if not (_is_finite(self.min_p) and 0 <= self.min_p <= 1):
            raise _invalid("min_p", self.min_p, "a number in [0, 1] (0 keeps all tokens)")
        if not (_is_finite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise _invalid("repetition_penalty", self.repetition_penalty, "a finite number above 0 (1 changes nothing)")
        if not _is_logit_bias(self.logit_bias):
            rule = "a mapping of token ids of at least 0 to finite numbers or -inf, such as {2: -1.5}"
            raise _invalid("logit_bias", self.logit_bias, rule)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))  # a caller may change its own later
        if not (isinstance(self.stop_token_ids, tuple) and all(_is_int(i, at_least=0) for i in self.stop_token_ids)):
            raise _invalid("stop_token_ids", self.stop_token_ids, "a tuple of token ids of at least 0, such as (2,)")
        if not (isinstance(self.stop_strings, tuple) and all(isinstance(s, str) and s for s in self.stop_strings)):
            raise _invalid(
                "stop_strings", self.stop_strings, "a tuple of strings, none of them empty, such as ('END',)"
            )
        if not _is_int(self.seed):
            raise _invalid("seed", self.seed, "an integer")


def _is_int(value: object, at_least: int | None = None) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and (at_least is None or value >= at_least)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_logit_bias(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        _is_int(token, at_least=0) and (_is_finite(bias) or bias == -math.inf) for token, bias in value.items()
    )


def _invalid(name: str, value: object, rule: str) -> ValueError:
    return ValueError(f"SamplingParams: {name} is {value!r}; it must be {rule}.")


def sample_seeds(seed: int, step: int, prompt_indices: Tensor, n: int) -> Tensor:
    """Return the seed of every response, a 64-bit hash of (seed, step, prompt index, sample number).

    The n seeds of one prompt are all different; any two others are equal with a chance of 2**-64.

    Args:
        seed: ``SamplingParams.seed``; any integer, taken modulo 2**64.
        step: The training step.
        prompt_indices: ``PromptBatch.indices``, int64 ``[B]``; the seeds are made on its device.
        n: Samples for each prompt.

    Returns:
        int64 ``[B * n]``, the n seeds of one prompt adjacent.
    """
    device = prompt_indices.device
    zero = torch.zeros((), dtype=torch.int64, device=device)
    state = _absorb(_absorb(zero, zero + _signed(seed)), zero + _signed(step))
    state = _absorb(state, prompt_indices.to(torch.int64))
    return _absorb(state[:, None], torch.arange(n, device=device)).flatten()


def uniforms(seeds: Tensor, position: int | Tensor) -> Tensor:
    """Return the uniform number that samples the response token at ``position``, the same on every device.

    Args:
        seeds: From :func:`sample_seeds`, int64 ``[N]``.
        position: Place in the response, from 0: one for all rows, or int64 ``[N]``.

    Returns:
        float64 ``[N]``, multiples of 2**-53 in [0, 1).
    """
    counter = torch.zeros_like(seeds) + position
    return _shift_right(_mix(seeds ^ _mix(counter + _GOLDEN)), 64 - _BITS).double() * 2.0**-_BITS


def sample_tokens(logits: Tensor, params: SamplingParams, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Sample one token a row by inverting the cumulative distribution.

    Temperature 0 takes the likeliest token (of equals the lowest id); its log-prob is that of temperature 1 over the
    whole vocabulary, whatever top-k, top-p and min-p are, since the greedy distribution itself has only the log-prob 0.
    A token of zero probability is never sampled.

    Args:
        logits: ``[N, V]``, any float type, not modified; -inf marks a forbidden token.
        params: Temperature, top-k, top-p and min-p; the rest is not read:
            :class:`~lightning_verl.rollout.adjust.LogitAdjuster` applies what changes logits before.
        uniform: From :func:`uniforms`, float64 ``[N]``; not read when greedy.

    Returns:
        ``(tokens, logprobs)``: int64 ``[N]`` and float32 ``[N]``, see :func:`support_logprobs`. A row whose logits hold
        NaN gives an arbitrary token with log-prob NaN.
    """
    if params.temperature == 0:
        tokens = logits.argmax(-1)
        logprobs = logits.float().log_softmax(-1)
    else:
        logprobs = support_logprobs(logits, params)
        tokens = _invert_cumulative(logprobs, uniform)
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)


def support_logprobs(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return the log-probs that sampling at a temperature above 0 draws from, after top-k, then top-p, then min-p.

    Top-k keeps exactly k tokens, of equal ones those with the lowest ids. Top-p keeps the smallest set of likeliest
    tokens whose probability, among those that top-k left, reaches ``top_p``: the token that crosses it is kept, so at
    least one is. Min-p keeps, of what is left, the tokens whose probability is at least ``min_p`` times the largest
    one, which itself is always kept. The vocabulary is sorted for top-p only.

    Args:
        logits: ``[N, V]``.
        params: A temperature above 0, top-k, top-p and min-p.

    Returns:
        float32 ``[N, V]``, normalised over the kept tokens, -inf elsewhere.
    """
    scaled = logits.float()
    # The maximum becomes 0 first: a very low temperature must not overflow float32.
    scaled = (scaled - scaled.amax(-1, keepdim=True)) / max(params.temperature, LOWEST_TEMPERATURE)
    if params.top_k is not None and params.top_k < scaled.shape[-1]:
        scaled = scaled.masked_fill(~_top_k_mask(scaled, params.top_k), -math.inf)
    if params.top_p < 1:
        scaled = scaled.masked_fill(~_top_p_mask(scaled, params.top_p), -math.inf)
    if params.min_p > 0:  # the largest is exp(0), so exp(scaled) is already relative to it
        scaled = scaled.masked_fill(scaled < math.log(params.min_p) - _MIN_P_ROUNDING, -math.inf)
    return scaled.log_softmax(-1)


def _top_k_mask(scaled: Tensor, top_k: int) -> Tensor:
    threshold = scaled.topk(top_k, dim=-1).values[:, -1:]
    above = scaled > threshold
    tied = scaled == threshold
    room = top_k - above.sum(-1, keepdim=True)
    return above | (tied & (tied.cumsum(-1) <= room))


def _top_p_mask(scaled: Tensor, top_p: float) -> Tensor:
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    mass = _integer_mass(ordered.log_softmax(-1))
    cumulative = mass.cumsum(-1)
    kept = cumulative - mass < cumulative[:, -1:].double() * (top_p - _TOP_P_ROUNDING)
    kept[:, 0] = True
    return torch.zeros_like(kept).scatter(-1, order, kept)


def _invert_cumulative(logprobs: Tensor, uniform: Tensor) -> Tensor:
    cumulative = _integer_mass(logprobs).cumsum(-1)
    total = cumulative[:, -1]
    # A uniform that was rounded to 1 on its way must not point behind the last token that has any mass.
    target = torch.minimum((uniform.double() * total.double()).long(), total - 1)
    tokens = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(-1)
    # Only NaN logits lead beyond the vocabulary; an index error would end a CUDA process.
    return tokens.clamp(max=logprobs.shape[-1] - 1)


def _integer_mass(logprobs: Tensor) -> Tensor:
    """Probabilities in units of 2**-53, int64: a float32 probability is exact down to 2**-30, and 0 stays 0."""
    return (logprobs.exp().double() * 2.0**_BITS).long()


def _absorb(state: Tensor, word: Tensor) -> Tensor:
    return _mix((state ^ word) + _GOLDEN)


def _mix(value: Tensor) -> Tensor:
    """SplitMix64's output function (Steele, Lea, Flood 2014; Stafford's variant 13), a bijection of 64-bit words."""
    value = (value ^ _shift_right(value, 30)) * _MULTIPLIERS[0]
    value = (value ^ _shift_right(value, 27)) * _MULTIPLIERS[1]
    return value ^ _shift_right(value, 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Shift as an unsigned word; torch's own shift of int64 copies the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    """The int64 with the same 64 bits."""
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)


_BITS = 53
"""Bits of a float64's fraction: uniforms and probabilities are counted in units of 2**-53."""
_GOLDEN = _signed(0x9E3779B97F4A7C15)
"""SplitMix64's increment, 2**64 over the golden ratio; keeps a counter of 0 from being hashed to 0."""
_MULTIPLIERS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))
_TOP_P_ROUNDING = 1e-6
"""How far below top_p a cumulative probability counts as having reached it: float32 logits of 0.5 and 0.3 may sum to a
little less than 0.8, and a set that reaches 0.8 on paper must not depend on that."""
_MIN_P_ROUNDING = 1e-6
"""How far below log(min_p) a log-ratio counts as having reached it, for the same reason."""
LOWEST_TEMPERATURE = torch.finfo(torch.float32).tiny
"""Lower temperatures are 0 in float32, and 0 / 0 is NaN."""
