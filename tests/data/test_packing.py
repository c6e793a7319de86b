"""Micro-batches of bounded size, and rows spread over ranks."""

from __future__ import annotations

import pytest
import torch

from lightning_verl.data.packing import RowSize, balance, group_cost, pack, pack_groups, pack_padded


def test_pack_fills_bins_longest_row_first():
    # Longest first: 7 opens a bin; 5 opens one (7 + 5 > 10); 4 joins the 5; 3 joins the 7; 2 opens a third.
    assert pack([2, 5, 3, 7, 4], budget=10) == [[2, 3], [1, 4], [0]]


def test_pack_of_equal_rows():
    assert pack([95] * 5, budget=100) == [[0], [1], [2], [3], [4]]
    assert pack([20] * 5, budget=100) == [[0, 1, 2, 3, 4]]


def test_pack_gives_a_row_over_the_budget_its_own_bin():
    assert pack([3, 12, 0, 4], budget=8) == [[1], [0, 2, 3]]


def test_pack_of_nothing():
    assert pack([], budget=8) == []


def test_pack_holds_every_row_once_within_the_budget_and_near_the_bound():
    generator = torch.Generator().manual_seed(0)
    for count in range(1, 51):
        lengths = torch.randint(0, 61, (count,), generator=generator).tolist()
        bins = pack(lengths, budget=50)
        assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
        assert all(len(rows) == 1 or sum(lengths[row] for row in rows) <= 50 for rows in bins)
        assert bins == pack(lengths, budget=50)
        # Two bins that together fit into one would have been one.
        totals = sorted(sum(lengths[row] for row in rows) for rows in bins)
        assert len(totals) == 1 or totals[0] + totals[1] > 50


def test_pack_padded_bounds_rows_times_the_longest_row():
    # Longest first: 9 alone (2 x 9 > 12), then 4, 4, 3 (3 x 4 = 12), then 2, 1.
    assert pack_padded([4, 1, 9, 3, 2, 4], budget=12) == [[2], [0, 5, 3], [4, 1]]
    assert pack_padded([95] * 5, budget=100) == [[0], [1], [2], [3], [4]]
    assert pack_padded([20] * 5, budget=100) == [[0, 1, 2, 3, 4]]
    assert pack_padded([7], budget=5) == [[0]]
    assert pack_padded([], budget=5) == []


def test_pack_groups_keeps_groups_together_and_counts_their_prompt_once():
    # Group 0: 4 + 2 + 3 + 1 = 10 tokens, group 1: 2 + 5 = 7, group 2: 1 + 1 + 1 = 3. Into bins of 10: 10 | 7 + 3.
    sizes = [RowSize(4, 2, 0), RowSize(4, 3, 0), RowSize(4, 1, 0), RowSize(2, 5, 1), RowSize(1, 1, 2), RowSize(1, 1, 2)]
    assert pack_groups(sizes, budget=10) == [[0, 1, 2], [3, 4, 5]]
    assert pack_groups(sizes, budget=20) == [[0, 1, 2, 3, 4, 5]]
    assert pack_groups([], budget=5) == []


def test_pack_groups_divides_a_group_that_is_too_large():
    # Bins of 9 have room for 9 - 4 = 5 response tokens: 5 | 3 + 2 | 2, each with the prompt again. The prompt alone
    # fills a bin of 4, so every row has its own.
    sizes = [RowSize(4, 2, 0), RowSize(4, 3, 0), RowSize(4, 5, 0), RowSize(4, 2, 0)]
    assert pack_groups(sizes, budget=9) == [[2], [0, 1], [3]]
    assert pack_groups(sizes, budget=4) == [[2], [1], [0], [3]]


def test_pack_groups_holds_every_row_once_within_the_budget():
    generator = torch.Generator().manual_seed(0)
    for count in range(1, 40):
        prompts = torch.randint(1, 20, (8,), generator=generator).tolist()
        groups = torch.randint(0, 8, (count,), generator=generator).tolist()
        responses = torch.randint(0, 30, (count,), generator=generator).tolist()
        sizes = [RowSize(prompts[group], response, group) for group, response in zip(groups, responses, strict=True)]
        bins = pack_groups(sizes, budget=40)
        assert sorted(row for rows in bins for row in rows) == list(range(count))
        for rows in bins:
            shared = {sizes[row].group: sizes[row].prompt for row in rows}
            tokens = sum(shared.values()) + sum(sizes[row].response for row in rows)
            assert tokens <= 40 or len(rows) == 1


def test_pack_refuses_bad_input():
    with pytest.raises(ValueError, match=r"pack: budget=0 tokens, but it must be at least 1"):
        pack([1], budget=0)
    with pytest.raises(ValueError, match=r"pack: row 1 has length -2, but lengths must be at least 0"):
        pack([1, -2], budget=4)


def test_group_cost_counts_the_longest_prompt_of_each_group_once():
    rows = [RowSize(5, 3, group=7), RowSize(2, 4, group=9), RowSize(6, 1, group=7), RowSize(2, 0, group=9)]
    # Group 7: 6 + 3 + 1 = 10. Group 9: 2 + 4 + 0 = 6.
    assert group_cost(rows) == 16
    assert group_cost(rows[::2]) == 10
    assert group_cost([]) == 0
    assert [row.tokens for row in rows] == [8, 6, 7, 2]


def test_balance_gives_the_longest_row_to_the_lightest_rank():
    # 9 to rank 0; 7 to rank 1; 6 to rank 1 (7 < 9); 5 to rank 0 (9 < 13); 1 to rank 1 (13 < 14).
    assert balance([5, 9, 6, 7, 1], ranks=2) == [[0, 1], [2, 3, 4]]


def test_balance_leaves_ranks_empty_and_takes_no_rows():
    assert balance([4], ranks=3) == [[0], [], []]
    assert balance([], ranks=2) == [[], []]
    assert balance([3, 1, 2], ranks=1) == [[0, 1, 2]]


def test_balance_spreads_rows_without_tokens():
    assert balance([0, 0, 0, 0], ranks=2) == [[0, 2], [1, 3]]


def test_balance_holds_every_row_once_and_stays_within_one_row():
    generator = torch.Generator().manual_seed(1)
    for count in range(41):
        lengths = torch.randint(1, 101, (count,), generator=generator).tolist()
        shares = balance(lengths, ranks=4)
        assert len(shares) == 4
        assert sorted(row for rows in shares for row in rows) == list(range(len(lengths)))
        assert shares == balance(lengths, ranks=4)
        totals = [sum(lengths[row] for row in rows) for rows in shares]
        assert max(totals) - min(totals) <= max(lengths, default=0)


def test_balance_refuses_bad_input():
    with pytest.raises(ValueError, match=r"balance: ranks=0, but it must be at least 1"):
        balance([1], ranks=0)
    with pytest.raises(ValueError, match=r"balance: row 0 has length -1"):
        balance([-1], ranks=2)
