"""Rows on their way between the layouts of roles, on several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric

from lightning_verl import HybridStrategy
from lightning_verl.data.experience import Experience, PromptBatch, RolloutBatch
from lightning_verl.dataflow import _Figures, _Scored
from lightning_verl.strategies.dispatch import RowExchange, exchange_objects
from lightning_verl.testing import run_ranks

ACTOR_ROWS = [[5, 6, 7], [8, 9]]
"""Tokens of the rows on each data rank of the actor."""
ALL_ROWS = [5, 6, 7, 8, 9]


def make_rollout(lengths: list[int]) -> RolloutBatch:
    """Rows that can be told apart: all that a row has says how long it is."""
    count, width, tokens = len(lengths), max([*lengths, 2]), torch.tensor(lengths, dtype=torch.int64)
    return RolloutBatch(
        input_ids=tokens[:, None].repeat(1, width),
        prompt_lengths=torch.ones(count, dtype=torch.int64),
        response_lengths=tokens - 1,
        rollout_logprobs=tokens[:, None].repeat(1, width - 1).float(),
        group_ids=tokens,
        truncated=tokens % 2 == 0,
        prompt_texts=[f"p{length}" for length in lengths],
        response_texts=[f"r{length}" for length in lengths],
        fields=[{"answer": length} for length in lengths],
        temperature=0.7,
        weight_version=4,
    )


def make_experience(lengths: list[int]) -> Experience:
    rollout = make_rollout(lengths)
    return Experience(rollout, rollout.lengths.float(), rollout.truncated, values=rollout.rollout_logprobs.bfloat16())


def describe(batch: RolloutBatch) -> list[tuple[Any, ...]]:
    """Every row with all that it carries, so that rows whose parts were mixed up show."""
    columns = [batch.lengths, batch.group_ids, batch.truncated, batch.input_ids[:, 0], batch.rollout_logprobs[:, 0]]
    rows = zip(
        *[column.tolist() for column in columns], batch.prompt_texts, batch.response_texts, batch.fields, strict=True
    )
    return list(rows)


def launched(mesh: Any, config: dict[str, Any]) -> HybridStrategy:
    fabric = Fabric(accelerator="cpu", strategy=HybridStrategy(mesh, config))
    fabric.launch()
    return fabric.strategy


def exchange(mesh: Any, config: dict[str, Any], target: str, held: list[list[int]]) -> dict[str, Any]:
    """Every kind of batch there, and results of every kind back."""
    strategy = launched(mesh, config)
    actor = strategy.layout("actor")
    own = held[strategy.data_rank("actor")] if actor.holds(strategy.global_rank) else []
    rows = RowExchange(strategy, [("actor", target)])
    there, receipt = rows.there(make_rollout(own), "actor", target)
    experience, _ = rows.there(make_experience(own), "actor", target)
    figures = rows.back(_Figures(there.rollout_logprobs), receipt, "actor", target).values
    scored = rows.back(_Scored(there.lengths.float() / 2, there.truncated), receipt, "actor", target)
    prompts = PromptBatch(
        torch.tensor(own, dtype=torch.int64)[:, None].repeat(1, 3),
        torch.tensor(own, dtype=torch.int64),
        torch.tensor(own, dtype=torch.int64),
        [str(length) for length in own],
        [{}] * len(own),
    )
    asked, receipt = rows.there(prompts, "actor", target)
    answered = rows.back(make_rollout([length + 100 for length in asked.lengths.tolist()]), receipt, "actor", target)
    assert describe(there) == describe(make_rollout(there.lengths.tolist())), "rows stay whole"
    assert experience.lengths.tolist() == there.lengths.tolist() == experience.need("values")[:, 0].tolist()
    assert experience.values is not None
    assert (experience.values.dtype, there.temperature, there.weight_version) == (torch.bfloat16, 0.7, 4)
    return {
        "there": there.lengths.tolist(),
        "figures": figures[:, 0].tolist(),
        "scored": [scored.values.tolist(), scored.valid.tolist()],
        "answered": answered.lengths.tolist(),
    }


@pytest.mark.parametrize(
    ("mesh", "config", "target", "held", "wanted"),
    [
        # Longest first, 9 8 7 6, and 5 joins the 6 (tests/strategies/test_rows.py).
        ((2, 2, 1, 1), {"critic": {"dp": 4}}, "critic", ACTOR_ROWS, [[9], [8], [7], [5, 6]]),
        # Three actor ranks, of which one has no row, and a role on a rank of its own.
        ((3, 1, 1, 1), {"reward": {"dp": 1, "ranks": [3]}}, "reward", [[5, 6], [], [7]], [[], [], [], [5, 6, 7]]),
        # Fewer rows than data ranks: 9 and 4 leave two ranks without one.
        ((2, 2, 1, 1), {"critic": {"dp": 4}}, "critic", [[], [4, 9]], [[], [4], [], [9]]),
        # Each of two tensor ranks gets all rows.
        ((2, 1, 1, 1), {"reward": {"tp": 2, "ranks": [2, 3]}}, "reward", ACTOR_ROWS, [[], [], ALL_ROWS, ALL_ROWS]),
    ],
    ids=["data4", "own-rank", "ranks-without-rows", "own-tensor2"],
)
def test_rows_go_to_another_role_and_results_come_back(
    mesh: Any, config: Any, target: str, held: list[list[int]], wanted: list[list[int]]
) -> None:
    for rank, result in enumerate(run_ranks(exchange, 4, mesh, config, target, held)):
        data, tensor = mesh[:2]
        own = held[rank // tensor] if rank < data * tensor else []
        assert result == {
            "there": wanted[rank],
            "figures": own,
            "scored": [[length / 2 for length in own], [length % 2 == 0 for length in own]],
            "answered": [length + 100 for length in own],
        }


def bystander() -> tuple[int, int]:
    """Rank 2 has no part of actor and critic, so it does not enter their exchange."""
    strategy = launched((1, 2, 1, 1), {"critic": {"dp": 2}, "reward": {"dp": 1, "ranks": [2]}})
    rows = RowExchange(strategy, [("actor", "critic"), ("actor", "reward")])
    batch, valued = make_rollout([3, 4] if strategy.global_rank < 2 else []), 0
    if strategy.global_rank < 2:
        there, receipt = rows.there(batch, "actor", "critic")
        valued = len(there)
        batch = rows.back(there, receipt, "actor", "critic")
    return valued, len(rows.there(batch, "actor", "reward")[0])


def test_ranks_of_neither_role_need_not_come() -> None:
    # Two rows, on both tensor ranks of the actor: one each for the two data ranks of the critic.
    assert run_ranks(bystander, 3) == [(1, 0), (1, 0), (0, 2)]


def test_nothing_moves_between_roles_on_the_same_ranks() -> None:
    strategy = launched(None, {})
    batch = make_rollout([5, 6])
    there, receipt = RowExchange(strategy).there(batch, "actor", "critic")
    assert there is batch
    assert RowExchange(strategy).back(there, receipt, "actor", "critic") is batch


def pass_objects() -> dict[int, Any]:
    strategy = launched((1, 2, 1, 1), {})
    group = strategy.group("actor", "tensor")
    assert group is not None
    assert exchange_objects({}, group) == {}
    return exchange_objects({1 - strategy.global_rank: "x" * (1 + strategy.global_rank)}, group)


def test_objects_go_to_their_receiver_only() -> None:
    assert run_ranks(pass_objects, 2) == [{1: "xx"}, {0: "x"}]
