"""torch's pipeline schedules over micro-batches of unequal length.

A stage of torch has receive buffers of one shape for all micro-batches, made for all of them at the start. Here every
rank of a pipeline knows the micro-batches, so a buffer gets the shape of its micro-batch, and exists from when it is
received until its backward pass is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from lightning_verl.pipeline.order import PipelineSchedule
from lightning_verl.pipeline.stages import Stage


@dataclass(frozen=True)
class Wire:
    """What travels between stages, and where."""

    group: dist.ProcessGroup
    """The ranks of the pipeline."""
    device: torch.device
    """Where stages run."""
    width: int
    """H."""
    dtype: torch.dtype
    """Of hidden states."""
    positions: tuple[int, ...]
    """Of each micro-batch."""


class _Body(nn.Module):
    """What torch's stage takes for its module: runs a micro-batch by its number. The role is not a part of it."""

    def __init__(self, run: Callable[[int, Tensor | None], Tensor]) -> None:
        super().__init__()
        self._run = run

    def forward(self, received: Tensor, *, number: Tensor) -> Tensor:
        """Hidden states ``[positions, H]``, or of the last stage the loss ``[1]``; the first gets a number, not states.

        Args:
            received: What the stage before has sent.
            number: The number of the micro-batch, int64 ``[1]``.
        """
        return self._run(int(number), received if received.is_floating_point() else None)


class UnevenStage(PipelineStage):
    """torch's stage, for micro-batches that each have their own number of positions.

    Args:
        stage: Which one.
        run: Runs it on a micro-batch: from its number and the hidden states before it to those behind it, or of the
            last stage to the loss, ``[1]``.
        wire: What travels.
        around_backward: A context for each backward pass, told whether it is the stage's last.
    """

    def __init__(
        self,
        stage: Stage,
        run: Callable[[int, Tensor | None], Tensor],
        wire: Wire,
        around_backward: Callable[[bool], Any],
    ) -> None:
        edge = torch.empty(0, wire.width, dtype=wire.dtype, device="meta", requires_grad=True)
        number = torch.empty(1, dtype=torch.int64, device="meta")
        super().__init__(
            _Body(run),
            stage.index,
            stage.count,
            wire.device,
            input_args=number if stage.is_first else edge,
            output_args=torch.empty(1, device="meta") if stage.is_last else edge,
            group=wire.group,
        )
        self._wire, self._around_backward = wire, around_backward

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """What is received before a forward pass, into a buffer that is made now."""
        if not self.is_first:
            self._make_room(self.args_recv_info[fwd_chunk_id], fwd_chunk_id, self.has_backward)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """What is received before a backward pass, into a buffer that is made now."""
        if self.has_backward and not self.is_last:
            self._make_room(self.grad_recv_info[bwd_chunk_id], bwd_chunk_id, requires_grad=False)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """A forward pass; of the last stage without a backward pass the end of its buffers too."""
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self.is_last and not self.has_backward:
            self._finish_forward(fwd_chunk_id)
        return output

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """What is sent behind a forward pass; without a backward pass nobody else holds it."""
        operations = [] if self.is_last else super().get_fwd_send_ops(fwd_chunk_id)
        if not self.is_last and not self.has_backward:
            self._finish_forward(fwd_chunk_id)
        return operations

    def _finish_forward(self, number: int) -> None:
        del self.fwd_cache[number]
        self._forget(self.args_recv_info[number])

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """A backward pass, and the end of the buffers that it was the last to need."""
        if not self.has_backward:
            return
        with self._around_backward(last_backward):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self._forget(self.args_recv_info[bwd_chunk_id])
        self._forget(self.grad_recv_info[bwd_chunk_id])

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """What is sent behind a backward pass."""
        return super().get_bwd_send_ops(bwd_chunk_id) if self.has_backward else []

    def _validate_fwd_input(self, *args: Any, **kwargs: Any) -> None:
        """Before 2.13 torch wanted the shape of the first micro-batch."""

    def _validate_fwd_outputs(self, *args: Any, **kwargs: Any) -> None:
        """The same."""

    def _make_room(self, infos: Sequence[Any], number: int, requires_grad: bool) -> None:
        shape = (self._wire.positions[number], self._wire.width)
        for info in infos:
            info.buffer = torch.empty(shape, dtype=self._wire.dtype, device=self.device, requires_grad=requires_grad)

    def _forget(self, infos: Sequence[Any]) -> None:
        for info in infos:
            if hasattr(info, "buffer"):
                info.buffer = None


def make_schedule(
    name: PipelineSchedule, stages: Sequence[UnevenStage], micro_batches: int, with_backward: bool
) -> Any:
    """torch's schedule of a name, for one run.

    Args:
        name: Which one.
        stages: This rank's.
        micro_batches: How many, as ``count_for`` allows.
        with_backward: Whether the last stage makes losses, whose backward pass follows.
    """
    options: dict[str, Any] = {"scale_grads": False}
    if with_backward:
        options["loss_fn"] = _the_output
    if name == "interleaved":
        return ScheduleInterleaved1F1B(list(stages), micro_batches, **options)
    return (Schedule1F1B if name == "1f1b" else ScheduleGPipe)(stages[0], micro_batches, **options)


def run_schedule(schedule: Any, stages: Sequence[UnevenStage], micro_batches: int, with_backward: bool) -> None:
    """Run all micro-batches (a collective call of the pipeline).

    Each is handed over as its number: torch cuts what it is given into equal parts, and rows do not come in such.
    """
    numbers = torch.arange(micro_batches)
    given = (numbers,) if any(stage.is_first for stage in stages) else ()
    target = numbers if with_backward and any(stage.is_last for stage in stages) else None
    try:
        schedule.step(*given, target=target, number=numbers)
    except RuntimeError as error:
        if isinstance(error.__cause__, Exception) and "failed to run forward" in str(error):
            raise error.__cause__ from None  # what went wrong in a stage, not torch's list of its arguments
        raise


def _the_output(output: Tensor, target: Tensor) -> Tensor:
    """The loss, which is what the last stage has made."""
    return output
