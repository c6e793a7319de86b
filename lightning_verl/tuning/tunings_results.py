"""What ``lightning-verl tunings`` measured, and how its page reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from lightning_verl.tuning.arms import TUNINGS, Claim, Tuning, Work, arms_of, key_of
from lightning_verl.tuning.profile import Profile
from lightning_verl.tuning.record import Record, record_of

_KEPT_METRICS = ("time/", "cache/", "throughput/")


@dataclass(frozen=True)
class Figures:
    """What a row of the table compares; None where it was not measured."""

    rate: float
    """Tokens of prompts and responses a second and GPU."""
    seconds: float
    """Seconds of a GPU for a token."""
    peak: float
    """GB (10^9 bytes)."""
    rollout_peak: float | None
    """GB."""
    micro_batch: float
    """Tokens."""
    received: float | None
    """Bytes that collectives bring to a rank, for each token of the step."""
    mean_latency: float | None
    """Of collectives, in ms."""
    largest_latency: float | None
    """In ms."""
    scoring: float
    """What the step waits for rewards, in ms."""
    busy: float | None
    """Share of a step with a kernel running."""
    data_wait: float
    """What the step waits for prompts, in ms."""

    @classmethod
    def of(cls, record: Record, reward_apart: bool) -> Figures:
        """Those of an arm.

        Args:
            record: What it measured.
            reward_apart: Whether rewards are scored beside other work, so that only the wait for them counts.
        """
        metrics, profile = record.metrics, record.profile or Profile(None, 0, None, None)
        scoring = metrics["time/reward_wait"] + (0.0 if reward_apart else metrics["time/reward_score"])
        rollout = record.peaks.get("rollout")
        return cls(
            rate=record.rate,
            seconds=1 / record.rate,
            peak=record.peak / 1e9,
            rollout_peak=None if rollout is None else rollout / 1e9,
            micro_batch=record.micro_batch_tokens,
            received=None if record.received_bytes is None else record.received_bytes / record.tokens[-1],
            mean_latency=_milliseconds(profile.mean_latency),
            largest_latency=_milliseconds(profile.largest_latency),
            scoring=scoring * 1e3,
            busy=profile.busy,
            data_wait=metrics["time/data_wait"] * 1e3,
        )


_COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "rate": ("tokens/s/GPU", lambda value: f"{value:,.0f}"),
    "peak": ("peak, GB", lambda value: f"{value:.1f}"),
    "rollout_peak": ("in the rollout", lambda value: f"{value:.1f}"),
    "micro_batch": ("micro-batch, tokens", lambda value: f"{value:,.0f}"),
    "received": ("received, KB a token", lambda value: f"{value / 1e3:,.1f}"),
    "mean_latency": ("collective, ms, mean", lambda value: f"{value:.2f}"),
    "largest_latency": ("largest", lambda value: f"{value:.1f}"),
    "scoring": ("rewards, ms", lambda value: f"{value:.1f}"),
    "busy": ("busy", lambda value: f"{value:.0%}"),
    "data_wait": ("prompts, ms", lambda value: f"{value:.2f}"),
}
_MORE_IS_BETTER = ("rate", "busy")
_SHOWN = {**_COLUMNS, "seconds": ("time a token, µs", lambda value: f"{value * 1e6:,.0f}")}


@dataclass(frozen=True)
class Result:
    """All arms of one machine."""

    ranks: int
    work: Work
    arms: dict[str, Record] = field(default_factory=dict)
    """By ``key_of``."""
    versions: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    """By row: what else a reader should know."""

    def with_arm(self, key: str, record: Record) -> Result:
        """With one more arm, or this in place of the one that was there; what the page does not need is left out."""
        metrics = {name: value for name, value in record.metrics.items() if name.startswith(_KEPT_METRICS)}
        return replace(self, arms={**self.arms, key: replace(record, metrics=metrics, scores=[])})

    def records(self, tuning: Tuning) -> tuple[Record | None, Record | None]:
        """What was measured with a tuning off and on; None where nothing was, or it takes more ranks."""
        if tuning.needs_ranks > self.ranks:
            return None, None
        off, on = (self.arms.get(key_of(arm)) for arm in arms_of(tuning, self.ranks, self.work))
        return off, on

    def figures(self, tuning: Tuning) -> tuple[Figures, Figures] | None:
        """Of a row, off and on; None where one of them is missing or failed."""
        off, on = self.records(tuning)
        if off is None or on is None or off.problem or on.problem:
            return None
        return Figures.of(off, False), Figures.of(on, tuning.name == "reward")


# ---- files -----------------------------------------------------------------------------------------------------------


def save(path: Path, result: Result) -> None:
    """Write a result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(result), indent=2) + "\n")


def load(path: Path) -> Result:
    """Read a result."""
    entry = json.loads(path.read_text())
    arms = {key: record_of(record) for key, record in entry.pop("arms").items()}
    return Result(work=Work(**entry.pop("work")), arms=arms, **entry)


# ---- the page --------------------------------------------------------------------------------------------------------


def page(result: Result, command: str) -> str:
    """The page about a result.

    Args:
        result: The result.
        command: The one that writes the page again.
    """
    work = result.work
    device = next((record.device for record in result.arms.values() if record.seconds), "nothing")
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    cap = "all of the GPU's memory" if work.memory_gib is None else f"at most {work.memory_gib:g} GiB of a GPU"
    micro_batch = "as many as memory holds" if work.micro_batch_tokens is None else f"{work.micro_batch_tokens:,}"
    return "\n".join(
        [
            "# Tunings, off and on",
            "",
            f"Written by `{command} --table-only`; do not edit.",
            "",
            f"{result.ranks} x {device}, {versions}. PPO with actor, critic, reference and reward model, all of the "
            f"{work.shape} shape of Qwen2.5 with random weights, {work.precision}, {cap}; mini-batches of "
            f"{work.prompts} prompts x {work.samples} samples x ({work.prompt_tokens} + {work.new_tokens}) tokens; "
            f"tokens of a micro-batch: {micro_batch}. Both sides of a row: the same engine, rows side by side without "
            "padding, fused log-probs, the same GPUs and the same memory.",
            "",
            *_table(result),
            "",
            *_definitions(),
            "",
            "## The rows",
            "",
            *[f"- {tuning.title}: {tuning.about}" for tuning in TUNINGS],
            "",
            "## What is commonly claimed",
            "",
            *_claims(result),
            "",
            *_problems(result),
        ]
    )


def _table(result: Result) -> Iterator[str]:
    yield "Off → on."
    yield ""
    yield "| " + " | ".join(["", *(title for title, _ in _COLUMNS.values()), "claimed"]) + " |"
    yield "|---" * (len(_COLUMNS) + 2) + "|"
    for tuning in TUNINGS:
        found = result.figures(tuning)
        if found is None:
            continue
        cells = [_cell(name, *found) for name in _COLUMNS]
        cells[0] += f" ({found[1].rate / found[0].rate:.2f}x)"
        yield f"| {' | '.join([tuning.title, *cells, ', '.join(claim.text for claim in tuning.claims)])} |"


def _cell(name: str, off: Figures, on: Figures) -> str:
    _, spelled = _SHOWN[name]
    before, after = getattr(off, name), getattr(on, name)
    return "" if before is None or after is None else f"{spelled(before)} → {spelled(after)}"


def _definitions() -> list[str]:
    return [
        "Tokens are those of prompts and responses, the prompt once a sample; medians of the steps. Peak: the most that"
        " PyTorch had allocated on a GPU in the step, and in its rollout. Received: what collectives bring to a rank, "
        "for each token of the step, by the ring that moves least; those inside of CUDA graphs, which decode over "
        "tensor ranks, are not in it. Collective: time of the kernels of collectives, the wait for slower ranks "
        "included. Rewards and prompts: how long a step waits for them. Busy: time with a kernel running in one more "
        "step, under the profiler, over the time of that step.",
    ]


def _claims(result: Result) -> Iterator[str]:
    yield "| | claimed | measured | holds here |"
    yield "|---|---|---|---|"
    for tuning in TUNINGS:
        found = result.figures(tuning)
        for claim in tuning.claims:
            if claim.figure and found is not None:
                cell = _cell(claim.figure, *found)
                change = _change(claim, *found)
                measured = (
                    f"{_SHOWN[claim.figure][0]}: {cell}{_spelled(claim, change)}" if cell else "not on this device"
                )
                yield f"| {tuning.title} | {claim.text} | {measured} | {_verdict(claim, change)} |"
    for tuning in TUNINGS:
        if tuning.name in result.notes:
            yield ""
            yield f"{tuning.title}: {result.notes[tuning.name]}"


def _change(claim: Claim, off: Figures, on: Figures) -> float | None:
    before, after = getattr(off, claim.figure), getattr(on, claim.figure)
    if before is None or after is None or not (claim.absolute or before):
        return None
    return float(after - before if claim.absolute else after / before - 1)


def _spelled(claim: Claim, change: float | None) -> str:
    return "" if change is None or claim.absolute else f" ({change:+.0%})"


def _verdict(claim: Claim, change: float | None) -> str:
    if change is None:
        return ""
    better = change >= claim.change if claim.figure in _MORE_IS_BETTER else change <= claim.change
    return "yes" if better else "no"


def _problems(result: Result) -> Iterator[str]:
    """Rows without figures, and why."""
    lines = []
    for tuning in TUNINGS:
        sides = dict(zip(("off", "on"), result.records(tuning), strict=True))
        if tuning.needs_ranks > result.ranks:
            lines.append(f"- {tuning.title}: it takes {tuning.needs_ranks} GPUs.")
        elif result.figures(tuning) is None:
            failed = [f"{side}: {record.problem}" for side, record in sides.items() if record and record.problem]
            lines.append(f"- {tuning.title}: {'; '.join(failed) or 'not in this run'}.")
    if lines:
        yield from ["Not measured:", "", *lines, ""]


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
