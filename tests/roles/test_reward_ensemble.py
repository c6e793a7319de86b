"""Tests of the reward role that aggregates over members."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_verl.data.experience import RolloutBatch
from lightning_verl.rewards.functions import RewardError, Scores
from lightning_verl.roles.reward_ensemble import RewardEnsemble, aggregate_members
from lightning_verl.roles.reward_function import RewardFunction

NAN = math.nan


def make_batch(count: int, **fields: list[Any]) -> RolloutBatch:
    return RolloutBatch(
        input_ids=torch.ones(count, 2, dtype=torch.long),
        prompt_lengths=torch.ones(count, dtype=torch.long),
        response_lengths=torch.ones(count, dtype=torch.long),
        rollout_logprobs=torch.zeros(count, 1),
        group_ids=torch.full((count,), 5),
        truncated=torch.zeros(count, dtype=torch.bool),
        prompt_texts=["p"] * count,
        response_texts=["r"] * count,
        fields=[{name: values[row] for name, values in fields.items()} for row in range(count)],
    )


class StubModel(LightningModule):
    """A reward role with a parameter that returns what it is given."""

    def __init__(self, values: Tensor, valid: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1), requires_grad=False)
        self.values, self.valid = values, valid

    def score(self, batch: RolloutBatch) -> Scores:
        return Scores(self.values, self.valid, {}, fallbacks=2)


def first(a: float | None) -> float | None:
    return a


def second(b: float | None) -> float | None:
    return b


def third(c: float | None) -> float | None:
    return c


# Rows: (1, 2, 6), (1, 3, absent), (absent, absent, 4), all absent.
BATCH = make_batch(4, a=[1, 1, None, None], b=[2, 3, None, None], c=[6, None, 4, None])
# Means: 3, 2, 4. Unbiased variances: (4 + 1 + 9) / 2 = 7; (1 + 1) / 1 = 2; one member: 0.
SPREAD = [math.sqrt(7), math.sqrt(2), 0.0, 0.0]


@pytest.mark.parametrize(
    ("mode", "penalty", "expected"),
    [
        ("mean", 1.0, [3.0, 2.0, 4.0, 0.0]),
        ("min", 1.0, [1.0, 1.0, 4.0, 0.0]),
        ("pessimistic", 1.0, [3 - math.sqrt(7), 2 - math.sqrt(2), 4.0, 0.0]),
        ("pessimistic", 0.5, [3 - math.sqrt(7) / 2, 2 - math.sqrt(2) / 2, 4.0, 0.0]),
        ("pessimistic", 0.0, [3.0, 2.0, 4.0, 0.0]),
    ],
)
def test_each_mode_aggregates_over_the_members_that_scored(mode: Any, penalty: float, expected: list[float]) -> None:
    scores = RewardEnsemble([first, second, third], mode=mode, penalty=penalty).score(BATCH)
    torch.testing.assert_close(scores.values, torch.tensor(expected))
    assert scores.disagreement is not None
    torch.testing.assert_close(scores.disagreement, torch.tensor(SPREAD))
    assert scores.valid.tolist() == [True, True, True, False]
    assert scores.values.dtype == scores.disagreement.dtype == torch.float32


def test_components_are_the_members_scores() -> None:
    scores = RewardEnsemble([first, RewardFunction([first, second]), third]).score(BATCH)
    expected = {"first": [1.0, 1.0, NAN, NAN], "first+second": [3.0, 4.0, NAN, NAN], "third": [6.0, NAN, 4.0, NAN]}
    assert list(scores.components) == list(expected)
    for name, values in expected.items():
        torch.testing.assert_close(scores.components[name], torch.tensor(values), equal_nan=True)


def test_members_may_be_models_and_their_fallbacks_add_up() -> None:
    model = StubModel(torch.tensor([5.0, 0.0], dtype=torch.bfloat16), torch.tensor([True, False]))
    failing = RewardFunction(lambda response: 1 / 0, on_error="fallback", fallback=2.0)
    ensemble = RewardEnsemble([model, failing, lambda response: 2.0])
    scores = ensemble.score(make_batch(2))
    assert scores.values.tolist() == [3.0, 2.0]  # (5 + 2 + 2) / 3; (2 + 2) / 2
    assert scores.fallbacks == 4  # 2 that the stub reports, 2 rows of the failing function
    assert list(scores.components) == ["StubModel", "lambda", "lambda_2"]
    assert list(ensemble.state_dict()) == ["members.0.weight"]
    assert (ensemble.role, ensemble.trainable) == ("reward", False)


def test_equal_scores_do_not_disagree() -> None:
    values, spread = aggregate_members(torch.full((3, 1), 0.1, dtype=torch.float64), "pessimistic", 1.0)
    assert values.tolist() == pytest.approx([0.1])
    assert spread.tolist() == pytest.approx([0.0], abs=1e-12)


def test_a_member_s_bad_scores_are_named() -> None:
    def ensemble(values: list[float], valid: list[bool]) -> RewardEnsemble:
        return RewardEnsemble([first, second, StubModel(torch.tensor(values), torch.tensor(valid))])

    batch = make_batch(2, a=[1, 1], b=[1, 1])
    with pytest.raises(RewardError, match=r"member 'StubModel' returned nan on row 1 \(sample 5/1\), prompt 'p'"):
        ensemble([1.0, NAN], [True, True]).score(batch)
    assert ensemble([1.0, NAN], [True, False]).score(batch).values.tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match=r"'StubModel' returned values \[3\] and valid \[3\] for 2 rows; .* \[2\]"):
        ensemble([1.0] * 3, [True] * 3).score(batch)


def test_the_constructor_names_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="RewardEnsemble: got 2 members, but needs at least 3"):
        RewardEnsemble([first, second])
    with pytest.raises(ValueError, match="mode='median' must be one of mean, min, pessimistic"):
        RewardEnsemble([first, second, third], mode="median")  # type: ignore[arg-type]
    for penalty in (-0.1, NAN, math.inf):
        with pytest.raises(ValueError, match="penalty=.* must be finite and at least 0"):
            RewardEnsemble([first, second, third], penalty=penalty)
    for member in (nn.Linear(1, 1), 3):
        with pytest.raises(TypeError, match=f"member {type(member).__name__} must be a reward role"):
            RewardEnsemble([first, second, member])  # type: ignore[list-item]
