"""Cutting rows into micro-batches of bounded size, and spreading them over ranks. Plain integers, no tensors."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RowSize:
    """What a row costs, and with which rows it shares its prompt."""

    prompt: int
    """Tokens of the prompt."""
    response: int
    """Tokens of the response; 0 before there is one."""
    group: int
    """The prompt that the row belongs to: rows with equal numbers have the same one."""

    @property
    def tokens(self) -> int:
        """Prompt and response tokens, as where no row shares the prompt."""
        return self.prompt + self.response


def group_cost(rows: Iterable[RowSize]) -> int:
    """Tokens of rows that lie together: the prompt of each group once, and every response."""
    rows = list(rows)
    return sum({row.group: row.prompt for row in rows}.values()) + sum(row.response for row in rows)


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Put rows into as few bins as first-fit-decreasing finds, each of at most ``budget`` tokens.

    First-fit-decreasing needs at most 11/9 of the best number of bins, plus one (Johnson, 1973). The same input gives
    the same bins on every rank.

    Args:
        lengths: Tokens of each row.
        budget: Most tokens in a bin. A single row that is longer gets a bin of its own.

    Returns:
        The bins, the one with the longest row first; each lists its row numbers in ascending order. No rows: no bins.

    Raises:
        ValueError: ``budget`` is below 1 or a length is negative.
    """
    if budget < 1:
        raise ValueError(
            f"pack: budget={budget} tokens, but it must be at least 1; pass the most tokens a bin may hold."
        )
    bins: list[list[int]] = []
    totals: list[int] = []
    for row in _longest_first("pack", lengths):
        fitting = (place for place, total in enumerate(totals) if total + lengths[row] <= budget)
        place = next(fitting, len(bins))
        if place == len(bins):
            bins.append([])
            totals.append(0)
        bins[place].append(row)
        totals[place] += lengths[row]
    return [sorted(rows) for rows in bins]


def pack_groups(sizes: Sequence[RowSize], budget: int) -> list[list[int]]:
    """Put rows into few bins of at most ``budget`` tokens, where rows of a group in one bin share their prompt's.

    A group stays together where it fits into a bin. A larger one is divided into parts that are as full as they can be,
    and each of them has the prompt again.

    Args:
        sizes: Those of the rows.
        budget: Most tokens in a bin. A single row that is longer gets a bin of its own.

    Returns:
        The bins, the one with the largest group first; each lists its row numbers in ascending order. No rows: no bins.

    Raises:
        ValueError: ``budget`` is below 1.
    """
    parts = list(_group_parts(sizes, budget))
    costs = [sizes[part[0]].prompt + sum(sizes[row].response for row in part) for part in parts]
    return [sorted(row for number in numbers for row in parts[number]) for numbers in pack(costs, budget)]


def _group_parts(sizes: Sequence[RowSize], budget: int) -> Iterator[list[int]]:
    """The rows of each group, divided where they are too many tokens for a bin."""
    groups: dict[int, list[int]] = {}
    for row, size in enumerate(sizes):
        groups.setdefault(size.group, []).append(row)
    for rows in groups.values():
        room = budget - sizes[rows[0]].prompt
        if sum(sizes[row].response for row in rows) <= room:
            yield rows
        elif room < 1:
            yield from ([row] for row in rows)
        else:
            yield from ([rows[place] for place in part] for part in pack([sizes[row].response for row in rows], room))


def pack_padded(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Sort rows into bins that stay within a budget when each bin is padded to its longest row.

    Rows of like lengths come together, longest first, so little of a bin is padding.

    Args:
        lengths: Tokens of each row.
        budget: Most positions (rows x longest row) in a bin. A single row that is longer gets a bin of its own.

    Returns:
        The bins, each with its row numbers, the longest row first. No rows: no bins.

    Raises:
        ValueError: A length is negative.
    """
    bins: list[list[int]] = []
    for row in _longest_first("pack_padded", lengths):
        if bins and (len(bins[-1]) + 1) * lengths[bins[-1][0]] <= budget:
            bins[-1].append(row)
        else:
            bins.append([row])
    return bins


def balance(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Spread rows over ranks so that the ranks' token totals are close.

    Longest row first, each to the rank with the fewest tokens so far: the largest total is at most 4/3 of the best
    possible one (Graham, 1969). Ranks may get unequal numbers of rows, or none. The same input gives the same answer on
    every rank.

    Args:
        lengths: Tokens of each row.
        ranks: Number of ranks.

    Returns:
        For each rank its row numbers in ascending order.

    Raises:
        ValueError: ``ranks`` is below 1 or a length is negative.
    """
    if ranks < 1:
        raise ValueError(f"balance: ranks={ranks}, but it must be at least 1; pass the size of the data axis.")
    shares: list[list[int]] = [[] for _ in range(ranks)]
    # (tokens, rows, rank): of equally loaded ranks the one with fewer rows is next, then the lower rank.
    loads = [(0, 0, rank) for rank in range(ranks)]
    for row in _longest_first("balance", lengths):
        tokens, rows, rank = loads[0]
        shares[rank].append(row)
        heapq.heapreplace(loads, (tokens + lengths[row], rows + 1, rank))
    return [sorted(rows) for rows in shares]


def _longest_first(caller: str, lengths: Sequence[int]) -> list[int]:
    for row, length in enumerate(lengths):
        if length < 0:
            raise ValueError(
                f"{caller}: row {row} has length {length}, but lengths must be at least 0 tokens; fix that row."
            )
    return sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
