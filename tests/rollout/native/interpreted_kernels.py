"""Runs the Triton kernels on the CPU, in Triton's interpreter, beside plain torch; prints what test_kernels.py asserts.

A process of its own: the interpreter is chosen by TRITON_INTERPRET=1 when a kernel is defined.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lightning_verl.rollout.native import kernels
from lightning_verl.rollout.native.attention import PagedBatch, attending
from lightning_verl.rollout.native.batch import _rows
from lightning_verl.rollout.native.cache import CacheShape, KVCache, as_bytes
from lightning_verl.rollout.native.draw import draw_tokens, draw_uniforms
from lightning_verl.rollout.native.graphs import PATIENCE, DecodeGraphs
from lightning_verl.rollout.native.linears import joined_linear, pays
from lightning_verl.rollout.native.scheduler import Chunk, Group, Request
from lightning_verl.rollout.native.state import CachePlaces, DecodeState
from lightning_verl.rollout.sampling import SamplingParams, sample_tokens, uniforms

CPU = torch.device("cpu")
DECODE = [(5, 1), (40, 1), (16, 1), (0, 1), (15, 1), (31, 1)]
PROMPTS = [(0, 33), (0, 16), (0, 1)]
MIXED = [(0, 18), (40, 1), (16, 5), (33, 2), (5, 1)]


@dataclass
class Attention:
    """One attention of sequences, each given by its tokens in the cache and its new ones."""

    specs: list[tuple[int, int]]
    heads: int = 4
    kv_heads: int = 2
    size: int = 16
    window: int = 0
    softcap: float = 0.0
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    stored: torch.dtype | None = None
    moves: bool = False
    """Whether the kernel looks up where the cache is."""
    programs: int = 1
    """What fills the GPU: with more than there are tiles and heads, the walk over the blocks is split."""


ATTENTIONS = {
    "decode": Attention(DECODE),
    "decode, split": Attention(DECODE, programs=48),
    "decode, split more than there are blocks": Attention(DECODE, programs=400),
    "decode, cache elsewhere": Attention(DECODE, moves=True),
    "decode, cache elsewhere, fp8": Attention(DECODE, moves=True, stored=torch.float8_e4m3fn, programs=48),
    "prompts": Attention(PROMPTS),
    "prompts, split": Attention(PROMPTS, programs=24),
    "mixed": Attention(MIXED),
    "mixed, split": Attention(MIXED, programs=40),
    "nothing": Attention([]),
    "as many key-value heads": Attention(MIXED, kv_heads=4),
    "one key-value head of six": Attention(MIXED, heads=6, kv_heads=1),
    "seven heads a key-value head": Attention(DECODE, heads=14, kv_heads=2, programs=48),
    "head size 24": Attention(MIXED, size=24),
    "head size 64": Attention(MIXED, size=64, programs=40),
    "head size 80": Attention(DECODE, size=80),
    "head size 256": Attention(DECODE, heads=2, kv_heads=1, size=256),
    "window": Attention(MIXED, window=9),
    "window, split": Attention([(70, 1), (60, 1), (3, 1)], window=9, programs=48),
    "window of one token": Attention(MIXED, window=1),
    "window of a block": Attention(MIXED, window=16, programs=40),
    "window wider than all": Attention(MIXED, window=500),
    "softcap": Attention(MIXED, softcap=2.0),
    "softcap and window, split": Attention(MIXED, softcap=2.0, window=20, programs=40),
    "blocks of 64": Attention([(100, 1), (0, 18), (63, 2)], block_size=64, programs=24),
    "float16": Attention(MIXED, dtype=torch.float16, programs=40),
    "cache of bfloat16": Attention(MIXED, stored=torch.bfloat16),
    "cache of fp8": Attention(MIXED, stored=torch.float8_e4m3fn),
}


def chunks_of(specs: list[tuple[int, int]], block_size: int) -> list[Chunk]:
    """Sequences whose blocks lie scattered in the cache."""
    free = torch.randperm(63).add(1).tolist()
    chunks = []
    for cached, new in specs:
        request = Request(0, 0, Group(list(range(cached + new))))
        request.cached = cached
        request.blocks = [free.pop() for _ in range(-(-(cached + new) // block_size))]
        chunks.append(Chunk(request, cached, new, (request,)))
    return chunks


def attention(case: Attention) -> dict[str, Any]:
    torch.manual_seed(0)
    size, stored = case.block_size, case.stored or case.dtype
    chunks = chunks_of(case.specs, size)
    # What nobody has written is NaN: no result may depend on it.
    cache = torch.full((1, 2, 64, case.kv_heads, size, case.size), math.nan).to(stored)
    positions, blocks = [], []
    for chunk in chunks:
        for place in range(chunk.start):
            content = torch.randn(2, case.kv_heads, case.size).to(stored)
            as_bytes(cache)[0, :, chunk.request.blocks[place // size], :, place % size] = as_bytes(content)
        for place in range(chunk.start, chunk.start + chunk.count):
            positions.append(place)
            blocks.append(chunk.request.blocks[place // size])
    positions, blocks = positions or [0], blocks or [0]
    at, count = torch.tensor(positions), len(positions)
    query, key, value = (  # heads behind tokens in memory, as the projections leave them
        torch.randn(1, count, heads, case.size).to(case.dtype).transpose(1, 2)
        for heads in (case.heads, case.kv_heads, case.kv_heads)
    )
    if case.stored is not None:  # numbers that it holds exactly: the interpreter rounds towards zero
        key, value = key.to(stored).to(case.dtype), value.to(stored).to(case.dtype)
    own, other = cache.clone(), cache.clone()
    batch = PagedBatch(own, torch.tensor(blocks), at % size, rows=tuple(_rows(chunks)))
    layer = torch.tensor(0)
    with attending(batch):
        expected = torch.ops.lightning_verl.paged_attention(query, key, value, layer, 0.3, case.window, case.softcap)
    kernels._PROGRAMS = case.programs
    tiles = kernels.tiles_of(chunks, size, CPU)
    if case.moves:
        places = CachePlaces(KVCache(CacheShape(1, case.kv_heads, case.size, case.dtype), 2, size, stored, CPU))
        places.point_to(SimpleNamespace(data=other))  # type: ignore[arg-type]
        tiles = replace(tiles, origin=places.origin, distances=places.distances)
    result = kernels.attend_on_gpu(
        query[0], key[0], value[0], *other[0],
        PagedBatch(other, torch.tensor(blocks), at % size, tiles=tiles), 0, 0.3, case.window, case.softcap,
    )  # fmt: skip
    return {
        "split": case.programs >= 2 * len(tiles.sequences) * case.kv_heads,
        "difference": float((result.float() - expected.float()).abs().max()),
        "largest": float(expected.abs().max()),
        "same cache": torch.equal(own.view(torch.uint8), other.view(torch.uint8)),
        "shape": list(result.shape) == list(expected.shape),
    }


def unusual_strides() -> float:
    """Inputs whose numbers of a head do not lie side by side."""
    torch.manual_seed(1)
    chunks = chunks_of([(0, 5)], 16)
    cache = torch.zeros(1, 2, 64, 2, 16, 16)
    other = cache.clone()
    query, key, value = (torch.randn(1, heads, 16, 5).transpose(2, 3) for heads in (4, 2, 2))
    places = (torch.full((5,), chunks[0].request.blocks[0]), torch.arange(5))
    with attending(PagedBatch(cache, *places, rows=tuple(_rows(chunks)))):
        expected = torch.ops.lightning_verl.paged_attention(query, key, value, torch.tensor(0), 0.3, 0, 0.0)
    batch = PagedBatch(other, *places, tiles=kernels.tiles_of(chunks, 16, CPU))
    result = kernels.attend_on_gpu(query[0], key[0], value[0], *other[0], batch, 0, 0.3, 0, 0.0)
    return float((result - expected).abs().max())


def draws() -> Iterator[tuple[str, Tensor, SamplingParams, Tensor]]:
    """Logits, how to sample, and uniform numbers."""
    torch.manual_seed(2)
    edges = torch.tensor([0.0, 1 - 2.0**-53, 0.5, 1e-9, 1 - 1e-9], dtype=torch.float64)
    for vocabulary in (5, 9001):
        logits = torch.randn(8, vocabulary) * 3
        uniform = torch.cat([edges, torch.rand(3, dtype=torch.float64)])
        for temperature in (1.0, 0.7, 1e-40):
            params = SamplingParams(temperature=temperature)
            yield f"{vocabulary} tokens at {temperature}", logits, params, uniform
        yield f"{vocabulary} tokens in bfloat16", logits.bfloat16(), SamplingParams(), uniform
        wide = torch.randn(8, vocabulary + 7)
        yield f"{vocabulary} tokens of longer rows", wide[:, :vocabulary], SamplingParams(), uniform
        yield f"{vocabulary} tokens, far from zero", logits + 3e4, SamplingParams(), uniform
        forbidden = logits.clone()
        forbidden[:, ::3] = -torch.inf
        forbidden[:, 4096:] = -torch.inf  # a whole part of the vocabulary
        forbidden[0, :4096] = -torch.inf
        forbidden[0, -1] = 1.0  # and all but one token
        yield f"{vocabulary} tokens with forbidden ones", forbidden, SamplingParams(temperature=0.7), uniform
        for change in ({"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0.0}):
            yield f"{vocabulary} tokens, {change}", logits, SamplingParams(**change), uniform


def draw(logits: Tensor, params: SamplingParams, uniform: Tensor) -> dict[str, Any]:
    before = logits.clone()
    (expected, expected_logprobs), (tokens, logprobs) = (
        function(logits, params, uniform) for function in (sample_tokens, draw_tokens)
    )
    return {
        "equal": torch.equal(tokens, expected),
        "difference": float((logprobs - expected_logprobs).abs().max()),
        "types": [str(tokens.dtype), str(logprobs.dtype)],
        "finite": bool(logprobs.isfinite().all()),
        "untouched": torch.equal(logits, before),
    }


def broken_draw() -> dict[str, Any]:
    """A row of NaN among others."""
    torch.manual_seed(3)
    logits, uniform = torch.randn(3, 5000), torch.rand(3, dtype=torch.float64)
    expected, _ = sample_tokens(logits, SamplingParams(), uniform)
    logits[1] = torch.nan
    tokens, logprobs = draw_tokens(logits, SamplingParams(), uniform)
    return {
        "others": tokens[[0, 2]].tolist() == expected[[0, 2]].tolist(),
        "inside": bool(((tokens >= 0) & (tokens < 5000)).all()),
        "nan": logprobs.isnan().tolist(),
    }


def equal_uniforms() -> bool:
    """Seeds and positions with high bits set, more of them than a program takes."""
    generator = torch.Generator().manual_seed(4)
    seeds = torch.randint(-(2**63), 2**63 - 1, (300,), generator=generator)
    seeds[:3] = torch.tensor([0, -1, 2**63 - 1])
    positions = torch.randint(0, 2**40, (300,), generator=generator)
    return torch.equal(draw_uniforms(seeds, positions), uniforms(seeds, positions))


def linears() -> Iterator[tuple[str, float]]:
    """The largest error of layers of one input in float16, by how many rows and layers there are."""
    torch.manual_seed(5)
    for rows, inputs, widths, biased in (
        (1, 40, (24,), True),
        (5, 256, (130, 24, 24), True),
        (65, 300, (64, 70), False),
        (130, 96, (48, 16, 16), True),
    ):
        hidden = torch.randn(1, rows, inputs).half()
        weights = [torch.randn(width, inputs).half() / inputs**0.5 for width in widths]
        biases = [torch.randn(width).half() if biased else None for width in widths]
        worst = 0.0
        for weight, bias, output in zip(weights, biases, joined_linear(hidden, weights, biases), strict=True):
            exact = hidden.double() @ weight.double().T + (bias.double() if bias is not None else 0)
            worst = max(worst, float((output.double() - exact).abs().max())) if output.shape == exact.shape else 9.0
        yield f"{rows} rows, {len(widths)} layers", worst


def which_pay() -> dict[str, bool]:
    """For which layers the kernel is chosen: up to 2e9 = 2 x rows x 1024 x 2048 FLOPs, which are 476 rows."""
    hidden, weights = torch.empty(1, 476, 1024).bfloat16(), [torch.empty(1024, 1024).bfloat16()] * 2
    bias = torch.empty(1024).bfloat16()
    return {
        "few rows": pays(hidden, weights, [None, None]),
        "biases": pays(hidden, weights, [bias, bias]),
        "many rows": pays(torch.empty(1, 477, 1024).bfloat16(), weights, [None, None]),
        "one bias": pays(hidden, weights, [bias, None]),
        "four layers": pays(hidden[:, :8], weights * 2, [None] * 4),
        "float32": pays(hidden.float(), [weight.float() for weight in weights], [None, None]),
        "two types": pays(hidden, [weights[0], weights[1].half()], [None, None]),
        "columns": pays(hidden, [weight.T for weight in weights], [None, None]),
    }


def decoding() -> dict[str, Any]:
    """Two samples in a state of three rows, which decode three tokens; the first has 5 tokens of 6 at most."""
    cache = CachePlaces(KVCache(CacheShape(1, 1, 16, torch.float32), 2, 16, torch.float32, CPU))
    state = DecodeState(3, width=2, burst=4, longest=6, vocabulary=10, device=CPU)
    requests = [
        Request(0, 7, Group([1, 2, 3]), response=[4, 5], cached=4, blocks=[9]),
        Request(1, 8, Group([3]), response=[6], cached=1, blocks=[2, 5]),
    ]
    state.load(requests)
    facts: dict[str, Any] = {"tables": state.tiles(3, cache).tables.tolist(), "seen": state.seen(2).tolist()}  # type: ignore[union-attr]
    facts["steps"] = []
    for turn in range(3):
        steps = (*state.last(3), *state.source(3), state.tiles(3, cache).lengths)
        facts["steps"].append([values.tolist() for values in steps])
        state.advance(torch.tensor([7, 8 - turn, 0]), torch.tensor([-1.0, -2.0 - turn, 0.0]))
    drawn = state.drawn(3, 2)
    for request in requests:
        request.blocks = [*request.blocks[:1], 1]
    state.load(requests)  # whose numbers are there already
    return facts | {
        "tokens": drawn.tokens,
        "logprobs": drawn.logprobs,
        "seen later": state.seen(2).tolist(),  # type: ignore[union-attr]
        "kept": [values.tolist() for values in state.last(2)],
        "turn": state._turn.tolist(),
    }


def sizes() -> list[int]:
    """Batch sizes of bursts of 16 tokens, while samples end; what is not captured yet is captured at once."""
    graphs = DecodeGraphs.__new__(DecodeGraphs)
    graphs._replays, graphs._patience = {}, PATIENCE
    chosen = []
    for samples in (250, 140, 130, 120, 100, 60, 60, 60, 60, 60, 60, 300, 60, 200):
        chosen.append(graphs._size_for(samples, 16))
        graphs._replays[chosen[-1]] = lambda: None
    return chosen


def tiles() -> dict[str, Any]:
    """How a step of a prompt of 20 tokens, 18 of them new, and a token that decodes is divided."""
    chunks = chunks_of([(2, 18), (16, 1)], 16)
    both = kernels.tiles_of(chunks, 16, CPU)
    decode = kernels.tiles_of(chunks[1:], 16, CPU)
    return {
        "both": [values.tolist() for values in (both.lengths, both.starts, both.counts, both.sequences, both.firsts)],
        "tables": both.tables.tolist() == [chunk.request.blocks for chunk in chunks],
        "queries": [both.queries, decode.queries],
        "decode": [decode.sequences.tolist(), decode.firsts.tolist()],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    facts = {
        "attention": {name: attention(case) for name, case in ATTENTIONS.items()},
        "strides": unusual_strides(),
        "draw": {name: draw(*case) for name, *case in draws()},
        "broken draw": broken_draw(),
        "tiles": tiles(),
        "uniforms": equal_uniforms(),
        "linears": dict(linears()),
        "pays": which_pay(),
        "decoding": decoding(),
        "sizes": sizes(),
    }
    print(json.dumps(facts))
