"""run_ranks: results by rank, torchrun's environment, and every way in which a rank can fail."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from torch import Tensor

from lightning_verl.testing import run_ranks


def _sum_of_ranks(offset: int) -> tuple[int, float, int]:
    dist.init_process_group("gloo")
    value = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(value)
    return dist.get_rank(), value.item(), torch.get_num_threads()


def _place() -> dict[str, str | None]:
    names = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "LEFT_BY_PARENT")
    return {"detected": str(TorchElasticEnvironment.detect()), **{name: os.environ.get(name) for name in names}}


def _process_title() -> str:
    """What the process was started for, by its command line."""
    words = Path("/proc/self/cmdline").read_text()
    return next(name for name in ("spawn_main", "forkserver") if name in words)


def _sum_and_title() -> tuple[tuple[int, float, int], str]:
    return _sum_of_ranks(5), _process_title()


def _fabric_gather() -> list[int]:
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=int(os.environ["WORLD_SIZE"]))
    fabric.launch()
    gathered = fabric.all_gather(torch.tensor(fabric.global_rank * 10))
    return [int(value) for value in gathered]


def _add_in_place(tensor: Tensor) -> Tensor:
    return tensor.add_(int(os.environ["RANK"]))


def _with_gradient() -> Tensor:
    return torch.ones(2, requires_grad=True) * 3


def _fail_on(bad: int) -> None:
    if int(os.environ["RANK"]) == bad:
        raise ValueError(f"no luck on rank {bad}")
    time.sleep(60)


def _die_on(bad: int) -> None:
    if int(os.environ["RANK"]) == bad:
        os._exit(3)


def _hang_except_on(good: int) -> None:
    if int(os.environ["RANK"]) != good:
        time.sleep(60)


def _start_sleeper(pid_file: Path) -> None:
    pid_file.write_text(str(subprocess.Popen(["/bin/sleep", "60"]).pid))
    time.sleep(60)


def _generator() -> Any:
    return (number for number in range(3))


def test_results_come_back_in_rank_order_from_single_threaded_ranks() -> None:
    # (0 + 10) + (1 + 10) + (2 + 10) = 33 on every rank
    assert run_ranks(_sum_of_ranks, 3, 10) == [(0, 33.0, 1), (1, 33.0, 1), (2, 33.0, 1)]
    assert not dist.is_initialized()


def test_a_rank_sees_what_torchrun_would_set(monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(_place, 1)  # the server is up before the variable is set
    monkeypatch.setenv("LEFT_BY_PARENT", "yes")
    common = {"detected": "True", "NODE_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    common |= {"MASTER_ADDR": "127.0.0.1", "LEFT_BY_PARENT": "yes"}
    assert run_ranks(_place, 2) == [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    assert "RANK" not in os.environ


def test_fabric_finds_its_rank_by_itself() -> None:
    assert run_ranks(_fabric_gather, 2) == [[0, 10], [0, 10]]


def test_tensors_are_copied_not_shared() -> None:
    given = torch.zeros(2)
    first, second = run_ranks(_add_in_place, 2, given)
    assert (first.tolist(), second.tolist(), given.tolist()) == ([0.0, 0.0], [1.0, 1.0], [0.0, 0.0])


def test_a_failing_rank_raises_with_its_traceback_and_ends_the_waiting_ones() -> None:
    start = time.monotonic()
    with pytest.raises(
        RuntimeError, match=r"rank 1 of 2 failed:(?s:.*)in _fail_on(?s:.*)ValueError: no luck on rank 1"
    ):
        run_ranks(_fail_on, 2, 1)
    assert time.monotonic() - start < 30  # far below the timeout: nobody waited for the other rank


def test_a_dying_rank_is_reported_with_its_exit_code() -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 failed:\nIt died without an answer, exit code 3"):
        run_ranks(_die_on, 2, 1)


def test_hung_ranks_are_named_and_killed() -> None:
    run_ranks(_place, 1)  # the server is up: the timeout covers the ranks alone
    with pytest.raises(TimeoutError, match=r"ranks \[0, 2\] of 3 hung: no result after 2 s, so all were killed"):
        run_ranks(_hang_except_on, 3, 1, timeout=2)


def test_processes_that_a_rank_started_end_with_it(tmp_path: Path) -> None:
    run_ranks(_place, 1)
    with pytest.raises(TimeoutError, match=r"ranks \[0\] of 1 hung"):
        run_ranks(_start_sleeper, 1, tmp_path / "pid", timeout=2)
    status = Path("/proc", (tmp_path / "pid").read_text(), "status")
    deadline = time.monotonic() + 5
    while _is_running(status) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_running(status)


def _is_running(status: Path) -> bool:
    return status.exists() and "State:\tZ" not in status.read_text()


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot be sent between processes: .*top level of a module"):
        run_ranks(lambda: 1, 1)
    with pytest.raises(RuntimeError, match="rank 0 of 1 failed(?s:.*)results must be plain data or tensors"):
        run_ranks(_generator, 1)


def test_a_result_may_belong_to_a_graph() -> None:
    (result,) = run_ranks(_with_gradient, 1)
    assert result.tolist() == [3.0, 3.0]


def test_a_world_without_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="world_size must be at least 1, got 0"):
        run_ranks(_place, 0)


def test_with_cuda_ranks_are_new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    # Forked ranks could not use CUDA: what the server imports has asked for the devices.
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert run_ranks(_sum_and_title, 2) == [((0, 11.0, 1), "spawn_main"), ((1, 11.0, 1), "spawn_main")]
    assert os.environ.get("TOKENIZERS_PARALLELISM") == before
