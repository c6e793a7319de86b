"""Plans of models that are cut by layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_verl.config import (
    BatchConfig,
    ConfigError,
    DataConfig,
    ModelConfig,
    RewardConfig,
    StrategyConfig,
    TrainConfig,
)
from lightning_verl.pipeline.order import bubble_share, count_for, micro_batches_kept
from lightning_verl.planning.batch import BatchSizes, RoleBatch
from lightning_verl.planning.plan import check_pipelines, make_plan
from lightning_verl.planning.report import report
from lightning_verl.rollout.sampling import SamplingParams
from lightning_verl.testing import tiny_config
from lightning_verl.train import run_training

LAYER, VOCABULARY, NORM = 37_024, 128 * 64, 64
"""Parameters of the tiny Qwen3: of a layer, of embedding and head each, of the final norm."""


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder with nothing but the config of a tiny Qwen3 of four layers."""
    tiny_config("qwen3", num_hidden_layers=4).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def config(model: str, strategy: StrategyConfig, algorithm: str = "grpo", **changes: Any) -> TrainConfig:
    whole = TrainConfig(
        model=ModelConfig(model),
        data=DataConfig("prompts.jsonl", max_prompt_length=8),
        algorithm={"name": algorithm},
        steps=1,
        output="out",
        rewards=RewardConfig(["rewards:score"]),
        sampling=SamplingParams(max_new_tokens=8),
        batch=BatchConfig(rollout_batch_size=16, samples_per_prompt=2, max_tokens_per_micro_batch=64),
        strategy=strategy,
    )
    return replace(whole, **changes)


def test_a_plan_shows_stages_and_the_bubble(model: str) -> None:
    text = report(make_plan(config(model, StrategyConfig((2, 1, 2, 1)))))
    drawn = text[text.index("  actor      1 x") : text.index("\n\nBatches")]
    assert drawn.splitlines() == [
        "  actor      1 x 2 x 1 x 1 in 2 stages: 2 data ranks, ranks 0-3",
        "             stage 0: [0] [1]",
        "             stage 1: [2] [3]",
        "  rollout    4 x 1 x 1 x 1: 4 data ranks, ranks 0-3",
        "             [0] [1] [2] [3]",
        "  reward     functions, on the first rank of each tensor axis of the actor",
    ]
    # A data rank has 8 prompts of 2 samples: 8 x 8 + 16 x 8 = 192 tokens packed, so that two stages get 96 each; 64 is
    # the limit, 24 a group: two groups a micro-batch, four of them. (2 - 1) / (4 + 2 - 1) = 20%.
    assert "Pipelines (1f1b): layers of each stage, head and norm on the last\n  actor      0-1, 2-3\n" in text
    assert (
        "4 micro-batches of a mini-batch, of each 0.00 GB each way between stages; the bubble is 20% at least" in text
    )
    assert "(ranks 0-1, stage 0; 72.00 usable" in text
    assert "(ranks 2-3, stage 1; 72.00 usable" in text
    assert "Pipelines" not in report(make_plan(config(model, StrategyConfig((4, 1, 1, 1)))))


def test_memory_of_each_stage_by_hand(model: str) -> None:
    plan = make_plan(config(model, StrategyConfig((1, 1, 2, 1))))
    first, last = (kind.phases[-1].peak.items for kind in plan.memory)
    held = [{item.what: item.bytes for item in items} for items in (first, last)]
    # Two layers each; the embedding on the first, norm and head on the last. fp32.
    assert held[0]["parameters"] == 4 * (2 * LAYER + VOCABULARY)
    assert held[1]["parameters"] == 4 * (2 * LAYER + VOCABULARY + NORM)
    assert [state["optimizer state"] for state in held] == [2 * state["parameters"] for state in held]
    # Under 1F1B the first stage keeps two micro-batches for their backward passes, the last one.
    (waiting, alone) = (plan.role_on("actor", kind).activations()[0] for kind in plan.memory)
    assert waiting == 2 * alone
    assert not any("logits" in item.what for kind in plan.memory[:1] for p in kind.phases[1:] for item in p.peak.items)


def test_what_each_stage_receives_for_the_rollout_by_hand(model: str) -> None:
    received = make_plan(config(model, StrategyConfig((1, 1, 2, 1)))).received
    assert received == (4 * (2 * LAYER + NORM + VOCABULARY), 4 * (2 * LAYER + VOCABULARY))


def test_both_ends_hold_a_tied_weight(tmp_path: Path) -> None:
    tiny_config("qwen2", num_hidden_layers=2).save_pretrained(tmp_path / "tied")
    plan = make_plan(config(str(tmp_path / "tied"), StrategyConfig((1, 1, 2, 1))))
    stages = [plan.role_on("actor", kind).parameters for kind in plan.memory]
    assert sum(stages) == 4 * (plan.roles["actor"].model.numel + VOCABULARY)


def test_what_cannot_be_cut_is_refused_with_the_rest(model: str) -> None:
    strategy = StrategyConfig((1, 1, 8, 1))
    with pytest.raises(ConfigError, match=r"actor: Qwen3ForCausalLM has 4 layers, fewer than the 8 stages"):
        make_plan(config(model, strategy))
    with pytest.raises(ConfigError, match="4 layers, fewer than the 8 stages"):
        make_plan(config(model, StrategyConfig((1, 1, 4, 1), pipeline_schedule="interleaved")))


def test_fewer_rows_than_stages_are_refused(model: str) -> None:
    batch = BatchConfig(rollout_batch_size=2, update_batch_size=1, samples_per_prompt=2)
    with pytest.raises(ConfigError, match=r"actor: .*1 x 2 / 1 leaves 2 rows.*fewer micro-batches than its 4 pipeline"):
        make_plan(config(model, StrategyConfig((1, 1, 4, 1)), batch=batch))


def test_a_run_is_refused_before_its_launch(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = config(model, StrategyConfig((1, 1, 8, 1)), devices=8, accelerator="cpu")
    with pytest.raises(ConfigError, match="4 layers, fewer than the 8 stages"):
        check_pipelines(deep, 8)
    monkeypatch.setattr("lightning.fabric.Fabric.launch", lambda self: pytest.fail("it was launched"))
    with pytest.raises(ConfigError, match="4 layers, fewer than the 8 stages"):
        run_training(deep)
    # A model that is nowhere here yet, and a run without stages, are left to what follows.
    check_pipelines(config("some/where", StrategyConfig((1, 1, 8, 1))), 8)
    check_pipelines(config("some/where", StrategyConfig((8, 1, 1, 1))), 8)


def test_schedules_keep_and_wait_differently() -> None:
    # 1F1B: rank r of 4 keeps 4 - r; GPipe all; interleaved, by stages of half a rank: (2 (3 - r) + 5) / 2.
    assert [micro_batches_kept("1f1b", rank, 4, 8) for rank in range(4)] == [4, 3, 2, 1]
    assert micro_batches_kept("1f1b", 0, 4, 2) == 2
    assert micro_batches_kept("gpipe", 3, 4, 8) == 8
    assert [micro_batches_kept("interleaved", rank, 4, 8) for rank in range(4)] == [5.5, 4.5, 3.5, 2.5]
    assert (count_for("1f1b", 3, 4), count_for("gpipe", 9, 4), count_for("interleaved", 9, 4)) == (4, 9, 12)
    assert bubble_share(4, 12, 2) == pytest.approx(3 / 27)


def test_a_pipeline_cuts_smaller_micro_batches() -> None:
    sizes = BatchSizes(64, 16, 1, 1, 16_384, 1_024, 1_024)
    # 16 rows of 2,048 tokens: 32k tokens over 4 x 2 stages are 4,096, two rows.
    assert RoleBatch.of(sizes, 1, stages=2).micro_batches == 8
    assert RoleBatch.of(sizes, 1).micro_batches == 2
