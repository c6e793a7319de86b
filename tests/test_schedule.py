"""The schedule of learning rates."""

from __future__ import annotations

import pytest

from lightning_verl.schedule import check_schedule, learning_rate_scale


@pytest.mark.parametrize(
    ("warmup", "decay", "expected"),
    [
        (0, None, [1, 1, 1, 1, 1]),
        (2, None, [0.5, 1, 1, 1, 1]),
        (0, 4, [1, 0.75, 0.5, 0.25, 0]),
        # behind a warm-up of 2 there are 4 - 2 = 2 steps: 2/2, then 1/2, then nothing is left
        (2, 4, [0.5, 1, 1, 0.5, 0]),
    ],
)
def test_scale(warmup: int, decay: int | None, expected: list[float]) -> None:
    assert [learning_rate_scale(step, warmup, decay) for step in range(5)] == expected


@pytest.mark.parametrize(
    ("warmup", "decay", "message"),
    [(-1, None, "warmup_steps=-1"), (10, 10, "decay_steps=10 with warmup_steps=10"), (0, 0, "decay_steps=0")],
)
def test_what_cannot_be(warmup: int, decay: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=f"^RLTrainer got .*{message}"):
        check_schedule("RLTrainer", warmup, decay)


def test_a_run_that_falls_to_nothing_or_not_at_all_is_fine() -> None:
    check_schedule("RLTrainer", 0, None)
    check_schedule("RLTrainer", 9, 10)
