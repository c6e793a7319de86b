"""A config that was written reads as the same config."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from lightning_verl import SamplingParams
from lightning_verl.config import (
    BatchConfig,
    DataConfig,
    EngineConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    StrategyConfig,
    TrainConfig,
    read_config,
)
from lightning_verl.tuning.files import config_values, write_config

SMALLEST = TrainConfig(ModelConfig("model"), DataConfig("prompts.jsonl"), {"name": "grpo"}, 2, "out")
ROOT = Path(__file__).parents[2]


def test_defaults_are_left_out() -> None:
    assert config_values(SMALLEST) == {
        "model": {"actor": "model"},
        "data": {"source": "prompts.jsonl"},
        "algorithm": {"name": "grpo"},
        "steps": 2,
        "output": "out",
    }


def test_a_config_goes_to_a_file_and_back(tmp_path: Path) -> None:
    everything = replace(
        SMALLEST,
        model=ModelConfig("model", lora={"r": 8, "target_modules": ["q_proj"]}, activation_checkpointing="full"),
        algorithm={"name": "ppo", "kl": 0.1, "clip": [0.2, 0.28]},
        rewards=RewardConfig(["rewards:right"], [0.5]),
        sampling=SamplingParams(
            max_new_tokens=8, top_k=5, logit_bias={3: -math.inf}, stop_token_ids=(7,), stop_strings=("Ende\n",)
        ),
        engine=EngineConfig("native", {"offload_kvcache": True}),
        batch=BatchConfig(64, 16, max_tokens_per_micro_batch=1000),
        optimizer=OptimizerConfig(learning_rates={"actor": 1e-4}),
        strategy=StrategyConfig((2, 1, 1, 1), {"reward": {"dp": 1, "ranks": [2]}}, {"rollout_tp": 2}),
        devices=3,
        precision="bf16-mixed",
        seed=7,
    )
    path = tmp_path / "run.yaml"
    for config in (SMALLEST, everything):
        write_config(path, config, "A comment.")
        assert path.read_text().startswith("# A comment.\nmodel:\n")
        assert read_config([str(path)]) == config
    assert yaml.safe_load(path.read_text())["strategy"]["mesh_shape"] == [2, 1, 1, 1]


@pytest.mark.parametrize("name", ["grpo_yaml/train.yaml", "plan/plan.yaml"])
def test_the_examples_come_back_equal(name: str, tmp_path: Path) -> None:
    config = read_config([str(ROOT / "examples" / name)])
    write_config(tmp_path / "again.yaml", config)
    assert read_config([str(tmp_path / "again.yaml")]) == config
