"""Turns a step of the scheduler into the tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_verl.data.transfer import int64, to_device
from lightning_verl.rollout.native.attention import PagedBatch, Rows
from lightning_verl.rollout.native.cache import KVCache
from lightning_verl.rollout.native.scheduler import Chunk

LEAST_ROWS = 16
"""Fewest rows of a matrix product on the CPU. With fewer, libraries take other kernels that round differently, and the
logits of a sample would depend on how many others there are."""


@dataclass
class ForwardInput:
    """The tokens of one step, all sequences in one row."""

    ids: Tensor
    """int64 ``[1, T]``."""
    positions: Tensor
    """int64 ``[1, T]``."""
    last: Tensor
    """The places of the tokens that logits are wanted of, int64 ``[L]``."""
    attention: PagedBatch


def forward_input(chunks: Sequence[Chunk], cache: KVCache) -> ForwardInput:
    """Lay the tokens of a step side by side.

    Args:
        chunks: What the step computes; a step without any is padding alone.
        cache: Where their keys and values go.
    """
    device, size = cache.data.device, cache.block_size
    ids: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    last: list[int] = []
    for chunk in chunks:
        places = range(chunk.start, chunk.start + chunk.count)
        ids += chunk.request.tokens(chunk.start, chunk.count)
        positions += places
        blocks += [chunk.request.blocks[place // size] for place in places]
        if chunk.samples:
            last.append(len(ids) - 1)
    least = LEAST_ROWS if device.type == "cpu" else 1
    for column in (ids, positions, blocks):  # padding goes to block 0
        column += [0] * (least - len(column))
    at = int64(positions)
    attention = PagedBatch(
        cache=cache.data,
        blocks=to_device(int64(blocks), device),
        offsets=to_device(at % size, device),
    )
    if device.type == "cuda":
        from lightning_verl.rollout.native.kernels import tiles_of

        attention.tiles = tiles_of(chunks, size, device)
    else:
        attention.rows = tuple(_rows(chunks))
    return ForwardInput(
        ids=to_device(int64([ids]), device),
        positions=to_device(at[None], device),
        last=to_device(int64(last), device),
        attention=attention,
    )


def _rows(chunks: Sequence[Chunk]) -> list[Rows]:
    """Sequences that decode, and those with more tokens: padding one token to a whole prompt would waste most of it."""
    if not chunks:
        zero = torch.zeros(1, 1, dtype=torch.int64)
        return [Rows(places=zero, positions=zero, tables=zero)]
    first = 0
    decoding: list[tuple[int, Chunk]] = []
    others: list[tuple[int, Chunk]] = []
    for chunk in chunks:
        (decoding if chunk.count == 1 else others).append((first, chunk))
        first += chunk.count
    return [_padded(part) for part in (decoding, others) if part]


def _padded(part: Sequence[tuple[int, Chunk]]) -> Rows:
    firsts, starts, counts = torch.tensor([(first, chunk.start, chunk.count) for first, chunk in part]).T[..., None]
    offsets = torch.arange(int(counts.max())).minimum(counts - 1)
    return Rows(
        places=offsets + firsts,
        positions=offsets + starts,
        tables=block_tables([chunk.request.blocks for _, chunk in part]),
    )


def block_tables(blocks: Sequence[Sequence[int]], width: int = 1) -> Tensor:
    """The blocks of some sequences as one table, int64 ``[S, W]``, filled with block 0.

    Args:
        blocks: Those of each sequence.
        width: W at least.
    """
    width = max(width, max(map(len, blocks), default=1))
    padding, flat = [0] * width, list[int]()
    for row in blocks:  # flat, since a list for each row keeps Python's garbage collector busy
        flat += row
        flat += padding[len(row) :]
    return int64(flat).view(-1, width)
