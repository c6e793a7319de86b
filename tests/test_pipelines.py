"""Losses, gradients and metrics do not depend on stages, alone and with the other axes."""

from __future__ import annotations

from typing import Any

import pytest
from test_invariance import ALGORITHMS, EVERYTHING, LORA, ONE_ROW, TWO_CUTS, assert_equal_updates, updates

from lightning_verl.testing import run_ranks

FOUR_LAYERS = [("qwen3", "ppo", TWO_CUTS), ("qwen2", "grpo", ONE_ROW)]
"""A model with a head of its own and one whose head is tied to the embedding."""


def compare(ranks: int, mesh: Any, cases: Any, **options: Any) -> None:
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
    cases = [("qwen3", name, budget) for name in ALGORITHMS for budget in (TWO_CUTS, EVERYTHING)]
    compare(ranks, mesh, [*cases, ("qwen2", "ppo", ONE_ROW)])


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
    compare(ranks, mesh, FOUR_LAYERS, layers=4, **options)


@pytest.mark.parametrize(("ranks", "mesh"), [(2, (1, 1, 2, 1)), (4, (2, 1, 2, 1))], ids=["stages2", "data2xstages2"])
def test_adapters_train_alike_in_stages(ranks: int, mesh: Any) -> None:
    compare(ranks, mesh, [("qwen3", "grpo", TWO_CUTS)], actor_options=LORA)


@pytest.mark.parametrize(("ranks", "mesh"), [(2, (1, 1, 2, 1)), (4, (1, 1, 2, 2))], ids=["stages2", "stages2xexpert2"])
def test_experts_train_alike_in_stages(ranks: int, mesh: Any) -> None:
    compare(ranks, mesh, [("qwen3_moe", "ppo", TWO_CUTS)])


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3", "gpt2"])
def test_every_family_trains_alike_in_stages(family: str) -> None:
    compare(2, (1, 1, 2, 1), [(family, "grpo", TWO_CUTS)])
