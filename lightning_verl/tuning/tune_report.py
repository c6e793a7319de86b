"""What ``lightning-verl tune`` prints."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from lightning_verl.tuning.record import Record
from lightning_verl.tuning.search import Outcome, Row

_QUANTILES = (0.1, 0.5, 0.9)
_COLUMNS = f"{'setting':<15}{'value':<28}{'tokens/s/rank':>14}{'step':>9}{'peak':>11}  "


def head() -> str:
    """The names of the columns."""
    return f"{_COLUMNS}verdict"


def line(row: Row) -> str:
    """A row of the table."""
    record = row.record
    if record is None or not record.seconds:
        figures = " " * 34
    else:
        seconds = statistics.median(record.seconds)
        figures = f"{record.rate:>14,.0f}{f'{seconds:.2f} s':>9}{f'{record.peak / 2**30:.2f} GiB':>11}"
    return f"{row.knob:<15}{row.name:<28}{figures}  {row.verdict}"


def summary(outcome: Outcome) -> str:
    """What came of it, bandwidth beside the offload of keys and values, and rewards beside LoRA."""
    first, best = outcome.rows[0].record, outcome.best
    lines = []
    if first is not None and first.seconds:
        lines.append(
            f"{best.rate:,.0f} tokens a second and rank, {best.rate / first.rate:.2f} x the {first.rate:,.0f} of the "
            f"config as given; peak {best.peak / 2**30:.2f} GiB for {first.peak / 2**30:.2f}"
        )
    else:
        lines.append(f"{best.rate:,.0f} tokens a second and rank; the config as given did not fit")
    lines += _bandwidths(outcome.rows)
    lines += _rewards(outcome.rows)
    return "\n".join(lines)


def _bandwidths(rows: Sequence[Row]) -> Iterator[str]:
    """Of collectives, without and with the offload."""
    for row, before in _with_best_before(rows, "kv-offload"):
        without, with_offload = before.bandwidth, row.bandwidth
        if without is None or with_offload is None:
            yield "collective bandwidth behind the rollout: nothing to measure on one rank"
        else:
            swapped = row.metrics.get("cache/swapped_bytes", 0.0) / 2**30
            yield (
                f"collective bandwidth behind the rollout: {without / 1e9:.2f} GB/s without the offload of keys and "
                f"values, {with_offload / 1e9:.2f} with it, which moved {swapped:.2f} GiB a step"
            )


def _rewards(rows: Sequence[Row]) -> Iterator[str]:
    """Of the steps that were measured, without and with an adapter."""
    for with_adapter, without in _with_best_before(rows, "lora"):
        if not (with_adapter.scores and without.scores):
            continue
        for name, scores in (("all weights", without.scores), ("LoRA", with_adapter.scores)):
            deciles = ", ".join(f"{quantile:.0%} {_quantile(scores, quantile):.3f}" for quantile in _QUANTILES)
            spread = statistics.pstdev(scores)
            yield f"rewards, {name}: mean {statistics.fmean(scores):.3f}, deviation {spread:.3f}, quantiles {deciles}"
        yield (
            f"rewards, shift under LoRA: mean {shift(with_adapter.scores, without.scores):+.3f}, largest distance of "
            f"the distributions {distance(with_adapter.scores, without.scores):.3f}"
        )


def _with_best_before(rows: Sequence[Row], knob: str) -> Iterator[tuple[Record, Record]]:
    """The record of each row of a setting that ran, with the one that it was compared with."""
    best: Record | None = None
    for row in rows:
        if row.record is not None and not row.record.problem:
            if row.knob == knob and best is not None:
                yield row.record, best
            if row.kept:
                best = row.record


def shift(scores: Sequence[float], others: Sequence[float]) -> float:
    """How much higher the mean of the first scores is."""
    return statistics.fmean(scores) - statistics.fmean(others)


def distance(scores: Sequence[float], others: Sequence[float]) -> float:
    """The largest difference of two empirical distribution functions (Kolmogorov and Smirnov's), from 0 to 1."""

    def below(values: Sequence[float], point: float) -> float:
        return sum(value <= point for value in values) / len(values)

    return max(abs(below(scores, point) - below(others, point)) for point in {*scores, *others})


def _quantile(scores: Sequence[float], share: float) -> float:
    ordered = sorted(scores)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
