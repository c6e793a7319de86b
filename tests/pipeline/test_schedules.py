"""torch's schedules over micro-batches of unequal length, without a model."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor

from lightning_verl import HybridStrategy
from lightning_verl.pipeline.order import PipelineSchedule, chunks_of
from lightning_verl.pipeline.passes import BusyClock
from lightning_verl.pipeline.schedules import UnevenStage, Wire, make_schedule, run_schedule
from lightning_verl.pipeline.stages import Stage
from lightning_verl.testing import run_ranks

WIDTH = 2


class Line:
    """Stages that double states, and a last one that adds them up; its loss is ``scale x weight`` of the first."""

    def __init__(self, name: PipelineSchedule, positions: tuple[int, ...], with_backward: bool) -> None:
        strategy = HybridStrategy((1, 1, 2, 1))
        fabric = Fabric(accelerator="cpu", strategy=strategy)
        fabric.launch()
        group: Any = strategy.group("actor", "pipeline")
        self.weight = torch.ones((), requires_grad=True)
        self.outputs: list[float] = []
        self.last_ones: list[bool] = []
        self.most_buffers = 0
        count = 2 * chunks_of(name)
        wire = Wire(group, torch.device("cpu"), WIDTH, torch.float32, positions)
        own = [Stage(index, count, range(index, index + 1)) for index in range(fabric.global_rank, count, 2)]
        self.stages = [UnevenStage(stage, self.runner(stage, positions), wire, self.around) for stage in own]
        schedule = make_schedule(name, self.stages, len(positions), with_backward)
        with nullcontext() if with_backward else torch.no_grad():
            run_schedule(schedule, self.stages, len(positions), with_backward)

    def runner(self, stage: Stage, positions: tuple[int, ...]) -> Any:
        def run(number: int, received: Tensor | None) -> Tensor:
            self.most_buffers = max(self.most_buffers, self.buffers())
            if received is None:
                return torch.full((positions[number], WIDTH), float(number + 1)) * self.weight
            assert received.shape == (positions[number], WIDTH)
            if not stage.is_last:
                return 2 * received
            self.outputs.append(received.sum().item())
            return received.sum().view(1)

        return run

    def around(self, is_last: bool) -> AbstractContextManager[None]:
        self.last_ones.append(is_last)
        return nullcontext()

    def buffers(self) -> int:
        """Receive buffers that hold something."""
        tables = [table for stage in self.stages for table in (stage.args_recv_info, stage.grad_recv_info)]
        infos = [info for table in tables for infos in table.values() for info in infos]
        return sum(getattr(info, "buffer", None) is not None and info.buffer.numel() > 0 for info in infos)


POSITIONS = (3, 1, 5, 2, 4, 1, 6, 2)


def run_line(name: PipelineSchedule, with_backward: bool) -> tuple[list[float], float | None, list[bool], int, int]:
    line = Line(name, POSITIONS, with_backward)
    gradient = None if line.weight.grad is None else line.weight.grad.item()
    return line.outputs, gradient, line.last_ones, line.most_buffers, line.buffers()


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "gpipe"])
@pytest.mark.parametrize("with_backward", [True, False])
def test_every_micro_batch_keeps_its_length(name: PipelineSchedule, with_backward: bool) -> None:
    first, last = run_ranks(run_line, 2, name, with_backward)
    # Micro-batch n of p positions is p x WIDTH numbers n + 1, doubled by each stage between the first and the last.
    doubled = 2 ** (2 * chunks_of(name) - 2)
    expected = [doubled * WIDTH * positions * (n + 1) for n, positions in enumerate(POSITIONS)]
    assert last[0] == expected
    assert first[1] == (sum(expected) if with_backward else None)
    for _, _, last_ones, most, left in (first, last):
        stages = chunks_of(name)
        assert last_ones.count(True) == (stages if with_backward else 0)
        assert len(last_ones) == (stages * len(POSITIONS) if with_backward else 0)
        assert left == 0
        if name == "1f1b":  # of eight micro-batches
            assert most <= 2


def failing_line() -> str:
    def fail(*_: Any) -> Any:
        raise ValueError("a stage's own")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Line, "runner", lambda *_: fail)
        try:
            Line("1f1b", POSITIONS, True)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def test_an_error_of_a_stage_is_raised_as_it_is() -> None:
    first, last = run_ranks(failing_line, 2)
    assert first == "ValueError: a stage's own"
    assert last  # the first rank is gone


def test_the_idle_share_is_what_no_part_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    # A span from 0 to 10 with parts from 1 to 3 and from 4 to 8: 4 of 10 are idle.
    times = iter([0.0, 1.0, 3.0, 4.0, 8.0, 10.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    clock = BusyClock(torch.device("cpu"))
    assert clock.idle_share() is None
    clock.start()
    for _ in range(2):
        with clock.busy():
            pass
    clock.stop()
    share = clock.idle_share()
    assert share is not None
    assert share.item() == pytest.approx(0.4)
