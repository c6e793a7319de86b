"""What benchmarks/step.py measures and how its page reads."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rollout_results import Work

COMMAND = "python benchmarks/step.py --output docs/benchmarks/step.json"

PHASES = (
    "generation",
    "old log-probs",
    "reference",
    "scoring",
    "reward",
    "critic update",
    "update",
    "weights",
    "other",
)
"""Parts of a step. "scoring" is old log-probs, reference and values in one, where they are not told apart; "weights" is
what brings them to where they generate; "other" is all the rest."""

PEAK_FLOPS = 989e12
"""Dense bf16 FLOP/s of an H200 (SXM)."""
EXPECTED = {"generate": 9.57, "vLLM": 7.41}
"""Seconds a step that TRL is known to take in the case ``REFERENCE_CASE``, by engine."""
REFERENCE_CASE = "1.5B"
TOLERANCE = 0.1
"""How far TRL may be from ``EXPECTED``, as a share of it, for a run to count."""
TOKENS_GOALS = {REFERENCE_CASE: {"generate": 3.0, "vLLM": 2.3}, "ppo-0.5B": {"generate": 4.0}}
"""Times the tokens a second of TRL, by case and TRL's engine."""
PEAK_GOAL = 0.75
"""Share of TRL's peak memory, at most; of the case ``REFERENCE_CASE``, as the next."""
MFU_GOAL = 0.5


@dataclass(frozen=True)
class Step:
    """One step, after the warm-up."""

    seconds: float
    phases: dict[str, float]
    """Seconds by the names in ``PHASES``."""
    tokens: int
    """Of prompts and responses, the prompt once a sample."""
    peak_bytes: int | None = None
    """Most that PyTorch had allocated on the GPU."""


@dataclass(frozen=True)
class Side:
    """One trainer in one case."""

    micro_batch: int
    """Rows for TRL, tokens for lightning_verl."""
    steps: list[Step] = field(default_factory=list)
    update_flops: float = 0.0
    """3 x the forward pass over the real tokens of a step, of what the phase "update" trains."""
    busy: float | None = None
    """Share of the time of one step with a kernel running."""
    device: str = "CPU"
    versions: dict[str, str] = field(default_factory=dict)
    problem: str = ""
    """Why something was not measured."""
    rollout_rows: int | None = None
    """Rows that TRL's PPO generates and scores at once; None for all others."""

    @property
    def seconds(self) -> float:
        """Seconds a step, the median."""
        return statistics.median(step.seconds for step in self.steps)

    def phase(self, name: str) -> float:
        """Seconds of a phase, the median."""
        return statistics.median(step.phases.get(name, 0.0) for step in self.steps)

    @property
    def update_seconds(self) -> float:
        """Seconds of all updates, the median: with a critic, which TRL updates in one with the policy, of both."""
        return statistics.median(
            step.phases.get("update", 0.0) + step.phases.get("critic update", 0.0) for step in self.steps
        )

    @property
    def tokens_per_second(self) -> float:
        """Tokens of prompts and responses of all samples over the seconds of the step; one GPU."""
        return statistics.median(step.tokens / step.seconds for step in self.steps)

    @property
    def peak_bytes(self) -> int | None:
        """The largest peak of the steps."""
        return max((step.peak_bytes for step in self.steps if step.peak_bytes is not None), default=None)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation of the update; None on a CPU, whose peak is another."""
        return None if self.device == "CPU" else self.update_flops / self.phase("update") / PEAK_FLOPS


@dataclass(frozen=True)
class Case:
    """The same work on both sides."""

    name: str
    work: Work
    precision: str
    """Ours; TRL holds its parameters in bf16 with "bf16-true" and in fp32 with "bf16-mixed", with autocast to bf16."""
    algorithm: str = "grpo"
    """Or "ppo"."""
    ours: Side | None = None
    trl: dict[str, Side] = field(default_factory=dict)
    """By engine, "generate" and "vLLM", with the best micro-batch; PPO has but "generate"."""
    sweep: dict[str, float | None] = field(default_factory=dict)
    """TRL's seconds of one step with ``generate``, by micro-batch; None where it failed."""

    def counts(self, engine: str) -> bool | None:
        """Whether TRL is as fast as it is known to be; None where nothing is known, or nothing was measured."""
        side = self.trl.get(engine)
        if self.name != REFERENCE_CASE or side is None or not side.steps:
            return None
        return abs(side.seconds / EXPECTED[engine] - 1) <= TOLERANCE


@dataclass(frozen=True)
class Result:
    """All cases."""

    cases: list[Case]
    note: str = ""
    """What else a reader should know of the run."""

    def counts(self) -> dict[str, bool | None]:
        """For each engine of TRL, whether the run counts; None where the case that tells is not in it."""
        found = {case.name: case for case in self.cases}.get(REFERENCE_CASE)
        return {engine: None if found is None else found.counts(engine) for engine in EXPECTED}

    def with_cases(self, cases: Iterable[Case]) -> Result:
        """These cases in place of those of the same name, new ones at the end."""
        new = {case.name: case for case in cases}
        kept = [new.pop(case.name, case) for case in self.cases]
        return Result([*kept, *new.values()], self.note)


# ---- files -----------------------------------------------------------------------------------------------------------


def save(path: Path, result: Result) -> None:
    """Write a result; whether it counts is in it for the reader."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**asdict(result), "counts": result.counts()}, indent=2) + "\n")


def load(path: Path) -> Result:
    """Read a result."""
    entry = json.loads(path.read_text())
    return Result([_case(**case) for case in entry["cases"]], entry["note"])


def load_side(path: Path) -> Side:
    """Read what one side wrote."""
    return _side(**json.loads(path.read_text()))


def _side(steps: list[dict[str, Any]], **rest: Any) -> Side:
    return Side(steps=[Step(**step) for step in steps], **rest)


def _case(work: dict[str, Any], ours: dict[str, Any] | None, trl: dict[str, dict[str, Any]], **rest: Any) -> Case:
    sides = {engine: _side(**side) for engine, side in trl.items()}
    return Case(work=Work(**work), ours=_side(**ours) if ours else None, trl=sides, **rest)


# ---- the page --------------------------------------------------------------------------------------------------------


def page(result: Result) -> str:
    """The page about a result."""
    sides = [side for case in result.cases for side in _sides(case).values()]
    devices = " and ".join(dict.fromkeys(side.device for side in sides if side.steps))
    versions = {name: version for side in sides for name, version in side.versions.items()}
    lines = [
        "# One step against TRL",
        "",
        "Written by `python benchmarks/step.py --table-only`; do not edit.",
        "",
        f"{devices}, {', '.join(f'{name} {version}' for name, version in versions.items())}. Measured with "
        f"`{COMMAND}`. {result.note}".rstrip(),
        "",
        *_method(),
        *_about_ppo(result.cases),
        *_verdicts(result),
        *_goals(result.cases),
        *_columns(result.cases),
        *_problems(result.cases),
    ]
    return "\n".join(lines)


def _method() -> list[str]:
    return [
        "One step of GRPO: rollout, rewards, reference, one update. Shapes of Qwen2.5 with random weights, both "
        "sides with fused AdamW, a KL coefficient of 0.04 in the loss, no activation checkpointing, and new prompts "
        "in each step. No end token can be sampled, so that every response has its exact length. Each side runs in a"
        " process of its own, all in one run. Medians of several steps after a warm-up. TRL takes the best of its "
        "micro-batches by one step of each with `generate`, and the same one with vLLM, which runs colocated with "
        "TRL's own options: 30% of the GPU for vLLM, and a pass for old log-probs to correct by, which is not needed"
        " with `generate`.",
        "",
        "In `bf16-true` both sides hold parameters and optimizer states in bf16. In `bf16-mixed` both hold them in "
        "fp32: ours computes with bf16 copies, TRL under autocast to bf16, and vLLM generates in bf16.",
        "",
        "Lengths that are drawn are the same on all sides, for each sample one. In lightning_verl and in vLLM they are "
        "the limits of the single samples. With `generate`, a logits processor forces the end token at the drawn "
        "length and forbids it before: it samples until the longest response ends, as it does with any end token.",
        "",
    ]


def _about_ppo(cases: list[Case]) -> list[str]:
    """Only where it was measured, and of TRL's only what was done."""
    sides = [case.trl.get("generate") for case in cases if case.algorithm == "ppo"]
    if not sides:
        return []
    roles = (
        "actor, critic, reference and a reward model of the same shape, all on the GPU, with the KL penalty in the "
        "reward, and one update of one epoch. The update MFU of ours is the actor's."
    )
    # With a number of rows TRL began, whatever came of it.
    if all(side is None or side.rollout_rows is None for side in sides):
        without = "TRL has had no PPO since 1.13, and no folder with its 1.12 was named by `--trl-ppo`"
        return [f"PPO is measured for lightning_verl alone: {roles} {without}: its columns stay empty.", ""]
    return [
        f"PPO: {roles} TRL's is the PPOTrainer of 1.12, the last version with one (`--trl-ppo`), on the same work, "
        "with a KL coefficient of 0.04 too and its own options but for these. It updates policy and critic in one "
        'pass: its update and its update MFU are those of both, and "update seconds" compares them with ours of both. '
        "It generates and scores as many rows at once as its line says, the first that fitted of what was tried, most "
        "first (its own default is 64): with fewer, `generate` takes as many steps for each part. However many they "
        "are, it stacks the fp32 logits of the whole rollout, and keeps those of the step before meanwhile.",
        "",
    ]


def _verdicts(result: Result) -> list[str]:
    lines = []
    for engine, counts in result.counts().items():
        known = f"TRL with {_spelled(engine)} is known to take {EXPECTED[engine]:.2f} s a step at {REFERENCE_CASE}"
        if counts is None:
            lines += [f"{known}; it was not measured in this run.", ""]
            continue
        side = next(case for case in result.cases if case.name == REFERENCE_CASE).trl[engine]
        verdict = "so the run counts" if counts else "so the run does **not** count"
        lines += [f"{known}; here it took {side.seconds:.2f} s, {verdict} (within {TOLERANCE:.0%}).", ""]
    return lines


def _goals(cases: list[Case]) -> list[str]:
    """How many times TRL's figures ours are; the goals are for one case."""
    lines = [
        "Ours over TRL's, with the goals in brackets; for the update MFU ours itself too.",
        "",
        "| case | against TRL with | tokens a second | peak memory | update MFU | update seconds | GPU busy |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        for engine, other in case.trl.items():
            if case.ours is None or not case.ours.steps or not other.steps:
                continue
            own = case.ours
            goal = TOKENS_GOALS.get(case.name, {}).get(engine)
            tokens = "" if goal is None else f" (at least {goal}x)"
            peak, mfu = f" (at most {PEAK_GOAL}x)", f" (at least {MFU_GOAL})"
            if case.name != REFERENCE_CASE:
                peak = mfu = ""
            used = "" if own.mfu is None else f"{_ratio(own.mfu, other.mfu)}, {own.mfu:.2f}{mfu}"
            lines.append(
                f"| {_title(case)} | {_spelled(engine)} | {_ratio(own.tokens_per_second, other.tokens_per_second)}"
                f"{tokens} | {_ratio(own.peak_bytes, other.peak_bytes)}{peak} | {used} | "
                f"{_ratio(own.update_seconds, other.update_seconds)} | "
                f"{_ratio(own.busy, other.busy)} |"
            )
    return [*lines, ""]


def _columns(cases: list[Case]) -> list[str]:
    lines = []
    for case in cases:
        measured = {name: side for name, side in _sides(case).items() if side.steps}
        shown = [phase for phase in PHASES if any(side.phase(phase) for side in measured.values())]
        lines += [
            f"## {_title(case)}",
            "",
            "| "
            + " | ".join(["", "seconds a step", *shown, "tokens a second", "peak", "update MFU", "GPU busy"])
            + " |",
            "|---" * (len(shown) + 6) + "|",
        ]
        for name, side in measured.items():
            phases = " | ".join(f"{side.phase(phase):.2f}" for phase in shown)
            lines.append(
                f"| {name} | {side.seconds:.2f} | {phases} | {side.tokens_per_second:,.0f} | "
                f"{_gigabytes(side.peak_bytes)} | {_number(side.mfu)} | {_share(side.busy)} |"
            )
        lines.append("")
        if case.sweep:
            tried = ", ".join(f"{rows}: {_seconds(seconds)}" for rows, seconds in case.sweep.items())
            lines += [f"TRL with `generate`, one step by rows of a micro-batch: {tried}.", ""]
    return [
        *lines,
        "Tokens and rows are those of a micro-batch. Seconds by phase, those that no side has left out; tokens are "
        "those of prompts and responses of all samples; the peak is what PyTorch had allocated, vLLM's cache "
        "included. Update MFU: 3 x the FLOPs of a forward pass over the real tokens, neither padding nor "
        "recomputation, over the seconds of the update and 989 TFLOP/s. Busy: time with a kernel running in one step"
        " under the profiler, over the time of that step. Old log-probs of lightning_verl are those of the update "
        "itself, where one update follows one rollout.",
        "",
    ]


def _problems(cases: list[Case]) -> list[str]:
    found = [
        f"- {_title(case)}, {name}: {side.problem}"
        for case in cases
        for name, side in _sides(case).items()
        if side.problem
    ]
    return ["Not measured:", "", *found, ""] if found else []


def _sides(case: Case) -> dict[str, Side]:
    sides = {} if case.ours is None else {f"lightning_verl, {case.ours.micro_batch:,} tokens": case.ours}
    for engine, side in case.trl.items():
        at_once = "" if side.rollout_rows is None else f", {side.rollout_rows} at once"
        sides[f"TRL, {_spelled(engine)}, {side.micro_batch} rows{at_once}"] = side
    return sides


def _title(case: Case) -> str:
    return ("PPO, " if case.algorithm == "ppo" else "") + f"{case.work.name}, {case.precision}"


def _spelled(engine: str) -> str:
    return "`generate`" if engine == "generate" else engine


def _ratio(own: float | None, other: float | None) -> str:
    return "" if own is None or other is None else f"{own / other:.2f}x"


def _gigabytes(value: int | None) -> str:
    return "" if value is None else f"{value / 1e9:.1f} GB"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _seconds(value: float | None) -> str:
    return "failed" if value is None else f"{value:.2f} s"
