"""What engines check before they start, and how responses of unequal length become tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from lightning_verl.data.experience import PromptBatch
from lightning_verl.rollout.base import FinishReason
from lightning_verl.rollout.inputs import (
    check_lengths,
    check_tokens,
    indices_of,
    refuse_weights,
    rollouts_of,
    starting_together,
    token_lists,
)
from lightning_verl.rollout.native import NativeEngine
from lightning_verl.rollout.sampling import SamplingParams
from lightning_verl.rollout.transformers import TransformersEngine
from lightning_verl.testing import run_ranks, tiny_config, tiny_model

BATCH = PromptBatch(
    ids=torch.tensor([[5, 9, 13], [7, 0, 0]]),
    lengths=torch.tensor([3, 1]),
    indices=torch.tensor([70, 71]),
    texts=["", ""],
    fields=[{}, {}],
)
CPU = torch.device("cpu")


def test_prompts_lose_their_padding() -> None:
    assert token_lists("E", BATCH) == [[5, 9, 13], [7]]
    given = [(5, 9), [7]]
    lists = token_lists("E", given)
    assert lists == [[5, 9], [7]]
    assert lists[1] is not given[1]
    assert token_lists("E", []) == []
    for rows in (BATCH.ids, BATCH.ids.numpy(), list(BATCH.ids), [[np.int32(5), 9, 13], (7, 0, 0)]):
        assert token_lists("E", rows) == [[5, 9, 13], [7, 0, 0]]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ([5, 9], "prompt 0 is 5;"),
        ("3+4=", "prompt 0 is '3';"),
        ([[5], "3+4="], r"prompt 1 is '3\+4=';"),
        ([[5, 9.0]], r"prompt 0 is \[5, 9.0\];"),
        ([[5], [[6]]], r"prompt 1 is \[\[6\]\];"),
        (torch.tensor([5, 9]), r"prompt 0 is tensor\(5\);"),
        (torch.tensor([[0.5]]), r"prompt 0 is tensor\(\[0.5000\]\);"),
        ([["text"] * 1000], r"prompt 0 is \['text', .{,40}\.\.\.\];"),
    ],
    ids=str,
)
def test_prompts_that_are_no_lists_of_ids_are_refused(prompts: Any, said: str) -> None:
    with pytest.raises(ValueError, match=rf"E.generate: {said} prompts must be lists of token ids, one list for each"):
        token_lists("E", prompts)


def test_indices_are_those_given_or_those_of_the_batch_or_counted() -> None:
    assert indices_of("E", BATCH, None).tolist() == [70, 71]
    assert indices_of("E", BATCH, [3, 4]).tolist() == [3, 4]
    assert indices_of("E", [[1], [2], [3]], None).tolist() == [0, 1, 2]
    empty = indices_of("E", [], [])
    assert (empty.tolist(), empty.dtype) == ([], torch.int64)
    with pytest.raises(ValueError, match="E.generate: got 3 prompt_indices for 2 prompts"):
        indices_of("E", BATCH, [1, 2, 3])


def test_indices_must_be_integers() -> None:
    for given in (torch.tensor([3, 4]), np.array([3, 4]), (np.int32(3), 4)):
        indices = indices_of("E", BATCH, given)  # type: ignore[arg-type]
        assert (indices.tolist(), indices.dtype) == ([3, 4], torch.int64)
    for wrong in ([0.5, 1], [0, 1.0], ["0", "1"], [[0], [1]], torch.tensor([0.5, 1.0])):
        with pytest.raises(ValueError, match=r"E.generate: prompt_indices are .*; they must be integers, .* \[0, 1\]:"):
            indices_of("E", BATCH, wrong)  # type: ignore[arg-type]


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


@pytest.mark.parametrize("config", [tiny_config("llama"), Gemma3Config(text_config=tiny_config("gemma3").to_dict())])
def test_tokens_are_checked_at_the_ends_of_the_vocabulary(config: Any) -> None:
    check_tokens("E", config, [[0], [127, 5]])
    check_tokens("E", config, [])
    for wrong in (128, 99999, -1):
        message = (
            f"E.generate: prompt 1 has the token id {wrong}, but the model's vocabulary has 128 tokens, so ids go from "
            r"0 to 127. If tokens were added to the tokenizer, call model.resize_token_embeddings\(len\(tokenizer\)\)"
        )
        with pytest.raises(ValueError, match=message):
            check_tokens("E", config, [[1], [1, wrong, 5]])


def test_the_first_token_out_of_the_vocabulary_is_named() -> None:
    for tokens, first in (([5, 200, -1], 200), ([5, -1, 200], -1)):
        with pytest.raises(ValueError, match=f"prompt 0 has the token id {first},"):
            check_tokens("E", tiny_config("llama"), [tokens])


def test_a_mistake_is_raised_as_it_is_without_a_group() -> None:
    with pytest.raises(ValueError, match="mine"), starting_together("E", None, CPU):
        raise ValueError("mine")
    with starting_together("E", None, CPU):
        pass


@pytest.mark.parametrize("engine", [NativeEngine, TransformersEngine])
def test_engines_refuse_what_no_model_embeds(engine: Any) -> None:
    engine = engine(tiny_model("llama"), pad_token_id=0, eos_token_ids=[2])
    for prompts, indices, message in (
        ([[1, 99999]], None, "prompt 0 has the token id 99999"),
        ([[1], [1, -1]], None, "prompt 1 has the token id -1"),
        ([1, 5], None, "prompt 0 is 1; prompts must be lists"),
        (["text"], None, "prompt 0 is 'text'; prompts must be lists"),
        ([[1]], [0.5], r"prompt_indices are \[0.5\]"),
    ):
        with pytest.raises(ValueError, match=f"{type(engine).__name__}.generate: {message}"):
            engine.generate(prompts, SamplingParams(max_new_tokens=2), prompt_indices=indices)
    engine.model.resize_token_embeddings(200)  # what the message says
    assert engine.generate([[1, 199]], SamplingParams(max_new_tokens=2)).response_ids.shape[0] == 1


@pytest.mark.parametrize("engine", [NativeEngine, TransformersEngine])
def test_models_with_a_config_for_text_have_a_longest_prompt_too(engine: Any) -> None:
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    vision |= {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=tiny_config("gemma3").to_dict(), vision_config=vision, mm_tokens_per_image=4)
    made = engine(Gemma3ForConditionalGeneration(config), pad_token_id=0, eos_token_ids=[2])
    message = r"prompt 0 has 127 tokens, with max_new_tokens \(2\) that is 129, but .*max_position_embeddings=128"
    with pytest.raises(ValueError, match=message):
        made.generate([[5] * 127], SamplingParams(max_new_tokens=2))


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
