"""An arm becomes the trainer that it describes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lightning_verl.callbacks import NCCLGroupIsolation, PrefetchLoader, Throughput
from lightning_verl.trainer import RLTrainer
from lightning_verl.tuning.arm_process import make_trainer
from lightning_verl.tuning.arms import Arm, Work
from lightning_verl.tuning.probe import Probe

WORK = Work("tiny", 2, 2, 6, 8, "32-true", None, micro_batch_tokens=100)


@pytest.fixture
def probe(tmp_path: Path) -> Probe:
    return Probe(tmp_path / "record.json", warmup=1, steps=2)


def kinds(trainer: RLTrainer) -> list[type]:
    return [type(callback) for callback in trainer.fabric._callbacks]


def test_without_tunings(probe: Probe) -> None:
    trainer = make_trainer(Arm(), WORK, "cpu", probe)
    flow, actor = trainer.dataflow, trainer.dataflow.modules["actor"]
    assert (trainer.rollout_batch_size, trainer.update_batch_size, trainer.sampling.n) == (2, 2, 2)
    assert (trainer.sampling.max_new_tokens, flow.max_tokens_per_micro_batch) == (8, 100)
    assert set(flow.modules) == {"actor", "critic", "reference", "reward"}
    assert (actor.has_adapter, actor.eos_token_ids, actor.activation_checkpointing) == (False, (), None)
    assert kinds(trainer)[:2] == [Throughput, Probe]
    assert not {PrefetchLoader, NCCLGroupIsolation} & set(kinds(trainer))
    assert trainer.data.prefetch_factor == 0
    assert flow.strategy.activation_checkpointing is None
    # 3 steps, and one to spare for what loads ahead, of 2 prompts
    assert len(trainer.data) == 8


def test_with_every_tuning_of_one_rank(probe: Probe) -> None:
    lora = {"r": 4, "target_modules": ["q_proj"]}
    arm = Arm(1, 1, "selective", {"offload_kvcache": True, "kv_cache_bytes": 9999}, lora, False, 3, True, True)
    trainer = make_trainer(arm, replace(WORK, micro_batch_tokens=None), "cpu", probe)
    flow, actor = trainer.dataflow, trainer.dataflow.modules["actor"]
    assert (trainer.rollout_batch_size, trainer.update_batch_size) == (6, 2)
    assert flow.max_tokens_per_micro_batch is None
    assert set(flow.modules) == {"actor", "critic", "reward"}
    assert actor.has_adapter
    assert any("lora" in name for name, _ in flow.modules["critic"].named_parameters())
    assert flow.strategy.activation_checkpointing == "selective"
    assert (actor.engine.options.offload_kvcache, actor.engine.options.kv_cache_bytes) == (True, 9999)
    assert {PrefetchLoader, NCCLGroupIsolation} <= set(kinds(trainer))
    assert trainer.data.prefetch_factor == 4
