"""Blocks are handed out once, shared by count, and free again after their last user."""

from __future__ import annotations

import pytest

from lightning_verl.rollout.native.blocks import BlockPool


def test_blocks_are_handed_out_once_and_never_block_0() -> None:
    pool = BlockPool(5)
    assert (pool.size, pool.free, pool.most_used) == (4, 4, 0)
    taken = pool.take(3) + pool.take(1)
    assert sorted(taken) == [1, 2, 3, 4]
    assert pool.free == 0
    assert pool.take(0) == []


def test_a_shared_block_is_free_after_its_last_user() -> None:
    pool = BlockPool(4)
    first, second = pool.take(2)
    assert pool.share([first]) == [first]
    pool.give_back([first, second])
    assert pool.free == 2
    assert first not in pool.take(2)
    pool.give_back([first])
    assert pool.take(1) == [first]


def test_the_most_that_was_in_use_is_kept() -> None:
    pool = BlockPool(10)
    blocks = pool.take(5)
    pool.share(blocks)  # more users, not more blocks
    pool.give_back(blocks[:2])
    pool.give_back(blocks[:2])
    pool.take(1)
    assert (pool.most_used, pool.free) == (5, 5)
    pool.take(3)
    assert pool.most_used == 7


def test_more_than_are_free_are_refused_and_none_is_taken() -> None:
    pool = BlockPool(4)
    pool.take(1)
    with pytest.raises(RuntimeError, match=r"BlockPool.take\(3\): only 2 of 3 blocks are free"):
        pool.take(3)
    assert pool.free == 2


def test_a_pool_of_block_0_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="got count=1; it needs block 0 for padding"):
        BlockPool(1)
