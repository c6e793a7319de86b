"""Tensors moved between layouts by several ranks, bit for bit, in buckets of any size."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_verl.resharding import buckets
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
        moves[f"w{number}"] = Move(plan_tensor(shape, *layouts), dtype, is_cast=dtype != torch.float32)
    return wholes, moves


def move_there(seed: int, bucket_bytes: int, small_bytes: int) -> list[ReshardReport]:
    """Several sets of tensors; every result is compared with what the target layout says, cast beforehand."""
    dist.init_process_group("gloo")
    buckets.SMALL_BYTES = small_bytes
    world, rank = dist.get_world_size(), dist.get_rank()
    reports = []
    for number in range(seed, seed + 12):
        wholes, moves = random_moves(number, world)
        held = {
            name: take(wholes[name], move.plan.held(rank)) if wholes[name].dim() else wholes[name]
            for name, move in moves.items()
        }
        resharder = Resharder(moves, dist.group.WORLD, bucket_bytes)
        for turn in range(3):
            wholes = {name: whole + turn for name, whole in wholes.items()}
            if turn == 1:  # an optimizer step changes them where they lie
                held = {name: tensor.add_(turn) for name, tensor in held.items()}
            elif turn == 2:  # and others may take their place
                held = {name: tensor + turn for name, tensor in held.items()}
            results = resharder.run(held)
            reports.append(resharder.report())
            for name, move in moves.items():
                whole = wholes[name].to(move.dtype)
                wanted = take(whole, move.plan.needed(rank)) if whole.dim() else whole
                torch.testing.assert_close(results[name], wanted, rtol=0, atol=0)
    return reports


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(("bucket_bytes", "small_bytes"), [(16, 2**20), (256, 1), (256, 64), (2**20, 2**20)])
def test_everything_arrives_bit_for_bit_in_buckets_of_any_size(world: int, bucket_bytes: int, small_bytes: int) -> None:
    for reports in run_ranks(move_there, world, 0, bucket_bytes, small_bytes):
        # Two buckets at most; one of 16 bytes is less than a row here, and rows are not cut any further.
        assert bucket_bytes == 16 or max(report.buffer_bytes for report in reports) <= 2 * bucket_bytes


def a_move(shape: tuple[int, ...], world: int, dtype: torch.dtype, **options: Any) -> Move:
    """From rows cut over all ranks to a whole copy on each."""
    grid = Grid(("shard",), (world,), tuple(range(world)))
    return Move(plan_tensor(shape, TensorLayout(grid, (Cut("shard", 0),)), TensorLayout(grid)), dtype, **options)


def moved(resharder: Resharder, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], ReshardReport]:
    return resharder.run(tensors), resharder.report()


def gather_rows(dtype: torch.dtype) -> ReshardReport:
    dist.init_process_group("gloo")
    move = a_move((8, 4), dist.get_world_size(), torch.bfloat16)
    rows = torch.full((8 // dist.get_world_size(), 4), float(dist.get_rank()), dtype=dtype)
    return moved(Resharder({"w": move}, dist.group.WORLD), {"w": rows})[1]


def test_the_report_counts_bytes_in_the_dtype_that_travels() -> None:
    # 8 x 4 in bf16 are 64 bytes: 16 of them are this rank's own, 48 come from the three others.
    for report in run_ranks(gather_rows, 4, torch.float32):
        assert (report.received_bytes, report.copied_bytes, report.aliased_bytes) == (48, 16, 0)
        assert report.bytes_per_second == 48 / report.seconds
        assert report.link_bytes_per_second > 0
        assert report.link_share == report.bytes_per_second / report.link_bytes_per_second
        assert report.buffer_bytes == 3 * 16  # what is cast for three ranks; what they send comes where it belongs


def test_rows_that_travel_as_they_are_need_no_buffer() -> None:
    for report in run_ranks(gather_rows, 4, torch.bfloat16):
        assert (report.received_bytes, report.copied_bytes, report.buffer_bytes) == (48, 16, 0)


def rows_to_columns() -> tuple[list[list[float]], ReshardReport]:
    dist.init_process_group("gloo")
    grid = Grid(("shard",), (2,), (0, 1))
    plan = plan_tensor((4, 4), TensorLayout(grid, (Cut("shard", 0),)), TensorLayout(grid, (Cut("shard", 1),)))
    rows = torch.arange(16.0).view(4, 4).chunk(2)[dist.get_rank()]
    results, report = moved(Resharder({"w": Move(plan, torch.float32)}, dist.group.WORLD), {"w": rows})
    return results["w"].tolist(), report


def test_rows_are_packed_for_a_cut_along_columns_and_received_where_they_belong() -> None:
    (first, report), (second, _) = run_ranks(rows_to_columns, 2)
    assert first == [[0, 1], [4, 5], [8, 9], [12, 13]]
    assert second == [[2, 3], [6, 7], [10, 11], [14, 15]]
    assert report.buffer_bytes == report.received_bytes == 2 * 2 * 4  # the sent half alone


def test_what_is_in_place_already_is_passed_on() -> None:
    grid = Grid(("shard",), (1,), (0,))
    plan = plan_tensor((4,), TensorLayout(grid), TensorLayout(grid))
    held = {"w": torch.arange(4.0)}
    same, report = moved(Resharder({"w": Move(plan, torch.float32)}, None), held)
    assert same["w"] is held["w"]
    assert (report.aliased_bytes, report.copied_bytes, report.received_bytes, report.buffer_bytes) == (16, 0, 0, 0)
    assert report.bytes_per_second == 0
    assert report.link_share is report.link_bytes_per_second is None
    copied = Resharder({"w": Move(plan, torch.float32, may_alias=False)}, None).run(held)
    assert copied["w"].data_ptr() != held["w"].data_ptr()
    assert copied["w"].tolist() == held["w"].tolist()
    cast = Resharder({"w": Move(plan, torch.bfloat16)}, None).run(held)
    assert (cast["w"].dtype, cast["w"].tolist()) == (torch.bfloat16, [0.0, 1.0, 2.0, 3.0])


def test_a_bucket_holds_something() -> None:
    with pytest.raises(ValueError, match="bucket_bytes=0; a bucket holds at least one byte"):
        Resharder({}, None, bucket_bytes=0)


def test_a_report_needs_a_run() -> None:
    with pytest.raises(RuntimeError, match="nothing to tell before the first run; call run"):
        Resharder({}, None).report()
