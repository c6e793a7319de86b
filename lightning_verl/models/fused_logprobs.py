"""Log-probs and entropies from logits in one compiled kernel each way, without fp32 copies of the logits.

Shape letters: n tokens, V size of the vocabulary. With ``x`` the logits over the temperature and ``p`` their softmax,
``m`` the largest of ``x`` and ``s = sum(exp(x - m))``: ``lse = m + log s``, ``log p(t) = x[t] - lse`` and
``entropy = -sum(p (x - lse)) = log s - sum(p (x - m))``; so, by hand, ``d log p(t) / dx = onehot(t) - p`` and
``d entropy / dx = -p (x - lse + entropy)``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


class TokenFigures(torch.autograd.Function):
    """``apply(logits, targets, scale)`` returns log-probs and entropies, both ``[n]``.

    Logits ``[n, V]`` of any float dtype are multiplied by ``scale`` (one over the temperature) in float32 (float64 for
    float64 logits). All that waits for the backward pass is the logits and two numbers a token.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Run one kernel over the logits."""
        forward, _ = _kernels(logits.device.type)
        logprobs, entropy, normalizer = forward(logits, targets, scale)
        ctx.save_for_backward(logits, targets, normalizer, entropy)
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None]:
        """Run one more; gradients are in the dtype of the logits."""
        logits, targets, normalizer, entropy = ctx.saved_tensors
        of_logprobs, of_entropy = gradients
        if of_logprobs is None and of_entropy is None:
            return None, None, None
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(entropy)
        _, backward = _kernels(logits.device.type)
        return backward(logits, targets, ctx.scale, normalizer, entropy, of_logprobs, of_entropy), None, None


def _forward(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies, and the logarithms of the sums of exponentials, all ``[n]``."""
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    largest = scaled.amax(-1)
    below = scaled - largest[:, None]
    weights = below.exp()
    total = weights.sum(-1)  # at least 1, so that no log-prob is above 0 but by rounding
    # Probability 0 contributes 0, but 0 * inf would be NaN. In this form one pass sums both.
    entropy = total.log() - torch.where(weights > 0, weights * below, 0).sum(-1) / total
    normalizer = largest + total.log()
    logprobs = (scaled.gather(-1, targets[:, None])[:, 0] - normalizer).clamp(max=0)
    return logprobs, entropy, normalizer


def _backward(
    logits: Tensor,
    targets: Tensor,
    scale: float,
    normalizer: Tensor,
    entropy: Tensor,
    of_logprobs: Tensor,
    of_entropy: Tensor | None,
) -> Tensor:
    """The gradient of the logits, ``[n, V]``."""
    surprise = normalizer[:, None] - logits.to(normalizer.dtype) * scale
    weights = (-surprise).exp()
    tokens = torch.arange(logits.shape[1], device=logits.device)
    gradient = of_logprobs[:, None] * ((tokens == targets[:, None]).to(weights.dtype) - weights)
    if of_entropy is not None:
        wave = torch.where(weights > 0, weights * (surprise - entropy[:, None]), 0)
        gradient = gradient + of_entropy[:, None] * wave
    return (gradient * scale).to(logits.dtype)


@cache
def _kernels(device: str) -> tuple[Any, Any]:
    """Both functions, compiled on CUDA; on a CPU as they are."""
    if device != "cuda":
        return _forward, _backward
    return torch.compile(_forward), torch.compile(_backward)
