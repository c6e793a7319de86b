"""Joins prompts with responses, sampled or given, into a ``RolloutBatch``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_verl.data.experience import PromptBatch, RolloutBatch, RowBatch
from lightning_verl.rollout.base import FinishReason, Rollouts
from lightning_verl.rollout.sampling import SamplingParams


@dataclass
class AnsweredPrompts(RowBatch):
    """Responses with one row a prompt, to travel back to where the prompts came from. W is max_new_tokens."""

    response_ids: Tensor
    """The n responses to each prompt side by side, int64 ``[B, n x W]``."""
    logprobs: Tensor
    """Float32 ``[B, n x W]``."""
    lengths: Tensor
    """Int64 ``[B, n]``."""
    finish_reasons: list[list[FinishReason]]
    """B entries of n."""
    weight_version: int
    """The version of the weights that produced them."""

    def __len__(self) -> int:
        return int(self.lengths.shape[0])

    @classmethod
    def of(cls, rollouts: Rollouts, sampling: SamplingParams) -> AnsweredPrompts:
        """Put the samples of each prompt into one row."""
        n, width = sampling.n, sampling.max_new_tokens
        missing = width - rollouts.response_ids.shape[1]
        prompts = len(rollouts.lengths) // n
        return cls(
            response_ids=torch.nn.functional.pad(rollouts.response_ids, (0, missing)).view(prompts, n * width),
            logprobs=torch.nn.functional.pad(rollouts.logprobs, (0, missing)).view(prompts, n * width),
            lengths=rollouts.lengths.view(prompts, n),
            finish_reasons=[rollouts.finish_reasons[row * n : (row + 1) * n] for row in range(prompts)],
            weight_version=rollouts.weight_version,
        )

    def rollouts(self, sampling: SamplingParams) -> Rollouts:
        """One row a response again, as an engine returns them."""
        rows = len(self) * sampling.n
        lengths = self.lengths.reshape(rows)
        longest = max(int(lengths.max()), 1) if rows else 1
        return Rollouts(
            response_ids=self.response_ids.reshape(rows, sampling.max_new_tokens)[:, :longest],
            lengths=lengths,
            logprobs=self.logprobs.reshape(rows, sampling.max_new_tokens)[:, :longest],
            finish_reasons=[reason for reasons in self.finish_reasons for reason in reasons],
            prompt_rows=torch.arange(rows, device=lengths.device) // sampling.n,
            weight_version=self.weight_version,
        )


def join_rollouts(
    prompts: PromptBatch,
    rollouts: Rollouts,
    tokenizer: PreTrainedTokenizerBase,
    sampling: SamplingParams,
    skip_special_tokens: bool,
    texts: Mapping[int, str] | None = None,
) -> RolloutBatch:
    """Join prompts and the responses that an engine sampled for them.

    Args:
        prompts: The prompts, B rows.
        rollouts: Their responses, N rows.
        tokenizer: Decodes the responses for rewards and people.
        sampling: How they were sampled.
        skip_special_tokens: Whether special tokens are left out of the text. The end token and padding always are.
        texts: The text of every response, by row, where it is known already.
    """
    device = rollouts.response_ids.device
    repeated = prompts.to(device).select(rollouts.prompt_rows)
    return RolloutBatch(
        input_ids=_join(repeated, rollouts.response_ids, rollouts.lengths),
        prompt_lengths=repeated.lengths,
        response_lengths=rollouts.lengths,
        rollout_logprobs=rollouts.logprobs,
        group_ids=repeated.indices,
        truncated=torch.tensor([r.is_truncated() for r in rollouts.finish_reasons], dtype=torch.bool, device=device),
        prompt_texts=repeated.texts,
        response_texts=[texts[row] for row in range(len(repeated))]
        if texts
        else _decode(rollouts.response_ids, rollouts.lengths, tokenizer, skip_special_tokens),
        fields=repeated.fields,
        temperature=sampling.temperature,
        weight_version=rollouts.weight_version,
    )


def no_rollouts(prompts: PromptBatch, temperature: float) -> RolloutBatch:
    """A rollout batch without rows, for ranks that have no part of the actor.

    Args:
        prompts: A prompt batch; its rows are left out.
        temperature: The temperature that the other ranks sample at.
    """
    none = prompts.lengths.new_zeros(0)
    return RolloutBatch(
        input_ids=none.new_zeros((0, 1)),
        prompt_lengths=none,
        response_lengths=none,
        rollout_logprobs=torch.zeros((0, 1), device=none.device),
        group_ids=none,
        truncated=none.bool(),
        prompt_texts=[],
        response_texts=[],
        fields=[],
        temperature=temperature,
    )


def demonstrations(prompts: PromptBatch, field: str, tokenizer: PreTrainedTokenizerBase) -> RolloutBatch:
    """Take the responses from a field of the data, on the CPU; the tokenizer's end token is added to each.

    Raises:
        ValueError: A row lacks the field, or it is no text.
    """
    prompts = prompts.to("cpu")  # everything is built there, and moved at once
    texts = []
    for index, row in zip(prompts.indices.tolist(), prompts.fields, strict=True):
        if not isinstance(row.get(field), str):
            raise ValueError(
                f"SFT wants a text in field {field!r} of every row; the row at place {index} of the stream has "
                f"{row.get(field)!r} (its fields: {sorted(row)}). Name the right field with SFT(response_field=...)."
            )
        texts.append(row[field])
    plain = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    ids = [[*row, int(tokenizer.eos_token_id)] for row in plain]
    lengths = torch.tensor([len(row) for row in ids], dtype=torch.int64)
    width = max(map(len, ids), default=1)
    responses = torch.tensor([row + [0] * (width - len(row)) for row in ids], dtype=torch.int64).reshape(-1, width)
    return RolloutBatch(
        input_ids=_join(prompts, responses, lengths),
        prompt_lengths=prompts.lengths,
        response_lengths=lengths,
        rollout_logprobs=torch.zeros(len(ids), width),
        group_ids=prompts.indices,
        truncated=torch.zeros(len(ids), dtype=torch.bool),
        prompt_texts=prompts.texts,
        response_texts=texts,
        fields=prompts.fields,
    )


def _join(prompts: PromptBatch, responses: Tensor, lengths: Tensor) -> Tensor:
    """Prompt and response of each row without a gap, int64 ``[N, T]``, 0 behind."""
    rows, width = prompts.ids.shape[0], prompts.ids.shape[1] + responses.shape[1]
    joined = responses.new_zeros((rows, width))
    columns = torch.arange(prompts.ids.shape[1], device=joined.device)
    joined[:, : prompts.ids.shape[1]] = prompts.ids.masked_fill(columns >= prompts.lengths[:, None], 0)
    produced = torch.arange(responses.shape[1], device=joined.device) < lengths[:, None]
    row, offset = produced.nonzero(as_tuple=True)
    joined[row, prompts.lengths[row] + offset] = responses[row, offset]
    longest = int((prompts.lengths + lengths).max()) if rows else 1
    return joined[:, :longest]


def _decode(ids: Tensor, lengths: Tensor, tokenizer: PreTrainedTokenizerBase, skip_special: bool) -> list[str]:
    rows = [row[:length] for row, length in zip(ids.tolist(), lengths.tolist(), strict=True)]
    return response_texts(rows, tokenizer, skip_special)


def response_texts(responses: Sequence[list[int]], tokenizer: PreTrainedTokenizerBase, skip_special: bool) -> list[str]:
    """The text of responses, without an end token at their end.

    Args:
        responses: Token ids without padding.
        tokenizer: Decodes them.
        skip_special: Whether other special tokens are left out too.
    """
    kept = [row[:-1] if row and row[-1] == tokenizer.eos_token_id else row for row in responses]
    # transformers decodes a list without rows to one empty text
    return list(tokenizer.batch_decode(kept, skip_special_tokens=skip_special)) if kept else []
