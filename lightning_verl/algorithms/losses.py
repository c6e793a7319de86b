"""Losses as pure functions, B sequences of T tokens, and the counts that make them independent of how a batch is cut.

**Denominators.** With a :class:`Normalizer` a loss is this call's sum over the counts of the *global* mini-batch, times
the data-parallel size: summed over the micro-batches of a rank and averaged over ranks (as gradients are), it is the
loss of the whole mini-batch. Without one, the counts of the given mask are used.

**Metrics** are detached 0-d tensors. With a normalizer each is this call's masked sum over the global number of tokens,
*without* the data-parallel size: summed over micro-batches and over ranks it is the global mean. A metric whose name
ends in ``_max`` combines by maximum instead.

Everything is computed in float32 (float64 for float64 input). Masked positions take no part, even when they hold NaN or
inf; no tokens at all give a loss of 0 with gradients of 0, still connected to the graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_verl.algorithms.kl import kl_estimate, max_log_ratio
from lightning_verl.data.masks import check_same_shape, masked_float

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-sum-over-max-length"]


@dataclass(frozen=True)
class Normalizer:
    """The counts of a global mini-batch: all its micro-batches on all ranks of a role's data axis.

    Raises:
        ValueError: A count is out of its range.
    """

    tokens: int
    """Tokens with mask 1."""
    sequences: int
    """Sequences with at least one such token."""
    data_parallel_size: int = 1
    """Ranks over which the gradient is averaged."""
    max_length: int | None = None
    """Tokens that ``seq-sum-over-max-length`` divides by; None: the width of the mask given, which is right only where
    every micro-batch has the same width."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        lowest = {"tokens": 0, "sequences": 0, "data_parallel_size": 1, "max_length": 1}
        for name, bound in lowest.items():
            given = getattr(self, name)
            if given is not None and given < bound:
                raise ValueError(
                    f"Normalizer: {name}={given}, but it must be at least {bound}; count the global mini-batch."
                )


def aggregate(per_token: Tensor, mask: Tensor, mode: Aggregation, *, normalizer: Normalizer | None = None) -> Tensor:
    """Reduce a loss of each token to one number.

    The modes, with their values for ``[[1, 2, 3], [4, -, -]]``:

    - ``token-mean``: sum / tokens (2.5);
    - ``seq-mean-token-sum``: sum / sequences (5.0);
    - ``seq-mean-token-mean``: mean of each sequence, summed / sequences (3.0);
    - ``seq-sum-over-max-length``: sum / (sequences * longest possible length), here 10 / (2 * 3) (1.6667).

    Args:
        per_token: Loss of each token, ``[B, T]``.
        mask: 1 at the tokens that count, bool or 0/1 ``[B, T]``. Sequences with an empty mask do not count.
        mode: How to reduce.
        normalizer: The counts of the global mini-batch; the result is then multiplied by its ``data_parallel_size``.
            None: the counts of ``mask``.

    Returns:
        A 0-d tensor.

    Raises:
        ValueError: Shapes differ or are not ``[B, T]``, or ``mode`` is unknown.
    """
    if mode not in get_args(Aggregation):
        raise ValueError(f"aggregate: mode={mode!r} is unknown; use one of {', '.join(get_args(Aggregation))}.")
    check_same_shape("aggregate", per_token=per_token, mask=mask)
    if mask.dim() != 2:
        raise ValueError(
            f"aggregate: got tensors of shape {tuple(mask.shape)}, but they must be [B, T]; add the missing dim."
        )
    kept = masked_float(per_token, mask)
    lengths = mask.bool().sum(dim=1)
    sequences = _divisor(normalizer.sequences if normalizer else (lengths > 0).sum())
    if mode == "token-mean":
        loss = kept.sum() / _divisor(normalizer.tokens if normalizer else lengths.sum())
    elif mode == "seq-mean-token-sum":
        loss = kept.sum() / sequences
    elif mode == "seq-mean-token-mean":
        loss = (kept.sum(dim=1) / _divisor(lengths)).sum() / sequences
    else:
        max_length = normalizer.max_length if normalizer and normalizer.max_length else mask.shape[1]
        loss = kept.sum() / (sequences * _divisor(max_length))
    return loss * normalizer.data_parallel_size if normalizer else loss


def metric_mean(per_token: Tensor, mask: Tensor, *, normalizer: Normalizer | None = None) -> Tensor:
    """Return the masked mean of a figure of each token, by this module's convention for metrics.

    Args:
        per_token: The figure, ``[B, T]``.
        mask: 1 at the tokens that count, bool or 0/1 ``[B, T]``.
        normalizer: Divide by its global number of tokens, so that micro-batches and ranks can be summed; None: by the
            tokens of ``mask``.

    Returns:
        A detached 0-d tensor.

    Raises:
        ValueError: Shapes differ.
    """
    check_same_shape("metric_mean", per_token=per_token, mask=mask)
    return masked_float(per_token.detach(), mask).sum() / _divisor(
        normalizer.tokens if normalizer else mask.bool().sum()
    )


def policy_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: tuple[float, float] = (0.2, 0.2),
    dual_clip: float | None = 3.0,
    aggregation: Aggregation = "token-mean",
    normalizer: Normalizer | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate loss of PPO (Schulman et al., 2017, arXiv:1707.06347), with the dual clip of Ye et al. (2019).

    With r = exp(logp - old_logp), its exponent capped at ``kl.max_log_ratio`` (gradient 0 beyond), a token's loss is
    max(-A r, -A clip(r, 1 - low, 1 + high)). Where A < 0 the dual clip (arXiv:1912.09729) bounds it by -A dual_clip.
    Gradients flow to ``logp`` alone.

    Args:
        logp: Log-probs of the policy, ``[B, T]``.
        old_logp: Log-probs of the policy before the update, ``[B, T]``.
        advantages: ``[B, T]``.
        mask: 1 at the tokens that count, bool or 0/1 ``[B, T]``.
        clip: How far the ratio may fall below and rise above 1, each at least 0 and the first at most 1.
        dual_clip: Bound above 1 on the ratio where the advantage is negative; None: no bound.
        aggregation: How :func:`aggregate` reduces.
        normalizer: The counts of the global mini-batch; None: those of ``mask``.

    Returns:
        The loss, and the metrics ``ratio`` (mean), ``ratio_max``, ``clip_fraction`` (tokens where the clip decides),
        ``dual_clip_fraction`` (not without a dual clip), ``approx_kl`` (k3 estimate of KL(old || new)).

    Raises:
        ValueError: Shapes differ, or ``clip``, ``dual_clip`` or ``aggregation`` is out of its range.
    """
    low, high = clip
    if not (0 <= low <= 1 and high >= 0):
        raise ValueError(
            f"policy_loss: clip={clip}, but the rule is 0 <= low <= 1 and high >= 0; the default is (0.2, 0.2)."
        )
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"policy_loss: dual_clip={dual_clip}, but it must be above 1; use None for no dual clip.")
    check_same_shape("policy_loss", logp=logp, old_logp=old_logp, advantages=advantages, mask=mask)
    gains = masked_float(advantages.detach(), mask)
    log_ratio = masked_float(logp, mask) - masked_float(old_logp.detach(), mask)
    ratio = log_ratio.clamp(max=max_log_ratio(log_ratio.dtype)).exp()
    free, clipped = -gains * ratio, -gains * ratio.clamp(1 - low, 1 + high)
    per_token = torch.maximum(free, clipped)
    metrics = {
        "ratio": metric_mean(ratio, mask, normalizer=normalizer),
        "ratio_max": _masked_max(ratio, mask),
        "clip_fraction": metric_mean(clipped > free, mask, normalizer=normalizer),
        "approx_kl": metric_mean(kl_estimate(old_logp, logp.detach(), "k3", mask), mask, normalizer=normalizer),
    }
    if dual_clip is not None:
        bound = -gains * dual_clip
        bounded = (gains < 0) & (per_token > bound)
        per_token = torch.where(bounded, bound, per_token)
        metrics["dual_clip_fraction"] = metric_mean(bounded, mask, normalizer=normalizer)
    return aggregate(per_token, mask, aggregation, normalizer=normalizer), metrics


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: float | None = 0.5,
    aggregation: Aggregation = "token-mean",
    normalizer: Normalizer | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared error of the critic, with PPO's value clipping.

    With v' = old + clip(v - old, -clip, clip), the loss of a token is max((v - R)^2, (v' - R)^2) / 2: a value that has
    moved towards its return by more than ``clip`` gets no more gradient. Gradients flow to ``values`` alone.

    Args:
        values: The critic's values, ``[B, T]``.
        old_values: Its values before the update, ``[B, T]``.
        returns: Its targets R, ``[B, T]``.
        mask: 1 at the tokens that count, bool or 0/1 ``[B, T]``.
        clip: How far a value may move, in units of reward, above 0; None: no clipping.
        aggregation: How :func:`aggregate` reduces.
        normalizer: The counts of the global mini-batch; None: those of ``mask``.

    Returns:
        The loss, and the metrics ``value`` (mean), ``value_error`` (mean of abs(value - return)), ``clip_fraction``
        (tokens where the clip decides).

    Raises:
        ValueError: Shapes differ, ``clip`` is not above 0, or ``aggregation`` is unknown.
    """
    if clip is not None and not clip > 0:
        raise ValueError(f"value_loss: clip={clip}, but it must be above 0; use None for no clipping.")
    check_same_shape("value_loss", values=values, old_values=old_values, returns=returns, mask=mask)
    values, old_values, returns = (
        masked_float(tensor, mask) for tensor in (values, old_values.detach(), returns.detach())
    )
    free = (values - returns).square()
    moved = values if clip is None else old_values + (values - old_values).clamp(-clip, clip)
    clipped = (moved - returns).square()
    metrics = {
        "value": metric_mean(values, mask, normalizer=normalizer),
        "value_error": metric_mean((values - returns).abs(), mask, normalizer=normalizer),
        "clip_fraction": metric_mean(clipped > free, mask, normalizer=normalizer),
    }
    return aggregate(torch.maximum(free, clipped) / 2, mask, aggregation, normalizer=normalizer), metrics


def _masked_max(per_token: Tensor, mask: Tensor) -> Tensor:
    """Return the largest masked entry of a figure that is never negative; 0 where there are no tokens."""
    kept = masked_float(per_token.detach(), mask)
    return kept.max() if kept.numel() else kept.sum()


def _divisor(count: int | Tensor) -> int | Tensor:
    """Return ``count``, but at least 1: with no tokens the sum above is 0, and 0 / 1 is the 0 that is wanted."""
    return max(count, 1) if isinstance(count, int) else count.clamp(min=1)
