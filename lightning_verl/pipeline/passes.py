"""Passes of a role whose layers lie in stages: micro-batches go through them under a schedule."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_verl.algorithms.base import Loss, Metrics
from lightning_verl.algorithms.losses import Normalizer
from lightning_verl.data.experience import Experience, RolloutBatch
from lightning_verl.parallel.fsdp import no_gradient_sync
from lightning_verl.pipeline.order import PipelineSchedule, count_for, micro_batch_limit
from lightning_verl.pipeline.schedules import UnevenStage, Wire, make_schedule, run_schedule
from lightning_verl.pipeline.stages import Stage, StagedRole
from lightning_verl.resharding.layouts import local_part


class StagedPasses:
    """The passes of a role that is cut into stages.

    Every rank of a pipeline has the same rows, so that hidden states and their gradients are all that travels. The last
    stage has the outputs and the loss; its gradient is the whole mini-batch's once all backward passes are through.

    Args:
        role: The role itself, cut and sharded.
        staged: Its stages here.
        schedule: In which order micro-batches run.
        group: The ranks of the pipeline.
        ends: The first and the last of them, of which this rank is one; None elsewhere.
        device: Where stages run.
        dtype: Of hidden states.
        defers_sync: Whether gradients are reduced once, in the last backward pass of a stage.
    """

    def __init__(
        self,
        role: Any,
        staged: StagedRole,
        schedule: PipelineSchedule,
        group: dist.ProcessGroup,
        ends: dist.ProcessGroup | None,
        device: torch.device,
        dtype: torch.dtype,
        defers_sync: bool,
    ) -> None:
        self._role, self._staged, self._schedule = role, staged, schedule
        self._group, self._ends, self._device, self._dtype = group, ends, device, dtype
        self._defers_sync = defers_sync
        self._width = role.model.config.get_text_config().hidden_size
        self._clock = BusyClock(device)
        self._touched = False

    def count(self, micro_batches: int) -> int:
        """As many as the schedule takes."""
        return count_for(self._schedule, micro_batches, self._group.size())

    def limit(self, total: int, limit: int) -> int:
        """Small enough for the pipeline to be filled."""
        return micro_batch_limit(total, limit, self._group.size())

    def train(self, take: Callable[[int], Experience], count: int, loss: Loss, normalizer: Normalizer) -> list[Metrics]:
        """Forward and backward passes as the schedule orders them; the gradient of a tied weight is whole at the end.

        Args:
            take: A micro-batch by its number.
            count: How many there are.
            loss: Run by the last stage.
            normalizer: The counts of the mini-batch.

        Returns:
            The metrics of the micro-batches on the last stage, nothing on the others.
        """
        parts = [take(number) for number in range(count)]
        found: list[Metrics] = []

        def run(stage: Stage, number: int) -> Tensor:
            rows = parts[number]
            if not stage.is_last:
                return self._states(rows.rollout)
            value, metrics = loss(self._role, rows, normalizer)
            found.append({name: figure.detach() for name, figure in metrics.items()})
            return value.view(1)

        self._clock.start()
        self._run(run, [part.rollout for part in parts], with_backward=True)
        self._clock.stop()
        self._add_tied_gradients()
        return found

    def forward(
        self, take: Callable[[int], RolloutBatch], count: int, run: Callable[[Any, RolloutBatch], Tensor]
    ) -> list[Tensor]:
        """Forward passes only, see ``train``.

        Returns:
            What ``run`` makes of the micro-batches, on the last stage.
        """
        parts = [take(number) for number in range(count)]
        found: list[Tensor] = []

        def run_stage(stage: Stage, number: int) -> Tensor:
            rows = parts[number]
            if not stage.is_last:
                return self._states(rows)
            found.append(run(self._role, rows))
            return found[-1].new_zeros(1)

        with torch.no_grad():
            self._run(run_stage, parts, with_backward=False)
        return found

    def share(self, result: Tensor) -> None:
        """Give all stages what the last one has."""
        dist.broadcast(result, group=self._group, group_src=self._group.size() - 1)

    def idle_share(self) -> Tensor | None:
        """The share of the last ``train`` in which this rank neither ran a stage forward nor backward."""
        return self._clock.idle_share()

    def _states(self, rows: RolloutBatch) -> Tensor:
        states: Tensor = self._role.stage_states(rows)
        return states.to(self._dtype).contiguous()

    def _run(self, run: Callable[[Stage, int], Tensor], parts: Sequence[RolloutBatch], with_backward: bool) -> None:
        """Run micro-batches through all stages (a collective call of the role's ranks)."""
        if not self._touched and hasattr(self._role, "_hybrid_touch"):
            self._role._hybrid_touch(None)  # FSDP2 looks for its units once, and must see those of all stages
            self._touched = True
        positions = tuple(self._role.positions(part) for part in parts)
        wire = Wire(self._group, self._device, self._width, self._dtype, positions)
        stages = [
            UnevenStage(stage, self._runner(stage, run), wire, self._around_backward) for stage in self._staged.stages
        ]
        schedule = make_schedule(self._schedule, stages, len(parts), with_backward)
        run_schedule(schedule, stages, len(parts), with_backward)

    def _runner(self, stage: Stage, run: Callable[[Stage, int], Tensor]) -> Callable[[int, Tensor | None], Tensor]:
        def run_micro_batch(number: int, received: Tensor | None) -> Tensor:
            with self._clock.busy(), self._staged.running(stage, received):
                return run(stage, number)

        return run_micro_batch

    @contextmanager
    def _around_backward(self, is_last: bool) -> Iterator[None]:
        held = self._defers_sync and not is_last
        with self._clock.busy(), no_gradient_sync(self._role, held):
            yield

    def _add_tied_gradients(self) -> None:
        """Add what the head of the last stage and the embedding of the first say of the weight that they share."""
        if self._staged.tied is None or self._ends is None:
            return
        for parameter in self._staged.tied.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(local_part(parameter.grad), group=self._ends)


class BusyClock:
    """Measures which share of a span a device worked in some parts of it.

    On CUDA the parts are timed by events, and nothing waits for the device before ``idle_share``.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._parts: list[tuple[Any, Any]] = []
        self._span: list[Any] = []

    def start(self) -> None:
        """Begin a span."""
        self._parts.clear()
        self._span = [self._now()]

    def stop(self) -> None:
        """End it."""
        self._span.append(self._now())

    def busy(self) -> AbstractContextManager[None]:
        """A part of the span in which the device works."""
        return self._busy()

    @contextmanager
    def _busy(self) -> Iterator[None]:
        begun = self._now()
        yield
        self._parts.append((begun, self._now()))

    def idle_share(self) -> Tensor | None:
        """The rest's share of the span; None before the first."""
        if len(self._span) < 2:
            return None
        if self._on_cuda:
            torch.cuda.synchronize()
        whole = self._between(*self._span)
        return torch.tensor(1 - sum(self._between(*part) for part in self._parts) / whole if whole else 0.0)

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begun: Any, ended: Any) -> float:
        """Seconds, or of events milliseconds."""
        return float(begun.elapsed_time(ended)) if self._on_cuda else float(ended - begun)
