"""Figures of a step, combined over ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_verl.metrics import StepMetrics
from lightning_verl.testing import run_ranks


def collect() -> dict[str, float]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    metrics = StepMetrics(torch.device("cpu"))
    # Rank 0 holds the values 1, 2, 3 and rank 1 the value 6: the mean of all is 3, the mean of means would be 4.
    metrics.mean("mean", torch.tensor([1.0, 2.0, 3.0]) if rank == 0 else torch.tensor([6.0]))
    # Rank 1 repeats what rank 0 adds, as a second tensor rank does.
    metrics.mean("once/mean", torch.tensor([1.0, 3.0]), counts=rank == 0)
    metrics.total("once/total", 5.0, counts=rank == 0)
    metrics.largest("largest", float(rank))
    metrics.mean("nothing", torch.zeros(0))
    # Two mini-batches of two micro-batches each; every rank adds its share: (1+2+1+2 + 1+1+1+1) / 2 = 5.
    for shares in ((1.0, 2.0), (1.0, 1.0)):
        for share in shares:
            metrics.share("actor/loss", torch.tensor(share))
            metrics.share("actor/ratio_max", torch.tensor(share + rank))
        metrics.finish_minibatch("actor/")
    first = metrics.compute()
    metrics.total("once/total", 1.0)
    return {**first, "next": metrics.compute()["once/total"]}


def test_figures_combine_over_values_and_ranks() -> None:
    for figures in run_ranks(collect, 2):
        assert figures == pytest.approx(
            {
                "mean": 3.0,
                "once/mean": 2.0,
                "once/total": 5.0,
                "largest": 1.0,
                "actor/loss": 5.0,
                "actor/ratio_max": 3.0,
                "next": 2.0,
            }
        )


def test_several_additions_are_weighted_by_their_number_of_values() -> None:
    metrics = StepMetrics(torch.device("cpu"))
    metrics.mean("mean", torch.tensor([1.0, 2.0, 3.0]))
    metrics.mean("mean", torch.tensor([6.0]))
    assert metrics.compute() == {"mean": 3.0}
    assert metrics.compute() == {}
