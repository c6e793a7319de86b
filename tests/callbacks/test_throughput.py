"""Throughput: rates, phases and the cost of an update, by hand."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric

from lightning_verl import (
    PPO,
    Actor,
    AsyncRolloutDataset,
    Critic,
    HybridDataFlow,
    HybridStrategy,
    RewardFunction,
    RLTrainer,
    SamplingParams,
)
from lightning_verl.callbacks import Throughput
from lightning_verl.callbacks.throughput import UpdateCost
from lightning_verl.metrics import StepMetrics
from lightning_verl.models.load import add_lora
from lightning_verl.testing import char_tokenizer, run_ranks, tiny_model

PHASES = ("rollout", "reward", "scoring", "critic_update", "actor_update")


class Clock:
    """Moves only when told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("lightning_verl.callbacks.throughput.time.perf_counter", clock)
    return clock


def make_trainer(model: Any = None, world_size: int = 1, epochs: int = 1) -> Any:
    flow = SimpleNamespace(
        metrics=StepMetrics(torch.device("cpu")),
        modules={"actor": SimpleNamespace(model=model or tiny_model("llama"))},
        strategy=SimpleNamespace(
            layout=lambda role: SimpleNamespace(speaks=lambda rank: True), group=lambda role, operation: None
        ),
    )
    fabric = SimpleNamespace(world_size=world_size, global_rank=0, device=torch.device("cpu"))
    return SimpleNamespace(fabric=fabric, dataflow=flow, epochs=epochs)


def run_step(callback: Throughput, trainer: Any, clock: Clock) -> dict[str, float]:
    """Phases of 1, 2, 4, 8 and 16 seconds in a step of 40; two sequences of 10 and 20 tokens."""
    batch = SimpleNamespace(lengths=torch.tensor([10, 20]))
    callback.on_step_start()
    callback.on_rollout_start()
    clock.now += 1
    callback.on_rollout_end(trainer, batch)
    clock.now += 2
    callback.on_rewards_computed()
    clock.now += 4
    callback.on_advantages_computed()
    clock.now += 100  # in no phase
    callback.on_critic_update_start()
    clock.now += 8
    callback.on_critic_update_end()
    callback.on_actor_update_start()
    clock.now += 16
    callback.on_actor_update_end()
    tokens = {"rollout/prompt_tokens": 10.0, "rollout/response_tokens": 20.0}
    metrics = {**trainer.dataflow.metrics.compute(), **tokens, "time/step": 40.0}
    callback.on_step_end(trainer, metrics)
    return metrics


def test_tokens_and_phases(clock):
    callback, trainer = Throughput(), make_trainer(world_size=2)
    callback.on_run_start(trainer)
    metrics = run_step(callback, trainer, clock)
    assert metrics["throughput/tokens_per_second_per_gpu"] == 30 / (40 * 2)
    assert [metrics[f"time/{phase}"] for phase in PHASES] == [1, 2, 4, 8, 16]
    # neither a known peak nor CUDA
    assert not {name for name in metrics if name.startswith("memory/") or "flops" in name or "mfu" in name}


def test_every_step_starts_anew(clock):
    callback, trainer = Throughput(), make_trainer()
    callback.on_run_start(trainer)
    run_step(callback, trainer, clock)
    callback.on_step_start()
    callback.on_rollout_start()  # a step that breaks here
    clock.now += 1000
    metrics = run_step(callback, trainer, clock)
    assert [metrics[f"time/{phase}"] for phase in PHASES] == [1, 2, 4, 8, 16]


def test_phases_that_do_not_run_are_left_out(clock):
    callback, trainer = Throughput(), make_trainer()
    callback.on_step_start()
    callback.on_actor_update_start()
    callback.on_actor_update_end()
    metrics = {"rollout/prompt_tokens": 1.0, "rollout/response_tokens": 1.0, "time/step": 1.0}
    callback.on_step_end(trainer, metrics)
    assert {name for name in metrics if name.startswith("time/")} == {"time/step", "time/actor_update"}


# Of each layer 64 x 64 (queries) + 2 x 64 x 32 (keys, values) + 64 x 64 (output) + 3 x 64 x 128 (MLP) = 36,864;
# two layers and the head of 128 x 64: 81,920. Layers x heads x head_dim: 2 x 4 x 16 = 128.
LLAMA = UpdateCost(trained=81_920, frozen=0, attention=128)


def test_mfu_by_hand(clock):
    callback, trainer = Throughput(peak_flops=1e9), make_trainer(world_size=2, epochs=3)
    callback.on_run_start(trainer)
    metrics = run_step(callback, trainer, clock)
    # forward: 2 x 81,920 x 30 tokens + 2 x 128 x (10^2 + 20^2) = 5,043,200; times 3, in 3 epochs
    assert metrics["throughput/update_flops"] == 3 * 3 * 5_043_200
    assert metrics["throughput/mfu"] == pytest.approx(3 * 3 * 5_043_200 / (16 * 1e9 * 2))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_matrices_are_counted_with_the_head_tied_or_not(family):
    assert UpdateCost.of(tiny_model(family)) == LLAMA


def test_gpt2_has_other_linear_layers_and_learned_positions():
    # 64 x 192 + 64 x 64 + 2 x 64 x 128 = 32,768 a layer, and the head
    assert UpdateCost.of(tiny_model("gpt2")) == UpdateCost(trained=2 * 32_768 + 8_192, frozen=0, attention=128)


def test_frozen_matrices_below_an_adapter_have_no_gradient_of_their_own():
    model = tiny_model("llama")
    add_lora(model, {"r": 4, "target_modules": ["q_proj"]}, "Actor")
    cost = UpdateCost.of(model)
    assert cost == UpdateCost(trained=2 * (64 * 4 + 4 * 64), frozen=81_920, attention=128)
    # forward of 10 tokens: 2 x (1,024 + 81,920) x 10 + 2 x 128 x 100 = 1,684,480
    assert cost.flops(torch.tensor([10])).item() == 3 * 1_684_480 - 2 * 81_920 * 10


def cost_in_stages(family: Any) -> UpdateCost | None:
    strategy = HybridStrategy((1, 1, 2, 1))
    fabric = Fabric(accelerator="cpu", strategy=strategy)
    fabric.launch()
    actor = Actor(tiny_model(family))
    fabric.setup_module(actor)
    return UpdateCost.of(actor.model, strategy.group("actor", "pipeline"))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe"])
def test_the_matrices_of_all_stages_are_counted(family):
    assert run_ranks(cost_in_stages, 2, family) == [UpdateCost.of(tiny_model(family))] * 2


def test_packed_experts_get_no_mfu(clock):
    model = tiny_model("llama")
    model.experts = torch.nn.Parameter(torch.zeros(2, 3, 4))
    assert UpdateCost.of(model) is None
    callback, trainer = Throughput(peak_flops=1e9), make_trainer(model)
    callback.on_run_start(trainer)
    assert not {name for name in run_step(callback, trainer, clock) if name.startswith("throughput/mfu")}


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA A100-SXM4-80GB", None),
    ],
)
def test_peak_by_device_name(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    trainer = make_trainer()
    trainer.fabric.device = torch.device("cuda", 0)
    callback = Throughput()
    callback.on_run_start(trainer)
    assert callback.peak_flops == peak


def test_memory_of_each_phase_on_cuda(monkeypatch, clock):
    peaks, resets = iter(range(1, 6)), []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(peaks) * 2**30)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    trainer = make_trainer()
    trainer.fabric.device = torch.device("cuda", 0)
    callback = Throughput(peak_flops=1.0)
    callback.on_run_start(trainer)
    metrics = run_step(callback, trainer, clock)
    assert [metrics[f"memory/{phase}_gib"] for phase in PHASES] == [1, 2, 3, 4, 5]
    assert len(resets) == 5  # at the start of each phase


@pytest.mark.parametrize("peak", [0, -1.0, float("nan")])
def test_peak_out_of_range(peak):
    with pytest.raises(ValueError, match=r"Throughput got peak_flops=.*989e12"):
        Throughput(peak_flops=peak)


def _train() -> tuple[list[dict[str, float]], list[int]]:
    """Two steps of PPO on two ranks that share one copy; returns the metrics and the tokens of all sequences."""
    seen: list[dict[str, float]] = []
    lengths: list[int] = []
    recorder = SimpleNamespace(
        on_step_end=lambda metrics: seen.append(dict(metrics)),
        on_rollout_end=lambda batch: lengths.extend(batch.lengths.tolist()),
    )
    strategy = HybridStrategy(parallelism_config={"actor": {"dp": 1, "tp": 2}})
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, callbacks=[Throughput(peak_flops=1e12), recorder])
    fabric.launch()
    random.seed(0)
    actor = Actor(tiny_model("llama"), tokenizer=char_tokenizer())
    flow = HybridDataFlow(actor, Critic(tiny_model("llama")), RewardFunction(lambda response: float(len(response))))
    data = AsyncRolloutDataset([{"prompt": "a"}, {"prompt": "abc"}], tokenizer=actor.tokenizer)
    RLTrainer(fabric, flow, PPO(), data, rollout_batch_size=2, epochs=2, sampling=SamplingParams(max_new_tokens=4)).fit(
        1
    )
    return seen, lengths


def test_in_a_run_with_cut_matrices():
    (seen, lengths), _ = run_ranks(_train, 2)
    (metrics,) = seen
    assert all(metrics[f"time/{phase}"] > 0 for phase in PHASES)
    assert metrics["throughput/tokens_per_second_per_gpu"] == pytest.approx(sum(lengths) / metrics["time/step"] / 2)
    # both ranks hold the same rows, which count once; the cut matrices count whole
    assert metrics["throughput/update_flops"] == 2 * LLAMA.flops(torch.tensor(lengths)).item()
    assert metrics["throughput/mfu"] == pytest.approx(
        metrics["throughput/update_flops"] / metrics["time/actor_update"] / 1e12 / 2
    )
