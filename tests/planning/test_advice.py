"""Advice: each line appears where it should, with its numbers, and not elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_verl.config import (
    BatchConfig,
    DataConfig,
    ModelConfig,
    RewardConfig,
    StrategyConfig,
    TrainConfig,
    read_config,
)
from lightning_verl.planning.advice import advise, ranges
from lightning_verl.planning.plan import Hardware, Plan, make_plan
from lightning_verl.planning.traffic import Traffic
from lightning_verl.rollout.sampling import SamplingParams
from lightning_verl.testing import tiny_config

ROOT = Path(__file__).parents[2]
KIB = 2.0**-20
"""A KiB in GiB."""


@pytest.fixture
def run(tmp_path: Path) -> TrainConfig:
    """GRPO of a tiny model on one rank: 4 x 8 rows of 16 tokens a mini-batch, 4 mini-batches."""
    tiny_config("qwen3").save_pretrained(tmp_path / "model")
    return TrainConfig(
        model=ModelConfig(str(tmp_path / "model")),
        data=DataConfig("prompts.jsonl", max_prompt_length=8),
        algorithm={"name": "grpo"},
        steps=1,
        output="out",
        rewards=RewardConfig(["rewards:score"]),
        sampling=SamplingParams(max_new_tokens=8),
        batch=BatchConfig(rollout_batch_size=16, update_batch_size=4, max_tokens_per_micro_batch=128),
    )


@pytest.fixture(scope="module")
def large() -> TrainConfig:
    """PPO of an 8B model, in examples/plan."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        config = read_config(["examples/plan/plan.yaml"])
    return replace(config, model=replace(config.model, actor=str(ROOT / config.model.actor)))


def texts(plan: Plan, topic: str) -> list[str]:
    """The lines on a topic."""
    return [line.text for line in advise(plan) if line.topic == topic]


def strategy(config: TrainConfig, **changes: Any) -> TrainConfig:
    return replace(config, strategy=replace(config.strategy, **changes))


def batch(config: TrainConfig, **changes: Any) -> TrainConfig:
    return replace(config, batch=replace(config.batch, **changes))


# ---- a phase that does not fit ---------------------------------------------------------------------------------------


def test_a_phase_that_does_not_fit_says_by_how_much_and_what_to_change(large: TrainConfig) -> None:
    without = replace(large, model=replace(large.model, activation_checkpointing=None))
    plan = make_plan(without, 64, Hardware(76.0))
    line = texts(plan, "fit")[-1]
    update = plan.memory[0].phases[-1].peak
    over = (update.bytes - plan.hardware.usable_bytes) / 2**30
    assert line.startswith(
        f"actor_update does not fit on ranks 0-63: {update.bytes / 2**30:.2f} GiB at its backward of "
    )
    assert f"{over:.2f} more than the 68.40 usable" in line
    # What a change saves is what the changed plan takes less.
    kept = make_plan(replace(large, model=replace(large.model, activation_checkpointing="full")), 64, Hardware(76.0))
    saved = (update.bytes - kept.memory[0].phases[-1].peak.bytes) / 2**30
    assert f"model.activation_checkpointing=full (-{saved:.2f} GiB)" in line
    away = make_plan(strategy(without, activation_offload=True), 64, Hardware(76.0))
    saved = (update.bytes - away.memory[0].phases[-1].peak.bytes) / 2**30
    assert f"strategy.activation_offload=true (-{saved:.2f} GiB)" in line
    assert not any("activation_offload" in line for line in texts(away, "fit"))
    smaller = make_plan(batch(without, max_tokens_per_micro_batch=8192), 64, Hardware(76.0))
    saved = (update.bytes - smaller.memory[0].phases[-1].peak.bytes) / 2**30
    assert f"batch.max_tokens_per_micro_batch=8192 (-{saved:.2f} GiB)" in line
    assert "actor: model.lora, almost all of it (-" in line
    eight = make_plan(replace(without, optimizer=replace(without.optimizer, name="adamw8bit")), 64, Hardware(76.0))
    saved = (update.bytes - eight.memory[0].phases[-1].peak.bytes) / 2**30
    assert f"optimizer.name=adamw8bit (-{saved:.2f} GiB)" in line
    assert not any("adamw8bit" in line for line in texts(eight, "fit"))
    assert "critic: ranks of its own (-1.32 GiB)" in line  # 12 bytes for each of 7.57 B / 64 shards
    assert line.index("activation_checkpointing") < line.index("max_tokens") < line.index("ranks of its own")
    assert texts(kept, "fit") == []


def test_a_rollout_that_does_not_fit(run: TrainConfig) -> None:
    plan = make_plan(batch(run, rollout_batch_size=64), hardware=Hardware(4_000 * KIB))
    line = next(text for text in texts(plan, "fit") if text.startswith("rollout does not fit on rank 0"))
    peak = plan.memory[0].phases[0].peak
    rows = sum(item.bytes for item in peak.items if item.what in ("key-value cache", "logits", "activations"))
    assert f"batch.rollout_batch_size=32 (-{rows / 2 / 2**30:.2f} GiB)" in line
    assert "rollout_tp" not in line, "there is one rank"
    # 8 bytes for each of 90,496 trained elements are away while it samples, and smaller than what sampling takes.
    assert f"strategy.hybrid_engine_config.offload_to_cpu=true (-{8 * 90_496 / 2**30:.2f} GiB)" in line
    away = strategy(batch(run, rollout_batch_size=64), hybrid_engine_config={"offload_to_cpu": True})
    offloaded = make_plan(away, hardware=Hardware(4_000 * KIB))
    assert peak.bytes - offloaded.memory[0].phases[0].peak.bytes == 8 * 90_496
    assert not any("offload_to_cpu" in line for line in texts(offloaded, "fit"))


def test_a_finer_rollout_is_offered_where_it_is_possible(large: TrainConfig) -> None:
    coarse = strategy(large, hybrid_engine_config={"rollout_tp": 1})
    plan = make_plan(coarse, 64, Hardware(16.0))
    line = next(text for text in texts(plan, "fit") if text.startswith("rollout does not fit"))
    # 16.38 GB in bf16 on each rank; over two, matrices and vocabulary are half: 7.63 GiB less.
    assert "strategy.hybrid_engine_config.rollout_tp=2 (-7.63 GiB)" in line


def test_more_shards_are_offered_from_copies_or_from_more_ranks(run: TrainConfig) -> None:
    copies = strategy(run, mesh_shape=(2, 1, 1, 1))
    (fit, *_) = texts(make_plan(copies, 4, Hardware(1_000 * KIB)), "fit")
    assert "actor: dp=4 for dp=2, 1 copies for 2 (-" in fit
    (fit, *_) = texts(make_plan(copies, 2, Hardware(1_000 * KIB)), "fit")
    assert "actor: dp=4 for dp=2, on 4 ranks (-" in fit


# ---- memory that is left ---------------------------------------------------------------------------------------------


def test_memory_that_is_left_goes_to_data(run: TrainConfig) -> None:
    (line,) = texts(make_plan(run), "memory")
    assert "GiB are left on rank 0 even in " in line
    # A mini-batch has 4 prompts x 8 samples x 16 tokens = 512, so that no micro-batch needs more; in steps of 1,024
    # there is nothing to gain.
    assert "max_tokens_per_micro_batch" not in line
    assert "batch.rollout_batch_size up to " in line
    assert "a smaller tp" not in line


def test_larger_micro_batches_are_offered_up_to_what_fits(large: TrainConfig) -> None:
    few = batch(strategy(large, parallelism_config={}), update_batch_size=1024)
    plan = make_plan(few, 64)
    (line,) = texts(plan, "memory")
    tokens = int(line.partition("max_tokens_per_micro_batch up to ")[2].split()[0].rstrip(",").replace(",", ""))
    assert tokens > 16_384
    assert "or a smaller tp of the actor, for more data ranks" in line
    fuller = make_plan(batch(few, max_tokens_per_micro_batch=tokens), 64)
    assert texts(fuller, "fit") == []
    assert fuller.memory[0].worst.peak.bytes > plan.memory[0].worst.peak.bytes


def test_no_memory_is_left_of_a_small_gpu(large: TrainConfig) -> None:
    assert texts(make_plan(large, 1024, Hardware(28.0)), "memory") == []


# ---- traffic ---------------------------------------------------------------------------------------------------------


def test_gather_bound_runs_are_told_their_times_and_ways_out(large: TrainConfig) -> None:
    plan = make_plan(large, 1024)
    traffic = Traffic.of(plan.roles["actor"], plan.sizes, None)
    assert traffic is not None
    line = texts(plan, "traffic")[0]
    assert line.startswith(
        "gather-bound: a micro-batch of 13,312 tokens computes for 445 ms, its gathers and reductions of"
    )
    assert "31.74 GB take 635 ms, all-reduces of the tensor axis 70.9 ms." in line
    assert (round(traffic.matmul_seconds, 3), round(traffic.parameter_seconds, 3)) == (0.445, 0.635)
    # Matmuls of 445 ms less all-reduces of 71 ms for 13,312 tokens have to become 635 ms: 22,596 tokens or 7 rows of
    # 3,072 and a fourth of a prompt of 1,024, which 2 prompts of 4 samples on each of 512 data ranks give.
    assert "batch.max_tokens_per_micro_batch=23296 with batch.update_batch_size=1024, which hides the gathers" in line
    assert "less tensor and finer sharding, tp=1 and dp=64" in line
    # 64 ranks of a mesh become 8: eight times of (4 + 8 + 4) bytes x 147,432,864 elements, less what is there.
    assert f"a mesh of 8 ranks with dp=4, for {7 * 16 * 127_985_056 / 2**30:.2f} GiB more a rank" in line


def test_offload_is_offered_where_it_is_off(large: TrainConfig) -> None:
    # The optimizer states of a mesh of 8 ranks: 8 times of 8 bytes x 147,432,864 elements.
    away = f"GiB more a rank, {8 * 8 * 127_985_056 / 2**30:.2f} of which offload_to_cpu takes away during rollouts"
    assert away in texts(make_plan(large, 1024), "traffic")[0]
    engine = {"rollout_tp": 8, "offload_to_cpu": True}
    assert "offload_to_cpu" not in texts(make_plan(strategy(large, hybrid_engine_config=engine), 1024), "traffic")[0]


def test_a_fast_link_is_not_a_bound(large: TrainConfig) -> None:
    lines = texts(make_plan(large, 1024, Hardware(link=1_000.0)), "traffic")
    assert not any("gather-bound" in line for line in lines)


def test_a_tensor_axis_across_hosts_is_told(large: TrainConfig) -> None:
    # fsdp32 x tp2 -> tp8: the rollout takes the ranks of one host each time.
    assert not any("hosts" in line for line in texts(make_plan(large, 1024), "traffic"))
    # Rank 3 is claimed, so that the mesh of 8 lies on ranks 0-2 and 4-8, and a host ends behind rank 7.
    apart = {"critic": {"dp": 8}, "reference": {"dp": 1, "ranks": [3]}}
    plan = make_plan(strategy(large, mesh_shape=(4, 2, 1, 1), parallelism_config=apart), 9)
    rollout, actor = (line for line in texts(plan, "traffic") if "hosts" in line)
    assert rollout.startswith(
        "the tensor axis of the rollout lies on 2 hosts of 8 ranks, such as [0, 2, 5, 7, 1, 4, 6, 8]"
    )
    assert "or lower hybrid_engine_config.rollout_tp" in rollout
    assert actor.startswith("the tensor axis of the actor lies on 2 hosts of 8 ranks, such as [7, 8]: in each layer")


# ---- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("update", "told"), [(4, False), (16, False), (8, True)])
def test_the_ratio(run: TrainConfig, update: int, told: bool) -> None:
    # 16 / 4 = 4 and 16 / 16 = 1, the one data rank, are fine; 2 is not.
    lines = texts(make_plan(batch(run, update_batch_size=update)), "ratio")
    assert bool(lines) is told
    if told:
        assert lines[0].startswith(
            "one rollout batch feeds 2 update batches (16 / 8); 4, or the actor's data ranks (1)"
        )
        assert lines[0].endswith("batch.update_batch_size=4.")


def test_all_that_does_not_divide_is_told(large: TrainConfig) -> None:
    config = batch(strategy(large, mesh_shape=(8, 1, 1, 1), parallelism_config={}), rollout_batch_size=30)
    config = batch(strategy(config, hybrid_engine_config={}), update_batch_size=20)
    lines = texts(make_plan(config, 8), "divisibility")
    # 20 and then 10 prompts over 8 data ranks: 1 to 3 of them, of 4 samples. Actor, critic and reference lie alike.
    assert lines == [
        "batch.update_batch_size=20 over the 8 data ranks of the actor: some have 4 rows and some 12, and the fewer "
        "wait. A multiple of 8, such as 24, is even.",
        "batch.rollout_batch_size=30 in mini-batches of 20 leaves a last one of 10 prompts, whose step weighs as much "
        "as the others. Make it 20 or 40.",
    ]
    assert texts(make_plan(batch(config, rollout_batch_size=64, update_batch_size=16), 8), "divisibility") == []


def test_a_role_with_another_grid_divides_rows(run: TrainConfig) -> None:
    # 4 prompts x 1 sample over the 2 data ranks of the actor are even, over the 8 of the critic they are not; the
    # reference, untrained, has all 12 rows over 8.
    layouts = {"critic": {"dp": 8}, "reference": {"dp": 8}}
    config = replace(run, algorithm={"name": "ppo", "kl": 0.1}, strategy=StrategyConfig((4, 2, 1, 1), layouts))
    lines = texts(make_plan(batch(config, rollout_batch_size=12), 8), "divisibility")
    assert [line[:76] for line in lines] == [
        "batch.update_batch_size=4 over the 8 data ranks of the critic: some have 0 r",
        "batch.rollout_batch_size=12 over the 8 data ranks of the reference: some hav",
    ]


def test_padding_is_told_where_it_costs(large: TrainConfig) -> None:
    # 151,936 rows over 1,024 shards are parts of 149; 1,019 of them hold 151,831, the next 105 and the last 4 nothing.
    # 72 norms of queries and keys have 128 elements. The critic has a value head of one row in place of the head.
    flat = strategy(large, mesh_shape=(1024, 1, 1, 1), parallelism_config={}, hybrid_engine_config={})
    lines = [line for line in texts(make_plan(flat, 1024), "divisibility") if "padded" in line]
    assert [line.partition(" are padded")[0] for line in lines] == [
        "74 parameters of the actor",
        "74 parameters of the critic",
        "74 parameters of the reference",
    ]
    assert "model.model.embed_tokens.weight with 151936 rows over 1024 shards" in lines[0]
    # 149 x 4,096 x 4 bytes, twice: 4.7 MiB.
    assert "4.7 MiB on the last rank, and as much for each of gradients and two optimizer moments" in lines[0]
    assert not any("padded" in line for line in texts(make_plan(large, 1024), "divisibility"))


def test_ranks_as_text() -> None:
    assert ranges([3]) == "rank 3"
    assert ranges([0, 1, 2, 3]) == "ranks 0-3"
    assert ranges([0, 2, 3, 7]) == "ranks 0, 2-3, 7"
