"""Which rows travel from the data ranks of one role to those of another, and who sends them: plain integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from lightning_verl.data.packing import balance
from lightning_verl.data.sharding import split
from lightning_verl.strategies.layout import RoleLayout


@dataclass(frozen=True)
class Placement:
    """Where the rows of a batch lie. They are numbered over all data ranks of the role that they come from."""

    layout: RoleLayout
    """The role that holds them; its tensor ranks of one data coordinate hold the same rows."""
    shares: tuple[tuple[int, ...], ...]
    """The rows of each data coordinate, in the order in which they lie there."""

    def rows(self, rank: int) -> tuple[int, ...]:
        """The rows that a world rank holds; none outside the role."""
        return self.shares[self.layout.data_rank(rank)] if self.layout.holds(rank) else ()


def place_rows(lengths: Sequence[Sequence[int]], source: RoleLayout, target: RoleLayout) -> tuple[Placement, Placement]:
    """Spread the rows of a role's data ranks over those of another role, by tokens.

    The largest share has at most the mean plus the longest row. Where a cut into contiguous parts of equal numbers of
    rows is as even, it is taken: more rows stay where they are. The same input gives the same answer on every rank.

    Args:
        lengths: For each data coordinate of the source, the tokens of each of its rows.
        source: Where the rows are.
        target: Where they go.

    Returns:
        The rows where they are, and where they go. Every row has one place in either.
    """
    ends = [0, *accumulate(len(part) for part in lengths)]
    tokens = [length for part in lengths for length in part]
    contiguous = [list(split(len(tokens), target.data_size, index)) for index in range(target.data_size)]
    cuts = (contiguous, balance(tokens, target.data_size))
    best = min(cuts, key=lambda shares: max(sum(tokens[row] for row in share) for share in shares))
    held = tuple(tuple(range(start, end)) for start, end in pairwise(ends))
    return Placement(source, held), Placement(target, tuple(map(tuple, best)))


def incoming(held: Placement, wanted: Placement, rank: int) -> dict[int, list[int]]:
    """Which rows a world rank takes from which.

    Args:
        held: Where the rows are.
        wanted: Where they go.
        rank: The world rank that receives.

    Returns:
        For each sending world rank, in ascending order, the rows in the order in which it holds them.
    """
    need = set(wanted.rows(rank))
    taken = {
        _sender(held.layout, coordinate, rank): [row for row in rows if row in need]
        for coordinate, rows in enumerate(held.shares)
    }
    return {sender: rows for sender, rows in sorted(taken.items()) if rows}


def outgoing(held: Placement, wanted: Placement, rank: int) -> dict[int, list[int]]:
    """Which rows a world rank gives to which: the other side of :func:`incoming`.

    Returns:
        For each receiving world rank, in ascending order, the places of the rows among those that ``rank`` holds.
    """
    given: dict[int, list[int]] = {}
    if not held.layout.holds(rank):
        return given
    own, coordinate = held.rows(rank), held.layout.data_rank(rank)
    for receiver in sorted(wanted.layout.ranks):
        if _sender(held.layout, coordinate, receiver) == rank:
            need = set(wanted.rows(receiver))
            given[receiver] = [place for place, row in enumerate(own) if row in need]
    return {receiver: places for receiver, places in given.items() if places}


def _sender(held: RoleLayout, coordinate: int, receiver: int) -> int:
    """Who gives the rows of a data coordinate to a rank: itself where it has them, else the first tensor rank."""
    if held.holds(receiver) and held.data_rank(receiver) == coordinate:
        return receiver
    return held.ranks[coordinate * held.tensor]
