"""Buckets and messages, by hand arithmetic; no tensor is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_verl.resharding import buckets
from lightning_verl.resharding.buckets import Bucket, Move, make_buckets
from lightning_verl.resharding.planner import Cut, Grid, TensorLayout, plan_tensor

PAIR = Grid(("shard",), (2,), (0, 1))


def a_move(shape: tuple[int, ...], target_dim: int | None, dtype: torch.dtype = torch.float32, **options: Any) -> Move:
    """From rows cut over two ranks to a whole copy on each, or to a cut along another dim."""
    cuts = () if target_dim is None else (Cut("shard", target_dim),)
    return Move(plan_tensor(shape, TensorLayout(PAIR, (Cut("shard", 0),)), TensorLayout(PAIR, cuts)), dtype, **options)


def described(bucket: Bucket) -> list[tuple[list[tuple[str, int, bool]], ...]]:
    """For sends and receives, of each message: its tensors, its elements, whether it is without gaps."""
    return [
        ([("".join(p.name for p in m.parts), m.elements, m.contiguous) for m in messages],)
        for messages in (bucket.sends, bucket.receives)
    ]


def test_a_large_tensor_goes_in_pieces_and_small_ones_share_a_bucket() -> None:
    moves = {"a": a_move((8, 4), None), "b": a_move((2, 2), None)}
    for limit, sizes in ((1000, [144]), (128, [128, 16]), (64, [64, 64, 16]), (80, [64, 64 + 16])):
        # A rank sends 64 and receives 64 bytes of "a", and 8 and 8 of "b".
        assert [bucket.nbytes for bucket in make_buckets(moves, 0, limit)] == sizes


@pytest.mark.parametrize(
    ("is_cast", "limit", "sizes"),
    [
        (False, 40, [144]),
        (False, 32, [128, 16]),
        (False, 16, [64, 64, 16]),
        (True, 64, [128, 16]),
        (True, 40, [64, 64 + 16]),
    ],
)
def test_what_needs_no_buffer_counts_a_quarter(
    monkeypatch: pytest.MonkeyPatch, is_cast: bool, limit: int, sizes: list[int]
) -> None:
    monkeypatch.setattr(buckets, "SMALL_BYTES", 1)
    moves = {"a": a_move((8, 4), None, is_cast=is_cast), "b": a_move((2, 2), None, is_cast=is_cast)}
    # A rank sends 64 bytes of "a", through a buffer if they are cast, and receives 64 past any; of "b" 8 and 8.
    assert [bucket.nbytes for bucket in make_buckets(moves, 1, limit)] == sizes


def test_each_end_says_whether_a_message_has_gaps_in_its_memory() -> None:
    rows, columns = a_move((8, 4), None), a_move((8, 4), 1)
    (copied,) = make_buckets({"w": rows}, 1, 1000)
    assert described(copied) == [([("w", 16, True)],), ([("w", 16, True)],)]
    # A rank sends 2 columns of its 4 rows, with gaps, and receives 4 rows of its 2 columns, without.
    (cut,) = make_buckets({"w": columns}, 1, 1000)
    assert described(cut) == [([("w", 8, False)],), ([("w", 8, True)],)]


@pytest.mark.parametrize(("shape", "contiguous"), [((2, 1, 4), True), ((2, 3, 4), True), ((4, 3, 4), False)])
def test_dims_of_length_one_make_no_gaps(shape: tuple[int, ...], contiguous: bool) -> None:
    # Cut along dim 1 at the target; a rank sends one row, two or three columns of it, each of 4.
    (bucket,) = make_buckets({"w": a_move(shape, 1)}, 1, 1000)
    assert {message.contiguous for message in bucket.sends} == {contiguous}


def test_large_parts_travel_alone_and_small_ones_together_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "SMALL_BYTES", 64)
    moves = {
        "a": a_move((2, 2), None),
        "b": a_move((8, 4), None),
        "c": a_move((4, 4), None),
        "d": a_move((16, 4), None),
    }
    # A rank sends 8, 64, 32 and 128 bytes of them. "a" has less than 64 to move at all and comes last.
    (bucket,) = make_buckets(moves, 0, 1000)
    assert described(bucket)[0] == ([("b", 16, True), ("d", 32, True), ("ca", 10, False)],)
    assert described(bucket)[1] == described(bucket)[0]
    (bucket,) = make_buckets({"a": moves["a"]}, 0, 1000)
    assert described(bucket)[0] == ([("a", 2, True)],)
