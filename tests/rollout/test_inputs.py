"""What engines check before they start, and how responses of unequal length become tensors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_verl.data.experience import PromptBatch
from lightning_verl.rollout.base import FinishReason
from lightning_verl.rollout.inputs import (
    check_lengths,
    indices_of,
    refuse_weights,
    rollouts_of,
    starting_together,
    token_lists,
)
from lightning_verl.rollout.sampling import SamplingParams
from lightning_verl.testing import run_ranks

BATCH = PromptBatch(
    ids=torch.tensor([[5, 9, 13], [7, 0, 0]]),
    lengths=torch.tensor([3, 1]),
    indices=torch.tensor([70, 71]),
    texts=["", ""],
    fields=[{}, {}],
)
CPU = torch.device("cpu")


def test_prompts_lose_their_padding() -> None:
    assert token_lists(BATCH) == [[5, 9, 13], [7]]
    given = [(5, 9), [7]]
    lists = token_lists(given)
    assert lists == [[5, 9], [7]]
    assert lists[1] is not given[1]
    assert token_lists([]) == []


def test_indices_are_those_given_or_those_of_the_batch_or_counted() -> None:
    assert indices_of("E", BATCH, None).tolist() == [70, 71]
    assert indices_of("E", BATCH, [3, 4]).tolist() == [3, 4]
    assert indices_of("E", [[1], [2], [3]], None).tolist() == [0, 1, 2]
    empty = indices_of("E", [], [])
    assert (empty.tolist(), empty.dtype) == ([], torch.int64)
    with pytest.raises(ValueError, match="E.generate: got 3 prompt_indices for 2 prompts"):
        indices_of("E", BATCH, [1, 2, 3])


def test_lengths_are_checked_at_the_limit() -> None:
    config, sampling = SimpleNamespace(max_position_embeddings=10), SamplingParams(max_new_tokens=4)
    check_lengths("E", config, [[1] * 6, [1]], sampling)
    check_lengths("E", config, [], sampling)
    message = (
        r"E.generate: prompt 1 has 7 tokens, with max_new_tokens \(4\) that is 11, but .*max_position_embeddings=10"
    )
    with pytest.raises(ValueError, match=message):
        check_lengths("E", config, [[1] * 6, [1] * 7], sampling)
    with pytest.raises(ValueError, match="E.generate: prompt 0 is empty"):
        check_lengths("E", config, [[]], sampling)
    check_lengths("E", SimpleNamespace(), [[1] * 1000], sampling)  # no limit is known


def test_a_mistake_is_raised_as_it_is_without_a_group() -> None:
    with pytest.raises(ValueError, match="mine"), starting_together("E", None, CPU):
        raise ValueError("mine")
    with starting_together("E", None, CPU):
        pass


def ranks_start(mistaken: tuple[int, ...]) -> str:
    dist.init_process_group("gloo")
    try:
        with starting_together("E", dist.group.WORLD, CPU):
            if dist.get_rank() in mistaken:
                raise ValueError(f"mistake of {dist.get_rank()}")
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


def test_a_mistake_of_one_rank_stops_all() -> None:
    assert run_ranks(ranks_start, 2, ()) == ["went on", "went on"]
    other = "RuntimeError: E.generate: another rank of the step group refused its prompts."
    assert run_ranks(ranks_start, 2, (1,)) == [other, "ValueError: mistake of 1"]
    assert run_ranks(ranks_start, 2, (0, 1)) == ["ValueError: mistake of 0", "ValueError: mistake of 1"]


def test_responses_of_unequal_length_become_tensors() -> None:
    reasons = [FinishReason.EOS, FinishReason.LENGTH, FinishReason.STOP_STRING, FinishReason.LENGTH]
    rollouts = rollouts_of(
        [[4, 5, 6], [7], [8, 9], [1, 2, 3]],
        [[-1.0, -2.0, -3.0], [-4.0], [-5.0, -6.0], [-7.0, -8.0, -9.0]],
        reasons,
        2,
        pad_token_id=99,
        weight_version=5,
        device=CPU,
    )
    assert rollouts.response_ids.tolist() == [[4, 5, 6], [7, 99, 99], [8, 9, 99], [1, 2, 3]]
    assert rollouts.logprobs.tolist() == [[-1, -2, -3], [-4, 0, 0], [-5, -6, 0], [-7, -8, -9]]
    assert rollouts.lengths.tolist() == [3, 1, 2, 3]
    assert rollouts.prompt_rows.tolist() == [0, 0, 1, 1]
    assert (rollouts.finish_reasons, rollouts.weight_version) == (reasons, 5)
    assert (rollouts.response_ids.dtype, rollouts.logprobs.dtype) == (torch.int64, torch.float32)


def test_no_responses_are_one_column_wide() -> None:
    rollouts = rollouts_of([], [], [], 4, pad_token_id=0, weight_version=0, device=CPU)
    assert rollouts.response_ids.shape == rollouts.logprobs.shape == (0, 1)
    assert rollouts.lengths.shape == rollouts.prompt_rows.shape == (0,)
    assert (rollouts.response_ids.dtype, rollouts.logprobs.dtype) == (torch.int64, torch.float32)


def test_weights_are_refused_by_name() -> None:
    refuse_weights("E", [], version=1)
    with pytest.raises(ValueError, match="E shares the trainer's weights, so it takes none, but got 'a' for version 2"):
        refuse_weights("E", iter([("a", torch.zeros(1)), ("b", torch.zeros(1))]), version=2)
