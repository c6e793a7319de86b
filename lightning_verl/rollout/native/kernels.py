"""Triton kernels of the native engine: attention over blocks, and storing keys and values in them.

One kernel serves prompts and decoding. A program takes a tile of queries of one sequence, together with the query heads
that share a key-value head, and walks over the sequence's blocks with a running softmax (Milakov and Gimelshein 2018;
Dao et al. 2022). Where there are too few tiles to fill the GPU, the walk is split and the parts are put together by
their log-sum-exps.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_verl.data.transfer import int64, to_device
from lightning_verl.rollout.native.attention import PagedBatch
from lightning_verl.rollout.native.batch import block_tables
from lightning_verl.rollout.native.scheduler import Chunk

_QUERIES = 16
"""Queries of a tile, where a sequence has more than one."""
_PROGRAMS = 264
"""Programs that fill the GPU: two on each of 132 multiprocessors. With fewer, the walk over the blocks is split."""
_MOST_SPLITS = 16
_AHEAD = 5
"""Blocks of keys and values that are on their way or in use at once where a program has a multiprocessor to itself."""
_OTHER_BYTES = 16 * 1024
"""Shared memory that a program takes beside them, at most."""


@dataclass
class Tiles:
    """How the attention kernel divides a step: B tiles of S sequences. All int32."""

    tables: Tensor
    """Blocks of each sequence, ``[S, W]``."""
    lengths: Tensor
    """Tokens that each sequence has in the cache, those of this step included, ``[S]``."""
    starts: Tensor
    """Where its tokens of this step begin, ``[S]``."""
    counts: Tensor
    """How many they are, ``[S]``."""
    sequences: Tensor
    """The sequence of each tile, ``[B]``."""
    firsts: Tensor
    """The first query of each tile, counted from ``starts``, ``[B]``."""
    queries: int
    """Queries of a tile: 1 while all sequences decode."""
    origin: Tensor | None = None
    """Of the cache's type; None where keys and values are where the call says, which a graph could not know."""
    distances: Tensor | None = None
    """How many numbers behind the origin keys and values of a layer begin, int64 ``[layers, 2]``; multiples of 16."""

    def places(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """What the kernel is given to find the keys and values of a layer."""
        if self.origin is None or self.distances is None:
            return keys, values, self.lengths
        return self.origin, self.origin, self.distances[layer]


def tiles_of(chunks: Sequence[Chunk], block_size: int, device: torch.device) -> Tiles:
    """Divide a step; one without chunks is a single token in block 0.

    Args:
        chunks: What the step computes.
        block_size: Tokens in a block.
        device: Where the tensors go.
    """
    counts = [chunk.count for chunk in chunks] or [1]
    ends = [chunk.start + chunk.count for chunk in chunks] or [1]
    blocks = [chunk.request.blocks[: -(-end // block_size)] for chunk, end in zip(chunks, ends, strict=False)] or [[0]]
    starts = [0, *itertools.accumulate(counts)][:-1]
    queries = 1 if max(counts) == 1 else _QUERIES
    tiles = [(place, first) for place, count in enumerate(counts) for first in range(0, count, queries)]

    def column(values: Sequence[int]) -> Tensor:
        return to_device(int64(values).int(), device)

    return Tiles(
        tables=to_device(block_tables(blocks).int(), device),
        lengths=column(ends),
        starts=column(starts),
        counts=column(counts),
        sequences=column([place for place, _ in tiles]),
        firsts=column([first for _, first in tiles]),
        queries=queries,
    )


def attend_on_gpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: PagedBatch,
    layer: int,
    scaling: float,
    window: int,
    softcap: float,
) -> Tensor:
    """Store new keys and values and attend to all of a sequence's.

    Args:
        query: ``[H, T, D]``.
        key: ``[K, T, D]``.
        value: ``[K, T, D]``.
        keys: The layer's part of the cache, ``[blocks, K, block_size, D]``.
        values: As ``keys``.
        batch: Where tokens go, and how the step is divided.
        layer: The layer's number.
        scaling: Factor of the scores.
        window: Tokens that a query sees, itself included; 0 for all.
        softcap: Scores become ``softcap x tanh(score / softcap)``; 0 for no cap.

    Returns:
        ``[1, T, H, D]``.
    """
    query, key, value = (_with_unit_stride(tensor) for tensor in (query, key, value))
    (heads, tokens, size), kv_heads = query.shape, key.shape[0]
    padded = triton.next_power_of_2(size)
    tiles: Tiles = batch.tiles
    if tiles.queries > 1:  # else the attention kernel stores the one token of its sequence itself
        _store[(tokens, kv_heads)](
            key, value, keys, values, batch.blocks, batch.offsets,
            key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            keys.stride(0), keys.stride(1), keys.stride(2), SIZE=size, PADDED=padded,
        )  # fmt: skip
    count, group = len(tiles.sequences), heads // kv_heads
    splits = min(_MOST_SPLITS, triton.next_power_of_2(max(1, _PROGRAMS // (count * kv_heads))))
    output = query.new_empty(tokens, heads, size)
    parts, sums = output, output
    if splits > 1:
        parts = query.new_empty(splits, tokens, heads, size, dtype=torch.float32)
        sums = query.new_empty(splits, tokens, heads, dtype=torch.float32)
    _attend[(count, kv_heads, splits)](
        query, key, value, *tiles.places(keys, values, layer), parts, sums,
        tiles.tables, tiles.lengths, tiles.starts, tiles.counts, tiles.sequences, tiles.firsts,
        scaling, softcap, window, tokens,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        keys.stride(0), keys.stride(1), keys.stride(2), tiles.tables.stride(0),
        GROUP=group, SIZE=size, PADDED=padded, BLOCK=keys.shape[2], QUERIES=tiles.queries,
        ROWS=max(16, triton.next_power_of_2(tiles.queries * group)),
        SPLITS=splits, CAPPED=softcap > 0, WINDOWED=window > 0, MOVES=tiles.origin is not None,
        num_warps=4 if tiles.queries > 1 else 2, num_stages=_stages(count * kv_heads * splits, keys, padded),
    )  # fmt: skip
    if splits > 1:
        _join[(tokens * heads,)](parts, sums, output, tokens * heads, SIZE=size, PADDED=padded, SPLITS=splits)
    return output[None]


def _stages(programs: int, keys: Tensor, padded: int) -> int:
    """How many blocks are on their way or in use at once: the fewer programs run, the more each must load ahead."""
    ahead = _AHEAD * 2 * keys.shape[2] * padded * keys.element_size() + _OTHER_BYTES
    if programs <= _PROGRAMS and ahead <= shared_bytes(keys.device):
        return _AHEAD
    return 3 if padded <= 128 else 2


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may take: 227 KiB on Hopper, 99 on some others. The interpreter takes any."""
    if device.type != "cuda":
        return sys.maxsize
    found = torch.cuda.get_device_properties(device)
    return int(getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block))


def _with_unit_stride(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@triton.jit
def _store(
    key, value, keys, values, blocks, offsets,
    key_head, key_token, value_head, value_token, cache_block, cache_head, cache_token,
    SIZE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Put one token's key and value of one head into the cache."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    dim = tl.arange(0, PADDED)
    inside = dim < SIZE
    block = tl.load(blocks + token).to(tl.int64)
    place = block * cache_block + head * cache_head + tl.load(offsets + token).to(tl.int64) * cache_token + dim
    _put(key + head * key_head + token * key_token + dim, keys + place, inside)
    _put(value + head * value_head + token * value_token + dim, values + place, inside)


@triton.jit
def _put(source, target, inside):
    """Copy numbers, in the type of the target."""
    tl.store(target, tl.load(source, mask=inside).to(target.dtype.element_ty), mask=inside)


@triton.jit
def _walk(
    queries, keys, values, blocks, begin, end, length, position, real, scaling, softcap, window,
    cache_block, cache_token,
    SIZE: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Attend to the blocks from ``begin`` to ``end``: the largest score, the sum of weights, and of weighted values."""
    dim = tl.arange(0, PADDED)
    slot = tl.arange(0, BLOCK)
    inside = dim < SIZE
    largest = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    result = tl.zeros([ROWS, PADDED], dtype=tl.float32)
    for index in range(begin, end):
        base = tl.load(blocks + index).to(tl.int64) * cache_block
        some_keys = tl.load(
            keys + base + slot[None, :] * cache_token + dim[:, None], mask=inside[:, None], other=0.0
        ).to(queries.dtype)
        scores = tl.dot(queries, some_keys, input_precision="ieee") * scaling
        if CAPPED:
            scores = softcap * (2 / (1 + tl.exp(-2 * scores / softcap)) - 1)  # tanh
        seen = index * BLOCK + slot
        visible = (seen[None, :] <= position[:, None]) & real[:, None]
        if WINDOWED:
            visible = visible & (seen[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        anchor = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp(scores - anchor[:, None])
        shrink = tl.exp(largest - anchor)
        # Behind the sequence, an earlier user of the block may have left NaN, and 0 x NaN is NaN.
        some_values = tl.load(
            values + base + slot[:, None] * cache_token + dim[None, :],
            mask=inside[None, :] & (seen[:, None] < length),
            other=0.0,
        ).to(queries.dtype)
        total = total * shrink + tl.sum(weights, 1)
        result = result * shrink[:, None] + tl.dot(weights.to(queries.dtype), some_values, input_precision="ieee")
        largest = new_largest
    return largest, total, result


@triton.jit(do_not_specialize=["table_width"])  # it changes between rollouts, and no graph can hold a compilation
def _attend(
    query, key, value, keys, values, distances, parts, sums,
    tables, lengths, starts, counts, sequences, firsts,
    scaling, softcap, window, tokens,
    query_head, query_token, key_head, key_token, value_head, value_token,
    cache_block, cache_head, cache_token, table_width,
    GROUP: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr,
    ROWS: tl.constexpr, SPLITS: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, MOVES: tl.constexpr,
):  # fmt: skip
    """One tile: ``QUERIES`` queries x ``GROUP`` heads of one sequence, over its share of the blocks."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    sequence = tl.load(sequences + tile)
    first = tl.load(firsts + tile)
    length = tl.load(lengths + sequence)
    start = tl.load(starts + sequence)
    count = tl.load(counts + sequence)
    if MOVES:
        keys += tl.multiple_of(tl.load(distances), 16)  # loads of 16 bytes need to know
        values += tl.multiple_of(tl.load(distances + 1), 16)
    keys += kv_head * cache_head
    values += kv_head * cache_head
    blocks = tables + sequence * table_width
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, PADDED)
    number = first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    real = (row < QUERIES * GROUP) & (number < count)
    position = length - count + number
    place = (start + number).to(tl.int64)
    known = real[:, None] & (dim < SIZE)[None, :]
    queries = tl.load(query + head[:, None] * query_head + place[:, None] * query_token + dim[None, :], known, 0.0)
    lowest = 0
    if WINDOWED:
        lowest = tl.maximum(0, length - count + first - window + 1) // BLOCK
    highest = tl.cdiv(tl.minimum(length, length - count + first + QUERIES), BLOCK)
    share = tl.cdiv(highest - lowest, SPLITS)
    begin = lowest + split * share
    end = tl.minimum(begin + share, highest)

    if (QUERIES == 1) & (begin < end) & (end == highest):  # this program is the one that reads the new token
        block = tl.load(blocks + (length - 1) // BLOCK).to(tl.int64)
        spot = block * cache_block + (length - 1) % BLOCK * cache_token + dim
        _put(key + kv_head * key_head + start * key_token + dim, keys + spot, dim < SIZE)
        _put(value + kv_head * value_head + start * value_token + dim, values + spot, dim < SIZE)
        tl.debug_barrier()  # other threads of this program load what was stored

    largest, total, result = _walk(
        queries, keys, values, blocks, begin, end, length, position, real, scaling, softcap, window,
        cache_block, cache_token, SIZE, PADDED, BLOCK, ROWS, CAPPED, WINDOWED,
    )  # fmt: skip
    result = result / tl.where(total == 0, 1.0, total)[:, None]
    heads = tl.num_programs(1) * GROUP
    target = (split * tokens + place) * heads + head
    tl.store(parts + target[:, None] * SIZE + dim[None, :], result.to(parts.dtype.element_ty), known)
    if SPLITS > 1:
        tl.store(sums + target, tl.where(total == 0, float("-inf"), largest + tl.log(total)), mask=real)


@triton.jit
def _join(parts, sums, output, rows, SIZE: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr):
    """Put the parts of one query and head together."""
    row = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, PADDED)
    split = tl.arange(0, SPLITS)
    own = tl.load(sums + split * rows + row)
    weights = tl.exp(own - tl.max(own, 0))
    weights = weights / tl.sum(weights, 0)
    inside = dim < SIZE
    each = tl.load(parts + (split[:, None] * rows + row) * SIZE + dim[None, :], mask=inside[None, :], other=0.0)
    joined = tl.sum(each * weights[:, None], 0)
    tl.store(output + row * SIZE + dim, joined.to(output.dtype.element_ty), mask=inside)
