"""Batch arithmetic of a plan, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_verl.planning.batch import BatchSizes, RoleBatch

SIZES = BatchSizes(
    rollout_batch_size=10,
    update_batch_size=4,
    samples_per_prompt=3,
    epochs=2,
    max_tokens_per_micro_batch=100,
    prompt_tokens=10,
    response_tokens=20,
)


def test_rows_of_the_actor_stay_together_by_prompt() -> None:
    # 10 prompts are mini-batches of 4, 4 and 2; over 4 data ranks 1, 1 and 0 or 1 prompts of 3 rows each. 100 tokens
    # hold 3 rows of 30.
    batch = RoleBatch.of(SIZES, 4)
    assert batch.rows == (6, 9)
    assert batch.minibatch_rows == (0, 3)
    assert (batch.minibatches, batch.micro_batches, batch.micro_batch_tokens) == (3, 1, 90)
    assert (batch.micro_batch_responses, batch.scoring_responses) == (60, 60)
    assert SIZES.ratio == 2.5


def test_rows_of_another_grid_are_divided_one_by_one() -> None:
    # 30 rows over 8 ranks: 3 or 4; the 12 of a mini-batch: 1 or 2, which fit into one micro-batch of 60 tokens.
    batch = RoleBatch.of(SIZES, 8, as_the_actor=False)
    assert (batch.rows, batch.minibatch_rows) == ((3, 4), (1, 2))
    assert (batch.micro_batches, batch.micro_batch_tokens, batch.scoring_tokens) == (1, 60, 90)


def test_micro_batches_hold_at_least_a_row() -> None:
    batch = RoleBatch.of(replace(SIZES, max_tokens_per_micro_batch=1), 1)
    assert (batch.minibatch_rows, batch.micro_batches, batch.micro_batch_tokens) == ((6, 12), 12, 30)


@pytest.mark.parametrize(("limit", "rows"), [(29, 1), (59, 1), (60, 2), (100, 3)])
def test_rows_of_a_micro_batch(limit: int, rows: int) -> None:
    assert replace(SIZES, max_tokens_per_micro_batch=limit).micro_batches(6, True)[1] == rows * 30


def test_samples_of_a_prompt_share_its_tokens() -> None:
    # A prompt and three responses are 10 + 3 x 20 = 70 tokens. 140 hold two of the four groups, and 120 response
    # tokens; in 50 a prompt and two responses fit, the third has the prompt again: 50 and 30, for each group.
    shared = replace(SIZES, packing="shared")
    assert replace(shared, max_tokens_per_micro_batch=140).micro_batches(12, True) == (2, 140, 120)
    assert replace(shared, max_tokens_per_micro_batch=50).micro_batches(12, True) == (8, 50, 40)
    assert replace(shared, max_tokens_per_micro_batch=140).micro_batches(12, False) == (3, 120, 80)
    assert shared.micro_batches(0, True) == (0, 0, 0)
