"""Triton kernels that draw tokens from whole vocabularies, in two passes over the logits instead of a dozen.

They compute what :func:`lightning_verl.rollout.sampling.sample_tokens` computes where nothing is cut off: the
cumulative distribution, in integers of 2**-53, is inverted at one uniform number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_verl.rollout.sampling import LOWEST_TEMPERATURE, SamplingParams, sample_tokens

_WIDTH = 4096
"""Tokens of the vocabulary that a program takes."""


def draw_tokens(logits: Tensor, params: SamplingParams, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token a row; see :func:`lightning_verl.rollout.sampling.sample_tokens`, which is called for the rest.

    Args:
        logits: ``[N, V]``, on a GPU.
        params: How to sample.
        uniform: float64 ``[N]``.

    Returns:
        int64 ``[N]`` and float32 ``[N]``.
    """
    if params.temperature == 0 or params.top_k is not None or params.top_p < 1 or params.min_p > 0:
        return sample_tokens(logits, params, uniform)
    rows, vocabulary = logits.shape
    count = triton.cdiv(vocabulary, _WIDTH)
    largest = torch.empty(rows, count, dtype=torch.float32, device=logits.device)
    sums, masses = torch.empty_like(largest), torch.empty_like(largest, dtype=torch.int64)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    inverse = 1.0 / max(params.temperature, LOWEST_TEMPERATURE)
    sizes = {"WIDTH": _WIDTH, "COUNT": count, "PADDED": triton.next_power_of_2(count)}
    stride = logits.stride(0)
    _sum[(rows, count)](logits, largest, sums, stride, vocabulary, inverse, WIDTH=_WIDTH, COUNT=count)
    _weigh[(rows, count)](logits, largest, sums, masses, stride, vocabulary, inverse, **sizes)
    _pick[(rows,)](
        logits, largest, sums, masses, uniform, tokens, logprobs, stride, vocabulary, inverse, **sizes
    )  # fmt: skip
    return tokens, logprobs


@triton.jit
def _sum(logits, largest, sums, stride, vocabulary, inverse, WIDTH: tl.constexpr, COUNT: tl.constexpr):
    """The largest logit of a part of the vocabulary, and the sum of exponentials relative to it."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    token = part * WIDTH + tl.arange(0, WIDTH)
    values = tl.load(logits + row * stride + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    most = tl.max(values, 0)
    anchor = tl.where(most == float("-inf"), 0.0, most)
    tl.store(largest + row * COUNT + part, most)
    tl.store(sums + row * COUNT + part, tl.sum(tl.exp((values - anchor) * inverse), 0))


@triton.jit
def _normalizer(largest, sums, row, inverse, COUNT: tl.constexpr, PADDED: tl.constexpr):
    """The largest logit of a row, and the log of the sum of exponentials relative to it."""
    part = tl.arange(0, PADDED)
    own = tl.load(largest + row * COUNT + part, mask=part < COUNT, other=float("-inf"))
    some = tl.load(sums + row * COUNT + part, mask=part < COUNT, other=0.0)
    most = tl.max(own, 0)
    return most, tl.log(tl.sum(some * tl.exp((own - most) * inverse), 0))


@triton.jit
def _mass(values, most, normalizer, inverse):
    """Probabilities in units of 2**-53, and the log-probs."""
    logprobs = (values - most) * inverse - normalizer
    return (tl.exp(logprobs).to(tl.float64) * 9007199254740992.0).to(tl.int64), logprobs


@triton.jit
def _weigh(
    logits, largest, sums, masses, stride, vocabulary, inverse,
    WIDTH: tl.constexpr, COUNT: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """The probability of a part of the vocabulary, as an integer."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    most, normalizer = _normalizer(largest, sums, row, inverse, COUNT, PADDED)
    token = part * WIDTH + tl.arange(0, WIDTH)
    values = tl.load(logits + row * stride + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    mass, _ = _mass(values, most, normalizer, inverse)
    tl.store(masses + row * COUNT + part, tl.sum(mass, 0))


@triton.jit
def _pick(
    logits, largest, sums, masses, uniform, tokens, logprobs, stride, vocabulary, inverse,
    WIDTH: tl.constexpr, COUNT: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """The token at which the cumulative distribution passes the uniform number."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PADDED)
    mass = tl.load(masses + row * COUNT + part, mask=part < COUNT, other=0)
    total = tl.sum(mass, 0)
    target = tl.minimum((tl.load(uniform + row) * total.to(tl.float64)).to(tl.int64), total - 1)
    cumulative = tl.cumsum(mass, 0)
    chosen = tl.minimum(tl.sum((cumulative <= target).to(tl.int32), 0), COUNT - 1)
    before = tl.sum(tl.where(part < chosen, mass, 0), 0)
    most, normalizer = _normalizer(largest, sums, row, inverse, COUNT, PADDED)
    token = chosen * WIDTH + tl.arange(0, WIDTH)
    values = tl.load(logits + row * stride + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    inner, own = _mass(values, most, normalizer, inverse)
    place = tl.sum((before + tl.cumsum(inner, 0) <= target).to(tl.int32), 0)
    place = tl.minimum(place, tl.minimum(vocabulary - 1 - chosen * WIDTH, WIDTH - 1))
    tl.store(tokens + row, (chosen * WIDTH + place).to(tl.int64))
    tl.store(logprobs + row, tl.sum(tl.where(tl.arange(0, WIDTH) == place, own, 0.0), 0))
