"""The bare exchange that a resharding is compared with."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_verl.resharding.buckets import Move, make_buckets
from lightning_verl.resharding.link import measure_link
from lightning_verl.resharding.planner import Grid, TensorLayout, plan_tensor
from lightning_verl.testing import run_ranks


def from_first_to_second() -> float | None:
    dist.init_process_group("gloo")
    first, second = (TensorLayout(Grid(("shard",), (1,), (rank,))) for rank in (0, 1))
    moves = {"w": Move(plan_tensor((1000,), first, second), torch.float32)}
    rate = measure_link(make_buckets(moves, dist.get_rank(), 400), dist.group.WORLD, torch.device("cpu"))
    dist.barrier()  # the sender must not leave before the other has all
    return rate


def test_a_rank_that_receives_nothing_has_no_rate() -> None:
    sender, receiver = run_ranks(from_first_to_second, 2)
    assert sender is None
    assert receiver > 0
