"""Advantage estimators as pure functions: B sequences, T tokens, N samples.

Results come in float32 (float64 for float64 input). Positions outside a mask and rows that are not valid get exactly 0
and influence nothing, even when they hold NaN or inf; a NaN inside shows up in the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_verl.data.masks import check_same_shape, masked_float

ScoreScale = Literal["std", "none"]

_WHITEN_EPS = 1e-8
"""Added to the variance in ``whiten``: a constant batch (variance 0) is not divided by 0, and rounding residue in one
that should be constant is not blown up to size 1."""


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al., 2016, arXiv:1506.02438) over the masked tokens.

    The recursion runs over the tokens with mask 1 alone: a hole (mask 0 inside a row, such as a tool's output) is
    skipped as if the row did not hold it. After the last masked token the episode is over (value 0).

    Args:
        rewards: Reward of each token, ``[B, T]``.
        values: The critic's value before each token, ``[B, T]``.
        mask: 1 at the tokens that count, bool or 0/1 ``[B, T]``.
        gamma: Discount a token.
        lam: Weight of longer looks ahead: 0 is one step, 1 the whole return.

    Returns:
        Advantages and returns (advantage + value), each ``[B, T]``, 0 outside the mask.

    Raises:
        ValueError: Shapes differ or are not ``[B, T]``.
    """
    check_same_shape("gae", rewards=rewards, values=values, mask=mask)
    if rewards.dim() != 2:
        raise ValueError(
            f"gae: got tensors of shape {tuple(rewards.shape)}, but they must be [B, T]; add the missing dim."
        )
    keep = mask.bool()
    rewards, values = masked_float(rewards, keep), masked_float(values, keep)
    advantages = torch.zeros_like(rewards + values)
    advantage = next_value = advantages.new_zeros(rewards.shape[0])
    columns: list[Tensor] = []
    for reward, value, kept in zip(*(tensor.flip(1).unbind(1) for tensor in (rewards, values, keep)), strict=True):
        error = reward + gamma * next_value - value
        advantage = torch.where(kept, error + gamma * lam * advantage, advantage)
        next_value = torch.where(kept, value, next_value)
        columns.append(advantage)
    if columns:
        advantages = masked_float(torch.stack(columns, dim=1).flip(1), keep)
    return advantages, advantages + values


def group_advantages(
    scores: Tensor,
    group_ids: Tensor,
    *,
    valid: Tensor | None = None,
    scale: ScoreScale = "std",
    eps: float = 1e-6,
) -> Tensor:
    """Score minus the mean of its group, by default over the group's standard deviation (GRPO, arXiv:2402.03300).

    The standard deviation is the sample one (n - 1 below). A group whose scores are all equal gives exactly 0, found by
    comparing its largest and smallest score, and so does a group of one. A group must be whole on this process.

    Args:
        scores: Score of each sample, any real dtype ``[N]``.
        group_ids: The group that each sample belongs to, int ``[N]``, in any order.
        valid: False for samples without a score: they get 0 and leave the statistics alone, bool ``[N]``; None: all
            valid.
        scale: "std" divides by the standard deviation; "none" does not (arXiv:2503.20783).
        eps: Added to the standard deviation; softens groups whose scores differ by little.

    Returns:
        Advantages, ``[N]``.

    Raises:
        ValueError: Shapes differ, or ``scale`` is unknown.
    """
    if scale not in get_args(ScoreScale):
        raise ValueError(f"group_advantages: scale={scale!r} is unknown; use one of {', '.join(get_args(ScoreScale))}.")
    groups = _Groups.of("group_advantages", scores, group_ids, valid)
    if scale == "none":
        return groups.finish(groups.centred)
    variances = groups.sum(groups.centred.square()) / (groups.counts - 1).clamp(min=1)
    # The root of 0 has an infinite slope; constant groups are set to 0 anyway.
    deviations = variances.masked_fill(groups.constant, 1.0).sqrt()
    return groups.finish(groups.centred / (deviations + eps)[groups.members])


def rloo_advantages(scores: Tensor, group_ids: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """Score minus the mean score of the *other* samples of its group (RLOO, Ahmadian et al., 2024, arXiv:2402.14740).

    A group of one has no others and gives 0; a constant group gives exactly 0. A group must be whole on this process.

    Args:
        scores: Score of each sample, any real dtype ``[N]``.
        group_ids: The group that each sample belongs to, int ``[N]``, in any order.
        valid: False for samples without a score: they get 0 and are no one's "others", bool ``[N]``; None: all valid.

    Returns:
        Advantages, ``[N]``.

    Raises:
        ValueError: Shapes differ.
    """
    groups = _Groups.of("rloo_advantages", scores, group_ids, valid)
    # score - (sum - score) / (n - 1) = (score - mean) * n / (n - 1), which does not subtract large sums.
    leave_one_out = groups.counts / (groups.counts - 1).clamp(min=1)
    return groups.finish(groups.centred * leave_one_out[groups.members])


def reinforce_plus_plus_advantages(
    rewards: Tensor, mask: Tensor, *, gamma: float = 1.0, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Discounted reward to go of each token, whitened over the whole batch (REINFORCE++, Hu, 2025, arXiv:2501.03262).

    Args:
        rewards: Reward of each token, ``[B, T]``.
        mask: 1 at the tokens that count, bool or 0/1 ``[B, T]``; holes are skipped as in :func:`gae`.
        gamma: Discount a token.
        group: The ranks whose batches make up the whole one; None: this process alone. A collective call otherwise.

    Returns:
        Advantages, ``[B, T]``, 0 outside the mask.

    Raises:
        ValueError: Shapes differ or are not ``[B, T]``.
    """
    check_same_shape("reinforce_plus_plus_advantages", rewards=rewards, mask=mask)
    rewards_to_go, _ = gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lam=1.0)
    return whiten(rewards_to_go, mask, group=group)


def remax_advantages(scores: Tensor, greedy_scores: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """Score minus the score of the greedy response to the same prompt (ReMax, Li et al., 2023, arXiv:2310.10505).

    Args:
        scores: Score of each sample, any real dtype ``[N]``.
        greedy_scores: Score of the greedy response to each sample's prompt, ``[N]``.
        valid: False where either score is missing: 0 there, bool ``[N]``; None: all valid.

    Returns:
        Advantages, ``[N]``.

    Raises:
        ValueError: Shapes differ.
    """
    valid = _all_true_like(scores) if valid is None else valid
    check_same_shape("remax_advantages", scores=scores, greedy_scores=greedy_scores, valid=valid)
    return masked_float(scores, valid) - masked_float(greedy_scores, valid)


def whiten(values: Tensor, mask: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Shift and scale the masked values to mean 0 and variance 1 (unbiased, n - 1 below), over all ranks of ``group``.

    Fewer than two masked values over all ranks have no variance: they are returned unchanged. Mean and variance are
    found in two passes in float64 and are constants to autograd.

    Args:
        values: Any shape.
        mask: 1 at the values that count, bool or 0/1, the shape of ``values``.
        group: The ranks whose values are taken together; None: this process alone. With a group this is a collective
            call: every rank makes it, also one with no values. The group's backend must take the tensors' device.

    Returns:
        The whitened values, 0 outside the mask.

    Raises:
        ValueError: Shapes differ.
    """
    check_same_shape("whiten", values=values, mask=mask)
    values = masked_float(values, mask)
    exact = values.double()
    with torch.no_grad():
        count, total = _sum_over_ranks(torch.stack([mask.bool().sum().double(), exact.sum()]), group).unbind()
        mean = total / count.clamp(min=1)
        centred = masked_float(exact - mean, mask)
        squares = _sum_over_ranks(centred.square().sum(), group)
        scale = (squares / (count - 1).clamp(min=1) + _WHITEN_EPS).rsqrt()
        too_few = count < 2
        shift, scale = mean.masked_fill(too_few, 0.0), scale.masked_fill(too_few, 1.0)
    return masked_float((exact - shift) * scale, mask).to(values.dtype)


@dataclass(frozen=True)
class _Groups:
    """Samples sorted into G groups, with their statistics in float64."""

    members: Tensor
    """The group number of each sample, int64 ``[N]``."""
    valid: Tensor
    """bool ``[N]``."""
    counts: Tensor
    """Valid samples of each group, float64 ``[G]``."""
    centred: Tensor
    """Score minus the mean of its group, 0 where not valid, float64 ``[N]``."""
    constant: Tensor
    """Whether all valid scores of a group are equal, bool ``[G]``."""
    dtype: torch.dtype
    """The dtype that results come in."""

    @classmethod
    def of(cls, caller: str, scores: Tensor, group_ids: Tensor, valid: Tensor | None) -> _Groups:
        """Sort ``scores`` into groups."""
        valid = _all_true_like(scores) if valid is None else valid.bool()
        check_same_shape(caller, scores=scores, group_ids=group_ids, valid=valid)
        if scores.dim() != 1:
            raise ValueError(
                f"{caller}: scores has shape {tuple(scores.shape)}, but must be [N]; pass one score a sample."
            )
        known = masked_float(scores, valid)
        exact = known.double()
        ids, members = torch.unique(group_ids, return_inverse=True)
        empty = exact.new_zeros(ids.shape[0])
        counts = empty.index_add(0, members, valid.double())
        means = empty.index_add(0, members, exact) / counts.clamp(min=1)
        scores_of_valid, members_of_valid = exact.detach()[valid], members[valid]
        highest = empty.scatter_reduce(0, members_of_valid, scores_of_valid, "amax", include_self=False)
        lowest = empty.scatter_reduce(0, members_of_valid, scores_of_valid, "amin", include_self=False)
        centred = masked_float(exact - means[members], valid)
        return cls(members, valid, counts, centred, highest == lowest, known.dtype)

    def sum(self, values: Tensor) -> Tensor:
        """Sum ``values`` ``[N]`` over each group, ``[G]``."""
        return torch.zeros_like(self.counts).index_add(0, self.members, values)

    def finish(self, advantages: Tensor) -> Tensor:
        """Set rows that are not valid and constant groups to exactly 0."""
        return masked_float(advantages, self.valid & ~self.constant[self.members]).to(self.dtype)


def _all_true_like(scores: Tensor) -> Tensor:
    return torch.ones_like(scores, dtype=torch.bool)


def _sum_over_ranks(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(value, op=dist.ReduceOp.SUM, group=group)
    return value
