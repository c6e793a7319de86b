"""What kernels say about a time: how much of it the GPU was busy, and how long collectives took."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Kernel:
    """One run of a kernel on the GPU."""

    name: str
    start: int
    """In ns."""
    end: int
    """In ns."""


@dataclass(frozen=True)
class Profile:
    """One step of one rank."""

    busy: float | None
    """Share of the step's time with a kernel running; None where no kernel was seen."""
    collectives: int
    """Kernels of collectives."""
    mean_latency: float | None
    """Seconds of such a kernel, the wait for slower ranks included; None without any."""
    largest_latency: float | None
    """Of the longest of them."""

    @classmethod
    def of(cls, kernels: Sequence[Kernel], seconds: float) -> Profile:
        """The figures of a step.

        Args:
            kernels: All that ran in it.
            seconds: Its time.
        """
        latencies = [(kernel.end - kernel.start) / 1e9 for kernel in kernels if kernel.name.startswith("nccl")]
        return cls(
            busy=busy_share([(kernel.start, kernel.end) for kernel in kernels], seconds * 1e9),
            collectives=len(latencies),
            mean_latency=statistics.fmean(latencies) if latencies else None,
            largest_latency=max(latencies, default=None),
        )


def busy_share(spans: Iterable[tuple[int, int]], whole: float) -> float | None:
    """Share of a time that is covered by spans, each from its start to its end; None without spans."""
    covered, reached = 0, None
    for start, end in sorted(spans):
        begin = start if reached is None else max(start, reached)
        covered += max(0, end - begin)
        reached = end if reached is None else max(end, reached)
    return None if reached is None else covered / whole


def kernels_of(profiler: Any) -> Iterator[Kernel]:
    """The kernels that a profiler saw; copies are no kernels.

    Args:
        profiler: A ``torch.profiler.profile`` that has stopped.
    """
    for event in profiler.profiler.kineto_results.events():
        on_device = event.device_type() == torch.autograd.DeviceType.CUDA and not event.is_user_annotation()
        if on_device and not event.name().startswith(("Memcpy", "Memset")):
            yield Kernel(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
