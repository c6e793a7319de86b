"""KL divergence from a reference policy: estimators for each token, and what weighs it in the reward or loss.

Estimators k1, k2, k3: J. Schulman, "Approximating KL divergence", 2020, http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_verl.data.masks import check_same_shape, masked_float

KLEstimator = Literal["k1", "k2", "k3", "abs"]

EXPONENT_SHARE = 0.25
"""Share of a dtype's exponent range that ``exp`` of a log-ratio may fill. At a quarter the ratio's fourth power still
fits: neither the value, nor the gradient, nor the gradient's square that an optimizer keeps can overflow."""

MAX_LOG_DIFFERENCE = 1e4
"""Largest difference of two log-probs that an estimator tells apart. A log-prob this low means probability 0 (a
filtered token's can be -3.4e38); without it k2 would overflow."""

MAX_KL_ERROR = 0.2
"""Bound on the relative error that ``AdaptiveKL`` answers to: one odd batch cannot move the coefficient far."""


def max_log_ratio(dtype: torch.dtype) -> float:
    """Return the largest log-ratio that is passed to ``exp``: 22.18 for float32, 177.4 for float64.

    Args:
        dtype: The dtype that ``exp`` is computed in.
    """
    return EXPONENT_SHARE * math.log(torch.finfo(dtype).max)


def kl_estimate(logp: Tensor, ref_logp: Tensor, estimator: KLEstimator = "k3", mask: Tensor | None = None) -> Tensor:
    """Estimate KL(policy || reference) at each token, from tokens that the policy sampled.

    With d = ref_logp - logp: "k1" is -d (unbiased, can be negative), "k2" d^2 / 2, "k3" exp(d) - 1 - d (unbiased, never
    negative), "abs" the absolute value of d. Value and gradient are finite for all finite log-probs: d is capped at
    +-``MAX_LOG_DIFFERENCE``, and for k3 above at ``max_log_ratio`` (in float32 a token that the reference finds e^22
    times likelier). Beyond a cap the value stays and the gradient is 0; :func:`capped_fraction` says how often.

    Args:
        logp: Log-probs of the policy, any shape; computed in float32 at least.
        ref_logp: Log-probs of the reference, the shape of ``logp``.
        estimator: Which estimator.
        mask: 1 at the tokens that count, bool or 0/1, the shape of ``logp``; None: all.

    Returns:
        The estimates, the shape of ``logp``, float32 (float64 for float64 input), exactly 0 outside the mask.

    Raises:
        ValueError: Shapes differ, or ``estimator`` is unknown.
    """
    difference = _difference("kl_estimate", logp, ref_logp, estimator, mask)
    lowest, highest = _caps(estimator, difference.dtype)
    difference = difference.clamp(lowest, highest)
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "abs":
        return difference.abs()
    # expm1 keeps the small values that exp(d) - 1 rounds away; where it is off by its last digit the result is not < 0.
    return (torch.expm1(difference) - difference).clamp(min=0)


def capped_fraction(
    logp: Tensor,
    ref_logp: Tensor,
    estimator: KLEstimator = "k3",
    mask: Tensor | None = None,
    *,
    tokens: int | None = None,
) -> Tensor:
    """Return the fraction of tokens at which :func:`kl_estimate` with the same arguments hits a cap.

    Args:
        logp: As for :func:`kl_estimate`.
        ref_logp: As for :func:`kl_estimate`.
        estimator: As for :func:`kl_estimate`.
        mask: As for :func:`kl_estimate`.
        tokens: The count to divide by: that of the whole mini-batch, where the fractions of micro-batches and ranks are
            summed. None: the tokens of this mask.

    Returns:
        A detached 0-d tensor; 0 where there are no tokens.

    Raises:
        ValueError: Shapes differ, or ``estimator`` is unknown.
    """
    difference = _difference("capped_fraction", logp.detach(), ref_logp.detach(), estimator, mask)
    lowest, highest = _caps(estimator, difference.dtype)
    capped = ((difference < lowest) | (difference > highest)).sum()
    if tokens is not None:
        return capped / max(tokens, 1)
    return capped / (mask.bool().sum().clamp(min=1) if mask is not None else max(difference.numel(), 1))


def _difference(caller: str, logp: Tensor, ref_logp: Tensor, estimator: KLEstimator, mask: Tensor | None) -> Tensor:
    """Return ref_logp - logp, in float32 at least, 0 outside the mask."""
    if estimator not in get_args(KLEstimator):
        raise ValueError(
            f"{caller}: estimator={estimator!r} is unknown; use one of {', '.join(get_args(KLEstimator))}."
        )
    mask = torch.ones_like(logp, dtype=torch.bool) if mask is None else mask
    check_same_shape(caller, logp=logp, ref_logp=ref_logp, mask=mask)
    return masked_float(ref_logp, mask) - masked_float(logp, mask)


def _caps(estimator: KLEstimator, dtype: torch.dtype) -> tuple[float, float]:
    highest = max_log_ratio(dtype) if estimator == "k3" else MAX_LOG_DIFFERENCE
    return -MAX_LOG_DIFFERENCE, highest


class FixedKL:
    """A KL coefficient that stays what it is.

    Args:
        coef: The coefficient, at least 0.

    Raises:
        ValueError: ``coef`` is negative or not finite.
    """

    def __init__(self, coef: float) -> None:
        if not (math.isfinite(coef) and coef >= 0):
            raise ValueError(f"FixedKL: coef={coef}, but it must be finite and at least 0; use 0 for no KL term.")
        self._value = float(coef)

    @property
    def value(self) -> float:
        """The coefficient."""
        return self._value

    def update(self, kl: float | Tensor, n: int) -> None:
        """Do nothing; the arguments are those of :meth:`AdaptiveKL.update`."""

    def state_dict(self) -> dict[str, float]:
        """Return an empty state: the coefficient is configuration."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Do nothing: the configured coefficient holds, also when the state is that of an ``AdaptiveKL``."""


class AdaptiveKL:
    """A KL coefficient that steers the measured KL to a target (Ziegler et al., 2019, arXiv:1909.08593, section 2.2).

    After n sequences with mean KL ``kl``: error = clip(kl / target - 1, -0.2, 0.2), value *= 1 + error * n / horizon.

    Args:
        coef: The coefficient to start with, above 0 (the update multiplies: 0 would stay 0).
        target: The wanted mean KL, in the unit of the ``kl`` given to :meth:`update`, above 0.
        horizon: Sequences over which the coefficient changes by a factor of about 1 + error, above 0.

    Raises:
        ValueError: An argument is not finite and above 0.
    """

    def __init__(self, coef: float, target: float, horizon: float) -> None:
        for name, given in (("coef", coef), ("target", target), ("horizon", horizon)):
            if not (math.isfinite(given) and given > 0):
                raise ValueError(
                    f"AdaptiveKL: {name}={given}, but it must be finite and above 0; for a coefficient that does not "
                    "move, use FixedKL."
                )
        self.target = float(target)
        self.horizon = float(horizon)
        self._value = float(coef)

    @property
    def value(self) -> float:
        """The coefficient now."""
        return self._value

    def update(self, kl: float | Tensor, n: int) -> None:
        """Move the coefficient by what one batch measured.

        Args:
            kl: Mean KL of the batch, over all ranks (each rank must give the same number, or coefficients drift apart).
            n: Sequences in the batch, over all ranks.

        Raises:
            ValueError: ``kl`` is NaN, or ``n`` is negative or so large that the coefficient could turn negative.
        """
        measured = float(kl)
        if math.isnan(measured):
            raise ValueError(
                f"AdaptiveKL: kl={measured} would make the coefficient NaN for good; skip this batch's update."
            )
        if not 0 <= n * MAX_KL_ERROR < self.horizon:
            raise ValueError(
                f"AdaptiveKL: n={n} sequences with horizon={self.horizon:g} could turn the coefficient negative; the "
                f"rule is 0 <= {MAX_KL_ERROR} * n < horizon. Raise horizon above {MAX_KL_ERROR * n:g}."
            )
        error = min(max(measured / self.target - 1, -MAX_KL_ERROR), MAX_KL_ERROR)
        self._value *= 1 + error * n / self.horizon

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient; target and horizon are configuration."""
        return {"value": self._value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Take the coefficient of a checkpoint.

        A state without one (an older checkpoint, or one of another controller) leaves the coefficient as it is, with a
        warning.

        Args:
            state: What :meth:`state_dict` returned.

        Raises:
            ValueError: The coefficient in it is not finite and above 0.
        """
        if "value" not in state:
            warnings.warn(
                f"AdaptiveKL: the checkpoint holds no coefficient (its keys: {sorted(state)}); going on from "
                f"{self._value:g}.",
                stacklevel=2,
            )
            return
        value = float(state["value"])
        if not (math.isfinite(value) and value > 0):
            raise ValueError(
                f"AdaptiveKL: the checkpoint's value={value}, but it must be finite and above 0; repair it."
            )
        self._value = value
