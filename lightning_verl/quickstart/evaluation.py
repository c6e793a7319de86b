"""How good a policy is: its greedy answers to prompts that training never saw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing

import torch

from lightning_verl.data.prompts import AsyncRolloutDataset
from lightning_verl.dataflow import HybridDataFlow
from lightning_verl.rollout.sampling import SamplingParams


def greedy_accuracy(dataflow: HybridDataFlow, rows: Sequence[Mapping[str, str]], *, max_new_tokens: int) -> float:
    """Let the actor answer greedily, through the engine that rolls out, and compare with the right answers.

    A collective call: each data rank answers its share of the prompts.

    Args:
        dataflow: The roles, set up.
        rows: Rows with a ``prompt`` and an ``answer``.
        max_new_tokens: Longest answer, the end token included.

    Returns:
        The share of answers that are right to the character, in [0, 1], the same on every rank.
    """
    strategy = dataflow.strategy
    share = range(strategy.data_rank("actor"), len(rows), strategy.layout("actor").data_size)
    data = AsyncRolloutDataset(rows, tokenizer=dataflow.tokenizer, shuffle=False, epochs=1, prefetch_factor=0)
    with closing(data.loader(len(rows), share)) as loader:
        prompts = next(iter(loader)).to(dataflow.fabric.device)
    batch = dataflow.rollout(prompts, SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0), step=0)
    answers = zip(batch.response_texts, batch.fields, strict=True)
    right = sum(response == fields["answer"] for response, fields in answers)
    # The ranks of a tensor axis count the same rows, which leaves the ratio as it is.
    counts = torch.tensor([right, len(batch)], dtype=torch.float64, device=dataflow.fabric.device)
    total_right, total = torch.as_tensor(dataflow.fabric.all_reduce(counts, reduce_op="sum")).tolist()
    return float(total_right / total)
