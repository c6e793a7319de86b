"""Rows side by side give what padded rows give, for every family, by the plain way and by torch's kernel."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from lightning_verl import Actor, Reward
from lightning_verl.data.experience import RolloutBatch
from lightning_verl.data.microbatches import MicroBatches, Packing
from lightning_verl.models import attention
from lightning_verl.parallel.checkpointing import apply_activation_checkpointing
from lightning_verl.testing import char_tokenizer, tiny_config, tiny_model, tiny_rollouts

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gemma", "gemma2", "gemma3", "gpt2")
PROMPTS, RESPONSES, GROUPS = [3, 3, 3, 12, 5, 5, 5, 6], [4, 0, 16, 5, 1, 22, 3, 0], [0, 0, 0, 1, 2, 2, 2, 3]
"""Some longer than the sliding windows of 8 and 20 tokens, which then begin in a prompt; two without a response."""


def make_batch() -> RolloutBatch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 128, (len(PROMPTS), 27), generator=generator)
    prompts, groups = torch.tensor(PROMPTS), torch.tensor(GROUPS)
    ids = torch.where(torch.arange(27) < prompts[:, None], ids[groups], ids)
    return replace(
        tiny_rollouts(len(PROMPTS)),
        input_ids=ids,
        prompt_lengths=prompts,
        response_lengths=torch.tensor(RESPONSES),
        rollout_logprobs=torch.zeros(len(PROMPTS), 22),
        group_ids=groups,
    )


def run(actor: Actor, packing: Packing, budget: int = 60) -> tuple[list[Tensor], int]:
    """Log-probs, entropies and the gradients of a sum of both, and the tokens that the model ran on."""
    batch, tokens = make_batch(), 0
    batches = MicroBatches.cut(batch.sizes(), budget, packing)
    figures = torch.zeros(2, len(batch), 22)
    actor.zero_grad()
    with nullcontext() if packing == "padded" else actor.without_padding():
        for number, part in enumerate(batches.bins):
            rows = batches.take(batch, number)
            tokens += rows.input_ids.numel() if rows.packed is None else rows.packed.source.numel()
            logprobs, entropy = actor(rows, 0.7, True)
            assert entropy is not None
            (logprobs.sum() - 0.3 * entropy.sum()).backward()
            figures[:, part, : logprobs.shape[1]] = torch.stack([logprobs, entropy]).detach()
    return [
        figures,
        *(parameter.grad.clone() for parameter in actor.parameters() if parameter.grad is not None),
    ], tokens


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_packing_changes_nothing(family: Any) -> None:
    actor = Actor(tiny_model(family), tokenizer=char_tokenizer())
    padded, _ = run(actor, "padded")
    rows, tokens = run(actor, "rows")
    assert tokens == sum(PROMPTS) + sum(RESPONSES) == 93
    assert_equal(rows, padded)
    shared, tokens = run(actor, "shared")
    assert tokens == (3 + 12 + 5 + 6) + sum(RESPONSES) == 77
    assert_equal(shared, padded)


@pytest.mark.parametrize("mode", ["selective", "full", ["self_attn", "mlp.down_proj"]])
def test_recomputed_layers_are_packed_too(mode: Any) -> None:
    expected, _ = run(Actor(tiny_model("qwen3"), tokenizer=char_tokenizer()), "padded")
    actor = Actor(tiny_model("qwen3"), tokenizer=char_tokenizer())
    apply_activation_checkpointing(actor, mode)
    assert_equal(run(actor, "shared")[0], expected)


def varlen(
    query: Tensor, key: Tensor, value: Tensor, starts: Any, longest: Any, scaling: float, window: int | None
) -> Tensor:
    """What torch's kernel computes, sequence by sequence: the last query sees the last key."""
    outputs = []
    bounds = [list(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)) for ends in starts]
    assert max(end - start for start, end in bounds[0]) == longest[0]
    assert max(end - start for start, end in bounds[1]) == longest[1]
    for (start, end), (first, last) in zip(*bounds, strict=True):
        queries, keys, values = query[start:end], key[first:last], value[first:last]
        keys, values = (states.repeat_interleave(query.shape[1] // key.shape[1], 1) for states in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scaling
        distance = torch.arange(last - first) - torch.arange(last - first - (end - start), last - first)[:, None]
        unseen = (distance > 0) | (distance <= -(window or 10**6))
        weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(outputs)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
@pytest.mark.parametrize("packing", ["rows", "shared"])
def test_the_kernel_is_given_the_same_sequences(monkeypatch: pytest.MonkeyPatch, family: Any, packing: Packing) -> None:
    actor = Actor(tiny_model(family), tokenizer=char_tokenizer())
    expected, _ = run(actor, "padded")
    monkeypatch.setattr(attention, "_has_kernel", lambda query: True)
    monkeypatch.setattr(attention, "varlen_attention", varlen)
    assert_equal(run(actor, packing)[0], expected)


def test_a_model_of_rewards_reads_the_same_last_tokens() -> None:
    reward = Reward(tiny_config("llama")).eval()
    batch = make_batch()
    scores = {packing: torch.zeros(len(batch)) for packing in get_args(Packing)}
    for packing in get_args(Packing):
        batches = MicroBatches.cut(batch.sizes(), 1000, packing)
        with nullcontext() if packing == "padded" else reward.without_padding():
            scores[packing][batches.bins[0]] = reward.score(batches.take(batch, 0)).values
    torch.testing.assert_close(scores["shared"], scores["padded"])
    torch.testing.assert_close(scores["rows"], scores["padded"])


def test_packed_rows_outside_the_context_run_padded() -> None:
    actor = Actor(tiny_model("llama"), tokenizer=char_tokenizer())
    batch = make_batch()
    packed = MicroBatches.cut(batch.sizes(), 1000, "shared").take(batch, 0)
    torch.testing.assert_close(actor(packed)[0], actor(batch)[0])
    assert actor.model.config._attn_implementation != attention.NAME


def test_attention_without_rows_says_what_is_missing() -> None:
    actor = Actor(tiny_model("llama"), tokenizer=char_tokenizer())
    with actor.without_padding(), pytest.raises(RuntimeError, match="works on the rows that .* runs only"):
        actor.model(torch.ones(1, 3, dtype=torch.int64))


def test_models_that_cannot_are_refused() -> None:
    actor = Actor(tiny_model("llama"), tokenizer=char_tokenizer())
    actor.model._supports_attention_backend = False
    with (
        pytest.raises(ValueError, match=r"Actor cannot run LlamaForCausalLM without padding: its attention does not"),
        actor.without_padding(),
    ):
        pass
