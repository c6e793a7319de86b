"""The reward role that scores rollouts with Python functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

from lightning.pytorch import LightningModule

from lightning_verl.data.experience import PromptBatch, RolloutBatch
from lightning_verl.rewards.early import EarlyScores
from lightning_verl.rewards.functions import (
    CallPolicy,
    RewardInput,
    Scorer,
    Scores,
    check_weights,
    combine_scores,
    run_scorers,
    unique_names,
)


class RewardFunction(LightningModule):
    """Scores each response with one or more Python functions; it has no parameters.

    A function takes by name what it needs: ``prompt``, ``response`` (text), ``prompt_ids``, ``response_ids`` (lists of
    token ids) and any field of the data row, or all of it with ``**kwargs``; a field of one of these four names is
    hidden by it. The function returns a number (int, bool, float, numpy scalar, tensor of one element) or None to
    abstain. Wrap a function with `batch_reward` to score all rows in one call. Gradients are off while functions run.

    The reward of a row is the sum of ``weight x score`` over the functions that did not abstain, not rescaled. A row
    that every function abstained from is not valid, and its value is 0; a function of weight 0 does not count here.

    Args:
        functions: One function or several.
        weights: One number a function; None gives each 1.
        time_limit: Seconds a sample may take, None for no limit; a batch function gets N times as long. It works on any
            thread. Past it the sample takes ``fallback`` whatever ``on_error`` says. Code that keeps the interpreter
            lock, such as a regular expression that backtracks without end, cannot be stopped (see `rewards.pool`).
        fallback: The score of a sample that ran out of time or failed; None makes the function abstain from it. One
            warning a function and call names the samples, and ``Scores.fallbacks`` counts them.
        on_error: ``"raise"`` turns an exception, or a value that is no finite number, into a `RewardError` that names
            function, row and prompt; ``"fallback"`` gives the row the fallback.
        on_none: ``"abstain"``, or ``"error"`` to treat a returned None like an exception.
        num_workers: Threads that functions run in, 0 for the calling thread; None takes 4 with a time limit and 0
            without. With more than one, functions must be safe to run at the same time.
        names: One name a function, for metrics and messages; None takes the functions' own.
        during_rollout: Whether functions for one sample run on samples that have ended while others are still sampled
            (`rewards.early`), in any order; False: on all of them after the rollout, in the order of the rows.

    Raises:
        ValueError: No function, a function that cannot be called by name, weights or names that do not match the
            functions, or a value out of its range.
    """

    role: ClassVar[str] = "reward"
    trainable: ClassVar[bool] = False

    def __init__(
        self,
        functions: Callable[..., Any] | Sequence[Callable[..., Any]],
        *,
        weights: Sequence[float] | None = None,
        time_limit: float | None = None,
        fallback: float | None = 0.0,
        on_error: Literal["raise", "fallback"] = "raise",
        on_none: Literal["abstain", "error"] = "abstain",
        num_workers: int | None = None,
        names: Sequence[str] | None = None,
        during_rollout: bool = True,
    ) -> None:
        super().__init__()
        given = list(functions) if isinstance(functions, Sequence) else [functions]
        if not given:
            raise ValueError("RewardFunction: got no functions; give one at least.")
        if names is not None and (len(names) != len(given) or len(set(names)) < len(names) or "" in names):
            raise ValueError(
                f"RewardFunction: names {list(names)} must be {len(given)} different, non-empty names, one a function."
            )
        self.during_rollout = during_rollout
        self._early: list[EarlyScores] = []
        self.policy = CallPolicy(time_limit, fallback, on_error, on_none, num_workers)
        self.weights = check_weights(weights, len(given))
        self.scorers = [Scorer(function) for function in given]
        for scorer, name in zip(self.scorers, names or unique_names([s.name for s in self.scorers]), strict=True):
            scorer.name = name

    @property
    def names(self) -> list[str]:
        """The name of each function."""
        return [scorer.name for scorer in self.scorers]

    def watch(self, prompts: PromptBatch, samples: int, decode: Callable[[list[int]], str]) -> EarlyScores | None:
        """Begin to score a rollout whose samples ``score`` will be given; None if that has to wait for all of them.

        Args:
            prompts: Its prompts.
            samples: Samples a prompt.
            decode: Makes text of a response.
        """
        if not self.during_rollout or all(scorer.batched for scorer in self.scorers):
            return None
        try:
            self._early.append(EarlyScores(self.scorers, self.policy, prompts, samples, decode))
        except ValueError:  # a function lacks something: `score` says what, for its own row
            return None
        return self._early[-1]

    def score(self, batch: RolloutBatch) -> Scores:
        """Score every row.

        Returns:
            The scores, on the device of the batch.

        Raises:
            ValueError: A function needs something that a row does not have (before any function runs), or a batch
                function returned another number of scores than rows.
            RewardError: A function failed under ``on_error="raise"``.
        """
        inputs, known = RewardInput.from_rollout(batch), {}
        early, self._early = self._early, []
        for watched in early:
            known.update(watched.outcomes(inputs))
        raw, fallbacks = run_scorers(self.scorers, inputs, self.policy, known)
        values, valid = combine_scores(raw, self.weights)
        device = batch.input_ids.device
        components = dict(zip(self.names, raw.float().to(device), strict=True))
        return Scores(values.to(device), valid.to(device), components, fallbacks=fallbacks)
