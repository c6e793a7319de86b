"""Rows between roles: micro-batches, exchange, the gate, and what ends up in the loggers."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from lightning_verl import (
    GRPO,
    Actor,
    AsyncRolloutDataset,
    Critic,
    HybridDataFlow,
    HybridStrategy,
    RewardFunction,
    RLTrainer,
    SamplingParams,
)
from lightning_verl.data.experience import Experience, RolloutBatch
from lightning_verl.testing import char_tokenizer, run_ranks, tiny_model


def rows_of_lengths(lengths: list[int]) -> RolloutBatch:
    count, width = len(lengths), max([*lengths, 2])
    return RolloutBatch(
        input_ids=torch.full((count, width), 3),
        prompt_lengths=torch.ones(count, dtype=torch.int64),
        response_lengths=torch.tensor(lengths, dtype=torch.int64) - 1,
        rollout_logprobs=torch.zeros(count, width - 1),
        group_ids=torch.arange(count),
        truncated=torch.zeros(count, dtype=torch.bool),
        prompt_texts=[""] * count,
        response_texts=[""] * count,
        fields=[{}] * count,
    )


def micro_batches(lengths: list[list[int]]) -> tuple[int, int, float]:
    fabric = Fabric(accelerator="cpu", strategy=HybridStrategy())
    fabric.launch()
    flow = HybridDataFlow(Actor(tiny_model()), max_tokens_per_micro_batch=100)
    flow.setup(fabric)
    flow.setup_optimizers({"actor": 1e-3})
    rollout = rows_of_lengths(lengths[fabric.global_rank])
    experience = Experience(rollout, torch.ones(len(rollout)), torch.ones(len(rollout), dtype=torch.bool))
    experience.advantages = torch.ones_like(rollout.rollout_logprobs)
    bins, normalizer = flow._plan("actor", experience)
    GRPO().update(flow, experience)  # every forward and backward is a collective: other numbers of them would hang
    return len(bins), normalizer.tokens, flow.metrics.compute()["actor/grad_norm"]


def test_every_rank_runs_the_same_number_of_micro_batches() -> None:
    """Budget 100: five rows of 95 tokens make five micro-batches, five of 20 make one, no rows make none."""
    for lengths in ([[95] * 5, [20] * 5], [[95] * 5, []]):
        tokens = sum(length - 1 for rank in lengths for length in rank)
        first, second = run_ranks(micro_batches, 2, lengths)
        assert first == second
        assert first[:2] == (5, tokens)
        assert first[2] > 0


def uneven_rollout() -> list[int]:
    """Rank 0 has no prompt, rank 1 one that ends early."""
    fabric = Fabric(accelerator="cpu", strategy=HybridStrategy())
    fabric.launch()
    tokenizer = char_tokenizer()
    flow = HybridDataFlow(Actor(tiny_model(vocab_size=len(tokenizer)), tokenizer=tokenizer))
    flow.setup(fabric)
    with AsyncRolloutDataset([{"prompt": "12"}], tokenizer=tokenizer).loader(1) as loader:
        prompts = next(iter(loader))
    sampling = SamplingParams(n=2, max_new_tokens=6, stop_token_ids=tuple(range(40)))
    lengths = []
    for own in ([], [0]), ([0], []):
        batch = flow.rollout(prompts.select(own[fabric.global_rank]), sampling, step=0)
        lengths.append(len(batch))
        lengths.append(int(flow.logprobs(batch).shape[0]))
    return lengths


def test_ranks_need_not_take_equally_many_steps_of_a_rollout() -> None:
    assert run_ranks(uneven_rollout, 2) == [[0, 0, 2, 2], [2, 2, 0, 0]]


def test_both_loggers_show_every_metric_with_one_monotonic_step(tmp_path: Path) -> None:
    tokenizer = char_tokenizer()
    loggers = [CSVLogger(tmp_path, name="csv", version=""), TensorBoardLogger(tmp_path, name="board", version="")]
    seen: dict[int, set[str]] = {}

    class Note:
        def on_step_end(self, step: int, metrics: dict[str, float]) -> None:
            seen[step] = set(metrics)

    fabric = Fabric(accelerator="cpu", strategy=HybridStrategy(), loggers=loggers, callbacks=[Note()])
    fabric.launch()
    model = tiny_model(vocab_size=len(tokenizer))
    flow = HybridDataFlow(Actor(model, tokenizer=tokenizer), reward=RewardFunction(lambda response: len(response)))
    rows = [{"prompt": str(number)} for number in range(20)]
    for first_step in (0, 2):
        trainer = RLTrainer(
            fabric,
            flow,
            GRPO(),
            AsyncRolloutDataset(rows, tokenizer=tokenizer),
            rollout_batch_size=4,
            update_batch_size=1,
            samples_per_prompt=2,
            sampling=SamplingParams(max_new_tokens=3),
            first_step=first_step,
        )
        trainer.fit(2)
    loggers[1].finalize("success")

    assert sorted(seen) == [0, 1, 2, 3]
    with (tmp_path / "csv" / "metrics.csv").open() as file:
        written = {int(row["step"]): {name for name, value in row.items() if value} for row in csv.DictReader(file)}
    assert {step: names - {"step"} for step, names in written.items()} == seen
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    assert set(board.Tags()["scalars"]) == set().union(*seen.values())
    for name in board.Tags()["scalars"]:
        assert [event.step for event in board.Scalars(name)] == [step for step in sorted(seen) if name in seen[step]]


def test_a_fabric_with_another_strategy_is_refused() -> None:
    with pytest.raises(TypeError, match="HybridDataFlow needs Fabric"):
        HybridDataFlow(Actor(tiny_model())).setup(Fabric(accelerator="cpu", devices=1))


def test_a_layout_of_another_size_is_refused() -> None:
    fabric = Fabric(accelerator="cpu", strategy=HybridStrategy())
    fabric.launch()
    flow = HybridDataFlow(Actor(tiny_model(), tokenizer=char_tokenizer()), Critic(tiny_model()))
    with pytest.raises(RuntimeError, match="not set up; call dataflow.setup"):
        flow.get_actor_for_rollout()
    flow.setup(fabric)
    with pytest.raises(
        ValueError, match=r'tp_size=2, but .*\{"rollout_tp": 1\}.*HybridStrategy\(.*\{"rollout_tp": 2\}\)'
    ):
        flow.get_actor_for_rollout(tp_size=2)
    with pytest.raises(ValueError, match=r'dp_size=4, but .*\{"dp": 1\}.*HybridStrategy\(.*\{"dp": 4\}\}\)'):
        flow.get_actor_for_update(dp_size=4)
    with flow.get_actor_for_rollout(tp_size=1) as engine:
        assert engine.generate([[3, 4]], SamplingParams(max_new_tokens=2)).weight_version == 0
    with flow.get_actor_for_update(dp_size=1) as actor:
        assert actor(rows_of_lengths([5]))[0].requires_grad


SHARDS = {  # dim that both layouts cut, None where a tensor rank has all; shape whole, and a half of it
    "model.embed_tokens.weight": (0, (128, 64), (64, 64)),
    "model.layers.0.self_attn.q_proj.weight": (0, (64, 64), (32, 64)),
    "model.layers.1.self_attn.o_proj.weight": (1, (64, 64), (64, 32)),
    "model.layers.0.mlp.up_proj.weight": (0, (128, 64), (64, 64)),
    "model.layers.1.mlp.down_proj.weight": (1, (64, 128), (64, 64)),
    "model.norm.weight": (None, (64,), (32,)),
}


def both_layouts() -> list[dict[str, dict[str, Tensor]]]:
    """Weights of this rank in the rollout and in the update, and whole, before and after a training step."""
    strategy = HybridStrategy((2, 1, 1, 1), hybrid_engine_config={"rollout_tp": 2})
    fabric = Fabric(accelerator="cpu", strategy=strategy)
    fabric.launch()
    flow = HybridDataFlow(Actor(tiny_model("qwen3"), tokenizer=char_tokenizer()))
    flow.setup(fabric)
    flow.setup_optimizers({"actor": 1e-2})
    rows = rows_of_lengths([5, 7])
    rows.input_ids = torch.arange(3, 17).view(2, 7)  # attention to equal tokens is equal: queries would learn nothing
    found = []
    for version in (0, 1):
        with flow.get_actor_for_rollout(tp_size=2) as engine:
            rollout = {name: value.detach().clone() for name, value in engine.model.named_parameters()}
            rollouts = engine.generate([[3, 4], [5]], SamplingParams(max_new_tokens=4, n=2))
            assert (rollouts.weight_version, len(rollouts.lengths)) == (version, 4)
        with flow.get_actor_for_update(dp_size=2) as actor:
            trained = dict(flow.modules["actor"].model.named_parameters())  # type: ignore[operator, union-attr]
            update = {name: value.to_local().detach().clone() for name, value in trained.items()}
            whole = {name: value.full_tensor().detach().clone() for name, value in trained.items()}
            fabric.backward(actor(rows)[0].sum())
            flow.optimizers["actor"].step()
        found.append({"rollout": rollout, "update": update, "whole": whole})
    with pytest.raises(ValueError, match=r'tp_size=1, but .*\{"rollout_tp": 2\}'):
        flow.get_actor_for_rollout(tp_size=1)
    with pytest.raises(ValueError, match=r'dp_size=1, but .*\{"dp": 2\}'):
        flow.get_actor_for_update(dp_size=1)
    return found


def test_two_ranks_hold_the_same_weights_in_the_layout_that_they_ask_for() -> None:
    ranks = run_ranks(both_layouts, 2)
    start = dict(tiny_model("qwen3").named_parameters())
    for rank, (first, second) in enumerate(ranks):
        for name, (dim, shape, half) in SHARDS.items():
            assert first["whole"][name].shape == shape
            torch.testing.assert_close(first["whole"][name], start[name].detach(), rtol=0, atol=0)
            for weights in (first, second):
                whole = weights["whole"][name]
                shard, cut = whole.chunk(2, dim or 0)[rank], weights["rollout"][name]
                assert cut.shape == (shape if dim is None else half)
                torch.testing.assert_close(cut, whole if dim is None else shard, rtol=0, atol=0)
                assert weights["update"][name].shape == half
                torch.testing.assert_close(weights["update"][name], shard, rtol=0, atol=0)
            # AdamW's first step moves every element that has a gradient by the learning rate, 0.01.
            moved = (second["whole"][name] - first["whole"][name]).abs().max().item()
            assert moved == pytest.approx(0.01, rel=0.02)
