"""From token ids to hidden states, and from hidden states to logits, for any transformers causal model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from lightning_verl.models.attention import PackedSequence


def hidden_states(model: PreTrainedModel, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
    """The last hidden states, after the final norm.

    Rows are right-padded and attention is causal, so neither a mask nor position ids are needed: no real token sees
    padding.

    Args:
        model: A causal model, with or without a head.
        input_ids: int64 ``[B, T]``.
        position_ids: int64 ``[B, T]``; None counts from 0.

    Returns:
        ``[B, T, H]``.
    """
    output = model.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
    return output.last_hidden_state  # type: ignore[no-any-return]


def packed_states(model: PreTrainedModel, sequence: PackedSequence) -> Tensor:
    """The last hidden states of rows that lie side by side, after the final norm, ``[T, H]``.

    To be called while the model's attention is that of ``models.attention`` (``attention_named``), its backward pass
    too: layers that are recomputed run their attention again.

    Args:
        model: A causal model, with or without a head.
        sequence: The rows.
    """
    output = model.base_model(input_ids=sequence.ids, position_ids=sequence.positions, use_cache=False, packed=sequence)
    return output.last_hidden_state[0]  # type: ignore[no-any-return]


def output_logits(model: PreTrainedModel, hidden: Tensor, *, own_part: bool = False) -> Tensor:
    """The logits of hidden states, with the scaling or capping that some families put behind the head.

    Args:
        model: A model with a language-model head.
        hidden: ``[..., H]``.
        own_part: Of the tokens that this rank holds only, where a tensor axis cuts the head along the vocabulary.

    Returns:
        ``[..., V]``, or ``[..., tokens of this rank]``.
    """
    head = model.get_output_embeddings()
    logits: Tensor = _own_logits(head, hidden) if own_part else head(hidden)
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None)  # Cohere multiplies
    if scale is not None:
        logits = logits * scale
    divisor = getattr(config, "logits_scaling", None)  # Granite divides
    if divisor is not None:
        logits = logits / divisor
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2 and 3
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    return logits


def _own_logits(head: Any, hidden: Tensor) -> Tensor:
    bias = None if head.bias is None else head.bias.to_local()
    return functional.linear(hidden, head.weight.to_local(), bias)
