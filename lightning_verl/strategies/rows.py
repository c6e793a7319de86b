"""Which rows travel from the data ranks of one role to those of another, and who sends them: plain integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from lightning_verl.data.packing import RowSize, balance, group_cost
from lightning_verl.data.sharding import split
from lightning_verl.strategies.layout import RoleLayout

WORTH_MOVING = 1.1
"""Rows leave a role's data ranks for others of the same role where the largest share costs more than this many times
that of the best spread: a rank waits for the slowest in every pass, but the exchange goes through host memory."""


@dataclass(frozen=True)
class Placement:
    """Where the rows of a batch lie. They are numbered over all data ranks of the role that they come from."""

    layout: RoleLayout
    """The role that holds them; its tensor and pipeline ranks of one data coordinate hold the same rows."""
    shares: tuple[tuple[int, ...], ...]
    """The rows of each data coordinate, in the order in which they lie there."""

    def rows(self, rank: int) -> tuple[int, ...]:
        """The rows that a world rank holds; none outside the role."""
        return self.shares[self.layout.data_rank(rank)] if self.layout.holds(rank) else ()


def place_rows(
    sizes: Sequence[Sequence[RowSize]], source: RoleLayout, target: RoleLayout
) -> tuple[Placement, Placement]:
    """Spread the rows of a role's data ranks over those of another role, by what they cost (``group_cost``).

    Tried are contiguous parts of equal numbers of rows, with which more rows stay in place; then whole groups, the
    costliest first, each to the lightest rank; then single rows, the longest first, as there may be fewer groups than
    ranks. The one with the smallest largest share is taken, of equals the first. Where the roles lie alike, rows stay
    unless it pays (``WORTH_MOVING``). The same input gives the same answer on every rank.

    The largest share costs at most the mean over ranks of all tokens, prompts counted in every row, plus the longest
    row. It also costs at most the mean over ranks of the groups' costs, plus the costliest group. Where rows stay, it
    is at most ``WORTH_MOVING`` times as much.

    Args:
        sizes: For each data coordinate of the source, what each of its rows costs.
        source: Where the rows are.
        target: Where they go.

    Returns:
        The rows where they are, and where they go. Every row has one place in either.
    """
    ends = [0, *accumulate(len(part) for part in sizes)]
    rows = [row for part in sizes for row in part]

    def largest(shares: Sequence[Sequence[int]]) -> int:
        return max(group_cost(rows[row] for row in share) for share in shares)

    held = tuple(tuple(range(start, end)) for start, end in pairwise(ends))
    best = min(_spreads(rows, target.data_size), key=largest)
    if source.lies_like(target) and largest(held) <= WORTH_MOVING * largest(best):
        return Placement(source, held), Placement(target, held)
    return Placement(source, held), Placement(target, tuple(map(tuple, best)))


def _spreads(rows: Sequence[RowSize], ranks: int) -> list[list[list[int]]]:
    """The ways to spread rows over ranks that ``place_rows`` chooses from."""
    contiguous = [list(split(len(rows), ranks, index)) for index in range(ranks)]
    members: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        members.setdefault(row.group, []).append(number)
    groups = list(members.values())
    shares = balance([group_cost(rows[row] for row in group) for group in groups], ranks)
    whole = [sorted(row for group in share for row in groups[group]) for share in shares]
    return [contiguous, whole, balance([row.tokens for row in rows], ranks)]


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
    """Who gives the rows of a data coordinate to a rank: itself where it has them, else the rank that speaks."""
    if held.holds(receiver) and held.data_rank(receiver) == coordinate:
        return receiver
    return held.speakers[coordinate]
