"""RewardEMA: its numbers, resuming, rows that do not count, and several ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric

from lightning_verl.callbacks import RewardEMA
from lightning_verl.strategies.hybrid import HybridStrategy
from lightning_verl.testing import run_ranks


def make_trainer(strategy: Any = None, needs_reward: bool = True) -> Any:
    strategy = strategy or SimpleNamespace(group=lambda role, operation: None)
    return SimpleNamespace(
        algorithm=SimpleNamespace(needs_reward=needs_reward), dataflow=SimpleNamespace(strategy=strategy)
    )


def make_experience(scores: list[float], valid: list[bool] | None = None) -> Any:
    return SimpleNamespace(scores=torch.tensor(scores), valid=torch.tensor(valid or [True] * len(scores)))


def feed(ema: RewardEMA, *batches: list[float]) -> list[dict[str, float]]:
    logged = []
    for batch in batches:
        ema.on_rewards_computed(make_trainer(), make_experience(batch))
        logged.append({})
        ema.on_step_end(logged[-1])
    return logged


def test_mean_starts_at_zero_with_bias_correction():
    # decay 0.9: 0.1 / 0.1; 0.09 / 0.19; 0.081 / 0.271; (0.0729 + 0.1) / 0.3439
    logged = feed(RewardEMA(decay=0.9), [1.0], [0.0], [0.0], [1.0])
    assert [metrics["reward/ema_mean"] for metrics in logged] == pytest.approx(
        [1.0, 0.473684, 0.298893, 0.502762], abs=1e-6
    )


def test_resume_goes_on_where_it_stopped():
    first = RewardEMA(decay=0.9)
    feed(first, [1.0], [0.0])
    resumed = RewardEMA(decay=0.9)
    resumed.load_state_dict(first.state_dict())
    assert feed(resumed, [0.0]) == feed(first, [0.0])
    assert resumed.mean == pytest.approx(0.298893, abs=1e-6)


def test_std_is_that_of_all_scores_by_weight():
    # decay 0.5: the batches weigh 1/4, 1/2 and 1 of 7/4, their scores half of it each.
    # mean: (1/4 x 1 + 1/2 x 4 + 1 x 7) / 7/4 = 37/7
    # mean square: (1/4 x (0 + 4)/2 + 1/2 x (9 + 25)/2 + 1 x (36 + 64)/2) / 7/4 = 236/7
    # variance: 236/7 - (37/7)^2 = (1652 - 1369) / 49
    ema = RewardEMA(decay=0.5)
    *_, last = feed(ema, [0.0, 2.0], [3.0, 5.0], [6.0, 8.0])
    assert ema.mean == pytest.approx(37 / 7)
    assert last["reward/ema_std"] == pytest.approx((283 / 49) ** 0.5)


def test_first_std_is_the_batchs_and_large_scores_do_not_cancel():
    # squares of 1e9 would lose a variance of 1 in float64
    ema = RewardEMA(decay=0.9)
    scores = torch.tensor([1e9 - 1, 1e9 + 1], dtype=torch.float64)
    for _ in range(3):
        ema.on_rewards_computed(make_trainer(), SimpleNamespace(scores=scores, valid=torch.tensor([True, True])))
        assert (ema.mean, ema.std) == (1e9, 1.0)


def test_only_valid_rows_count():
    ema = RewardEMA()
    ema.on_rewards_computed(make_trainer(), make_experience([1.0, 50.0, 3.0], [True, False, True]))
    assert (ema.mean, ema.std) == (2.0, 1.0)


def test_batch_without_a_valid_row_changes_nothing():
    ema = RewardEMA(decay=0.9)
    feed(ema, [1.0], [0.0])
    before = ema.state_dict()
    ema.on_rewards_computed(make_trainer(), make_experience([7.0], [False]))
    assert ema.state_dict() == before


def test_nothing_is_logged_before_the_first_valid_row():
    ema, metrics = RewardEMA(), {"reward/mean": 1.0}
    ema.on_rewards_computed(make_trainer(), make_experience([0.0], [False]))
    ema.on_step_end(metrics)
    assert metrics == {"reward/mean": 1.0}


def test_algorithms_without_reward_leave_it_alone():
    ema = RewardEMA(normalize=True)
    experience = make_experience([0.0, 0.0])
    ema.on_rewards_computed(make_trainer(needs_reward=False), experience)
    assert ema.state_dict() == {"weight": 0.0, "mean": 0.0, "variance": 0.0}


def test_scores_are_left_as_they_are_unless_normalised():
    experience = make_experience([1.0, 3.0])
    RewardEMA().on_rewards_computed(make_trainer(), experience)
    assert experience.scores.tolist() == [1.0, 3.0]


def test_normalize_includes_the_batch_itself():
    ema = RewardEMA(decay=0.5, normalize=True)
    first, second = make_experience([0.0, 2.0]), make_experience([7.0, 7.0, 0.0], [True, True, False])
    ema.on_rewards_computed(make_trainer(), first)
    assert first.scores.tolist() == [-1.0, 1.0]  # mean 1, deviation 1
    ema.on_rewards_computed(make_trainer(), second)
    # weights 1/3 and 2/3: mean 5; variance 1/3 x (1 + 16) + 2/3 x (0 + 4) = 25/3
    assert second.scores.tolist() == pytest.approx([2 / (25 / 3) ** 0.5, 2 / (25 / 3) ** 0.5, 0.0])
    assert second.scores.dtype == torch.float32


def test_normalize_gives_zero_for_equal_scores():
    experience = make_experience([0.3, 0.3, 0.3])
    RewardEMA(normalize=True).on_rewards_computed(make_trainer(), experience)
    assert experience.scores.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_decay_out_of_range(decay):
    with pytest.raises(ValueError, match=r"RewardEMA got decay=.*in \[0, 1\)"):
        RewardEMA(decay=decay)


def test_eps_out_of_range():
    with pytest.raises(ValueError, match=r"RewardEMA got eps=0; it must be above 0"):
        RewardEMA(eps=0)


_ROWS = [[1.0, 2.0, 3.0], [], [10.0], [4.0, 4.0]]


def _track(world: dict[str, int], batches: list[list[float]]) -> dict[str, float]:
    """Each data rank takes its own batch; a score of -1 is not valid."""
    strategy = HybridStrategy(parallelism_config={"actor": world})
    Fabric(accelerator="cpu", devices=4, strategy=strategy).launch()
    ema = RewardEMA()
    scores = torch.tensor(batches[strategy.data_rank("actor")])
    ema.on_rewards_computed(make_trainer(strategy), SimpleNamespace(scores=scores, valid=scores >= 0))
    return ema.state_dict()


def test_ranks_agree_on_the_statistics_of_all_rows():
    # 1, 2, 3, 10, 4, 4: mean 4; squares of deviations 9 + 4 + 1 + 36 = 50
    states = run_ranks(_track, 4, {"dp": 4}, [[*_ROWS[0], -1.0], *_ROWS[1:]])
    assert states[0]["mean"] == pytest.approx(4.0)
    assert states[0]["variance"] == pytest.approx(50 / 6)
    assert all(state == states[0] for state in states)


def test_tensor_ranks_count_once():
    # two data ranks, each twice: 1 and 5 with 1, 5, 6: mean 4, squares of deviations 9 + 1 + 4 = 14
    states = run_ranks(_track, 4, {"dp": 2, "tp": 2}, [[1.0], [5.0, 6.0]])
    assert states[0]["mean"] == pytest.approx(4.0)
    assert states[0]["variance"] == pytest.approx(14 / 3)
    assert all(state == states[0] for state in states)
