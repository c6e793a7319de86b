"""Attention over rows that lie side by side in one sequence, and how it takes the place of a model's own.

transformers lets a name stand for an attention function (``config._attn_implementation``) and hands it what the model's
forward is given by name. Rotary embeddings, norms and grouped heads stay the model's own business.

Shape letters: T tokens of the sequence, H heads, K key-value heads, D head dim, S runs of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from lightning_verl.data.packed_rows import PackedRows, Run
from lightning_verl.data.transfer import to_device
from lightning_verl.models.block_attention import BlockPlan, attend_blocks
from lightning_verl.models.compat import varlen_attention

NAME = "lightning_verl_packed"
"""The name of the attention function in ``config._attn_implementation``."""

_LAYERS = {"full_attention", "sliding_attention"}
_NOT_OURS = ("s_aux", "position_bias", "indices", "block_indices")
"""What some models give their attention besides: sinks, biases, the keys of sparse attention."""


@contextmanager
def attention_named(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Have every attention layer of a model use the function of a name, and put back what was there."""
    owners: list[Any] = [module for module in model.modules() if hasattr(module, "config")]
    configs = {id(owner.config): owner.config for owner in owners}
    before = {key: config._attn_implementation for key, config in configs.items()}
    try:
        for config in configs.values():
            config._attn_implementation = name
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]


def attention_problem(model: Any) -> str | None:
    """Why a model's attention cannot be replaced by a function of ours; None if it can."""
    config = getattr(model, "config", None)
    if config is None or getattr(config, "is_encoder_decoder", False):
        return "it is not a causal language model of transformers"
    if not getattr(model, "_supports_attention_backend", False):
        return "its attention does not go through the attention interface of transformers"
    config = config.get_text_config()
    others = set(getattr(config, "layer_types", None) or ()) - _LAYERS
    if others:
        return f"its layers are of the types {sorted(others)}, not only {sorted(_LAYERS)}"
    if getattr(config, "use_bidirectional_attention", False):
        return "its attention is not causal"
    return None


def unknown_inputs(key: Tensor, value: Tensor, others: Mapping[str, Any]) -> str:
    """What an attention layer gives its function that ours do not take; empty if nothing."""
    given = [name for name in _NOT_OURS if others.get(name) is not None]
    if key.shape != value.shape:
        return f"has keys of {key.shape[-1]} and values of {value.shape[-1]} numbers a head"
    return f"gives its attention {', '.join(given)}" if given else ""


class PackedSequence:
    """Token ids of a micro-batch in one sequence, and what attention must know of it.

    Args:
        input_ids: The rows, right-padded, int64 ``[N, width]``.
        rows: How they lie in the sequence, on the same device.
    """

    def __init__(self, input_ids: Tensor, rows: PackedRows) -> None:
        self.ids = input_ids.flatten()[rows.source][None] if input_ids.numel() else rows.source[None]
        """int64 ``[1, T]``."""
        self.positions = rows.positions[None]
        """int64 ``[1, T]``."""
        runs, device = rows.runs, self.ids.device
        self.runs = torch.tensor([n for run in runs for n in (run.start, run.count, run.prefix, run.prefix_start)])
        """The runs as numbers, on the CPU, int64 ``[4 S]``."""
        counts, seen = [run.count for run in runs], [run.seen for run in runs]
        self.longest, self.longest_seen = max(counts), max(seen)
        self.starts = to_device(torch.tensor([0, *accumulate(counts)], dtype=torch.int32), device)
        """Where each run starts, and the end of the last, int32 ``[S + 1]``."""
        self.seen_starts = to_device(torch.tensor([0, *accumulate(seen)], dtype=torch.int32), device)
        """The same of the tokens that the runs see, one run's after the other's."""
        self.seen: Tensor | None = None
        """Where those lie, int64; None: the runs see themselves only."""
        if any(run.prefix for run in runs):
            self.seen = to_device(torch.cat([_seen(run) for run in runs]), device)

    @cached_property
    def plan(self) -> BlockPlan:
        """The runs for plain torch."""
        return BlockPlan(self.runs, self.ids.device)


def _seen(run: Run) -> Tensor:
    own = torch.arange(run.start, run.start + run.count)
    return torch.cat([torch.arange(run.prefix_start, run.prefix_start + run.prefix), own])


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    packed: PackedSequence | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: query ``[1, H, T, D]``, key and value ``[1, K, T, D]``; returns ``[1, T, H, D]``."""
    if packed is None:
        raise RuntimeError(
            f"The attention {NAME!r} works on the rows that models.heads.packed_states runs only. Let the role run its "
            "model through Role.response_states, or use HybridDataFlow(packing='padded')."
        )
    if problem := unknown_inputs(key, value, kwargs):
        raise ValueError(
            f"{type(module).__name__} {problem}, which attention without padding does not do. "
            "Use HybridDataFlow(packing='padded')."
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    queries, keys, values = (states[0].transpose(0, 1) for states in (query, key, value))  # [T, heads, D]
    if _has_kernel(query) and not softcap:
        if packed.seen is not None:
            keys, values = keys.index_select(0, packed.seen), values.index_select(0, packed.seen)
        output = varlen_attention(
            queries,
            keys,
            values,
            (packed.starts, packed.seen_starts),
            (packed.longest, packed.longest_seen),
            scale,
            sliding_window,
        )
        return output[None], None
    window, cap = sliding_window or 0, softcap or 0.0
    if torch.compiler.is_compiling():
        output = torch.ops.lightning_verl.block_attention(queries, keys, values, packed.runs, scale, window, cap)
    else:
        output = attend_blocks(queries, keys, values, packed.plan, scale, window, cap)
    return output[None], None


def _has_kernel(query: Tensor) -> bool:
    """Whether torch's attention over sequences of unequal length takes these queries."""
    size = query.shape[-1]  # under FSDP2 a symbol while a layer is compiled, which a range cannot be asked for
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and size % 8 == 0 and 8 <= size <= 256


AttentionInterface.register(NAME, _forward)
