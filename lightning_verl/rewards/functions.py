"""Scores rollouts with Python functions: what a function is offered, what it may return, how scores are combined.

A function is written for one sample, ``def score(response, answer): ...``, and gets by name what it asks for; wrapped
with ``batch_reward`` it gets the whole batch as lists. Functions see text, token ids and the fields of the data row,
never log-probs or values.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import numbers
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_verl.data.experience import RolloutBatch
from lightning_verl.rewards.pool import Call, Outcome, run_calls

_logger = logging.getLogger(__name__)

_DEFAULT_WORKERS = 4
"""Threads where a time limit needs some and the user named no number."""
_EXCERPT = 80
"""Characters of a prompt in a message: enough to find it, and a page of few-shot examples stays out of the log."""
_LISTED = 3
"""Samples that one warning lists: a scorer that fails on every row must not fill the log."""
_MAX_SCORE = torch.finfo(torch.float32).max
"""Scores travel as float32; a larger one would turn into inf there."""


class RewardError(RuntimeError):
    """A reward function failed on a row, or returned something that is no finite number."""


@dataclass
class RewardInput:
    """What reward functions see of a rollout batch; every list has N entries.

    Raises:
        ValueError: The lists differ in length.
    """

    prompts: list[str]
    """The prompts as text."""
    responses: list[str]
    """The responses as text; whether special tokens were kept in it was decided where it was decoded."""
    prompt_ids: list[list[int]]
    """The prompts as token ids, without padding."""
    response_ids: list[list[int]]
    """The responses as token ids, the end token included, without padding."""
    fields: list[Mapping[str, Any]]
    """The other fields of each data row."""
    sample_ids: list[str] = field(default_factory=list)
    """What messages call each row, by default its number."""

    def __post_init__(self) -> None:
        if not self.sample_ids:
            self.sample_ids = [str(row) for row in range(len(self.prompts))]
        lengths = {name: len(values) for name, values in vars(self).items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"RewardInput: every list must have one entry a row, got {lengths}.")

    def __len__(self) -> int:
        return len(self.prompts)

    @classmethod
    def from_rollout(cls, batch: RolloutBatch) -> RewardInput:
        """Take text, ids and fields from a rollout batch. Samples are called ``"<group id>/<place in the group>"``."""
        lengths = zip(batch.prompt_lengths.tolist(), batch.response_lengths.tolist(), strict=True)
        rows = list(zip(batch.input_ids.tolist(), lengths, strict=True))
        seen: Counter[int] = Counter()
        sample_ids = []
        for group in batch.group_ids.tolist():
            sample_ids.append(f"{group}/{seen[group]}")
            seen[group] += 1
        return cls(
            prompts=list(batch.prompt_texts),
            responses=list(batch.response_texts),
            prompt_ids=[ids[:prompt] for ids, (prompt, _) in rows],
            response_ids=[ids[prompt : prompt + response] for ids, (prompt, response) in rows],
            fields=list(batch.fields),
            sample_ids=sample_ids,
        )

    def describe(self, row: int) -> str:
        """Name a row for a message: its number, its id, and how its prompt begins."""
        prompt = self.prompts[row]
        excerpt = prompt if len(prompt) <= _EXCERPT else prompt[:_EXCERPT] + "..."
        return f"row {row} (sample {self.sample_ids[row]}), prompt {excerpt!r}"


@dataclass
class Scores:
    """What a reward role returns for N rows."""

    values: Tensor
    """The reward of each row, float32 ``[N]``; 0 where ``valid`` is False."""
    valid: Tensor
    """Whether anything scored the row, bool ``[N]``."""
    components: dict[str, Tensor]
    """The unweighted score of each function or member, float32 ``[N]``, NaN where it abstained."""
    disagreement: Tensor | None = None
    """Standard deviation over the members of an ensemble, float32 ``[N]``; None where there is one scorer only."""
    fallbacks: int = 0
    """Scores that are the fallback, because a function failed or ran out of time."""


class BatchReward:
    """A reward function for a whole batch; see `batch_reward`."""

    def __init__(self, function: Callable[..., Sequence[Any] | Tensor]) -> None:
        self.function = function
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Sequence[Any] | Tensor:
        return self.function(*args, **kwargs)


def batch_reward(function: Callable[..., Sequence[Any] | Tensor]) -> BatchReward:
    """Mark a function that scores all N rows in one call.

    It is offered ``prompts``, ``responses``, ``prompt_ids``, ``response_ids`` and each field of the data rows under its
    own name (None in rows without it), all lists of N entries, and returns N scores: a list, tuple, array or tensor.
    """
    return BatchReward(function)


@dataclass(frozen=True)
class CallPolicy:
    """How functions are called, and what happens when one fails.

    Raises:
        ValueError: A value is out of its range.
    """

    time_limit: float | None = None
    """Seconds a sample may take, None for no limit; a batch function gets N times as long for its one call."""
    fallback: float | None = 0.0
    """The score of a sample that ran out of time, or failed under ``on_error="fallback"``; None makes it abstain."""
    on_error: Literal["raise", "fallback"] = "raise"
    """What an exception, or a value that is no finite number, leads to."""
    on_none: Literal["abstain", "error"] = "abstain"
    """What a returned None means."""
    num_workers: int | None = None
    """Threads that functions run in; 0 is the calling thread. None: 4 with a time limit, 0 without."""

    def __post_init__(self) -> None:
        if self.time_limit is not None and not 0 < self.time_limit < math.inf:
            raise ValueError(
                f"RewardFunction: time_limit={self.time_limit} must be above 0 seconds, or None for no limit."
            )
        if self.fallback is not None and not math.isfinite(self.fallback):
            raise ValueError(f"RewardFunction: fallback={self.fallback} must be a finite number, or None to abstain.")
        if self.on_error not in ("raise", "fallback"):
            raise ValueError(f"RewardFunction: on_error={self.on_error!r} must be 'raise' or 'fallback'.")
        if self.on_none not in ("abstain", "error"):
            raise ValueError(f"RewardFunction: on_none={self.on_none!r} must be 'abstain' or 'error'.")
        least = 0 if self.time_limit is None else 1
        if self.num_workers is not None and self.num_workers < least:
            raise ValueError(
                f"RewardFunction: num_workers={self.num_workers} must be at least {least} with time_limit="
                f"{self.time_limit}; a limit can only be kept from outside the thread that runs the function."
            )

    @property
    def workers(self) -> int:
        """Threads that functions run in; 0 is the calling thread."""
        if self.num_workers is not None:
            return self.num_workers
        return 0 if self.time_limit is None else _DEFAULT_WORKERS


class Scorer:
    """A reward function with its name and the parameters that it asks for.

    Raises:
        ValueError: The signature cannot be read, or has a parameter that cannot be passed by name.
    """

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        if not callable(function):
            raise ValueError(f"RewardFunction: got {function!r}, but a reward function must be callable.")
        self.function = function
        self.name = name or _name_of(function)
        self.batched = isinstance(function, BatchReward)
        try:
            parameters = inspect.signature(function).parameters.values()
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"RewardFunction: the signature of reward function {self.name!r} cannot be read; wrap it in a function "
                "that names its parameters."
            ) from error
        for parameter in parameters:
            if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
                raise ValueError(
                    f"RewardFunction: parameter {parameter.name!r} of reward function {self.name!r} is positional "
                    "only, but arguments are passed by name; wrap it: lambda response: function(response)."
                )
        by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._accepted = {parameter.name for parameter in by_name}
        self._required = [parameter.name for parameter in by_name if parameter.default is parameter.empty]
        self._takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)

    def calls(self, inputs: RewardInput, time_limit: float | None) -> list[Call]:
        """Bind the arguments: one call a row, or one for all rows of a batch function.

        Raises:
            ValueError: A required parameter is neither offered nor a field of the row.
        """
        limit = math.inf if time_limit is None else time_limit
        if self.batched:
            arguments = self._select(_offer_batch(inputs), "the batch") if len(inputs) else None
            return [] if arguments is None else [self._call(arguments, limit * len(inputs))]
        return [
            self._call(self._select(_offer_row(inputs, row), inputs.describe(row)), limit) for row in range(len(inputs))
        ]

    def _select(self, offered: dict[str, Any], where: str) -> dict[str, Any]:
        for name in self._required:
            if name not in offered:
                raise ValueError(
                    f"RewardFunction: reward function {self.name!r} needs {name!r}, which {where} does not have. "
                    f"Available: {', '.join(offered)}. Add the field to the data, or give the parameter a default."
                )
        return {name: value for name, value in offered.items() if self._takes_all or name in self._accepted}

    def _call(self, arguments: dict[str, Any], limit: float) -> Call:
        # Current CUDA device and grad mode belong to a thread: a worker would start with device 0 and gradients on.
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
        return Call(partial(_call_function, self.function, arguments, device), limit)


def _call_function(function: Callable[..., Any], arguments: dict[str, Any], device: int) -> Any:
    with torch.no_grad(), torch.cuda.device(device):  # -1 leaves the device alone
        return function(**arguments)


def _name_of(function: Callable[..., Any]) -> str:
    while isinstance(function, partial):
        function = function.func
    name: str = getattr(function, "__name__", type(function).__name__)
    return name.strip("<>")  # a lambda's name becomes part of a metric's


def _offer_row(inputs: RewardInput, row: int) -> dict[str, Any]:
    # The ids are copied, so that a function that alters its list does not alter what the next function sees. Where a
    # field has the name of a text or id list, the latter wins: it is what the policy saw and said.
    return {
        **inputs.fields[row],
        "prompt": inputs.prompts[row],
        "response": inputs.responses[row],
        "prompt_ids": list(inputs.prompt_ids[row]),
        "response_ids": list(inputs.response_ids[row]),
    }


def _offer_batch(inputs: RewardInput) -> dict[str, Any]:
    names = dict.fromkeys(name for row in inputs.fields for name in row)
    return {
        **{name: [row.get(name) for row in inputs.fields] for name in names},
        "prompts": list(inputs.prompts),
        "responses": list(inputs.responses),
        "prompt_ids": [list(ids) for ids in inputs.prompt_ids],
        "response_ids": [list(ids) for ids in inputs.response_ids],
    }


def run_scorers(
    scorers: Sequence[Scorer],
    inputs: RewardInput,
    policy: CallPolicy,
    known: Mapping[tuple[int, int], Outcome] | None = None,
) -> tuple[Tensor, int]:
    """Call every function on every row.

    Args:
        scorers: F functions.
        inputs: N rows.
        policy: How functions are called.
        known: What functions have said already, by number of the function and row; they are not called again.

    Returns:
        The scores, float64 ``[F, N]``, NaN where a function abstained; and how many are the fallback.

    Raises:
        ValueError: A function asks for something that is not there (before any function runs), or a batch function
            returned another number of scores than rows.
        RewardError: A function raised, or returned something that is no finite number, under ``on_error="raise"``.
    """
    outcomes = dict(known or {})
    plans = [scorer.calls(inputs, policy.time_limit) for scorer in scorers]
    stop = policy.on_error == "raise"
    if not (stop and any(outcome.error is not None for outcome in outcomes.values())):
        open_calls = {(f, n): call for f, plan in enumerate(plans) for n, call in enumerate(plan)}
        open_calls = {key: call for key, call in open_calls.items() if key not in outcomes}
        fresh = run_calls(list(open_calls.values()), workers=policy.workers, stop_on_error=stop)
        outcomes.update(zip(open_calls, fresh, strict=False))
    raw = torch.full((len(scorers), len(inputs)), math.nan, dtype=torch.float64)
    fallbacks = 0
    for index, (scorer, plan) in enumerate(zip(scorers, plans, strict=True)):
        own = {n: outcomes[index, n] for n in range(len(plan)) if (index, n) in outcomes}
        scores, failures = _read_outcomes(scorer, own, inputs, policy)
        if failures:
            _warn_of_fallbacks(scorer, failures, inputs, policy)
        scores.update(dict.fromkeys(failures, policy.fallback))
        fallbacks += len(failures)
        for row, score in scores.items():
            raw[index, row] = math.nan if score is None else score
    return raw, fallbacks


def _read_outcomes(
    scorer: Scorer, outcomes: Mapping[int, Outcome], inputs: RewardInput, policy: CallPolicy
) -> tuple[dict[int, float | None], dict[int, str]]:
    """Turn outcomes into the score of each row that has one, and the reason for each row that takes the fallback."""
    scores: dict[int, float | None] = {}
    failures: dict[int, str] = {}
    for first, outcome in outcomes.items():
        rows = range(len(inputs)) if scorer.batched else range(first, first + 1)
        if outcome.timed_out:
            failures.update(dict.fromkeys(rows, f"ran out of its {policy.time_limit} s"))
        elif outcome.error is not None:
            reason = _fail(scorer, outcome.error, rows, inputs, policy)
            failures.update(dict.fromkeys(rows, reason))
        else:
            values = _batch_values(scorer, outcome.value, len(rows)) if scorer.batched else [outcome.value]
            for row, value in zip(rows, values, strict=True):
                try:
                    scores[row] = _to_score(value, policy)
                except (TypeError, ValueError) as error:
                    failures[row] = _fail(scorer, error, range(row, row + 1), inputs, policy)
    return scores, failures


def _fail(scorer: Scorer, error: BaseException, rows: range, inputs: RewardInput, policy: CallPolicy) -> str:
    """Raise a RewardError, or return the reason for taking the fallback, as the policy says."""
    reason = f"{type(error).__name__}: {error}"
    if policy.on_error == "fallback":
        return reason
    where = inputs.describe(rows[0])
    if len(rows) > 1:
        where = f"a batch of {len(rows)} rows that begins with {where}"
    raise RewardError(
        f"RewardFunction: reward function {scorer.name!r} failed on {where}: {reason}. "
        "Return None for a row that it cannot score, or set on_error='fallback'."
    ) from error


def _batch_values(scorer: Scorer, returned: Any, count: int) -> Sequence[Any]:
    values = returned.tolist() if isinstance(returned, Tensor | np.ndarray) else returned
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ValueError(
            f"RewardFunction: batch reward function {scorer.name!r} returned a {type(returned).__name__}, but must "
            f"return a list, tuple, array or tensor of {count} scores."
        )
    if len(values) != count:
        raise ValueError(
            f"RewardFunction: batch reward function {scorer.name!r} returned {len(values)} scores for {count} rows; "
            "return one for each, None for a row that it cannot score."
        )
    return values


def _to_score(value: Any, policy: CallPolicy) -> float | None:
    if value is None:
        if policy.on_none == "error":
            raise ValueError("returned None, and on_none='error'")
        return None
    is_array = isinstance(value, Tensor | np.ndarray | np.generic)
    number = value.item() if is_array and math.prod(value.shape) == 1 else value
    if not isinstance(number, numbers.Real):
        raise TypeError(f"returned a {type(value).__name__}, but a score is one real number or None")
    try:
        score = float(number)
    except OverflowError:  # an int of hundreds of digits
        score = math.inf
    if not abs(score) <= _MAX_SCORE:
        raise ValueError(f"returned {score}, which is no finite float32 number")
    return score


def _warn_of_fallbacks(scorer: Scorer, failures: dict[int, str], inputs: RewardInput, policy: CallPolicy) -> None:
    listed = [f"{inputs.describe(row)}: {reason}" for row, reason in list(failures.items())[:_LISTED]]
    if len(failures) > _LISTED:
        listed.append(f"and {len(failures) - _LISTED} more")
    _logger.warning(
        "Reward function %r: %d of %d samples take the fallback %s; %s",
        scorer.name,
        len(failures),
        len(inputs),
        policy.fallback,
        "; ".join(listed),
    )


def combine_scores(raw: Tensor, weights: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Sum ``weight x score`` over the functions that scored a row.

    The sum is not rescaled where a function abstains: with weights 0.25 and 0.75, scores 1 and 2 give 1.75, and 1 and
    an abstention give 0.25 (rescaled it would be 1.0). So each function adds the same to a row whoever else scored it.

    Args:
        raw: Scores, ``[F, N]``, NaN where a function abstained.
        weights: One a function. A function of weight 0 is only reported and does not make a row valid.

    Returns:
        The rewards, float32 ``[N]``, and whether any function of non-zero weight scored the row, bool ``[N]``.
    """
    weight = torch.tensor(weights, dtype=torch.float64)[:, None]
    present = ~raw.isnan()
    values = torch.where(present, raw * weight, 0.0).sum(dim=0).float()
    return values, (present & (weight != 0)).any(dim=0)


def check_weights(weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
    """Return the weights as floats, 1 each by default.

    Raises:
        ValueError: Their number is not that of the functions, one is not finite, or all are 0.
    """
    if weights is None:
        return (1.0,) * count
    if len(weights) != count:
        raise ValueError(f"RewardFunction: weights ({len(weights)}) must match functions ({count}).")
    checked = tuple(float(weight) for weight in weights)
    if not all(math.isfinite(weight) for weight in checked) or not any(checked):
        raise ValueError(f"RewardFunction: weights {checked} must be finite, and one at least other than 0.")
    return checked


def unique_names(names: Sequence[str]) -> list[str]:
    """Tell equal names apart: a second "f" becomes "f_2"."""
    unique: list[str] = []
    for name in names:
        candidate, number = name, 2
        while candidate in unique:
            candidate, number = f"{name}_{number}", number + 1
        unique.append(candidate)
    return unique


def refuse_lora(cls_name: str, lora_config: object) -> None:
    """Refuse an adapter on a reward role.

    Raises:
        ValueError: ``lora_config`` is not None.
    """
    if lora_config is not None:
        raise ValueError(
            f"{cls_name}: got lora_config={lora_config}, but a reward is frozen, an adapter would have nothing "
            "to train. Leave lora_config out here and give it to the actor or the critic."
        )
