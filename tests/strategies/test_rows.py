"""Which rows go where, over many layouts: plain arithmetic, no process group."""

from __future__ import annotations

import random

import pytest

from lightning_verl.strategies.layout import RoleLayout
from lightning_verl.strategies.rows import Placement, incoming, outgoing, place_rows


def grid(role: str, data: int, tensor: int, first: int = 0) -> RoleLayout:
    return RoleLayout(role, 1, data, tensor, tuple(range(first, first + data * tensor)))


def test_rows_are_balanced_by_tokens() -> None:
    # 5, 6, 7 | 8, 9 tokens over four: longest first, 9 8 7 6, and 5 joins the shortest, 6. In contiguous parts of one
    # or two rows the largest would have 8 + 9 = 17 tokens, here it is 11.
    held, wanted = place_rows([[5, 6, 7], [8, 9]], grid("actor", 2, 2), grid("critic", 4, 1))
    assert held.shares == ((0, 1, 2), (3, 4))
    assert wanted.shares == ((4,), (3,), (2,), (0, 1))
    # Rank 1 is the second tensor rank of coordinate 0: it holds rows 0 to 2. Rank 3 holds rows 3 and 4.
    assert [held.rows(rank) for rank in range(4)] == [(0, 1, 2), (0, 1, 2), (3, 4), (3, 4)]
    # Row 4 comes to rank 0 from rank 2, the first that has it; rank 2 gets row 2 from rank 0; rank 3 rows 0 and 1.
    assert [incoming(held, wanted, rank) for rank in range(4)] == [{2: [4]}, {2: [3]}, {0: [2]}, {0: [0, 1]}]
    assert [outgoing(held, wanted, rank) for rank in range(4)] == [{2: [2], 3: [0, 1]}, {}, {0: [1], 1: [0]}, {}]


def test_rows_stay_together_where_balancing_gains_nothing() -> None:
    # Equal rows: contiguous parts are as even as any, and the ranks of coordinate 0 keep its rows.
    held, wanted = place_rows([[4, 4], [4, 4]], grid("actor", 2, 2), grid("critic", 4, 1))
    assert wanted.shares == ((0,), (1,), (2,), (3,))
    assert [incoming(held, wanted, rank) for rank in range(4)] == [{0: [0]}, {1: [1]}, {2: [2]}, {3: [3]}]


def test_every_tensor_rank_of_the_target_gets_the_same_rows() -> None:
    held, wanted = place_rows([[3], [2, 2]], grid("actor", 2, 1), grid("reward", 1, 2, first=2))
    assert [incoming(held, wanted, rank) for rank in range(4)] == [{}, {}, {0: [0], 1: [1, 2]}, {0: [0], 1: [1, 2]}]
    assert [outgoing(held, wanted, rank) for rank in range(4)] == [{2: [0], 3: [0]}, {2: [0, 1], 3: [0, 1]}, {}, {}]
    # Back, only the first tensor rank sends.
    assert outgoing(wanted, held, 2) == {0: [0], 1: [1, 2]}
    assert outgoing(wanted, held, 3) == {}


def test_no_rows_at_all() -> None:
    held, wanted = place_rows([[], []], grid("actor", 2, 1), grid("reward", 3, 1, first=2))
    assert wanted.shares == ((), (), ())
    assert outgoing(held, wanted, 0) == incoming(held, wanted, 2) == {}


def some_layout(generator: random.Random, role: str, world: int) -> RoleLayout:
    """A grid of some of the ranks, in any order."""
    ranks = generator.sample(range(world), generator.randint(1, world))
    tensor = generator.choice([size for size in (1, 2, 3, 4) if len(ranks) % size == 0])
    shards = generator.choice([size for size in (1, 2, 4) if len(ranks) // tensor % size == 0])
    return RoleLayout(role, len(ranks) // tensor // shards, shards, tensor, tuple(ranks))


def lie(placement: Placement, rows: list[list[int]]) -> None:
    """Every rank's rows are those of its coordinate."""
    for rank, found in enumerate(rows):
        assert found == list(placement.rows(rank))


def carry(held: Placement, wanted: Placement, rows: list[list[int]]) -> list[list[int]]:
    """Do what the ranks do, with lists."""
    arrived: list[dict[int, list[int]]] = [{} for _ in rows]
    for rank, own in enumerate(rows):
        for receiver, places in outgoing(held, wanted, rank).items():
            assert places
            arrived[receiver][rank] = [own[place] for place in places]
    for rank, parts in enumerate(arrived):
        assert parts == incoming(held, wanted, rank), "what is sent is what is expected"
        assert list(incoming(held, wanted, rank)) == sorted(parts)
        if held.layout.holds(rank) and wanted.layout.holds(rank):
            kept = set(held.rows(rank)) & set(wanted.rows(rank))
            assert kept == set(parts.get(rank, [])), "what a rank holds does not travel to it"
    return [sorted(row for part in parts.values() for row in part) for parts in arrived]


@pytest.mark.parametrize("world", range(1, 9))
def test_any_layouts_and_rows(world: int) -> None:
    generator = random.Random(world)  # noqa: S311 - cases, not secrets
    for _ in range(50):
        source, target = some_layout(generator, "actor", world), some_layout(generator, "critic", world)
        lengths = [[generator.randint(1, 50) for _ in range(generator.randint(0, 6))] for _ in range(source.data_size)]
        held, wanted = place_rows(lengths, source, target)
        assert (held, wanted) == place_rows(lengths, source, target)

        count = sum(map(len, lengths))
        for placement in (held, wanted):
            assert len(placement.shares) == placement.layout.data_size
            assert sorted(row for share in placement.shares for row in share) == list(range(count))
        tokens = [length for part in lengths for length in part]
        loads = [sum(tokens[row] for row in share) for share in wanted.shares]
        assert max(loads) <= sum(tokens) / target.data_size + max(tokens, default=0)

        there = carry(held, wanted, [list(held.rows(rank)) for rank in range(world)])
        lie(wanted, there)
        lie(held, carry(wanted, held, there))
