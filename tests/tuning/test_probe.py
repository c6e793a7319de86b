"""What the probe keeps, with a made-up trainer; real ones are in test_trial.py."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_verl.tuning import probe as module
from lightning_verl.tuning.probe import Probe, memory_of_rank
from lightning_verl.tuning.profile import Kernel
from lightning_verl.tuning.record import load

GIB = 2**30


def make_trainer(device: str = "cpu", speaks: bool = True) -> Any:
    layout = SimpleNamespace(speaks=lambda rank: speaks)
    engine = SimpleNamespace(
        report=SimpleNamespace(cache_bytes=100, host_bytes=200, swapped_bytes=300, preemptions=4, steps=5)
    )
    flow = SimpleNamespace(
        strategy=SimpleNamespace(layout=lambda role: layout),
        modules={"actor": SimpleNamespace(engine=engine)},
        max_tokens_per_micro_batch=None,
        budget=SimpleNamespace(of=lambda role: 1234),
    )
    fabric = SimpleNamespace(device=torch.device(device), world_size=1, global_rank=0)
    return SimpleNamespace(fabric=fabric, dataflow=flow, algorithm=SimpleNamespace(needs_reward=True))


def run_step(probe: Probe, trainer: Any, seconds: float, score: float, **more: float) -> None:
    probe.on_rollout_end(trainer)
    experience = SimpleNamespace(scores=torch.tensor([score, 9.0]), valid=torch.tensor([True, False]))
    probe.on_rewards_computed(trainer, experience)  # type: ignore[arg-type]
    metrics = {"time/step": seconds, "rollout/prompt_tokens": 10.0, "rollout/response_tokens": 20.0, **more}
    probe.on_step_end(trainer, metrics)


def test_steps_that_count_are_kept(tmp_path: Path) -> None:
    probe, trainer = Probe(tmp_path / "record.json", warmup=1, steps=2), make_trainer()
    assert probe.total == 3
    probe.on_run_start(trainer)
    begun = load(tmp_path / "record.json")
    assert (begun.device, begun.ranks, begun.memory_bytes > GIB, begun.seconds) == ("CPU", 1, True, [])
    for number, seconds in enumerate([9.0, 2.0, 3.0]):
        run_step(probe, trainer, seconds, score=number / 4, loss=seconds)
    found = load(tmp_path / "record.json")
    assert (found.seconds, found.tokens, found.scores) == ([2.0, 3.0], [30.0, 30.0], [0.25, 0.5])
    assert found.metrics["loss"] == 2.5
    assert (found.metrics["cache/swapped_bytes"], found.metrics["cache/preemptions"]) == (300.0, 4.0)
    assert found.micro_batch_tokens == 1234
    assert found.peaks == {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    assert (found.bandwidth, found.received_bytes, found.profile) == (None, 0, None)


def test_rows_count_once(tmp_path: Path) -> None:
    probe, trainer = Probe(tmp_path / "record.json", warmup=1, steps=1), make_trainer(speaks=False)
    probe.on_run_start(trainer)
    for seconds in (9.0, 2.0):
        run_step(probe, trainer, seconds, score=1.0)
    assert load(tmp_path / "record.json").scores == []


def test_one_more_step_is_profiled_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    profiler = SimpleNamespace(start=lambda: calls.append("start"), stop=lambda: calls.append("stop"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.5)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * GIB))
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: profiler)
    monkeypatch.setattr(module, "kernels_of", lambda given: [Kernel("ncclDevKernel", 0, 10**9)])
    probe, trainer = Probe(tmp_path / "record.json", 1, 2, profile=True), make_trainer("cuda")
    assert probe.total == 4
    probe.on_run_start(trainer)
    peaks = [(50, 50), (1, 4), (3, 2), (70, 70)]  # GiB in the rollout and in the update
    for seconds, (rollout, update) in zip([9.0, 2.0, 3.0, 4.0], peaks, strict=True):
        memory = {"memory/rollout_gib": float(rollout), "memory/actor_update_gib": float(update)}
        run_step(probe, trainer, seconds, score=1.0, **memory)
    found = load(tmp_path / "record.json")
    assert calls == ["start", "stop"]
    assert (found.device, found.memory_bytes, found.seconds) == ("Some GPU", 40 * GIB, [2.0, 3.0])
    assert found.peaks == {"rollout": 3 * GIB, "actor_update": 4 * GIB}
    assert found.profile is not None
    assert (found.profile.busy, found.profile.mean_latency) == (0.25, 1.0)  # 1 s of 4
    assert Probe(tmp_path / "record.json", 1, 2).total == 3


def test_memory_of_a_cpu_rank_is_its_share() -> None:
    cpu = torch.device("cpu")
    assert memory_of_rank(cpu, 4) == memory_of_rank(cpu, 1) // 4


@pytest.mark.parametrize(("warmup", "steps", "name"), [(0, 1, "warmup=0"), (1, 0, "steps=0")])
def test_a_step_of_each_kind_is_needed(tmp_path: Path, warmup: int, steps: int, name: str) -> None:
    with pytest.raises(ValueError, match=f"Probe got {name}; it takes at least 1 step"):
        Probe(tmp_path / "record.json", warmup, steps)
