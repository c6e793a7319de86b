"""The reward role that asks several reward roles and aggregates what they say."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, Protocol, cast, get_args

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import Module, ModuleList

from lightning_verl.data.experience import RolloutBatch
from lightning_verl.rewards.functions import RewardError, RewardInput, Scores, unique_names
from lightning_verl.roles.reward_function import RewardFunction

EnsembleMode = Literal["mean", "min", "pessimistic"]

_MIN_MEMBERS = 3
"""With two members a spread says only that they differ, not which of them is off."""


class RewardRole(Protocol):
    """What a member must be able to do."""

    def score(self, batch: RolloutBatch) -> Scores:
        """Score every row of the batch."""
        ...


class RewardEnsemble(LightningModule):
    """Scores each response with three or more members and aggregates over those that scored it.

    ``Scores.disagreement`` is the unbiased standard deviation over the members that scored the row, 0 where it was one.
    A row is valid if any member scored it. ``Scores.components`` holds one entry a member: under the functions' names
    joined by "+" for a `RewardFunction`, else under the class name.

    Args:
        members: Reward roles (modules with ``score(batch) -> Scores``) or reward functions, which are wrapped in a
            `RewardFunction` with its defaults.
        mode: ``"mean"``, ``"min"``, or ``"pessimistic"``: mean - penalty x disagreement ("min" and
            "pessimistic" after Coste et al. 2023, "Reward Model Ensembles Help Mitigate Overoptimization", whose
            penalty is on the variance; here it is on the deviation, which has the unit of the reward).
        penalty: The factor of the disagreement, finite and at least 0; only used by ``"pessimistic"``.

    Raises:
        ValueError: Fewer than three members, or a mode or penalty out of range.
        TypeError: A member is neither a reward role nor a function.
    """

    role: ClassVar[str] = "reward"
    trainable: ClassVar[bool] = False

    def __init__(
        self,
        members: Sequence[Module | Callable[..., Any]],
        *,
        mode: EnsembleMode = "mean",
        penalty: float = 1.0,
    ) -> None:
        super().__init__()
        if len(members) < _MIN_MEMBERS:
            raise ValueError(
                f"RewardEnsemble: got {len(members)} members, but needs at least {_MIN_MEMBERS}; "
                "RewardFunction takes several functions with weights."
            )
        if mode not in get_args(EnsembleMode):
            raise ValueError(f"RewardEnsemble: mode={mode!r} must be one of {', '.join(get_args(EnsembleMode))}.")
        if not 0 <= penalty < math.inf:
            raise ValueError(f"RewardEnsemble: penalty={penalty} must be finite and at least 0.")
        self.members = ModuleList(_as_role(member) for member in members)
        self.names = unique_names([_name_of(member) for member in self.members])
        self.mode = mode
        self.penalty = penalty

    def score(self, batch: RolloutBatch) -> Scores:
        """Score every row with every member.

        Returns:
            The scores, on the device of the batch.

        Raises:
            ValueError: A member returned another number of scores than rows.
            RewardError: A member returned a score that is not finite for a row that it calls valid.
        """
        device = batch.input_ids.device
        rows, fallbacks = [], 0
        error: Exception | None = None
        for name, member in zip(self.names, self.members, strict=True):
            try:
                scores = cast(RewardRole, member).score(batch)
                rows.append(_checked(name, scores, batch).to(device))
                fallbacks += scores.fallbacks
            except Exception as problem:  # raised below: members may be sharded, and other ranks wait for their passes
                error = error or problem
        if error is not None:
            raise error
        raw = torch.stack(rows)
        values, spread = aggregate_members(raw, self.mode, self.penalty)
        components = dict(zip(self.names, raw.float(), strict=True))
        return Scores(values, ~raw.isnan().all(dim=0), components, disagreement=spread, fallbacks=fallbacks)


def aggregate_members(raw: Tensor, mode: EnsembleMode, penalty: float) -> tuple[Tensor, Tensor]:
    """Aggregate over the members that scored a row.

    Args:
        raw: Scores of M members, float64 ``[M, N]``, NaN where a member abstained.
        mode: See `RewardEnsemble`.
        penalty: See `RewardEnsemble`.

    Returns:
        The aggregate, and the unbiased standard deviation over the present members, both float32 ``[N]`` and 0 where no
        member scored the row.
    """
    present = ~raw.isnan()
    count = present.sum(dim=0)
    mean = torch.where(present, raw, 0.0).sum(dim=0) / count.clamp(min=1)
    squares = torch.where(present, (raw - mean) ** 2, 0.0).sum(dim=0)
    spread = (squares / (count - 1).clamp(min=1)).sqrt()
    if mode == "min":
        lowest = torch.where(present, raw, math.inf).amin(dim=0)
        values = torch.where(count > 0, lowest, 0.0)
    else:
        values = mean - penalty * spread if mode == "pessimistic" else mean
    return values.float(), spread.float()


def _as_role(member: Module | Callable[..., Any]) -> Module:
    if isinstance(member, Module):
        if callable(getattr(member, "score", None)):
            return member
    elif callable(member):
        return RewardFunction(member)
    raise TypeError(
        f"RewardEnsemble: member {type(member).__name__} must be a reward role (a module with score(batch) -> Scores) "
        "or a function; wrap a plain model in a reward role."
    )


def _name_of(member: Module) -> str:
    return "+".join(member.names) if isinstance(member, RewardFunction) else type(member).__name__


def _checked(name: str, scores: Scores, batch: RolloutBatch) -> Tensor:
    """Return a member's scores as float64 ``[N]`` with NaN where they are not valid."""
    if scores.values.shape != (len(batch),) or scores.valid.shape != (len(batch),):
        raise ValueError(
            f"RewardEnsemble: member {name!r} returned values {list(scores.values.shape)} and valid "
            f"{list(scores.valid.shape)} for {len(batch)} rows; both must be [{len(batch)}]."
        )
    wrong = (scores.valid & ~scores.values.isfinite()).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise RewardError(
            f"RewardEnsemble: member {name!r} returned {float(scores.values[row])} on "
            f"{RewardInput.from_rollout(batch).describe(row)}; a score must be finite, or its row not valid."
        )
    return scores.values.double().masked_fill(~scores.valid, math.nan)
