"""Log-probs and entropies of tokens, at the temperature that they are sampled with.

Logits are divided by the temperature *before* the softmax; rollout, old, new and reference log-probs must share it.
V is the size of the vocabulary, H the width of the hidden states.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_verl.models.fused_logprobs import TokenFigures

if TYPE_CHECKING:
    from lightning_verl.parallel.vocabulary import VocabularyShard

Head = Tensor | Callable[[Tensor], Tensor]


def logprobs_from_logits(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the log-prob of each target token, never above 0.

    Args:
        logits: ``[..., V]``, any float dtype; the softmax is computed in float32 (float64 for float64 logits).
        targets: Token ids in 0..V-1, int64 ``[...]``; padding too needs an id in that range.
        temperature: What the logits are divided by; 0 (greedy sampling) counts as 1.

    Returns:
        Log-probs ``[...]``, float32 (float64 for float64 logits).

    Raises:
        ValueError: Shapes do not fit, or ``temperature`` is negative or not finite.
    """
    _check_targets("logprobs_from_logits", logits, targets)
    return _pick(_log_softmax(logits, temperature), targets)


def entropy_from_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the entropy of each token's distribution, in nats.

    Args:
        logits: ``[..., V]``, any float dtype; entries may be -inf (probability 0).
        temperature: What the logits are divided by; 0 (greedy sampling) counts as 1.

    Returns:
        Entropies ``[...]``, float32 (float64 for float64 logits).

    Raises:
        ValueError: ``temperature`` is negative or not finite.
    """
    return _entropy(_log_softmax(logits, temperature))


def logprobs_from_hidden(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    chunk_size: int = 1024,
    with_entropy: bool = False,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs (and entropies) straight from hidden states, without ever holding the logits of all tokens.

    The head is applied to ``chunk_size`` tokens at a time. Where gradients are on, a chunk's logits are dropped after
    use and computed again in the backward pass. On CUDA what follows the head is compiled. Values and gradients are
    those of ``logprobs_from_logits(head(hidden), targets, temperature)``.

    Args:
        hidden: Last hidden states, ``[..., H]``.
        head: The head's weight ``[V, H]``, in the dtype of ``hidden``, or a callable from ``[n, H]`` to logits
            ``[n, V]``.
        targets: Token ids in 0..V-1, int64 ``[...]``.
        temperature: What the logits are divided by; 0 (greedy sampling) counts as 1.
        chunk_size: Tokens whose logits live at once.
        with_entropy: Also return the entropies.
        shard: Which part of the vocabulary the head gives the logits of, where ranks share it out; all of them make
            this call together, with equal hidden states and targets, and get equal results. None: all of it.

    Returns:
        Log-probs ``[...]``, and entropies ``[...]`` or None; float32 (float64 for float64 logits).

    Raises:
        ValueError: Shapes do not fit, ``chunk_size`` is below 1, or ``temperature`` is negative or not finite.
    """
    _check_targets("logprobs_from_hidden", hidden, targets)
    if chunk_size < 1:
        raise ValueError(f"logprobs_from_hidden: chunk_size={chunk_size} tokens, but it must be at least 1.")

    def score(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        logits = F.linear(hidden, head) if isinstance(head, Tensor) else head(hidden)
        return _score(logits, targets, temperature, with_entropy, shard)

    def score_without_keeping(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        if not torch.is_grad_enabled():
            return score(hidden, targets)
        scored: tuple[Tensor, Tensor | None] = checkpoint(score, hidden, targets, use_reentrant=False)
        return scored

    if shard is not None:
        hidden = shard.shared(hidden)
    # Empty input makes one empty chunk, which keeps the result connected to the graph.
    vectors = hidden.reshape(targets.numel(), hidden.shape[-1])
    chunks = zip(torch.split(vectors, chunk_size), torch.split(targets.flatten(), chunk_size), strict=True)
    picked, entropies = zip(*(score_without_keeping(*chunk) for chunk in chunks), strict=True)
    entropy = torch.cat(entropies).view(targets.shape) if with_entropy else None
    return torch.cat(picked).view(targets.shape), entropy


def _score(
    logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool, shard: VocabularyShard | None
) -> tuple[Tensor, Tensor | None]:
    if logits.is_cuda or shard is not None:
        scored: tuple[Tensor, Tensor] = TokenFigures.apply(  # type: ignore[no-untyped-call]
            logits, targets, 1 / _divisor(temperature), shard
        )
        return scored if with_entropy else (scored[0], None)
    log_probs = _log_softmax(logits, temperature)
    return _pick(log_probs, targets), _entropy(log_probs) if with_entropy else None


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    divisor = _divisor(temperature)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if divisor == 1:
        return F.log_softmax(logits, dim=-1, dtype=dtype)  # converts and sums in one kernel, without a copy in between
    return F.log_softmax(logits.to(dtype) / divisor, dim=-1)


def _divisor(temperature: float) -> float:
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(
            f"log-probs: temperature={temperature}, but it must be finite and at least 0; 0 is greedy and counts as 1."
        )
    return temperature or 1.0


def _pick(log_probs: Tensor, targets: Tensor) -> Tensor:
    return log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def _entropy(log_probs: Tensor) -> Tensor:
    # Probability 0 contributes 0, but 0 * -inf would be NaN.
    finite = log_probs.clamp(min=torch.finfo(log_probs.dtype).min)
    return -(log_probs.exp() * finite).sum(dim=-1)


def _check_targets(caller: str, source: Tensor, targets: Tensor) -> None:
    if source.dim() < 1 or source.shape[:-1] != targets.shape:
        raise ValueError(
            f"{caller}: targets has shape {tuple(targets.shape)}, but the first argument {tuple(source.shape)} needs "
            f"one target for each vector of its last dim, {tuple(source.shape[:-1])}; shift or slice them alike."
        )
