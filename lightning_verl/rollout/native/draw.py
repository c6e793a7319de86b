"""Triton kernels that draw tokens from whole vocabularies, in one pass over the logits instead of a dozen.

They draw what :func:`lightning_verl.rollout.sampling.sample_tokens` draws where nothing is cut off, up to the rounding
of float32 sums: the cumulative distribution over parts of the vocabulary is inverted at one uniform number, and then,
in integers of 2**-53, that of the part where it falls.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_verl.rollout.sampling import LOWEST_TEMPERATURE, SamplingParams, sample_tokens

_WIDTH = 4096
"""Tokens of the vocabulary that a program takes."""
_ROWS = 128
"""Uniform numbers that a program makes."""


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
    sums = torch.empty_like(largest)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    inverse = 1.0 / max(params.temperature, LOWEST_TEMPERATURE)
    stride = logits.stride(0)
    _sum[(rows, count)](logits, largest, sums, stride, vocabulary, inverse, WIDTH=_WIDTH, COUNT=count)
    _pick[(rows,)](
        logits, largest, sums, uniform, tokens, logprobs, stride, vocabulary, inverse,
        WIDTH=_WIDTH, COUNT=count, PADDED=triton.next_power_of_2(count),
    )  # fmt: skip
    return tokens, logprobs


def draw_uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """What :func:`lightning_verl.rollout.sampling.uniforms` makes, in one kernel instead of thirty.

    Args:
        seeds: int64 ``[N]``, on a GPU.
        positions: int64 ``[N]``.

    Returns:
        float64 ``[N]``.
    """
    uniform = torch.empty(len(seeds), dtype=torch.float64, device=seeds.device)
    _uniform[(triton.cdiv(len(seeds), _ROWS),)](seeds, positions, uniform, len(seeds), ROWS=_ROWS)
    return uniform


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
def _pick(
    logits, largest, sums, uniform, tokens, logprobs, stride, vocabulary, inverse,
    WIDTH: tl.constexpr, COUNT: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """The part at which the cumulative distribution passes the uniform number, and the token there."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PADDED)
    own_most = tl.load(largest + row * COUNT + part, mask=part < COUNT, other=float("-inf"))
    own_sum = tl.load(sums + row * COUNT + part, mask=part < COUNT, other=0.0)
    most = tl.max(own_most, 0)
    mass = own_sum * tl.exp((own_most - most) * inverse)
    total = tl.sum(mass, 0)
    exact = mass.to(tl.float64)
    cumulative = tl.cumsum(exact, 0)
    target = tl.load(uniform + row) * tl.sum(exact, 0)
    # Rounding must not lead behind the last part that has any mass.
    chosen = tl.minimum(tl.sum((cumulative <= target).to(tl.int32), 0), tl.max(tl.where(mass > 0, part, 0), 0))
    before = tl.sum(tl.where(part < chosen, exact, 0.0), 0)
    here = tl.sum(tl.where(part == chosen, exact, 0.0), 0)
    part_most = tl.load(largest + row * COUNT + chosen)
    part_sum = tl.load(sums + row * COUNT + chosen)

    token = chosen * WIDTH + tl.arange(0, WIDTH)
    values = tl.load(logits + row * stride + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    share = tl.exp((values - part_most) * inverse) / part_sum
    units = (share.to(tl.float64) * 9007199254740992.0).to(tl.int64)  # of 2**-53
    inner = tl.sum(units, 0)
    left = ((target - before) / here * inner.to(tl.float64)).to(tl.int64)
    left = tl.maximum(tl.minimum(left, inner - 1), 0)
    place = tl.sum((tl.cumsum(units, 0) <= left).to(tl.int32), 0)
    place = tl.minimum(place, tl.minimum(vocabulary - 1 - chosen * WIDTH, WIDTH - 1))
    own = (values - most) * inverse - tl.log(total)
    tl.store(tokens + row, (chosen * WIDTH + place).to(tl.int64))
    tl.store(logprobs + row, tl.sum(tl.where(tl.arange(0, WIDTH) == place, own, 0.0), 0))


@triton.jit
def _uniform(seeds, positions, uniform, count, ROWS: tl.constexpr):
    """SplitMix64 of a seed and a position."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    seed = tl.load(seeds + row, mask=inside, other=0).to(tl.uint64, bitcast=True)
    position = tl.load(positions + row, mask=inside, other=0).to(tl.uint64, bitcast=True)
    bits = _mix(seed ^ _mix(position + 0x9E3779B97F4A7C15)) >> 11
    tl.store(uniform + row, bits.to(tl.int64).to(tl.float64) * 1.1102230246251565e-16, mask=inside)  # 2**-53


@triton.jit
def _mix(value):
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)
