"""Tensors moved between layouts by several ranks, bit for bit, in buckets of any size."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_verl.resharding.buckets import Move
from lightning_verl.resharding.executor import Resharder, ReshardReport
from lightning_verl.resharding.planner import Cut, Grid, Region, TensorLayout, plan_tensor
from lightning_verl.testing import run_ranks

AXES = ("replicate", "shard", "tensor")


def take(whole: Tensor, region: Region) -> Tensor:
    """The elements of a region, by plain indexing with every global index."""
    for dim, intervals in enumerate(region):
        indices = [index for start, stop in intervals for index in range(start, stop)]
        whole = whole.index_select(dim, torch.tensor(indices, dtype=torch.int64))
    return whole


def random_moves(seed: int, world: int) -> tuple[dict[str, Tensor], dict[str, Move]]:
    """Some tensors of several shapes and dtypes, each between two random layouts of all ranks."""
    draw = random.Random(seed)  # noqa: S311 - no secret
    shapes = [(8, 6), (13, 4), (6,), (5, 2, 4), ()]
    grids = {
        1: [(1, 1, 1)],
        2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)],
        4: [(1, 4, 1), (1, 2, 2), (1, 1, 4), (2, 2, 1), (2, 1, 2)],
    }[world]
    wholes, moves = {}, {}
    for number in range(8):
        shape = draw.choice(shapes)
        layouts = []
        for _ in range(2):
            ranks = draw.sample(range(world), world)
            cuts = [Cut(axis, draw.randrange(len(shape))) for axis in draw.sample(AXES[1:], 2)] if shape else []
            layouts.append(TensorLayout(Grid(AXES, draw.choice(grids), tuple(ranks)), tuple(cuts)))
        dtype = draw.choice([torch.float32, torch.bfloat16])
        wholes[f"w{number}"] = torch.randn(shape, generator=torch.Generator().manual_seed(seed + number))
        moves[f"w{number}"] = Move(plan_tensor(shape, *layouts), dtype)
    return wholes, moves


def move_there(seed: int, bucket_bytes: int) -> list[ReshardReport]:
    """Several sets of tensors; every result is compared with what the target layout says, cast beforehand."""
    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    reports = []
    for number in range(seed, seed + 12):
        wholes, moves = random_moves(number, world)
        held = {
            name: take(wholes[name], move.plan.held(rank)) if wholes[name].dim() else wholes[name]
            for name, move in moves.items()
        }
        resharder = Resharder(moves, dist.group.WORLD, bucket_bytes)
        for _ in range(2):
            results, report = resharder.run(held)
            reports.append(report)
            for name, move in moves.items():
                whole = wholes[name].to(move.dtype)
                wanted = take(whole, move.plan.needed(rank)) if whole.dim() else whole
                torch.testing.assert_close(results[name], wanted, rtol=0, atol=0)
    return reports


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("bucket_bytes", [16, 256, 2**20])
def test_everything_arrives_bit_for_bit_in_buckets_of_any_size(world: int, bucket_bytes: int) -> None:
    for reports in run_ranks(move_there, world, 0, bucket_bytes):
        # Two buckets at most; one of 16 bytes is less than a row here, and rows are not cut any further.
        assert bucket_bytes == 16 or max(report.buffer_bytes for report in reports) <= 2 * bucket_bytes


def a_move(shape: tuple[int, ...], world: int, dtype: torch.dtype, **options: Any) -> Move:
    """From rows cut over all ranks to a whole copy on each."""
    grid = Grid(("shard",), (world,), tuple(range(world)))
    return Move(plan_tensor(shape, TensorLayout(grid, (Cut("shard", 0),)), TensorLayout(grid)), dtype, **options)


def gather_rows() -> ReshardReport:
    dist.init_process_group("gloo")
    move = a_move((8, 4), dist.get_world_size(), torch.bfloat16)
    rows = torch.full((8 // dist.get_world_size(), 4), float(dist.get_rank()))
    return Resharder({"w": move}, dist.group.WORLD).run({"w": rows})[1]


def test_the_report_counts_bytes_in_the_dtype_that_travels() -> None:
    # 8 x 4 in bf16 are 64 bytes: 16 of them are this rank's own, 48 come from the three others.
    for report in run_ranks(gather_rows, 4):
        assert (report.received_bytes, report.copied_bytes, report.aliased_bytes) == (48, 16, 0)
        assert report.bytes_per_second == 48 / report.seconds
        assert report.buffer_bytes == 3 * 16 + 48  # what is sent to three ranks, and what they send


def test_what_is_in_place_already_is_passed_on() -> None:
    grid = Grid(("shard",), (1,), (0,))
    plan = plan_tensor((4,), TensorLayout(grid), TensorLayout(grid))
    held = {"w": torch.arange(4.0)}
    same, report = Resharder({"w": Move(plan, torch.float32)}, None).run(held)
    assert same["w"] is held["w"]
    assert (report.aliased_bytes, report.copied_bytes, report.received_bytes, report.buffer_bytes) == (16, 0, 0, 0)
    assert report.bytes_per_second == 0
    copied, _ = Resharder({"w": Move(plan, torch.float32, may_alias=False)}, None).run(held)
    assert copied["w"].data_ptr() != held["w"].data_ptr()
    assert copied["w"].tolist() == held["w"].tolist()
    cast, _ = Resharder({"w": Move(plan, torch.bfloat16)}, None).run(held)
    assert (cast["w"].dtype, cast["w"].tolist()) == (torch.bfloat16, [0.0, 1.0, 2.0, 3.0])


def test_a_bucket_holds_something() -> None:
    with pytest.raises(ValueError, match="bucket_bytes=0; a bucket holds at least one byte"):
        Resharder({}, None, bucket_bytes=0)


def buckets_of(bucket_bytes: int) -> list[int]:
    dist.init_process_group("gloo")
    moves = {"a": a_move((8, 4), 2, torch.float32), "b": a_move((2, 2), 2, torch.float32)}
    resharder = Resharder(moves, dist.group.WORLD, bucket_bytes)
    dist.barrier()  # the first rank must not leave while the other still connects
    return [bucket.nbytes for bucket in resharder._buckets]


def test_a_large_tensor_goes_in_pieces_and_small_ones_share_a_bucket() -> None:
    # On 2 ranks a rank sends 64 and receives 64 bytes of "a", and 8 and 8 of "b".
    assert run_ranks(buckets_of, 2, 1000)[0] == [144]
    assert run_ranks(buckets_of, 2, 128)[0] == [128, 16]
    assert run_ranks(buckets_of, 2, 64)[0] == [64, 64, 16]
    assert run_ranks(buckets_of, 2, 80)[0] == [64, 64 + 16]
