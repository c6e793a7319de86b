"""Attention over the blocks of the cache, in the place of every attention layer of a transformers model.

transformers lets a name stand for an attention function (``config._attn_implementation``). Ours stores the new keys and
values in the cache and attends to all of a sequence's. Rotary embeddings, norms and grouped heads stay the model's own
business. The tokens of all sequences of a step stand in one row, one after the other.

Shape letters: T tokens of a step, S sequences, H heads, K key-value heads, D head dim, W blocks of a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from lightning_verl.models.attention import attention_named, unknown_inputs
from lightning_verl.models.block_attention import attend
from lightning_verl.rollout.native.cache import as_bytes

NAME = "lightning_verl_paged"
"""The name of the attention function in ``config._attn_implementation``."""


@dataclass
class Rows:
    """Sequences of a step that are attended to together, on the CPU. G of them, with at most Q tokens each."""

    places: Tensor
    """Where the tokens stand in the step, int64 ``[G, Q]``; padding repeats the last."""
    positions: Tensor
    """Their positions in their sequences, int64 ``[G, Q]``."""
    tables: Tensor
    """The blocks of the sequences, int64 ``[G, W]``."""
    masks: dict[int, Tensor] = field(default_factory=dict)
    """By sliding window (0 for none): which cached tokens a token sees, bool ``[G, 1, Q, W x block_size]``."""

    def mask(self, window: int, block_size: int) -> Tensor:
        """Make it on first use: all layers with the same window share it."""
        if window not in self.masks:
            keys = torch.arange(self.tables.shape[1] * block_size, device=self.tables.device)
            seen = keys <= self.positions[..., None]
            if window:
                seen &= keys > self.positions[..., None] - window
            self.masks[window] = seen[:, None]
        return self.masks[window]


@dataclass
class PagedBatch:
    """What attention needs to know about the tokens of one step."""

    cache: Tensor
    """``KVCache.data``."""
    blocks: Tensor | None = None
    """The block that each token is stored in, int64 ``[T]``; not needed where a GPU only decodes."""
    offsets: Tensor | None = None
    """Its place there, int64 ``[T]``."""
    rows: tuple[Rows, ...] = ()
    """How the CPU divides the step."""
    tiles: Any = None
    """How the GPU kernel divides it (``kernels.Tiles``)."""


@dataclass(frozen=True)
class SeenLayer:
    """What an attention layer computed when the model was run to find out."""

    index: int
    heads: int
    head_dim: int
    dtype: torch.dtype


class _Current:
    """What the attention function works on, set by ``attending``; one at a time in a process."""

    batch: PagedBatch | None = None
    probe: list[SeenLayer] | None = None


@contextmanager
def attending(batch: PagedBatch) -> Iterator[None]:
    """Let the model's forward read and write the cache by this batch."""
    _Current.batch = batch
    try:
        yield
    finally:
        _Current.batch = None


@contextmanager
def probing() -> Iterator[list[SeenLayer]]:
    """Let the model's forward tell which keys its layers compute; tokens see nothing but themselves meanwhile."""
    _Current.probe = []
    try:
        yield _Current.probe
    finally:
        _Current.probe = None


@contextmanager
def paged_attention(model: PreTrainedModel) -> Iterator[None]:
    """Have every attention layer of a model use the cache, and put back what was there."""
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "layer_idx")]
    try:
        for module in modules:
            module.kv_layer = _layer_tensor(int(module.layer_idx))
        with attention_named(model, NAME):
            yield
    finally:
        for module in modules:
            vars(module).pop("kv_layer", None)  # an interrupt may have come before all had theirs


_LAYER_TENSORS: list[Tensor] = []


def _layer_tensor(index: int) -> Tensor:
    """A layer's number as a tensor: a compiled layer takes it as an input and is compiled once, not once a layer."""
    while len(_LAYER_TENSORS) <= index:
        _LAYER_TENSORS.append(torch.tensor(len(_LAYER_TENSORS)))
    return _LAYER_TENSORS[index]


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: query ``[1, H, T, D]``, key and value ``[1, K, T, D]``; returns ``[1, T, H, D]``."""
    if _Current.probe is not None:
        _check_layer(module, key, value, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = torch.ops.lightning_verl.paged_attention(
        query, key, value, module.kv_layer, scale, sliding_window or 0, softcap or 0.0
    )
    return output, None


def _check_layer(module: nn.Module, key: Tensor, value: Tensor, others: Mapping[str, Any]) -> None:
    if problem := unknown_inputs(key, value, others):
        raise ValueError(
            f"NativeEngine: {type(module).__name__} {problem}, which the cache of blocks does not do. "
            "Use engine='transformers'."
        )


# A custom operator, so that torch.compile takes it as a whole. It says nothing of the cache that it changes: nothing
# else in a compiled layer reads it, and its output keeps it in order.
@torch.library.custom_op("lightning_verl::paged_attention", mutates_args=())
def _paged_attention(
    query: Tensor, key: Tensor, value: Tensor, layer: Tensor, scaling: float, window: int, softcap: float
) -> Tensor:
    index = int(layer)
    if _Current.probe is not None:
        _Current.probe.append(SeenLayer(index, key.shape[1], key.shape[3], key.dtype))
        return query.transpose(1, 2).clone()
    batch = _Current.batch
    if batch is None:
        raise RuntimeError(f"The attention {NAME!r} works inside NativeEngine.generate only.")
    keys, values = batch.cache[index]
    if query.is_cuda:
        from lightning_verl.rollout.native.kernels import attend_on_gpu

        return attend_on_gpu(query[0], key[0], value[0], keys, values, batch, index, scaling, window, softcap)
    for cached, new in ((keys, key), (values, value)):  # as bytes where need be: float8 has no index operations
        as_bytes(cached)[batch.blocks, :, batch.offsets] = as_bytes(new[0].transpose(0, 1).to(cached.dtype))
    output = query.new_zeros(query.shape[2], query.shape[1], query.shape[3])  # padding belongs to no sequence
    for rows in batch.rows:
        output[rows.places] = _attend(query[0], keys, values, rows, scaling, window, softcap)
    return output[None]


@_paged_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, layer: Tensor, scaling: float, window: int, softcap: float) -> Tensor:
    batch, heads, tokens, size = query.shape
    return query.new_empty(batch, tokens, heads, size)


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, rows: Rows, scaling: float, window: int, softcap: float
) -> Tensor:
    """Attention of some sequences with plain torch: ``[G, Q, H, D]``."""
    mask = rows.mask(window, keys.shape[2])
    queries = query[:, rows.places].movedim(0, 1)  # [G, H, Q, D]
    own_keys, own_values = (  # [G, K, W x block, D]
        as_bytes(cached)[rows.tables].view(cached.dtype).to(query.dtype).transpose(1, 2).flatten(2, 3)
        for cached in (keys, values)
    )
    # Where nobody looks, an earlier user of the block may have left NaN, and 0 x NaN is NaN.
    unseen = ~mask.any(2)[..., None]
    own_keys, own_values = own_keys.masked_fill_(unseen, 0), own_values.masked_fill_(unseen, 0)
    output = attend(queries, own_keys, own_values, mask, scaling, softcap)
    return output.transpose(1, 2)


AttentionInterface.register(NAME, _forward)
