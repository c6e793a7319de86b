"""What engines that run the trainer's own model check before they start, and how they hand over what they sampled."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_verl.data.experience import PromptBatch
from lightning_verl.data.transfer import float32, int64, to_device
from lightning_verl.rollout.base import FinishReason, Rollouts
from lightning_verl.rollout.sampling import SamplingParams


def token_lists(engine: str, prompts: PromptBatch | Sequence[Sequence[int]]) -> list[list[int]]:
    """The token ids of prompts, without padding.

    Args:
        engine: The engine's class, for the message.
        prompts: A prompt batch, or one list of token ids for each prompt.

    Raises:
        ValueError: A prompt is no list of integers.
    """
    if isinstance(prompts, PromptBatch):
        return prompts.token_lists()
    rows: list[list[int]] = []
    for row in prompts:
        try:
            rows.append(_integers(row))
        except TypeError:
            raise ValueError(
                f"{engine}.generate: prompt {len(rows)} is {reprlib.repr(row)}; prompts must be lists of token ids, "
                "one list for each, such as [[1, 5, 9], [1, 7]]. Put a single prompt into a list of its own, and turn "
                "text into ids with the tokenizer."
            ) from None
    return rows


def indices_of(engine: str, prompts: PromptBatch | Sequence[Sequence[int]], given: Sequence[int] | None) -> Tensor:
    """The indices of prompts, int64 ``[B]``: those given, those of the batch, or 0, 1, 2...

    Args:
        engine: The engine's class, for the message.
        prompts: B prompts.
        given: One for each, or None.

    Raises:
        ValueError: As many indices as prompts are wanted, and integers.
    """
    if given is None:
        return prompts.indices if isinstance(prompts, PromptBatch) else torch.arange(len(prompts))
    if len(given) != len(prompts):
        raise ValueError(
            f"{engine}.generate: got {len(given)} prompt_indices for {len(prompts)} prompts; give one for each."
        )
    try:
        return int64(_integers(given))
    except TypeError:
        raise ValueError(
            f"{engine}.generate: prompt_indices are {reprlib.repr(given)}; they must be integers, such as "
            f"{list(range(len(prompts)))[:3]}: the random numbers of a prompt are made of its index."
        ) from None


def _integers(values: Any) -> list[int]:
    """Numbers of a list, an array or a tensor; a ``TypeError`` where one is no integer, which ``int`` would cut."""
    return list(map(operator.index, values.tolist() if isinstance(values, Tensor) else values))


def check_lengths(
    engine: str,
    config: Any,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    limit_name: str = "max_position_embeddings",
) -> None:
    """Check that every prompt has a token, and room for its response in the model.

    Args:
        engine: The engine's class, for the message.
        config: The model's, or what else has the limit.
        prompts: Token ids.
        sampling: Gives ``max_new_tokens``.
        limit_name: The attribute of ``config`` with the most tokens of prompt and response together.

    Raises:
        ValueError: A prompt is empty or too long.
    """
    limit: int | None = getattr(config, limit_name, None)
    for row, tokens in enumerate(prompts):
        if not tokens:
            raise ValueError(
                f"{engine}.generate: prompt {row} is empty; every prompt needs at least one token, such as the "
                "begin-of-text token."
            )
        length = len(tokens) + sampling.max_new_tokens
        if limit is not None and length > limit:
            raise ValueError(
                f"{engine}.generate: prompt {row} has {len(tokens)} tokens, with max_new_tokens "
                f"({sampling.max_new_tokens}) that is {length}, but the model has {limit_name}={limit}; "
                "shorten the prompt or lower max_new_tokens."
            )


def check_tokens(engine: str, config: Any, prompts: Sequence[Sequence[int]]) -> None:
    """Check that the model has an embedding for every token: on a GPU a look-up beyond them ends the process.

    Args:
        engine: The engine's class, for the message.
        config: The model's.
        prompts: Token ids, at least one each.

    Raises:
        ValueError: A token is out of the vocabulary.
    """
    vocabulary = int(config.get_text_config().vocab_size)
    for row, tokens in enumerate(prompts):
        if min(tokens) < 0 or max(tokens) >= vocabulary:
            wrong = next(token for token in tokens if not 0 <= token < vocabulary)
            raise ValueError(
                f"{engine}.generate: prompt {row} has the token id {wrong}, but the model's vocabulary has "
                f"{vocabulary} tokens, so ids go from 0 to {vocabulary - 1}. If tokens were added to the tokenizer, "
                "call model.resize_token_embeddings(len(tokenizer)) before the model is given to its role."
            )


@contextmanager
def starting_together(engine: str, group: dist.ProcessGroup | None, device: torch.device) -> Iterator[None]:
    """Let a ``ValueError`` of this rank stop the others too: they would wait for it in the first step.

    Args:
        engine: The engine's class, for the message.
        group: The ranks that step together; None if there are no others.
        device: Of the group's tensors.

    Raises:
        RuntimeError: Another rank had one.
    """
    problem: ValueError | None = None
    try:
        yield
    except ValueError as error:
        problem = error
    if group is not None:
        refused = torch.tensor([int(problem is not None)], device=device)
        dist.all_reduce(refused, group=group)
        if problem is None and refused.item():
            raise RuntimeError(f"{engine}.generate: another rank of the step group refused its prompts.")
    if problem is not None:
        raise problem


def rollouts_of(
    responses: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    reasons: Sequence[FinishReason],
    n: int,
    *,
    pad_token_id: int,
    weight_version: int,
    device: torch.device,
) -> Rollouts:
    """Put responses of unequal length into tensors.

    Args:
        responses: N token lists, the n of one prompt adjacent.
        logprobs: The log-prob of each token.
        reasons: Why each ended.
        n: Samples for each prompt.
        pad_token_id: Fills the right of short responses.
        weight_version: Of the weights that sampled them.
        device: Where the tensors go.
    """
    width = max(map(len, responses), default=1)
    ids = [[*row, *[pad_token_id] * (width - len(row))] for row in responses]
    values = [[*row, *[0.0] * (width - len(row))] for row in logprobs]
    return Rollouts(
        response_ids=to_device(int64(ids).reshape(-1, width), device),
        lengths=to_device(int64([len(row) for row in responses]), device),
        logprobs=to_device(float32(values).reshape(-1, width), device),
        finish_reasons=list(reasons),
        prompt_rows=torch.arange(len(responses), device=device) // n,
        weight_version=weight_version,
    )


def refuse_weights(engine: str, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
    """Take no weights, as an engine that runs the trainer's own module does.

    Args:
        engine: The engine's class, for the message.
        weights: Must be empty.
        version: Their version, for the message.

    Raises:
        ValueError: There are weights.
    """
    for name, _ in weights:
        raise ValueError(
            f"{engine} shares the trainer's weights, so it takes none, but got {name!r} for version {version}; update "
            "the model itself and pass no weights."
        )
