"""Log-probs and entropies from logits, whole or a rank's part of them: on CUDA compiled, without fp32 copies of them.

Shape letters: n tokens, V logits of a token on this rank. With ``x`` the logits over the temperature, ``p`` their
softmax, ``m`` the largest of ``x`` and ``s = sum(exp(x - m))``: ``log p(t) = x[t] - m - log s`` and ``entropy =
log s - sum(exp(x - m) (x - m)) / s``; so, by hand, ``d log p(t) / dx = onehot(t) - p`` and ``d entropy / dx =
-p (log p + entropy)``. Where ranks share the vocabulary out, ``m`` and the sums are over all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from lightning_verl.parallel.vocabulary import VocabularyShard

_NO_MASS = -1e4
"""An ``x - m`` whose exponential is exactly 0, also in float64; -inf would make NaN of 0 x -inf."""


class TokenFigures(torch.autograd.Function):
    """``apply(logits, targets, scale, shard=None)`` returns log-probs, never above 0, and entropies, both ``[n]``.

    Logits ``[n, V]`` of any float dtype are multiplied by ``scale`` (one over the temperature) in float32 (float64 for
    float64 logits). With a ``shard`` they are its part of the vocabulary, targets are ids of the whole one, equal on
    all ranks, and the call is a collective one of its group, with equal results on all of them. All that waits for the
    backward pass is the logits and a few numbers a token; gradients are in the dtype of the logits.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, scale: float, shard: VocabularyShard | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run one kernel over the logits, or two with collectives in between."""
        device = logits.device.type
        if shard is None:
            here = None
            largest, *figures = _kernel(_whole, device)(logits, targets, scale)
        else:
            targets, here = shard.place(targets, logits.shape[1])
            largest = _kernel(_largest, device)(logits, scale)
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=shard.group)
            sums = torch.stack(_kernel(_sums, device)(logits, targets, scale, largest, here))
            dist.all_reduce(sums, group=shard.group)
            figures = _kernel(_figures, device)(*sums.unbind())
        logprobs, entropy, log_sum = figures
        ctx.save_for_backward(logits, targets, here, largest, log_sum, entropy)
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run one more; nothing is communicated."""
        logits, targets, here, largest, log_sum, entropy = ctx.saved_tensors
        of_logprobs, of_entropy = gradients
        if of_logprobs is None and of_entropy is None:
            return None, None, None, None
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(entropy)
        gradient = _kernel(_gradient, logits.device.type)
        figures = largest, log_sum, entropy, of_logprobs, of_entropy
        return gradient(logits, targets, ctx.scale, here, *figures), None, None, None


# Each of these is compiled on CUDA. None changes what it is given; what they change in place is their own.


def _whole(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, ...]:
    """The largest logits, and what ``_figures`` gives, where this rank has all logits."""
    largest = _largest(logits, scale)
    return largest, *_figures(*_sums(logits, targets, scale, largest))


def _largest(logits: Tensor, scale: float) -> Tensor:
    """The largest of the scaled logits, ``[n]``."""
    return logits.amax(-1).to(_computed_in(logits)) * scale


def _sums(
    logits: Tensor, targets: Tensor, scale: float, largest: Tensor, here: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """What is to be added up over ranks, ``[n]`` each: exponentials, these times exponents, and the targets' exponents.

    Args:
        logits: Of this rank, ``[n, V]``.
        targets: Where the targets are in them, 0..V-1, int64 ``[n]``.
        scale: What logits are multiplied by.
        largest: The largest of the scaled logits over all ranks, ``[n]``.
        here: Whether the targets are in them at all, bool ``[n]``; None: all of them.
    """
    below = _below(logits, scale, largest)
    picked = below.gather(-1, targets[:, None])[:, 0]
    if here is not None:
        picked = picked.masked_fill(~here, 0)
    below.clamp_(min=_NO_MASS)
    weights = below.exp()
    return weights.sum(-1), below.mul_(weights).sum(-1), picked


def _figures(total: Tensor, weighted: Tensor, picked: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies and ``log s``, ``[n]`` each, from the sums over all ranks."""
    log_sum = total.log()
    return (picked - log_sum).clamp(max=0), log_sum - weighted / total, log_sum


def _gradient(
    logits: Tensor,
    targets: Tensor,
    scale: float,
    here: Tensor | None,
    largest: Tensor,
    log_sum: Tensor,
    entropy: Tensor,
    of_logprobs: Tensor,
    of_entropy: Tensor | None,
) -> Tensor:
    """The gradient of this rank's logits, ``[n, V]``."""
    log_probs = _below(logits, scale, largest).clamp_(min=_NO_MASS).sub_(log_sum[:, None])
    gradient = log_probs.exp()
    inner = of_logprobs[:, None]
    if of_entropy is not None:
        inner = log_probs.add_(entropy[:, None]).mul_(of_entropy[:, None]).add_(inner)
    gradient.mul_(inner).neg_()
    del inner, log_probs
    own = of_logprobs if here is None else of_logprobs * here
    tokens = torch.arange(logits.shape[1], device=logits.device)
    gradient.add_(torch.where(tokens == targets[:, None], own[:, None], 0))
    return gradient.mul_(scale).to(logits.dtype)


def _below(logits: Tensor, scale: float, largest: Tensor) -> Tensor:
    """``x - m``, ``[n, V]``, in memory of its own."""
    return (logits.to(_computed_in(logits)) * scale).sub_(largest[:, None])


def _computed_in(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


@cache
def _kernel(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """A function compiled, on CUDA; on a CPU as it is."""
    return torch.compile(function) if device == "cuda" else function
