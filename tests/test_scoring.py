"""Rewards computed while others are sampled: the same rewards, and a trainer that does so by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric

from lightning_verl import GRPO, Actor, AsyncRolloutDataset, HybridDataFlow, HybridStrategy, RewardFunction, RLTrainer
from lightning_verl.rewards.early import EarlyScores
from lightning_verl.rollout.sampling import SamplingParams
from lightning_verl.testing import char_tokenizer, run_ranks, tiny_model

TOKENIZER = char_tokenizer()
ROWS = [{"prompt": text, "weight": number} for number, text in enumerate(["ab", "c", "def", "ghij"])]


def make_flow(reward: RewardFunction, engine: str = "native", **options: Any) -> HybridDataFlow:
    fabric = Fabric(accelerator="cpu", strategy=HybridStrategy(**options))
    fabric.launch()
    actor = Actor(tiny_model(vocab_size=len(TOKENIZER)), tokenizer=TOKENIZER, engine=engine, learning_rate=0.01)
    flow = HybridDataFlow(actor, reward=reward)
    flow.setup(fabric)
    return flow


def fit(during_rollout: bool, workers: int, options: dict[str, Any]) -> tuple[dict[str, float], int, int]:
    """Train two steps; the metrics that time has no part in, how many calls there were, and how many came early."""
    calls: list[str] = []
    early = [0]

    def score(response: str, weight: int) -> float:
        calls.append(response)
        return (len(response) + weight) % 3

    real = EarlyScores.outcomes

    def outcomes(self: EarlyScores, inputs: Any) -> Any:
        found = real(self, inputs)
        early[0] += len(found)
        return found

    EarlyScores.outcomes = outcomes  # type: ignore[method-assign]
    try:
        flow = make_flow(RewardFunction(score, num_workers=workers, during_rollout=during_rollout), **options)
        data = AsyncRolloutDataset(ROWS, tokenizer=TOKENIZER, max_prompt_length=8)
        trainer = RLTrainer(
            flow.fabric,
            flow,
            GRPO(),
            data,
            rollout_batch_size=4,
            samples_per_prompt=4,
            sampling=SamplingParams(max_new_tokens=12, temperature=2.0),
        )
        metrics = trainer.fit(2)
    finally:
        EarlyScores.outcomes = real  # type: ignore[method-assign]
    timed = ("time/", "reshard/link_share")
    return {name: value for name, value in metrics.items() if not name.startswith(timed)}, len(calls), early[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_is_the_same_either_way(workers: int) -> None:
    (after, calls, none), (during, calls_early, early) = (fit(during, workers, {}) for during in (False, True))
    assert during == after
    assert calls == calls_early == 2 * 16
    assert none == 0
    assert early == (32 if workers else 0)  # on a CPU there is nothing to wait for


@pytest.mark.parametrize(
    ("options", "early"),
    [
        ({"mesh_shape": (2, 1, 1, 1)}, [16, 16]),
        ({"mesh_shape": (1, 2, 1, 1)}, [32, 0]),  # both ranks sample all rows, the first one scores them
        ({"mesh_shape": (2, 1, 1, 1), "hybrid_engine_config": {"rollout_tp": 2}}, [0, 0]),  # scored elsewhere
    ],
    ids=["data2", "tensor2", "rows-move"],
)
def test_ranks_score_what_they_sample(options: dict[str, Any], early: list[int]) -> None:
    after, during = (run_ranks(fit, 2, flag, 1, options) for flag in (False, True))
    assert [found for _, _, found in during] == early
    for (metrics, calls, none), (metrics_early, calls_early, _) in zip(after, during, strict=True):
        assert metrics_early == metrics
        assert calls_early == calls
        assert none == 0


def test_rollouts_outside_of_the_context_call_no_reward() -> None:
    calls: list[str] = []
    flow = make_flow(RewardFunction(lambda response: calls.append(response) or 1.0, num_workers=1))
    data = AsyncRolloutDataset(ROWS, tokenizer=TOKENIZER, max_prompt_length=8)
    with data.loader(2, [0, 1]) as loader:
        prompts = next(iter(loader))
    sampling = SamplingParams(max_new_tokens=4, n=2)
    flow.rollout(prompts, sampling, 0)
    assert calls == []
    with flow.scoring_meanwhile():
        batch = flow.rollout(prompts, sampling, 0)
    assert flow.score(batch).scores.tolist() == [1.0] * 4
    assert len(calls) == 4
    with pytest.raises(AttributeError), flow.scoring_meanwhile():
        join_rows(flow.rollout(prompts, sampling, 1), None)
    assert flow.score(batch).scores.tolist() == [1.0] * 4


def join_rows(batch: Any, other: Any) -> None:
    """A user's step that fails behind a rollout."""
    other.fields += batch.fields


def test_an_engine_that_reports_nothing_scores_afterwards() -> None:
    flow = make_flow(RewardFunction(lambda response: float(len(response)), num_workers=1), engine="transformers")
    data = AsyncRolloutDataset(ROWS, tokenizer=TOKENIZER, max_prompt_length=8)
    with data.loader(2, [0, 1]) as loader:
        prompts = next(iter(loader))
    with flow.scoring_meanwhile():
        batch = flow.rollout(prompts, SamplingParams(max_new_tokens=4), 0)
    torch.testing.assert_close(flow.score(batch).scores, torch.tensor([float(len(t)) for t in batch.response_texts]))


@pytest.mark.parametrize(("workers", "watched"), [(0, False), (1, True)])
def test_functions_that_nothing_runs_beside_watch_nothing(
    monkeypatch: pytest.MonkeyPatch, workers: int, watched: bool
) -> None:
    """On a CPU the calling thread has no moment in which it only waits for a device."""
    begun: list[RewardFunction] = []
    monkeypatch.setattr(RewardFunction, "watch", lambda self, *arguments: begun.append(self))
    flow = make_flow(RewardFunction(lambda response: 1.0, num_workers=workers))
    data = AsyncRolloutDataset(ROWS, tokenizer=TOKENIZER, max_prompt_length=8)
    with data.loader(2, [0, 1]) as loader:
        prompts = next(iter(loader))
    with flow.scoring_meanwhile():
        flow.rollout(prompts, SamplingParams(max_new_tokens=4), 0)
    assert bool(begun) is watched
