"""Who sends which part of a tensor to whom, so that it gets from one layout to another. Pure arithmetic.

A layout cuts the dims of a tensor over the axes of a grid of ranks. What a rank holds is then a *region*: for each dim
a list of intervals. Regions of one layout are equal or disjoint, so that a rank that needs a region takes what it has
of it and receives the rest, each part from exactly one of the ranks that hold it. No plan can receive less.

Every rank computes the same plan from the same arguments, and nothing is communicated for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

Interval = tuple[int, int]
"""Global indices of one dim, the first and the one behind the last."""

Region = tuple[tuple[Interval, ...], ...]
"""For each dim the intervals that a rank holds, ascending; the product of them is held, in this order."""

_LONG = 64
"""So many indices in each part make parts equal enough: the longest is at most 1/64 above the mean."""


@dataclass(frozen=True)
class Grid:
    """Ranks in a grid with named axes.

    Raises:
        ValueError: The shape does not hold as many ranks as there are, or a rank comes twice.
    """

    axes: tuple[str, ...]
    """Names, the slowest axis first."""
    shape: tuple[int, ...]
    """Ranks an axis."""
    ranks: tuple[int, ...]
    """World ranks in the order of the grid, the last axis fastest."""

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape) or math.prod(self.shape) != len(self.ranks):
            raise ValueError(
                f"Grid: axes {self.axes} x shape {self.shape} hold {math.prod(self.shape)} ranks, but "
                f"{len(self.ranks)} were given. Make the product of the shape equal the ranks."
            )
        if len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"Grid: a rank comes twice in {self.ranks}; each rank has one place.")

    @cached_property
    def _places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.ranks)}

    def holds(self, rank: int) -> bool:
        """Whether a rank has a place in the grid."""
        return rank in self._places

    def size(self, axis: str) -> int:
        """Ranks along an axis; ValueError if there is no such axis."""
        if axis not in self.axes:
            raise ValueError(f"Grid has no axis {axis!r}; its axes are {self.axes}.")
        return self.shape[self.axes.index(axis)]

    def index(self, rank: int, axis: str) -> int:
        """The coordinate of a rank along an axis."""
        inner = math.prod(self.shape[self.axes.index(axis) + 1 :])
        return self._places[rank] // inner % self.size(axis)


@dataclass(frozen=True)
class Cut:
    """One dim of a tensor, cut over one axis into equal chunks, the last ones shorter or empty (``torch.chunk``)."""

    axis: str
    """The axis of the grid."""
    dim: int
    """The dim of the tensor."""
    blocks: int = 1
    """Tensors that lie one behind the other along the dim (packed weights): each is cut on its own."""


@dataclass(frozen=True)
class TensorLayout:
    """How one tensor lies on a grid: its cuts in order, a later one cuts what earlier ones left; other axes copy."""

    grid: Grid
    cuts: tuple[Cut, ...] = ()

    def region(self, shape: Sequence[int], rank: int) -> Region:
        """What a rank of the grid holds of a tensor of this shape.

        Raises:
            ValueError: A cut names a dim that is not there, or blocks that do not divide it.
        """
        dims: list[tuple[Interval, ...]] = [((0, size),) if size else () for size in shape or (1,)]
        for cut in self.cuts:
            if not 0 <= cut.dim < len(dims):
                raise ValueError(f"TensorLayout: {cut} cuts dim {cut.dim} of a tensor with shape {tuple(shape)}.")
            dims[cut.dim] = _cut(dims[cut.dim], cut, self.grid.size(cut.axis), self.grid.index(rank, cut.axis))
        return tuple(dims)

    def holders(self, shape: Sequence[int]) -> dict[Region, tuple[int, ...]]:
        """Every region that is not empty, with the ranks that hold it, in the order of the grid."""
        found: dict[Region, list[int]] = {}
        for rank in self.grid.ranks:
            region = self.region(shape, rank)
            if volume(region):
                found.setdefault(region, []).append(rank)
        return {region: tuple(ranks) for region, ranks in found.items()}


@dataclass(frozen=True)
class Transfer:
    """One region that goes from a rank to a rank; from a rank to itself it is a local copy."""

    source: int
    target: int
    region: Region


class TensorPlan:
    """The transfers of one tensor.

    Args:
        shape: The whole tensor's shape.
        source: Where it lies.
        target: Where it is wanted. Both grids number the same world; they may hold different ranks of it.
    """

    def __init__(self, shape: tuple[int, ...], source: TensorLayout, target: TensorLayout) -> None:
        self.shape, self.source, self.target = shape, source, target
        self._holders = source.holders(shape)
        self._needs = target.holders(shape)
        self._of_holder: dict[Region, list[Transfer]] = {}

    def transfers(self) -> Iterator[Transfer]:
        """All transfers, local copies included, in an order that is the same on every rank."""
        for held in self._holders:
            yield from self._given(held)

    def sends(self, rank: int) -> list[Transfer]:
        """What a rank gives to others."""
        held = self.held(rank)
        given = self._given(held) if held in self._holders else []
        return [t for t in given if t.source == rank != t.target]

    def receives(self, rank: int) -> list[Transfer]:
        """What a rank gets, its local copy included."""
        need = self.needed(rank)
        if need not in self._needs:
            return []
        overlapping = [held for held in self._holders if intersect(held, need)]
        return [t for held in overlapping for t in self._given(held) if t.target == rank]

    def held(self, rank: int) -> Region:
        """What a rank holds at the source; ``()`` outside of its grid."""
        return self.source.region(self.shape, rank) if self.source.grid.holds(rank) else ()

    def needed(self, rank: int) -> Region:
        """What a rank wants at the target; ``()`` outside of its grid."""
        return self.target.region(self.shape, rank) if self.target.grid.holds(rank) else ()

    def received(self, rank: int) -> int:
        """Elements that a rank must get from others, the lower bound: what it wants less what it holds of that."""
        need, held = self.needed(rank), self.held(rank)
        return volume(need) - volume(intersect(need, held))

    def _given(self, held: Region) -> list[Transfer]:
        """Who gives which part of one held region to whom: of its holders, the one that has given least so far."""
        if held not in self._of_holder:
            load = dict.fromkeys(self._holders[held], 0)
            transfers = []
            for need, takers in self._needs.items():
                common = intersect(held, need)
                for taker in takers if common else ():
                    giver = taker if taker in load else _idlest(load, taker)
                    if giver != taker:
                        load[giver] += volume(common)
                    transfers.append(Transfer(giver, taker, common))
            self._of_holder[held] = transfers
        return self._of_holder[held]


@lru_cache(maxsize=4096)
def plan_tensor(shape: tuple[int, ...], source: TensorLayout, target: TensorLayout) -> TensorPlan:
    """The plan of a tensor; the layers of a model share theirs."""
    return TensorPlan(shape, source, target)


def volume(region: Region) -> int:
    """Elements of a region; that of ``()`` is 0."""
    return math.prod(sum(stop - start for start, stop in intervals) for intervals in region) if region else 0


def intersect(a: Region, b: Region) -> Region:
    """What two regions have in common; ``()`` if that is nothing."""
    if not a or not b:
        return ()
    common = tuple(_common(x, y) for x, y in zip(a, b, strict=True))
    return common if all(common) else ()


def split(region: Region, parts: int, index: int) -> Region:
    """One of equally long parts of a region; ``()`` where nothing is left for it.

    It is cut along the first dim that is long enough for parts of about equal length, so that they have no gaps in
    memory where the region has none; else along the longest.
    """
    lengths = [sum(stop - start for start, stop in intervals) for intervals in region]
    long = [dim for dim, length in enumerate(lengths) if length >= _LONG * parts]
    dim = long[0] if long else lengths.index(max(lengths))
    part = _cut(region[dim], Cut("", dim), parts, index)
    return (*region[:dim], part, *region[dim + 1 :]) if part else ()


def local_shape(region: Region) -> tuple[int, ...]:
    """The shape of the tensor that holds a region."""
    return tuple(sum(stop - start for start, stop in intervals) for intervals in region)


def local_slices(region: Region, held: Region) -> list[list[Interval]]:
    """Where the intervals of a part lie in the tensor of a rank that holds ``held``: for each dim, local intervals."""
    return [_localized(part, whole) for part, whole in zip(region, held, strict=True)]


def _idlest(load: dict[int, int], taker: int) -> int:
    """The rank with the least to give; among equals the nearest, which is likely to be on the same node."""
    return min(load, key=lambda rank: (load[rank], abs(rank - taker)))


def _cut(intervals: tuple[Interval, ...], cut: Cut, parts: int, index: int) -> tuple[Interval, ...]:
    length = sum(stop - start for start, stop in intervals)
    block, rest = divmod(length, cut.blocks)
    if rest:
        raise ValueError(f"TensorLayout: {cut} wants {cut.blocks} blocks of equal length, but the dim has {length}.")
    chunk = -(-block // parts)
    start, stop = min(index * chunk, block), min((index + 1) * chunk, block)
    pieces = [piece for b in range(cut.blocks) for piece in _take(intervals, b * block + start, b * block + stop)]
    return _merged(pieces)


def _take(intervals: tuple[Interval, ...], start: int, stop: int) -> Iterator[Interval]:
    """The part of concatenated intervals from one local index to another."""
    offset = 0
    for first, last in intervals:
        low, high = max(start - offset, 0), min(stop - offset, last - first)
        if low < high:
            yield first + low, first + high
        offset += last - first


def _merged(pieces: Sequence[Interval]) -> tuple[Interval, ...]:
    merged: list[Interval] = []
    for start, stop in pieces:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def _common(a: tuple[Interval, ...], b: tuple[Interval, ...]) -> tuple[Interval, ...]:
    pairs = ((max(x[0], y[0]), min(x[1], y[1])) for x in a for y in b)
    return _merged([(start, stop) for start, stop in pairs if start < stop])


def _localized(part: tuple[Interval, ...], whole: tuple[Interval, ...]) -> list[Interval]:
    found, offset = [], 0
    for first, last in whole:
        for start, stop in _common(part, ((first, last),)):
            found.append((offset + start - first, offset + stop - first))
        offset += last - first
    return found
