"""Divides the transfers of many tensors into buckets of bounded size, and each bucket into messages between ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

import torch

from lightning_verl.resharding.planner import Region, TensorPlan, Transfer, local_shape, local_slices, split, volume

BUCKET_BYTES = 256 * 2**20
"""Most bytes of one bucket that go through buffers on a rank, sent and received ones taken together."""

SMALL_BYTES = 2**23
"""A part below this shares a message with others: a GPU copies it in microseconds, the host sends none in so few."""

_TRAVELLING = 4
"""So many times the bytes that may go through buffers may travel in one bucket, most of them past any buffer."""

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Move:
    """One tensor on its way: where to, and as what."""

    plan: TensorPlan
    """Its transfers."""
    dtype: torch.dtype
    """What it is cast to, before it travels."""
    is_cast: bool = True
    """Whether it has to be cast for that; it is held in the same dtype otherwise, on all ranks."""
    may_alias: bool = True
    """Whether the result may be the source tensor itself, where a rank wants just what it holds in this dtype."""


@dataclass(frozen=True)
class Part:
    """A rectangle of a local tensor that is sent or received."""

    name: str
    slices: Slices

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Of the rectangle."""
        return tuple(part.stop - part.start for part in self.slices)

    @cached_property
    def elements(self) -> int:
        """In the rectangle."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Message:
    """What goes to, or comes from, one rank at once: a large part, or the small ones of a bucket.

    Both ends cut the same messages and each decides for itself whether its one needs a buffer.
    """

    peer: int
    """The world rank at the other end."""
    parts: tuple[Part, ...]
    contiguous: bool
    """Whether this is one rectangle without gaps in the memory of this end's tensor."""

    @cached_property
    def elements(self) -> int:
        """In all parts."""
        return sum(part.elements for part in self.parts)


@dataclass(frozen=True)
class Bucket:
    """One exchange, seen from this rank."""

    dtype: torch.dtype
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that are sent and received."""
        return sum(message.elements for message in self.sends + self.receives) * self.dtype.itemsize


@dataclass(frozen=True)
class _Piece:
    """A share of one tensor's transfers: each of them is divided by ``count``, and this is number ``index``."""

    name: str
    count: int
    index: int


def make_buckets(moves: Mapping[str, Move], rank: int, limit: int) -> list[Bucket]:
    """What a rank sends and receives, bucket by bucket.

    Args:
        moves: By name; the same on every rank, in the same order.
        rank: This rank in the world.
        limit: Most bytes of one bucket that go through buffers on a rank, sent and received ones taken together.
    """
    return [_bucket([(piece, moves[piece.name]) for piece in pieces], rank) for pieces in _fill(moves, limit)]


def rectangles(region: Region, local: Region) -> list[Slices]:
    """Where the intervals of a region lie in the tensor of a rank that holds ``local``."""
    dims = [[slice(*interval) for interval in intervals] for intervals in local_slices(region, local)]
    return list(itertools.product(*dims))


def _fill(moves: Mapping[str, Move], limit: int) -> Iterator[list[_Piece]]:
    """Divide tensors into buckets, the same on every rank.

    The busiest rank decides how much of a tensor fits. A bucket has one dtype. Tensors with little to move come last,
    together: they take the host long and the link no time, so that the others are on their way meanwhile.
    """

    def order(name: str) -> tuple[str, bool]:
        return str(moves[name].dtype), _divided(moves[name], limit)[1].travelling < SMALL_BYTES

    for _, group in itertools.groupby(sorted(moves, key=order), lambda name: moves[name].dtype):
        pieces: list[_Piece] = []
        filled = _Load(0, 0)
        for name in group:
            count, load = _divided(moves[name], limit)
            for index in range(count):
                if pieces and not (filled + load).fits(limit):
                    yield pieces
                    pieces, filled = [], _Load(0, 0)
                pieces.append(_Piece(name, count, index))
                filled += load
        if pieces:
            yield pieces


@dataclass(frozen=True)
class _Load:
    """Bytes on the busiest rank."""

    buffered: int
    """Sent from and received into buffers."""
    travelling: int
    """Sent and received."""

    def __add__(self, other: _Load) -> _Load:
        return _Load(self.buffered + other.buffered, self.travelling + other.travelling)

    def fits(self, limit: int) -> bool:
        """Whether it is not too much for a bucket."""
        return self.buffered <= limit and self.travelling <= _TRAVELLING * limit


def _divided(move: Move, limit: int) -> tuple[int, _Load]:
    """In how many pieces a tensor goes, and what each of them adds to its bucket."""

    def load(count: int) -> _Load:
        return _load(move.plan, move.dtype.itemsize, move.is_cast, SMALL_BYTES, count)

    whole = load(1)
    count = max(-(-whole.buffered // limit), -(-whole.travelling // (_TRAVELLING * limit)))
    if not load(count).fits(limit):  # pieces have gaps where the whole had none, or are small
        count = -(-whole.travelling // limit)
    return count, load(count)


@lru_cache(maxsize=4096)
def _load(plan: TensorPlan, itemsize: int, is_cast: bool, small: int, count: int) -> _Load:
    """What one of so many pieces adds, the first, which is the largest; the layers of a model share it."""
    buffered: dict[int, int] = {}
    travelling: dict[int, int] = {}
    held, needed = cache(plan.held), cache(plan.needed)
    for transfer in plan.transfers() if count else ():
        if transfer.source != transfer.target:
            region = split(transfer.region, count, 0)
            size = volume(region) * itemsize
            for rank, local, copied in (
                (transfer.source, held(transfer.source), is_cast),
                (transfer.target, needed(transfer.target), False),
            ):
                travelling[rank] = travelling.get(rank, 0) + size
                if copied or size < small or _has_gaps(region, local):
                    buffered[rank] = buffered.get(rank, 0) + size
    return _Load(max(buffered.values(), default=0), max(travelling.values(), default=0))


def _bucket(pieces: Sequence[tuple[_Piece, Move]], rank: int) -> Bucket:
    """The messages of some pieces: peer after peer, and for each of them piece after piece."""
    sends: dict[int, list[tuple[Part, Region]]] = {}
    receives: dict[int, list[tuple[Part, Region]]] = {}
    for piece, move in pieces:
        held, need = move.plan.held(rank), move.plan.needed(rank)
        for transfer in move.plan.sends(rank):
            sends.setdefault(transfer.target, []).extend((part, held) for part in _parts(piece, transfer, held))
        for transfer in move.plan.receives(rank):
            if transfer.source != rank:
                receives.setdefault(transfer.source, []).extend((p, need) for p in _parts(piece, transfer, need))
    dtype = pieces[0][1].dtype
    return Bucket(
        dtype,
        tuple(message for peer in sorted(sends) for message in _messages(peer, sends[peer], dtype)),
        tuple(message for peer in sorted(receives) for message in _messages(peer, receives[peer], dtype)),
    )


def _messages(peer: int, parts: Sequence[tuple[Part, Region]], dtype: torch.dtype) -> Iterator[Message]:
    """Large parts alone, in order, then the small ones together."""
    small = [(part, local) for part, local in parts if part.elements * dtype.itemsize < SMALL_BYTES]
    for part, local in parts:
        if part.elements * dtype.itemsize >= SMALL_BYTES:
            yield Message(peer, (part,), _is_contiguous(part.shape, local))
    if small:
        yield Message(
            peer, tuple(part for part, _ in small), len(small) == 1 and _is_contiguous(small[0][0].shape, small[0][1])
        )


def _is_contiguous(shape: Sequence[int], local: Region) -> bool:
    """Whether a rectangle of this shape has no gaps in the row-major tensor that holds ``local``.

    Behind the first dim that is longer than 1 all dims have to be whole.
    """
    started = False
    for length, size in zip(shape, local_shape(local), strict=True):
        if started and length != size:
            return False
        started = started or length > 1
    return True


def _has_gaps(region: Region, local: Region) -> bool:
    found = rectangles(region, local)
    return len(found) > 1 or not _is_contiguous([part.stop - part.start for part in found[0]], local)


def _parts(piece: _Piece, transfer: Transfer, local: Region) -> Iterator[Part]:
    """The rectangles of one piece of a transfer in the tensor that holds ``local``.

    Both ends list them alike: an interval of the region lies in one interval of what either of them holds.
    """
    region = split(transfer.region, piece.count, piece.index)
    for slices in rectangles(region, local) if region else ():
        yield Part(piece.name, slices)
