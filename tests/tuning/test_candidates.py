"""What is tried, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tuning_configs import make_run

from lightning_verl.config import BatchConfig, EngineConfig, ModelConfig, StrategyConfig
from lightning_verl.planning.plan import Hardware
from lightning_verl.tuning import candidates
from lightning_verl.tuning.candidates import KNOBS, Start


@pytest.fixture
def start(tmp_path: Path) -> Start:
    return Start(make_run(tmp_path), ranks=1, hardware=Hardware(8.0))


def names(knob: str, start: Start) -> list[str]:
    (found,) = [entry for entry in KNOBS if entry.name == knob]
    return [candidate.name for candidate in found.candidates(start)]


def test_the_order_is_from_the_harmless_on() -> None:
    assert [knob.name for knob in KNOBS] == [
        "micro-batch",
        "mesh",
        "rollout-tensor",
        "ratio",
        "checkpointing",
        "kv-offload",
        "lora",
    ]
    assert [knob.name for knob in KNOBS if knob.alters_learning] == ["ratio", "lora"]


def test_a_mini_batch_is_cut_in_one_two_and_four(start: Start) -> None:
    # 2 prompts x 8 + 4 rows x 4 = 32 tokens; 32 / 2 + 12 = 28; 32 / 4 + 12 = 20
    config = replace(start.config, batch=replace(start.config.batch, max_tokens_per_micro_batch=25))
    assert names("micro-batch", replace(start, config=config)) == ["32 tokens", "28 tokens", "20 tokens"]
    # As given it is up to 16,384, which holds all 32.
    roomy = replace(start, tokens=16_384)
    assert names("micro-batch", roomy) == ["28 tokens", "20 tokens"]
    # Without shared prompts 4 rows x 12 = 48; 24 + 12; 12 + 12
    rows = replace(config, batch=replace(config.batch, packing="rows"))
    assert names("micro-batch", replace(start, config=rows)) == ["48 tokens", "36 tokens", "24 tokens"]


def test_too_large_micro_batches_are_left_out(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "_LARGEST_TOKENS", 30)
    config = replace(start.config, batch=replace(start.config.batch, max_tokens_per_micro_batch=25))
    assert names("micro-batch", replace(start, config=config)) == ["28 tokens", "20 tokens"]


def test_meshes_are_those_that_the_model_takes(start: Start) -> None:
    assert names("mesh", start) == []
    assert names("rollout-tensor", start) == []
    four = replace(start, ranks=4)
    # Two key-value heads: no tensor axis of 4. As given it is data 4.
    tried = {"data 1 x tensor 1, 4 copies", "data 2 x tensor 1, 2 copies"}
    assert set(names("mesh", four)) == {*tried, "data 1 x tensor 2, 2 copies", "data 2 x tensor 2"}
    assert names("rollout-tensor", four) == ["rollout tensor 2", "rollout tensor 4"]


def test_meshes_with_less_traffic_come_first(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(candidates.meshes(replace(start, ranks=4)))
    moved = [candidates._moved_bytes(replace(start, ranks=4).plan_of(entry.config)) for entry in found]
    assert moved == sorted(moved)
    # Four whole copies: nothing is gathered, and gradients travel twice but for the own quarter.
    one = replace(start, ranks=4).plan_of(next(e for e in found if "4 copies" in e.name).config)
    assert candidates._moved_bytes(one) == 2 * 4 * one.roles["actor"].model.numel * 3 // 4
    monkeypatch.setattr(candidates, "_MESHES", 2)
    assert list(candidates.meshes(replace(start, ranks=4))) == found[:2]


def test_claimed_ranks_stay_and_the_rest_of_the_layouts_goes(start: Start) -> None:
    layout = StrategyConfig(
        (1, 2, 1, 1),
        {"critic": {"dp": 2}, "reward": {"dp": 1, "ranks": [2]}},
        {"rollout_tp": 1, "update_dp": 1},
    )
    three = replace(start, config=replace(start.config, strategy=layout), ranks=3)
    found = {entry.name: entry.config.strategy for entry in candidates.meshes(three)}
    assert set(found) == {"data 1 x tensor 1, 2 copies", "data 2 x tensor 1"}
    assert found["data 2 x tensor 1"] == StrategyConfig(
        (2, 1, 1, 1), {"reward": {"dp": 1, "ranks": [2]}}, {"rollout_tp": 1}
    )


def test_meshes_that_do_not_fit_come_last(start: Start) -> None:
    plans = {ranks: replace(start, ranks=ranks).plan.memory[0].worst.peak.bytes for ranks in (1, 4)}
    assert plans[4] < plans[1]
    between = Hardware((plans[4] + plans[1]) / 2 / 0.9 / 2**30)  # 90% of it is usable
    found = names("mesh", replace(start, ranks=4, hardware=between))
    assert found[-1] == "data 1 x tensor 1, 4 copies"


def test_the_ratio_keeps_the_mini_batch(start: Start) -> None:
    found = list(candidates.ratios(start))  # 4 / 2 as given
    assert [(entry.name, entry.config.batch) for entry in found] == [
        ("1 x 2 prompts", BatchConfig(2, 2, samples_per_prompt=2)),
        ("4 x 2 prompts", BatchConfig(8, 2, samples_per_prompt=2)),
    ]
    whole = replace(start.config, batch=BatchConfig(4))
    found = list(candidates.ratios(replace(start, config=whole)))
    assert [entry.config.batch for entry in found] == [BatchConfig(8, 4), BatchConfig(16, 4)]


def test_recomputing_buys_the_micro_batch_that_did_not_fit(start: Start) -> None:
    assert names("checkpointing", start) == ["selective", "full"]
    found = list(candidates.checkpointings(replace(start, wanted_tokens=400)))
    assert [entry.name for entry in found] == ["selective", "selective, 400 tokens", "full", "full, 400 tokens"]
    assert found[1].config.model.activation_checkpointing == "selective"
    assert found[1].config.batch.max_tokens_per_micro_batch == 400
    config = replace(start.config, model=replace(start.config.model, activation_checkpointing="full"))
    assert names("checkpointing", replace(start, config=config)) == ["selective"]


def test_the_offload_is_the_native_engines(start: Start) -> None:
    (found,) = candidates.kv_offloads(start)
    assert found.config.engine == EngineConfig("auto", {"offload_kvcache": True})
    assert list(candidates.kv_offloads(replace(start, config=found.config))) == []
    other = replace(start.config, engine=EngineConfig("transformers"))
    assert list(candidates.kv_offloads(replace(start, config=other))) == []
    examples = replace(start.config, algorithm={"name": "sft"})
    assert list(candidates.kv_offloads(replace(start, config=examples))) == []


def test_an_adapter_is_tried_where_there_is_none(start: Start) -> None:
    (found,) = candidates.loras(start)
    assert found.config.model == ModelConfig(start.config.model.actor, lora=candidates.LORA)
    assert replace(start, config=found.config).plan.roles["actor"].model.is_trained
    assert list(candidates.loras(replace(start, config=found.config))) == []
