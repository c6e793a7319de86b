"""Losses, gradients and metrics do not depend on stages, alone and with the other axes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from test_invariance import (
    ALGORITHMS,
    EVERYTHING,
    LORA,
    ONE_ROW,
    TWO_CUTS,
    SGDActor,
    assert_equal_updates,
    compiled_updates,
    make_experience,
    offloaded_updates,
    split,
    updates,
    whole,
)
from transformers import AutoModelForSequenceClassification

from lightning_verl import SFT, Actor, HybridDataFlow, HybridStrategy
from lightning_verl.callbacks import NCCLGroupIsolation
from lightning_verl.roles.reward import Reward
from lightning_verl.testing import run_ranks, tiny_config, tiny_model

FOUR_LAYERS = [("qwen3", "ppo", TWO_CUTS), ("qwen2", "grpo", ONE_ROW)]
"""A model with a head of its own and one whose head is tied to the embedding."""


def assert_trains_alike(ranks: int, mesh: Any, cases: Any, **options: Any) -> None:
    """The updates of ranks are those of one process, whole on rank 0."""
    alone = {key: options[key] for key in ("layers", "actor_options") if key in options}
    expected = updates({}, None, cases, **alone)
    made = run_ranks(updates, ranks, {}, mesh, cases, **options)
    for rank in made:
        assert_equal_updates(rank, expected)
    for (steps, metrics), (wanted, _) in zip(made[0], expected, strict=True):
        assert steps.keys() == wanted.keys()
        assert 0 <= metrics["actor/bubble"] < 1


@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [(2, (1, 1, 2, 1)), (4, (2, 1, 2, 1)), (4, (1, 2, 2, 1))],
    ids=["stages2", "data2xstages2", "tensor2xstages2"],
)
def test_stages_change_nothing(ranks: int, mesh: Any) -> None:
    budgets = (TWO_CUTS, EVERYTHING) if ranks == 2 else (TWO_CUTS,)
    cases = [("qwen3", name, budget) for name in ALGORITHMS for budget in budgets]
    assert_trains_alike(ranks, mesh, [*cases, ("qwen2", "ppo", ONE_ROW)])


@pytest.mark.parametrize(
    ("ranks", "mesh", "options"),
    [
        (2, (1, 1, 2, 1), {"pipeline_schedule": "interleaved"}),
        (2, (1, 1, 2, 1), {"pipeline_schedule": "gpipe", "packing": "padded", "activation_checkpointing": "selective"}),
        (4, (1, 1, 4, 1), {"packing": "rows"}),
        (4, (2, 1, 2, 1), {"pipeline_schedule": "interleaved", "defer_gradient_sync": True}),
        (4, (1, 1, 2, 1), {"activation_checkpointing": "full", "defer_gradient_sync": True}),
    ],
    ids=[
        "interleaved",
        "gpipe-padded-selective",
        "stages4-rows",
        "data2-interleaved-deferred",
        "replicas2-full-deferred",
    ],
)
def test_schedules_and_memory_options_change_nothing(ranks: int, mesh: Any, options: Any) -> None:
    assert_trains_alike(ranks, mesh, FOUR_LAYERS, layers=4, **options)


@pytest.mark.parametrize(("ranks", "mesh"), [(2, (1, 1, 2, 1)), (4, (2, 1, 2, 1))], ids=["stages2", "data2xstages2"])
def test_adapters_train_alike_in_stages(ranks: int, mesh: Any) -> None:
    assert_trains_alike(ranks, mesh, [("qwen3", "grpo", TWO_CUTS)], actor_options=LORA)


@pytest.mark.parametrize(("ranks", "mesh"), [(2, (1, 1, 2, 1)), (4, (1, 1, 2, 2))], ids=["stages2", "stages2xexpert2"])
def test_experts_train_alike_in_stages(ranks: int, mesh: Any) -> None:
    assert_trains_alike(ranks, mesh, [("qwen3_moe", "ppo", TWO_CUTS)])


def test_activations_in_host_memory_change_nothing_in_stages() -> None:
    """Forward passes of several micro-batches come before the first backward pass, which is that of the first."""
    expected = updates({}, None, FOUR_LAYERS, layers=4)
    for options in ({}, {"pipeline_schedule": "gpipe", "activation_checkpointing": "selective"}):
        for made in run_ranks(offloaded_updates, 2, {}, (1, 1, 2, 1), FOUR_LAYERS, layers=4, **options):
            assert_equal_updates(made, expected)


@pytest.mark.slow
def test_compiled_layers_change_nothing_in_stages() -> None:
    expected = updates({}, None, FOUR_LAYERS, layers=4)
    for made, graphs in run_ranks(compiled_updates, 2, {}, (1, 1, 2, 1), FOUR_LAYERS, layers=4):
        assert_equal_updates(made, expected)
        assert graphs > 0


def test_a_vocabulary_that_ranks_do_not_divide_changes_nothing_in_stages() -> None:
    """Tied ends on the first and the last stage have equal parts of it."""
    assert_trains_alike(4, (1, 2, 2, 1), [("qwen2/131", "ppo", TWO_CUTS), ("qwen3/131", "grpo", TWO_CUTS)])


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3", "gpt2"])
def test_every_family_trains_alike_in_stages(family: str) -> None:
    assert_trains_alike(2, (1, 1, 2, 1), [(family, "grpo", TWO_CUTS)])


def isolated_updates(mesh: Any) -> tuple[Any, list[tuple[str, tuple[int, ...]]]]:
    """An update with groups of its own for every role and operation, and the actor's groups on this rank."""
    isolation = NCCLGroupIsolation()
    strategy = HybridStrategy(mesh)
    fabric = Fabric(accelerator="cpu", strategy=strategy, callbacks=[isolation])
    fabric.launch()
    flow = HybridDataFlow(SGDActor(tiny_model("qwen2", num_hidden_layers=3)), max_grad_norm=0.01)
    flow.setup(fabric)
    flow.setup_optimizers()
    group = strategy.group("actor", "pipeline")
    before = whole(flow.modules["actor"], group)
    experience = make_experience()
    algorithm = SFT()
    algorithm.compute_advantages(experience, strategy.group("actor", "scores"))
    algorithm.update(flow, experience)
    steps = {name: before[name] - value for name, value in whole(flow.modules["actor"], group).items()}
    own = [(entry.operation, entry.ranks) for entry in isolation.report if entry.role == "actor"]
    return steps, [entry for entry in own if entry[0] in ("pipeline", "ends")]


def test_three_stages_train_alike_on_groups_of_their_own() -> None:
    """The stage in the middle has no part of the group of the ends; a small norm scales what all stages do."""
    expected, _ = isolated_updates(None)
    assert sum(
        step.square().sum() for name, step in expected.items() if name != "model.lm_head.weight"
    ).sqrt().item() == (pytest.approx(0.01, rel=1e-3))
    made = run_ranks(isolated_updates, 3, (1, 1, 3, 1))
    torch.testing.assert_close(made[0][0], expected, rtol=1e-5, atol=1e-7)
    line, ends = ("pipeline", (0, 1, 2)), ("ends", (0, 2))
    assert [groups for _, groups in made] == [[line, ends], [line], [line, ends]]


def scored(mesh: Any) -> tuple[torch.Tensor, dict[str, float]]:
    """Scores of a reward model, and their metrics."""
    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", strategy=HybridStrategy(mesh))
    fabric.launch()
    flow = HybridDataFlow(
        Actor(tiny_model()), reward=Reward(AutoModelForSequenceClassification.from_config(one_label()))
    )
    flow.setup(fabric)
    layout, rank = flow.strategy.layout("actor"), flow.strategy.data_rank("actor")
    own = [g * 2 + sample for g in split(5, layout.data_size, rank) for sample in range(2)]
    return flow.score(make_experience().rollout.select(own)).scores, flow.step_metrics()


def one_label() -> Any:
    config = tiny_config("qwen3", pad_token_id=0)
    config.num_labels = 1
    return config


def test_a_reward_model_in_stages_scores_alike() -> None:
    expected, metrics = scored(None)
    made = run_ranks(scored, 4, (2, 1, 2, 1))
    # Ranks 0 and 2 hold the rows of one data coordinate, 1 and 3 those of the other.
    for first, second in ((0, 1), (2, 3)):
        torch.testing.assert_close(torch.cat([made[first][0], made[second][0]]), expected, rtol=1e-5, atol=1e-5)
    for _, figures in made:
        assert figures["reward/mean"] == pytest.approx(metrics["reward/mean"], abs=1e-5)


def failing_scores() -> str:
    fabric = Fabric(accelerator="cpu", strategy=HybridStrategy((1, 1, 2, 1)))
    fabric.launch()
    reward = Reward(AutoModelForSequenceClassification.from_config(one_label()))
    flow = HybridDataFlow(Actor(tiny_model()), reward=reward)
    flow.setup(fabric)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(reward), "score", lambda *_: (_ for _ in ()).throw(ValueError("no score")))
        with pytest.raises(RuntimeError, match="the reward phase failed on rank 1: ValueError: no score") as error:
            flow.score(make_experience().rollout)
    return type(error.value).__name__


def test_a_score_that_fails_in_stages_fails_on_all_ranks() -> None:
    assert run_ranks(failing_scores, 2) == ["AgreedError", "AgreedError"]
