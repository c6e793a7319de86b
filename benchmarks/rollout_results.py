"""What benchmarks/rollout.py measures and how its page reads."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from lightning_verl.tuning.shapes import SHAPES

COMMAND = "python benchmarks/rollout.py --output docs/benchmarks/rollout.json"
KNOWN_VLLM, TOLERANCE = {"with log-probs": 29_000, "without": 45_000}, 0.1
"""Tokens a second that vLLM is known to make of ``Work("1.5B")`` on one H200; a run in which it makes less by more than
the tolerance does not count."""
TESTED_GAP = 1e-5
"""Largest difference of log-probs that tests of tiny models allow in fp32."""


@dataclass(frozen=True)
class Work:
    """What is generated."""

    shape: str
    """One of ``SHAPES``."""
    prompts: int = 32
    """Different prompts."""
    n: int = 8
    """Samples for each."""
    prompt_tokens: int = 128
    """Tokens of a prompt."""
    new_tokens: int = 256
    """Tokens of a response, or the most of them."""
    drawn: bool = False
    """Whether the length of each response is drawn from 16 to ``new_tokens``."""

    @property
    def name(self) -> str:
        """In words."""
        lengths = f"16 to {self.new_tokens}" if self.drawn else str(self.new_tokens)
        return f"{self.shape}, {self.prompts} x {self.n}, {self.prompt_tokens} + {lengths} tokens"

    def lengths(self) -> list[int]:
        """The length of each response."""
        generator = torch.Generator().manual_seed(7)
        drawn = torch.randint(16, self.new_tokens + 1, (self.prompts * self.n,), generator=generator).tolist()
        return drawn if self.drawn else [self.new_tokens] * (self.prompts * self.n)


@dataclass(frozen=True)
class Speed:
    """How one engine did one piece of work. Medians over the runs."""

    seconds: float
    """From the call until the tokens were on the host."""
    tokens_per_second: float
    """Response tokens."""
    first_token: float | None = None
    """Seconds from construction to the first token, compilation included."""
    again: float | None = None
    """Seconds from new weights to the first token."""
    held_bytes: int | None = None
    """Device memory that stays taken between rollouts, weights not counted."""


@dataclass(frozen=True)
class Case:
    """One piece of work on every engine."""

    work: Work
    native: dict[str, Speed]
    """By variant: "default", "layers not compiled", "no graphs", "fp8 cache"."""
    transformers: Speed | None
    vllm: dict[str, Speed]
    """"with log-probs" and "without"; empty where vLLM is not installed."""
    floor_seconds: float | None
    """What reading weights and cache once a step takes at the measured bandwidth."""


@dataclass(frozen=True)
class Gap:
    """How far the engine's log-probs are from those of a training pass."""

    dtype: str
    largest: float
    mean: float


@dataclass(frozen=True)
class Divergence:
    """How often a sample differs between two compositions of its batch."""

    samples: int
    differing: int
    first_place: float | None
    """Mean place of the first token that differs."""


@dataclass(frozen=True)
class Offload:
    """A rollout with the cache that it needs, and with a smaller one and host memory."""

    work: Work
    bytes_whole: int
    """Device memory at the peak, weights included."""
    bytes_offloaded: int
    tokens_per_second_whole: float
    tokens_per_second_offloaded: float
    swapped_bytes: int
    preemptions: int
    same_tokens: float
    """Share of the tokens that are the same."""


@dataclass(frozen=True)
class Result:
    """All that one run measured."""

    device: str
    bandwidth: float | None
    """Bytes a second that a copy reads and writes."""
    cases: list[Case]
    gaps: list[Gap] = field(default_factory=list)
    divergence: Divergence | None = None
    offload: Offload | None = None
    versions: dict[str, str] = field(default_factory=dict)
    note: str = ""
    """What a reader has to know beside the figures."""

    def with_case(self, case: Case) -> Result:
        """With a case in place of the one of the same work, or behind the others; a note was about the old figures."""
        cases = {other.work: other for other in self.cases} | {case.work: case}
        return replace(self, cases=list(cases.values()), note="")


def save(path: Path, result: Result) -> None:
    """Write the result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(result), indent=2) + "\n")


def load(path: Path) -> Result:
    """Read a result."""
    entry = json.loads(path.read_text())
    cases = [
        Case(
            Work(**case["work"]),
            {name: Speed(**speed) for name, speed in case["native"].items()},
            Speed(**case["transformers"]) if case["transformers"] else None,
            {name: Speed(**speed) for name, speed in case["vllm"].items()},
            case["floor_seconds"],
        )
        for case in entry.pop("cases")
    ]
    gaps = [Gap(**gap) for gap in entry.pop("gaps")]
    divergence, offload = entry.pop("divergence"), entry.pop("offload")
    if offload:
        offload["work"] = Work(**offload["work"])
    return Result(
        cases=cases,
        gaps=gaps,
        divergence=Divergence(**divergence) if divergence else None,
        offload=Offload(**offload) if offload else None,
        **entry,
    )


def page(result: Result) -> str:
    """The page about a result."""
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    lines = [
        "# Rollouts",
        "",
        "Written by `python benchmarks/rollout.py --table-only`; do not edit.",
        "",
        f"{result.device}, {versions}; shapes of Qwen2.5 with random weights. Measured with `{COMMAND}`. Medians of "
        "several runs, `generate` once; all engines of a row in the same run. The native engine always returns "
        "log-probs. `generate` launches every kernel from Python, and vLLM schedules every step there, so that their "
        "speed is the host's too and varies between machines.",
        "",
        "| work (prompts x samples, prompt + response tokens) | native | `generate` of transformers | vLLM with "
        "log-probs | vLLM without | share of the bandwidth floor |",
        "|---|---|---|---|---|---|",
    ]
    for case in result.cases:
        own = case.native["default"]
        others = [case.transformers, case.vllm.get("with log-probs"), case.vllm.get("without")]
        floor = f"{case.floor_seconds / own.seconds:.0%}" if case.floor_seconds else ""
        columns = " | ".join(_times(own, other) for other in others)
        lines.append(f"| {case.work.name} | {own.tokens_per_second:,.0f} tokens/s | {columns} | {floor} |")
    lines += [
        "",
        f"Multiples: how many times the other's tokens a second the native engine makes. {result.note}".rstrip(),
        "",
    ]
    return "\n".join(
        [*lines, *_counting_lines(result), *_drawn_lines(result), *_start_lines(result), *_other_lines(result)]
    )


def _counting_lines(result: Result) -> list[str]:
    """Whether vLLM is as fast as it is known to be."""
    known_work = Work("1.5B")
    speeds = next((case.vllm for case in result.cases if case.work == known_work), {})
    if not speeds.keys() >= KNOWN_VLLM.keys():
        return []
    reached = {kind: speeds[kind].tokens_per_second / known for kind, known in KNOWN_VLLM.items()}
    verdict = "counts" if min(reached.values()) >= 1 - TOLERANCE else "does **not** count"
    shares = " and ".join(f"{share:.0%} of {KNOWN_VLLM[kind]:,} {kind}" for kind, share in reached.items())
    return [
        f"Of the tokens a second that vLLM is known to make of {known_work.name}, it made {shares} here, so the run "
        f"{verdict} (at least {1 - TOLERANCE:.0%}).",
        "",
    ]


def _drawn_lines(result: Result) -> list[str]:
    """What drawn lengths change in a step, beside equal ones of the same shape."""
    lines: list[str] = []
    for case in (case for case in result.cases if case.work.drawn and case.vllm):
        equal = _with_equal_lengths(case, result)
        if equal is None:
            continue
        lengths = case.work.lengths()
        speeds = [("the native engine", equal.native["default"], case.native["default"])]
        speeds += [(f"vLLM {kind}", equal.vllm[kind], case.vllm[kind]) for kind in ("with log-probs", "without")]
        steps = [
            f"{_step_ms(equal.work, whole):.2f} and {_step_ms(case.work, drawn):.2f} ms in {name}"
            for name, whole, drawn in speeds
        ]
        lines += [
            f"With drawn lengths the batch of {case.work.shape} empties: {sum(lengths):,} tokens in the "
            f"{max(lengths):,} steps of the longest response are {sum(lengths) / max(lengths):.0f} rows a step on "
            f"average, of {len(lengths)} at the start, which equal lengths keep to the end. With equal and with drawn "
            f"lengths a step (seconds by tokens of the longest response, prompts included) takes {', '.join(steps)}.",
            "",
        ]
    return lines


def _with_equal_lengths(drawn: Case, result: Result) -> Case | None:
    """The case of the same model and rows whose responses are equally long."""

    def rows(work: Work) -> tuple[str, int, int]:
        return work.shape, work.prompts, work.n

    cases = (case for case in result.cases if not case.work.drawn and case.vllm)
    return next((case for case in cases if rows(case.work) == rows(drawn.work)), None)


def _step_ms(work: Work, speed: Speed) -> float:
    """Milliseconds by tokens of the longest response."""
    return speed.seconds / max(work.lengths()) * 1e3


def _start_lines(result: Result) -> list[str]:
    """Starting up, memory and variants."""
    lines = [
        "| engine, work | tokens/s | construction to first token | new weights to first token | held between |",
        "|---|---|---|---|---|",
    ]
    for case in result.cases:
        speeds = [(f"native, {name}", speed) for name, speed in case.native.items()]
        speeds += [(f"vLLM {name}", speed) for name, speed in case.vllm.items()]
        for name, speed in speeds:
            held = f"{(speed.held_bytes or 0) / 1e9:.2f} GB"
            lines.append(
                f"| {name}: {case.work.name} | {speed.tokens_per_second:,.0f} | {_seconds(speed.first_token)} | "
                f"{_seconds(speed.again)} | {held} |"
            )
    return [
        *lines,
        "",
        "Construction: the process's first engine of a shape compiles, later ones find most of it done; only the "
        "first row begins with nothing. New weights: the native engine shares the trainer's, so that it is the first "
        "token of a rollout after a release; of vLLM it is that with an emptied prefix cache, and handing weights over "
        "is not in it. vLLM holds its weights and a cache up to half of the GPU (`gpu_memory_utilization=0.5`), and "
        "does not sleep here; this package's engine for it sizes that cache itself and lets vLLM sleep. What the "
        "native engine holds is beside the trainer's weights.",
        "",
    ]


def _other_lines(result: Result) -> list[str]:
    """Log-probs, divergence and offloading."""
    lines = [
        f"Log-probs of the rollout against those of a forward pass, {gap.dtype}, 8 responses: largest difference "
        f"{gap.largest:.2g}, mean {gap.mean:.2g}."
        for gap in result.gaps
    ]
    lines += _rounding_lines(result)
    if result.divergence:
        places = result.divergence.first_place
        where = "" if places is None else f", after {places:.1f} tokens on average"
        lines += [
            "",
            f"The same samples in a full batch and in a quarter of it: {result.divergence.differing} of "
            f"{result.divergence.samples} differ{where}. On a GPU another batch size takes other matrix kernels, which "
            "round differently; the random numbers are the same. Weights are random and sampling has a temperature of "
            "0.2: even so, many tokens are about equally likely, and the last bits of their sum decide.",
        ]
    if result.offload:
        offload = result.offload
        saved = 1 - offload.bytes_offloaded / offload.bytes_whole
        slower = 1 - offload.tokens_per_second_offloaded / offload.tokens_per_second_whole
        lines += [
            "",
            f"`offload_kvcache`, {offload.work.name}: {offload.bytes_whole / 1e9:.1f} GB at the peak with the whole "
            f"cache, {offload.bytes_offloaded / 1e9:.1f} GB with a smaller one ({saved:.0%} less) at {slower:.0%} "
            f"fewer tokens a second; {offload.preemptions} samples stepped back, {offload.swapped_bytes / 1e9:.1f} GB "
            f"went to host memory and back; {offload.same_tokens:.1%} of the tokens are the same."
            f"{_why_not_all(offload)}",
        ]
    return [*lines, ""]


def _rounding_lines(result: Result) -> list[str]:
    """What a difference in fp32 above that of the tests is made of."""
    gap = next((gap for gap in result.gaps if gap.dtype == "float32" and gap.largest > TESTED_GAP), None)
    shape = next((case.work.shape for case in result.cases if len(case.native) > 1), None)  # the one of all variants
    if gap is None or shape is None:
        return []
    size = math.log(SHAPES[shape][5])
    spacing = 2.0 ** (math.floor(math.log2(size)) - 23)
    return [
        "",
        f"Random weights spread over the {SHAPES[shape][5]:,} tokens of {shape}, so that a log-prob is about "
        f"-ln({SHAPES[shape][5]:,}) = -{size:.1f}: fp32 numbers of that size are {spacing:.2g} apart, and "
        f"{gap.largest:.2g} is {gap.largest / size:.2g} of it, rounding of sums in another order. The tests hold tiny "
        f"models, whose log-probs are about -ln(128) = -{math.log(128):.1f}, to {TESTED_GAP:g}.",
    ]


def _why_not_all(offload: Offload) -> str:
    """Why samples differ though no key or value was lost."""
    if offload.same_tokens == 1:
        return ""
    return (
        " With the smaller cache fewer rows run together, and another batch size rounds differently in bf16, as above: "
        "one other token, and all that follow it are drawn after another text. The same comparison with a tiny model "
        "in fp32 on the CPU gives the same tokens (tests/test_rollout_benchmark.py)."
    )


def _times(own: Speed, other: Speed | None) -> str:
    if other is None:
        return ""
    return f"{other.tokens_per_second:,.0f} ({own.tokens_per_second / other.tokens_per_second:.2f}x)"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"
