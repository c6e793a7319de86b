"""``Probe``: the callback that measures a trial."""

from __future__ import annotations

import os
import resource
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lightning_verl.tuning.profile import Profile, kernels_of
from lightning_verl.tuning.record import Record, save
from lightning_verl.tuning.traffic import TrafficMeter, collective_bandwidth

if TYPE_CHECKING:
    from lightning_verl.data.experience import Experience
    from lightning_verl.trainer import RLTrainer


class Probe:
    """Measures some steps and writes a ``Record``. It stands behind ``Throughput`` in the list of callbacks.

    The steps before ``warmup`` do not count; behind the rollout of the last of them ranks measure a plain collective.

    Args:
        output: The file; rank 0 writes it.
        warmup: Steps that do not count, at least 1.
        steps: Steps that do, at least 1.
        profile: Whether one more step runs under the profiler, on a GPU.

    Raises:
        ValueError: A number is below 1.
    """

    def __init__(self, output: Path, warmup: int, steps: int, profile: bool = False) -> None:
        for name, value in (("warmup", warmup), ("steps", steps)):
            if value < 1:
                raise ValueError(f"Probe got {name}={value}; it takes at least 1 step.")
        self._output, self._warmup, self._steps = output, warmup, steps
        self._profiles = profile and torch.cuda.is_available()
        self._profiler: torch.profiler.profile | None = None
        self._traffic = TrafficMeter()
        self._done = 0
        self._record = Record()
        self._metrics: list[dict[str, float]] = []
        self._peaks: dict[str, int] = {}
        self._scores: list[float] = []
        self._bandwidth: float | None = None
        self._received: int | None = None

    @property
    def total(self) -> int:
        """Steps to take."""
        return self._warmup + self._steps + self._profiles

    def on_run_start(self, trainer: RLTrainer) -> None:
        """Write where this runs, so that a trial that fails later has said it."""
        fabric = trainer.fabric
        on_cuda = fabric.device.type == "cuda"
        self._profiles = self._profiles and on_cuda
        name = torch.cuda.get_device_name(fabric.device) if on_cuda else "CPU"
        self._record = Record(name, fabric.world_size, memory_of_rank(fabric.device, fabric.world_size))
        self._write()

    def on_rollout_end(self, trainer: RLTrainer) -> None:
        """Measure a plain collective in the last step that does not count."""
        if self._done == self._warmup - 1:
            self._bandwidth = collective_bandwidth(trainer.fabric.device)

    def on_rewards_computed(self, trainer: RLTrainer, experience: Experience) -> None:
        """Keep the scores of this rank's rows."""
        strategy, rank = trainer.dataflow.strategy, trainer.fabric.global_rank
        if self._counts and strategy.layout("actor").speaks(rank):
            self._scores += experience.scores[experience.valid].tolist()

    def on_step_end(self, trainer: RLTrainer, metrics: dict[str, float]) -> None:
        """Keep what counts, and write the record behind the last step."""
        if self._profiler is not None:
            self._profiler.stop()
            profile = Profile.of(list(kernels_of(self._profiler)), metrics["time/step"])
            self._record = replace(self._record, profile=profile)
            self._write()
        elif self._counts:
            self._metrics.append({**metrics, **_cache_metrics(trainer)})
            for phase, peak in _peaks(trainer.fabric.device, metrics).items():
                self._peaks[phase] = max(self._peaks.get(phase, 0), peak)
        if self._done >= self._warmup - 1:
            self._received = self._traffic.read()
        self._done += 1
        if self._profiler is None and self._done == self._warmup + self._steps:
            self._finish(trainer)

    @property
    def _counts(self) -> bool:
        return self._warmup <= self._done < self._warmup + self._steps

    def _finish(self, trainer: RLTrainer) -> None:
        """Put the ranks' figures together, and look closer for one more step."""
        own = (self._peaks, self._scores, self._received)
        ranks = _of_every_rank(own)
        names = {name for metrics in self._metrics for name in metrics}
        self._record = replace(
            self._record,
            seconds=[metrics["time/step"] for metrics in self._metrics],
            tokens=[metrics["rollout/prompt_tokens"] + metrics["rollout/response_tokens"] for metrics in self._metrics],
            peaks={phase: max(peaks.get(phase, 0) for peaks, _, _ in ranks) for phase in self._peaks},
            metrics={name: statistics.fmean(m[name] for m in self._metrics if name in m) for name in sorted(names)},
            scores=[score for _, scores, _ in ranks for score in scores],
            bandwidth=self._bandwidth,
            received_bytes=_mean([received for _, _, received in ranks]),
        )
        if trainer.fabric.global_rank == 0:  # which has the actor
            flow = trainer.dataflow
            tokens = flow.max_tokens_per_micro_batch or flow.budget.of("actor")
            self._record = replace(self._record, micro_batch_tokens=tokens)
        self._write()  # should the profiler fail
        if self._profiles:
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profiler.start()

    def _write(self) -> None:
        if not dist.is_initialized() or dist.get_rank() == 0:
            save(self._output, self._record)


def memory_of_rank(device: torch.device, ranks: int) -> int:
    """Bytes that tensors of a rank may take: the GPU's, as far as this process may use it, or a share of the machine's.

    Args:
        device: Of the rank.
        ranks: Processes, all on this machine where it is a CPU.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return int(total * torch.cuda.get_per_process_memory_fraction(device))
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks


def _cache_metrics(trainer: RLTrainer) -> dict[str, float]:
    """What the native engine's cache took in the last rollout, on rank 0, whose metrics are kept."""
    if not trainer.algorithm.needs_reward or trainer.fabric.global_rank != 0:
        return {}
    report = getattr(trainer.dataflow.modules["actor"].engine, "report", None)
    names = ("cache_bytes", "host_bytes", "swapped_bytes", "preemptions")
    return {} if report is None else {f"cache/{name}": float(getattr(report, name)) for name in names}


def _peaks(device: torch.device, metrics: dict[str, float]) -> dict[str, int]:
    """Peaks of a step by phase; of a CPU rank that of the process."""
    if device.type != "cuda":
        return {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    kept = {name: value for name, value in metrics.items() if name.startswith("memory/") and name.endswith("_gib")}
    return {name[len("memory/") : -len("_gib")]: int(value * 2**30) for name, value in kept.items()}


def _mean(numbers: Sequence[int | None]) -> int | None:
    """None where one of them is."""
    known = [number for number in numbers if number is not None]
    return round(statistics.fmean(known)) if len(known) == len(numbers) else None


def _of_every_rank(own: Any) -> list[Any]:
    if not dist.is_initialized():
        return [own]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return every
