"""Splitting a global batch over the data ranks."""

from __future__ import annotations

import itertools
import math

import pytest

from lightning_verl.data.sharding import local_minibatch_sizes, rollout_rows, split


def test_split_is_contiguous_and_balanced():
    # 10 over 3: bounds 10*0//3=0, 10*1//3=3, 10*2//3=6, 10*3//3=10
    assert [split(10, 3, index) for index in range(3)] == [range(0, 3), range(3, 6), range(6, 10)]


def test_split_leaves_parts_empty_when_items_are_few():
    # 2 over 4: bounds 0, 0, 1, 1, 2
    assert [len(split(2, 4, index)) for index in range(4)] == [0, 1, 0, 1]
    assert split(0, 3, 2) == range(0, 0)


@pytest.mark.parametrize("count", range(12))
@pytest.mark.parametrize("parts", range(1, 6))
def test_split_covers_every_item_once(count, parts):
    joined = [item for index in range(parts) for item in split(count, parts, index)]
    assert joined == list(range(count))
    sizes = [len(split(count, parts, index)) for index in range(parts)]
    assert max(sizes) - min(sizes) <= 1


def test_rollout_rows_split_each_minibatch():
    # 8 prompts, mini-batches {0..3} and {4..7}, 2 ranks: each rank holds one half of each mini-batch
    assert rollout_rows(8, 4, 2, 0) == [0, 1, 4, 5]
    assert rollout_rows(8, 4, 2, 1) == [2, 3, 6, 7]
    assert local_minibatch_sizes(8, 4, 2, 0) == [2, 2]


def test_last_minibatch_may_be_shorter():
    # 10 prompts in mini-batches of 4: {0..3}, {4..7}, {8, 9}; 3 ranks: 4 -> 1, 1, 2 and 2 -> 0, 1, 1
    assert [rollout_rows(10, 4, 3, rank) for rank in range(3)] == [[0, 4], [1, 5, 8], [2, 3, 6, 7, 9]]
    assert [local_minibatch_sizes(10, 4, 3, rank) for rank in range(3)] == [[1, 1, 0], [1, 1, 1], [2, 2, 1]]


def test_update_batch_larger_than_the_rollout_batch_is_one_minibatch():
    assert rollout_rows(4, 100, 2, 1) == [2, 3]
    assert local_minibatch_sizes(4, 100, 2, 1) == [2]


@pytest.mark.parametrize("data_size", range(1, 9))
def test_minibatches_are_the_same_for_any_number_of_ranks(data_size):
    minibatches = [[], [], [], []]  # 14 prompts in mini-batches of 4: 4, 4, 4, 2
    for rank in range(data_size):
        rows = iter(rollout_rows(14, 4, data_size, rank))
        for number, size in enumerate(local_minibatch_sizes(14, 4, data_size, rank)):
            minibatches[number] += itertools.islice(rows, size)
        assert list(rows) == []
    assert minibatches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13]]


MESHES = [shape for shape in itertools.product(range(1, 9), repeat=4) if math.prod(shape) <= 8]


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_ranks_of_one_model_copy_hold_the_same_rows(shape):
    held = {}
    for coordinates in itertools.product(*(range(size) for size in shape)):
        rows = tuple(rollout_rows(10, 4, shape[0], coordinates[0]))
        held.setdefault(coordinates[0], set()).add(rows)
    assert all(len(rows) == 1 for rows in held.values())
    assert sorted(row for rows in held.values() for row in next(iter(rows))) == list(range(10))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 2, 0), "count=-1"),
        ((4, 0, 0), "parts=0"),
        ((4, 2, 2), r"index=2 is outside \[0, 2\)"),
        ((4, 2, -1), r"index=-1 is outside \[0, 2\)"),
    ],
)
def test_split_refuses_numbers_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        split(*arguments)


@pytest.mark.parametrize("function", [rollout_rows, local_minibatch_sizes])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4, 2, 0), "rollout_batch_size=0"),
        ((8, 0, 2, 0), "update_batch_size=0"),
        ((8, 4, 0, 0), "parts=0"),
        ((8, 4, 2, 2), r"index=2 is outside \[0, 2\)"),
    ],
)
def test_rows_refuse_numbers_out_of_range(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(*arguments)
