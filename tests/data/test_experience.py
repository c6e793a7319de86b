"""What the rows of typed batches cost."""

from __future__ import annotations

import pytest
import torch

from lightning_verl.data.experience import Experience, PromptBatch, RolloutBatch, RowBatch
from lightning_verl.data.packing import RowSize


def test_rows_tell_their_sizes():
    prompts = PromptBatch(
        torch.zeros(2, 4, dtype=torch.int64), torch.tensor([4, 3]), torch.tensor([70, 71]), ["", ""], [{}, {}]
    )
    assert prompts.sizes() == [RowSize(4, 0, 0), RowSize(3, 0, 1)]
    assert prompts.select([]).sizes() == []
    rollout = RolloutBatch(
        input_ids=torch.zeros(3, 9, dtype=torch.int64),
        prompt_lengths=torch.tensor([4, 4, 3]),
        response_lengths=torch.tensor([5, 0, 2]),
        rollout_logprobs=torch.zeros(3, 5),
        group_ids=torch.tensor([70, 70, 71]),
        truncated=torch.zeros(3, dtype=torch.bool),
        prompt_texts=[""] * 3,
        response_texts=[""] * 3,
        fields=[{}] * 3,
    )
    assert rollout.sizes() == [RowSize(4, 5, 0), RowSize(4, 0, 0), RowSize(3, 2, 1)]
    assert Experience(rollout, torch.zeros(3), torch.ones(3) > 0).select([2, 0]).sizes() == [
        RowSize(3, 2, 0),
        RowSize(4, 5, 1),
    ]
    with pytest.raises(TypeError, match="RowBatch must define the sizes of its rows"):
        RowBatch().sizes()
