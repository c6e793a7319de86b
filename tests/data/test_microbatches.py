"""Mini-batches cut into micro-batches."""

from __future__ import annotations

from dataclasses import replace

import torch

from lightning_verl.data.experience import Experience, RolloutBatch
from lightning_verl.data.microbatches import MicroBatches
from lightning_verl.data.packing import RowSize
from lightning_verl.testing import tiny_rollouts


def three_samples_and_one() -> RolloutBatch:
    """Prompts of 3 and responses of 5 tokens; rows 0 to 2 have the same prompt."""
    batch = tiny_rollouts(4)
    ids = batch.input_ids.clone()
    ids[1:3, :3] = ids[0, :3]
    return replace(batch, input_ids=ids, group_ids=torch.tensor([5, 5, 5, 6]))


def test_rows_that_share_a_prompt_have_one_number() -> None:
    assert three_samples_and_one().sizes() == [RowSize(3, 5, 0)] * 3 + [RowSize(3, 5, 1)]
    assert tiny_rollouts(0).sizes() == []


def test_rows_of_a_group_with_other_prompts_share_nothing() -> None:
    batch = three_samples_and_one()
    batch.input_ids[1, 2] += 1
    assert [size.group for size in batch.sizes()] == [0, 1, 2, 3]
    batch = three_samples_and_one()
    batch.prompt_lengths[2] = 2
    assert [size.group for size in batch.sizes()] == [0, 0, 1, 2]


def test_a_shared_prompt_counts_once() -> None:
    sizes = three_samples_and_one().sizes()
    # shared: 3 + 3 x 5 = 18, and 8. rows: 4 x 8, two of them in 18. padded: as rows here.
    assert MicroBatches.cut(sizes, 18, "shared").bins == [[0, 1, 2], [3]]
    assert MicroBatches.cut(sizes, 18, "rows").bins == [[0, 1], [2, 3]]
    assert MicroBatches.cut(sizes, 18, "padded").bins == [[0, 1], [2, 3]]


def test_a_micro_batch_is_cut_to_its_own_rows() -> None:
    rollout = three_samples_and_one()
    rollout.response_lengths[3] = 2
    experience = Experience(rollout, torch.arange(4.0), torch.ones(4, dtype=torch.bool), old_logprobs=torch.ones(4, 5))
    batches = MicroBatches.cut(experience.sizes(), 18, "shared").filled_up(3)
    first, second, third = (batches.take(experience, number) for number in range(3))
    assert (first.scores.tolist(), second.scores.tolist(), len(third)) == ([0, 1, 2], [3], 0)
    assert second.rollout.input_ids.shape == (1, 5)
    assert second.need("old_logprobs").shape == (1, 2)
    assert first.rollout.packed is not None
    assert first.rollout.input_ids.flatten()[first.rollout.packed.source].tolist() == [
        *rollout.input_ids[0].tolist(), *rollout.input_ids[1, 3:].tolist(), *rollout.input_ids[2, 3:].tolist(),
    ]  # fmt: skip
    assert third.rollout.packed is not None
    assert third.rollout.packed.source.numel() == 1


def test_other_rows_do_not_keep_how_rows_were_packed() -> None:
    rollout = three_samples_and_one()
    batches = MicroBatches.cut(rollout.sizes(), 100, "shared")
    packed = batches.take(rollout, 0)
    assert packed.packed is not None
    assert packed.select([0]).packed is None
    assert packed.to("cpu").packed is None
    assert packed.narrowed(8, 5).packed is None
    experience = Experience(packed, torch.zeros(4), torch.ones(4, dtype=torch.bool))
    assert experience.select([0]).rollout.packed is None
    assert MicroBatches.cut(rollout.sizes(), 100, "padded").take(rollout, 0).packed is None
