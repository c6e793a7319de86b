"""Attention over runs of tokens of one sequence in plain torch: for a CPU, for fp32, and for capped scores.

Shape letters: T tokens of the sequence, H heads, K key-value heads, D head dim, S runs, G runs of a block, each
padded to Q tokens that see up to L.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lightning_verl.data.transfer import to_device


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float, softcap: float = 0.0) -> Tensor:
    """Attention with a mask and grouped heads, in plain torch.

    Args:
        queries: ``[G, H, Q, D]``.
        keys: ``[G, K, L, D]``.
        values: ``[G, K, L, D]``.
        mask: Which keys a query sees, at least one, bool ``[G, 1, Q, L]``.
        scaling: What scores are multiplied by.
        softcap: Scores ``x`` become ``softcap * tanh(x / softcap)``; 0: they stay.

    Returns:
        ``[G, H, Q, D]``.
    """
    if not softcap:
        return functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=scaling, enable_gqa=True
        )
    group = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = softcap * torch.tanh(queries @ keys.transpose(2, 3) * (scaling / softcap))
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values


@dataclass(frozen=True)
class _Block:
    """Runs that are attended to together with plain torch: G of them, padded to Q tokens that see up to L."""

    queries: Tensor
    """Where their tokens lie, int64 ``[G x Q]``; padding repeats the last of a run."""
    keys: Tensor
    """Where the tokens lie that they see, int64 ``[G x L]``."""
    last_seen: Tensor
    """The place of a query among the keys of its run, int64 ``[G, 1, Q, 1]``."""
    masks: dict[int, Tensor]
    """By sliding window (0 for none): which keys a query sees, bool ``[G, 1, Q, L]``."""

    def mask(self, window: int) -> Tensor:
        """Make it on first use: all layers with the same window share it."""
        if window not in self.masks:
            places = torch.arange(self.keys.numel() // self.last_seen.shape[0], device=self.keys.device)
            seen = places <= self.last_seen
            if window:
                seen &= places > self.last_seen - window
            self.masks[window] = seen
        return self.masks[window]


class BlockPlan:
    """How runs are attended to: which of them together, and where their tokens lie.

    Args:
        runs: Start, count, prefix and start of the prefix of each, run after run, on the CPU, int64 ``[4 S]``.
        device: Where the sequence is.
    """

    def __init__(self, runs: Tensor, device: torch.device) -> None:
        rows = runs.view(-1, 4)
        # Those that see themselves only, and those that go on from a prompt: so little of a block is padding.
        parts = [part for part in (rows[rows[:, 2] == 0], rows[rows[:, 2] > 0]) if len(part)]
        self.blocks = tuple(_block(part, device) for part in parts)
        places = torch.empty(int(rows[:, 1].sum()), dtype=torch.int64)
        first = 0
        for part in parts:
            longest = int(part[:, 1].max())
            for start, count, _, _ in part.tolist():
                places[start : start + count] = torch.arange(first, first + count)
                first += longest
        self.places = to_device(places, device)
        """Where the output of each token lies among those of the blocks, int64 ``[T]``."""


def _block(runs: Tensor, device: torch.device) -> _Block:
    starts, counts, prefixes, prefix_starts = runs.T[..., None]
    offsets = torch.arange(int(counts.max())).minimum(counts - 1)
    keys = torch.arange(int((prefixes + counts).max())).minimum(prefixes + counts - 1)
    places = torch.where(keys < prefixes, prefix_starts + keys, starts + keys - prefixes)
    return _Block(
        queries=to_device((starts + offsets).flatten(), device),
        keys=to_device(places.flatten(), device),
        last_seen=to_device((prefixes + offsets)[:, None, :, None], device),
        masks={},
    )


def attend_blocks(
    queries: Tensor, keys: Tensor, values: Tensor, plan: BlockPlan, scaling: float, window: int, softcap: float
) -> Tensor:
    """Attention over the runs of a sequence.

    Args:
        queries: ``[T, H, D]``.
        keys: ``[T, K, D]``.
        values: ``[T, K, D]``.
        plan: The runs.
        scaling: What scores are multiplied by.
        window: Tokens that one sees, itself included; 0: all.
        softcap: See :func:`attend`.

    Returns:
        ``[T, H, D]``.
    """
    parts = []
    for block in plan.blocks:
        own, seen = block.queries, block.keys
        padded = [
            states.index_select(0, places).view(block.last_seen.shape[0], -1, *states.shape[1:]).transpose(1, 2)
            for states, places in ((queries, own), (keys, seen), (values, seen))
        ]
        output = attend(padded[0], padded[1], padded[2], block.mask(window), scaling, softcap)
        parts.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts).index_select(0, plan.places)


# The same as one operator, for compiled layers: they take the runs as numbers in a tensor, of which the compiler knows
# nothing, and are not compiled anew for each micro-batch. Its gradient runs the attention again and keeps no scores.
@torch.library.custom_op("lightning_verl::block_attention", mutates_args=())
def _operator(
    queries: Tensor, keys: Tensor, values: Tensor, runs: Tensor, scaling: float, window: int, softcap: float
) -> Tensor:
    return attend_blocks(queries, keys, values, _plan(runs, queries.device), scaling, window, softcap)


@torch.library.custom_op("lightning_verl::block_attention_backward", mutates_args=())
def _backward(
    gradient: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    runs: Tensor,
    scaling: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    plan = _plan(runs, queries.device)
    attention = partial(attend_blocks, plan=plan, scaling=scaling, window=window, softcap=softcap)
    gradients = torch.func.vjp(attention, queries, keys, values)[1]
    return tuple(each.contiguous() for each in gradients(gradient))


@_operator.register_fake
def _(queries: Tensor, *others: Any) -> Tensor:
    return queries.new_empty(queries.shape)


@_backward.register_fake
def _(gradient: Tensor, queries: Tensor, keys: Tensor, values: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return tuple(states.new_empty(states.shape) for states in (queries, keys, values))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.numbers = inputs[4:]


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    operator = torch.ops.lightning_verl.block_attention_backward
    return (*operator(gradient, *ctx.saved_tensors, *ctx.numbers), None, None, None, None)


_operator.register_autograd(_gradients, setup_context=_save)


def _plan(runs: Tensor, device: torch.device) -> BlockPlan:
    return _plan_of(runs.numpy().tobytes(), device)


@lru_cache(maxsize=2)  # all layers of a micro-batch share one
def _plan_of(runs: bytes, device: torch.device) -> BlockPlan:
    return BlockPlan(torch.frombuffer(bytearray(runs), dtype=torch.int64), device)
