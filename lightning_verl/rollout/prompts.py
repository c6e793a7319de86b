"""Prompts as engines take them: lists of token ids, each with an index, each short enough."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_verl.data.experience import PromptBatch
from lightning_verl.rollout.sampling import SamplingParams


def token_lists(prompts: PromptBatch | Sequence[Sequence[int]]) -> list[list[int]]:
    """The token ids of each prompt."""
    return prompts.token_lists() if isinstance(prompts, PromptBatch) else [list(row) for row in prompts]


def seed_indices(owner: str, prompts: PromptBatch | Sequence[Sequence[int]], given: Sequence[int] | None) -> Tensor:
    """The index of each prompt, for the seeds, int64 ``[B]``.

    Args:
        owner: The engine's class name, for messages.
        prompts: The prompts.
        given: What the caller gave; None takes ``PromptBatch.indices``, or 0, 1, 2... for plain lists.

    Raises:
        ValueError: There are more or fewer indices than prompts.
    """
    if given is None:
        return prompts.indices if isinstance(prompts, PromptBatch) else torch.arange(len(prompts))
    if len(given) != len(prompts):
        raise ValueError(
            f"{owner}.generate: got {len(given)} prompt_indices for {len(prompts)} prompts; give one for each."
        )
    return torch.as_tensor(given, dtype=torch.int64)


def check_lengths(
    owner: str, prompts: Sequence[Sequence[int]], sampling: SamplingParams, limit: int | None, limit_name: str
) -> None:
    """Refuse prompts that are empty or leave too little room for a response.

    Args:
        owner: The engine's class name, for messages.
        prompts: Token ids.
        sampling: Gives ``max_new_tokens``.
        limit: Most tokens of prompt and response together; None is no limit.
        limit_name: What the limit is called.

    Raises:
        ValueError: A prompt is.
    """
    for row, tokens in enumerate(prompts):
        if not tokens:
            raise ValueError(
                f"{owner}.generate: prompt {row} is empty; every prompt needs at least one token, such as the "
                "begin-of-text token."
            )
        if limit is not None and len(tokens) + sampling.max_new_tokens > limit:
            raise ValueError(
                f"{owner}.generate: prompt {row} has {len(tokens)} tokens, with max_new_tokens "
                f"({sampling.max_new_tokens}) that is {len(tokens) + sampling.max_new_tokens}, but the model has "
                f"{limit_name}={limit}; shorten the prompt or lower max_new_tokens."
            )
