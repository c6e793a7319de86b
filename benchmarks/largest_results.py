"""What benchmarks/largest.py measured, as a file and as a page."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

COMMAND = "python benchmarks/largest.py"
GIB = 2**30


@dataclass(frozen=True)
class Way:
    """How the roles are trained."""

    name: str
    """On the command line and in the table."""
    about: str
    """In words."""
    lora: bool = False
    """Whether actor and critic have adapters."""
    offload: bool = False
    """Whether parameters, gradients, optimizer states and activations lie in host memory."""


WAYS = {
    way.name: way
    for way in (
        Way("full", "full fine-tuning of actor and critic"),
        Way(
            "offload",
            "full fine-tuning with `offload_parameters` (parameters, gradients and optimizer states of all roles in "
            "host memory) and `activation_offload`",
            offload=True,
        ),
        Way("lora", "LoRA on all linear layers of actor and critic; the reference is the actor without it", lora=True),
    )
}
QUANTITIES = ("model", "batch", "context")
LIMITS = {
    "memory": "the next does not fit on the GPU",
    "host": "the next needs more host memory than there is",
    "time": "the next would take longer than a trial may",
    "ladder": "it is the largest that is tried",
    "error": "the next ended with an error",
    "unfinished": "the next was not tried",
}
"""Why a search went no further."""
WORK = {
    "model": "Model: a step has {0.prompts} prompts with a sample each, {0.prompt_tokens} + {0.new_tokens} tokens; "
    "layers run as they are written.",
    "batch": "Micro-batch: rows of {0.prompt_tokens} + {0.new_tokens} tokens, all rows of a step in one micro-batch.",
    "context": "Row: one row in a step, a long prompt and {0.new_tokens} tokens of a response.",
}
"""What grows, of a case."""


@dataclass(frozen=True)
class Case:
    """What a trial does: a way, a model, and the work of a step."""

    way: str
    """One of ``WAYS``."""
    quantity: str
    """One of ``QUANTITIES``."""
    shape: str
    """Of all roles."""
    prompts: int
    """Prompts of a step, with a sample each, all in one micro-batch."""
    prompt_tokens: int
    """Tokens of a prompt in the step that counts."""
    new_tokens: int
    """Tokens of a response."""

    @property
    def row_tokens(self) -> int:
        """Tokens of a row."""
        return self.prompt_tokens + self.new_tokens

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.prompts * self.row_tokens

    @property
    def value(self) -> str | int:
        """What is as large as possible."""
        return {"model": self.shape, "batch": self.tokens, "context": self.row_tokens}[self.quantity]

    @property
    def first_prompt_tokens(self) -> int:
        """Tokens of a prompt in the step before, which only has to make optimizer states and compiled layers."""
        return self.prompt_tokens if self.quantity == "model" else 1


@dataclass(frozen=True)
class Forecast:
    """What is expected of a case."""

    gpu_bytes: int
    """Of tensors on the GPU, at the peak."""
    host_bytes: int
    """Of the host, at the peak."""
    seconds: float
    """Of a step, roughly."""


@dataclass(frozen=True)
class Trial:
    """A case that was run."""

    case: Case
    """The case."""
    foreseen_gib: float
    """The peak that was planned."""
    measured_gib: float | None = None
    """The peak of the second step, by ``torch.cuda.max_memory_allocated``; None on a CPU and where it did not fit."""
    seconds: float | None = None
    """Of the second step."""
    tokens_per_second: float | None = None
    """Prompt and response tokens of the second step, a second."""
    problem: str = ""
    """First line of the error, where there was one."""
    out_of_memory: bool = False
    """Whether that was memory, of the GPU or the host."""

    @property
    def fits(self) -> bool:
        """Whether both steps were taken."""
        return not self.problem


@dataclass(frozen=True)
class Search:
    """How the search of one way and quantity ended."""

    way: str
    """One of ``WAYS``."""
    quantity: str
    """One of ``QUANTITIES``."""
    limit: str
    """A key of ``LIMITS``."""


@dataclass(frozen=True)
class Result:
    """The trials, and what they ran on."""

    device: str
    """Its name."""
    memory_gib: float
    """Of the GPU, as far as it may be used."""
    host_gib: float
    """Memory of the machine."""
    shape: str
    """Of batch and context."""
    precision: str
    """Fabric's."""
    versions: dict[str, str]
    """Of the libraries."""
    parameters: dict[str, float] = field(default_factory=dict)
    """Parameters of the actor of each shape, in 10^9."""
    trials: list[Trial] = field(default_factory=list)
    """In the order in which they were run."""
    searches: list[Search] = field(default_factory=list)
    """Those that were begun."""

    def of(self, way: str, quantity: str) -> list[Trial]:
        """The trials of a search."""
        return [trial for trial in self.trials if (trial.case.way, trial.case.quantity) == (way, quantity)]

    def best(self, way: str, quantity: str) -> Trial | None:
        """The largest that fits."""
        fitting = [trial for trial in self.of(way, quantity) if trial.fits]
        return max(
            fitting, key=lambda trial: (self.parameters.get(trial.case.shape, 0.0), trial.case.tokens), default=None
        )

    def limit(self, way: str, quantity: str) -> str | None:
        """Why a search went no further; None where it was not begun."""
        found = [s.limit for s in self.searches if (s.way, s.quantity) == (way, quantity)]
        return found[0] if found else None

    def with_trial(self, trial: Trial) -> Result:
        """With one trial more, in place of an older one of the same case."""
        return replace(self, trials=[*(old for old in self.trials if old.case != trial.case), trial])

    def with_search(self, search: Search) -> Result:
        """With how a search ended, in place of what was known of it."""
        others = [s for s in self.searches if (s.way, s.quantity) != (search.way, search.quantity)]
        return replace(self, searches=[*others, search])

    def comparable(self, other: Result) -> bool:
        """Whether trials of both may stand in one table."""
        return all(
            getattr(self, name) == getattr(other, name)
            for name in ("device", "memory_gib", "shape", "precision", "versions")
        )


def save(path: Path, result: Result) -> None:
    """Write the JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(result), indent=1) + "\n")


def load(path: Path) -> Result:
    """Read it."""
    read: dict[str, Any] = json.loads(path.read_text())
    trials = [Trial(**{**entry, "case": Case(**entry["case"])}) for entry in read["trials"]]
    return Result(**{**read, "trials": trials, "searches": [Search(**entry) for entry in read["searches"]]})


# ---- the page --------------------------------------------------------------------------------------------------------

HEAD = f"# The largest on one GPU\n\nWritten by `{COMMAND} --table-only`; do not edit.\n\n"


def page(path: Path) -> str:
    """The page of a file of results, or how to make one."""
    if not path.is_file():
        return f"{HEAD}Not measured yet:\n\n```bash\n{COMMAND}\n```\n"
    result = load(path)
    versions = ", ".join(f"{name} {version}" for name, version in sorted(result.versions.items()))
    shape = result.shape
    lines = [
        f"{result.device} with {result.memory_gib:.1f} GiB, {result.host_gib:.0f} GiB of host memory, {versions}. "
        f"Measured with `{COMMAND}`.",
        "",
        *_definitions(result),
        "",
        f"| way | largest model (B parameters) | most tokens in a micro-batch at {shape} | longest row at {shape} |",
        "|---|---|---|---|",
        *(_row(result, way) for way in WAYS if any(result.limit(way, quantity) for quantity in QUANTITIES)),
        "",
        *(f"- `{way.name}`: {way.about}." for way in WAYS.values()),
        "",
        *_against_trl(result),
        "## Trials",
        "",
        "| way | quantity | value | foreseen GiB | measured GiB | seconds | tokens a second | |",
        "|---|---|---|---|---|---|---|---|",
        *(_trial_row(trial) for trial in _ordered(result.trials)),
        "",
    ]
    return HEAD + "\n".join(lines)


def _definitions(result: Result) -> Iterable[str]:
    yield (
        "PPO with actor, critic, reference and reward model, all of one shape of Qwen2.5 with random weights in "
        f'`{result.precision}`, AdamW with states in the same, and `activation_checkpointing="full"`. A value fits if '
        "a process that begins with nothing takes two whole steps: rollout, scores, values, advantages, an update of "
        "critic and actor. In brackets is the peak of the second step, by `torch.cuda.max_memory_allocated`, and why "
        "the search ended there."
    )
    yield ""
    for quantity, text in WORK.items():
        of_it = [trial.case for trial in result.trials if trial.case.quantity == quantity]
        if of_it:
            first = "" if quantity == "model" else " Prompts of the first step have one token."
            yield f"- {text.format(of_it[0])}{first}"


def _row(result: Result, way: str) -> str:
    return f"| {way} | {' | '.join(_cell(result, way, quantity) for quantity in QUANTITIES)} |"


def _cell(result: Result, way: str, quantity: str) -> str:
    limit, best = result.limit(way, quantity), result.best(way, quantity)
    if limit is None:
        return ""
    if best is None:
        return f"none [{LIMITS[limit]}]"
    value = best.case.value
    text = f"{value} ({result.parameters[best.case.shape]:.2f})" if quantity == "model" else f"{value:,}"
    at_least = "" if limit in ("memory", "host") else "at least "
    peak = "" if best.measured_gib is None else f"{best.measured_gib:.1f} GiB; "
    return f"{at_least}{text} [{peak}{LIMITS[limit]}]"


def _against_trl(result: Result) -> Iterable[str]:
    """What a known run of another library is compared with, where there is one to compare."""
    best = result.best("full", "model")
    if best is None or best.measured_gib is None:
        return
    yield (
        "TRL 1.12's PPO, which holds four full copies, is known not to fit in 140 GiB at 1.5B with "
        "32 x 8 x (128 + 256) tokens."
    )
    yield ""


def _ordered(trials: Iterable[Trial]) -> list[Trial]:
    ways, places = list(WAYS), {quantity: place for place, quantity in enumerate(QUANTITIES)}
    return sorted(
        trials, key=lambda trial: (places[trial.case.quantity], ways.index(trial.case.way), trial.foreseen_gib)
    )


def _trial_row(trial: Trial) -> str:
    value = trial.case.value
    cells = [
        trial.case.way,
        trial.case.quantity,
        value if isinstance(value, str) else f"{value:,}",
        f"{trial.foreseen_gib:.1f}",
        "" if trial.measured_gib is None else f"{trial.measured_gib:.1f}",
        "" if trial.seconds is None else f"{trial.seconds:.1f}",
        "" if trial.tokens_per_second is None else f"{trial.tokens_per_second:,.0f}",
        "fits" if trial.fits else "out of memory" if trial.out_of_memory else trial.problem.replace("|", "/"),
    ]
    return f"| {' | '.join(cells)} |"
