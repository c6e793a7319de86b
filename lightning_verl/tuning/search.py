"""The search of ``lightning-verl tune``: one setting after the other, and a change stays only where it is worth it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from lightning_verl.config import ConfigError, TrainConfig
from lightning_verl.planning.plan import Hardware
from lightning_verl.tuning.candidates import KNOBS, Candidate, Knob, Start, overflow
from lightning_verl.tuning.record import Record

MARGIN = 0.03
"""A change must be faster by this share: less is within what the same run differs by."""


class TuneError(Exception):
    """There is nothing to tune: the run as it stands fails, and not for want of memory."""


@dataclass(frozen=True)
class Row:
    """One line of what was tried."""

    knob: str
    """The setting; ``"start"`` for the config as it was given."""
    name: str
    """Its value."""
    verdict: str
    """What became of it, and why."""
    record: Record | None = None
    """What it measured; None where it was not tried."""
    kept: bool = False
    """Whether the search went on from it."""


@dataclass
class Outcome:
    """What a search found."""

    config: TrainConfig
    """The best config."""
    best: Record
    """What it measured."""
    rows: list[Row] = field(default_factory=list)
    """Everything that was tried, in order."""


def search(
    config: TrainConfig,
    run: Callable[[TrainConfig], Record],
    report: Callable[[Row], None],
    knobs: Sequence[Knob] = KNOBS,
) -> Outcome:
    """Try every setting in turn, each from the best config before it.

    Args:
        config: Where it begins.
        run: Takes a few steps of a config.
        report: Called with each row when it is there.
        knobs: The settings, in order.

    Raises:
        TuneError: The first config fails, and not for want of memory; or no config could run.
    """
    first = run(config)
    if first.problem and not (first.out_of_memory and first.ranks):
        raise TuneError(f"the config does not run as it stands: {first.problem}")
    verdict = first.problem or "where it begins"
    outcome = Outcome(config, first, [Row("start", "as given", verdict, first, kept=not first.problem)])
    report(outcome.rows[0])
    hardware = Hardware(first.memory_bytes / 2**30)
    wanted: int | None = None
    for knob in knobs:
        tokens = outcome.best.micro_batch_tokens
        start = Start(outcome.config, first.ranks, hardware, wanted_tokens=wanted)
        start = replace(start, tokens=tokens) if tokens else start
        for candidate in list(knob.candidates(start)):
            row = _tried(knob, candidate, start, outcome, run)
            outcome.rows.append(row)
            report(row)
            if knob.name == "micro-batch" and (row.record is None or row.record.out_of_memory):
                wanted = candidate.config.batch.max_tokens_per_micro_batch
            if row.kept and row.record is not None:
                outcome.config, outcome.best = candidate.config, row.record
    if outcome.best.problem:
        raise TuneError(f"no config that was tried fits: {outcome.best.problem}")
    return outcome


def _tried(
    knob: Knob, candidate: Candidate, start: Start, outcome: Outcome, run: Callable[[TrainConfig], Record]
) -> Row:
    """Try one candidate, unless the plan says that it cannot run or does not fit."""
    try:
        too_much = overflow(start.plan_of(candidate.config))
    except ConfigError as error:
        too_much = str(error).splitlines()[0]
    if too_much is not None:
        return Row(knob.name, candidate.name, f"not tried: {too_much}")
    record = run(candidate.config)
    kept, verdict = judge(record, outcome.best)
    if kept and not outcome.best.problem:  # a machine has faster and slower minutes: both must be of this one
        again = run(outcome.config)
        if again.rate > outcome.best.rate:
            outcome.best = again
            kept, verdict = judge(record, again)
            verdict += "" if kept else ", with what came before measured again"
    return Row(knob.name, candidate.name, verdict, record, kept)


def judge(record: Record, best: Record) -> tuple[bool, str]:
    """Whether a trial is better than the best one so far, and why.

    It is where the best one could not run; or where its median rate is higher by ``MARGIN``, and higher than that of
    every step of the best one.
    """
    if record.problem:
        return False, record.problem
    if best.problem:
        return True, "kept: it runs, what came before did not"
    change = record.rate / best.rate - 1
    if change > MARGIN and record.rate > max(best.rates):
        return True, f"kept: {change:+.0%} tokens a second"
    return False, f"{change:+.0%} tokens a second"
