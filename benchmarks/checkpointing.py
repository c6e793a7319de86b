"""Measures what activation checkpointing, activation offload and compiled layers do to an update: memory and time.

    python benchmarks/checkpointing.py --output docs/benchmarks/checkpointing.json
    python benchmarks/checkpointing.py --only none selective
    python benchmarks/checkpointing.py --table-only

The first line measures every arm on one GPU and writes the JSON file after each. With ``--only`` other arms stay in the
file as they are. The last line measures nothing and writes the page docs/benchmarks/checkpointing.md from
docs/benchmarks/checkpointing.json. The model has the shape of Qwen2.5-1.5B and random weights. On a CPU it runs too, on
a tiny model (``--shape tiny --sequences 2 --tokens 16``), without figures of memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from lightning_verl import Actor
from lightning_verl.data.experience import RolloutBatch
from lightning_verl.data.microbatches import MicroBatches
from lightning_verl.parallel.checkpointing import ActivationCheckpointing
from lightning_verl.parallel.layers import prepare_layers
from lightning_verl.tuning.shapes import SHAPES, model_config

COMMAND = "python benchmarks/checkpointing.py --output docs/benchmarks/checkpointing.json"
RESULTS = Path(__file__).parents[1] / "docs" / "benchmarks" / "checkpointing.json"
PAGE = RESULTS.with_suffix(".md")
PROMPT = 128
"""Most tokens of a sequence that are its prompt."""
WARMUP = 2
"""Steps that do not count: the first compiles and makes optimizer states, the second settles memory."""
LEAST_SAVED, MOST_TIME = 0.35, 0.12
"""The goal of ``"selective"``: so much less peak memory at no more time than this."""


@dataclass(frozen=True)
class Arm:
    """One way to run the layers, and what it took."""

    name: str
    """What it is called."""
    checkpointing: ActivationCheckpointing
    """What is recomputed."""
    offload: bool = False
    """Whether activations go to host memory."""
    compiled: bool = False
    """Whether layers are compiled."""
    seconds: list[float] = field(default_factory=list)
    """Of each step that counts."""
    first_seconds: float | None = None
    """Of the first step, which compiles."""
    peak_bytes: int | None = None
    """Most memory allocated in a step; None on a CPU."""
    problem: str = ""
    """Why there is nothing more."""

    @property
    def key(self) -> tuple[str, bool]:
        """Which arm it is."""
        return self.name, self.compiled

    @property
    def median(self) -> float | None:
        """Seconds of a step."""
        return statistics.median(self.seconds) if self.seconds else None


PLAIN = (
    Arm("none", None),
    Arm("selective", "selective"),
    Arm("full", "full"),
    Arm("o_proj, down_proj", ["self_attn.o_proj", "mlp.down_proj"]),
    Arm("offload", None, offload=True),
    Arm("full, offload", "full", offload=True),
)
ARMS = (*PLAIN, *(replace(arm, compiled=True) for arm in PLAIN))


@dataclass(frozen=True)
class Result:
    """The arms, and what they ran on."""

    device: str
    """Its name."""
    torch: str
    """The version."""
    shape: str
    """One of ``SHAPES``."""
    sequences: int
    """In a step."""
    tokens: int
    """Of each."""
    arms: list[Arm]
    """In the order of ``ARMS``."""
    note: str = ""
    """On the circumstances."""

    def with_arm(self, arm: Arm) -> Result:
        """With this arm in place of an older one."""
        known = {other.key: other for other in self.arms} | {arm.key: arm}
        return replace(self, arms=[known[other.key] for other in ARMS if other.key in known])

    def base(self, compiled: bool) -> Arm | None:
        """The arm that others are compared with."""
        found = [arm for arm in self.arms if arm.key == ("none", compiled)]
        return found[0] if found else None


# ---- measuring -------------------------------------------------------------------------------------------------------


def make_batch(vocabulary: int, sequences: int, tokens: int, device: torch.device) -> RolloutBatch:
    """Random rows side by side, all in one micro-batch."""
    prompt = min(PROMPT, tokens // 2)
    generator = torch.Generator().manual_seed(0)
    rows = RolloutBatch(
        input_ids=torch.randint(2, vocabulary, (sequences, tokens), generator=generator),
        prompt_lengths=torch.full((sequences,), prompt),
        response_lengths=torch.full((sequences,), tokens - prompt),
        rollout_logprobs=torch.zeros(sequences, tokens - prompt),
        group_ids=torch.arange(sequences),
        truncated=torch.zeros(sequences, dtype=torch.bool),
        prompt_texts=[""] * sequences,
        response_texts=[""] * sequences,
        fields=[{}] * sequences,
    ).to(device)
    return MicroBatches.cut(rows.sizes(), sequences * tokens, "rows").take(rows, 0)


def measure_arm(arm: Arm, options: argparse.Namespace, device: torch.device) -> Arm:
    """Take the steps of one arm with a model of its own."""
    on_cuda = device.type == "cuda"
    torch.manual_seed(0)
    with device:
        actor = Actor(model_config(options.shape))
    actor.to(torch.bfloat16).eval()
    prepare_layers(actor, arm.checkpointing, arm.compiled, arm.offload)
    optimizer = actor.configure_optimizers()
    batch = make_batch(SHAPES[options.shape][5], options.sequences, options.tokens, device)
    times, peak = [], 0
    for number in range(WARMUP + options.steps):
        if on_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        with actor.without_padding():
            logprobs, _ = actor(batch)
            (-logprobs.mean()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if on_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
        if on_cuda and number >= WARMUP:
            peak = max(peak, torch.cuda.max_memory_allocated())
    return replace(arm, seconds=times[WARMUP:], first_seconds=times[0], peak_bytes=peak if on_cuda else None)


def try_arm(arm: Arm, options: argparse.Namespace, device: torch.device) -> Arm:
    """``measure_arm``; where it fails, such as for memory, the reason takes the place of figures."""
    try:
        return measure_arm(arm, options, device)
    except torch.OutOfMemoryError:
        return replace(arm, problem="out of memory")
    except Exception as error:  # the other arms go on
        return replace(arm, problem=f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}")


def clean_up() -> None:
    """Leave nothing of an arm behind."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure(options: argparse.Namespace) -> Result:
    """All arms that were asked for; the file is written after each."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    result = Result(name, torch.__version__, options.shape, options.sequences, options.tokens, [], options.note)
    if options.output.exists():
        before = load(options.output)
        if replace(before, arms=[], note="") == replace(result, note=""):  # else the arms do not compare
            result = replace(before, note=options.note or before.note)
    started = time.perf_counter()
    for arm in ARMS:
        if arm.name not in options.only or (arm.compiled and options.no_compile):
            continue
        measured = try_arm(arm, options, device)
        clean_up()
        result = result.with_arm(measured)
        save(options.output, result)
        spent, figures = time.perf_counter() - started, measured.problem or f"{measured.median:.3f} s a step"
        print(f"[{spent:4.0f} s] {_title(arm)}: {figures}", file=sys.stderr, flush=True)
    return result


def save(path: Path, result: Result) -> None:
    """Write the JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(result), indent=1) + "\n")


def load(path: Path) -> Result:
    """Read it."""
    read = json.loads(path.read_text())
    return Result(**{**read, "arms": [Arm(**arm) for arm in read["arms"]]})


# ---- the page --------------------------------------------------------------------------------------------------------


def page(result: Result) -> str:
    """The page about a result."""
    lines = [
        "# Activation checkpointing",
        "",
        "Written by `python benchmarks/checkpointing.py --table-only`; do not edit.",
        "",
        f"{result.device}, torch {result.torch}. Measured with `{COMMAND}`. {result.note}".rstrip(),
        "",
        f"One update of an actor of the {result.shape} shape of Qwen2.5 with random weights in bf16, fused AdamW with "
        f"states in bf16, {result.sequences} sequences of {result.tokens} tokens side by side in one micro-batch, on "
        "one device without FSDP2: forward pass with log-probs, backward pass, optimizer step. The peak is what "
        "PyTorch had allocated at most in a step: parameters, gradients and optimizer states are in it. Seconds are "
        f"medians after {WARMUP} steps. Ratios are to the arm without any of it, compiled or not like the arm itself. "
        "The first step compiles, with what earlier arms left in the compiler's cache, and allocates pinned memory.",
        "",
        "| layers | compiled | peak | of none's | seconds a step | of none's | first step |",
        "|---|---|---|---|---|---|---|",
        *(_row(arm, result.base(arm.compiled)) for arm in result.arms),
        "",
        *_verdicts(result),
    ]
    return "\n".join(lines)


def _row(arm: Arm, base: Arm | None) -> str:
    cells = [arm.name, "yes" if arm.compiled else "no"]
    if arm.problem:
        return "| " + " | ".join([*cells, arm.problem, "", "", "", ""]) + " |"
    memory, seconds = _ratios(arm, base)
    first = "" if arm.first_seconds is None else f"{arm.first_seconds:.1f} s"
    peak = "" if arm.peak_bytes is None else f"{arm.peak_bytes / 1e9:.1f} GB"
    return "| " + " | ".join([*cells, peak, _share(memory), f"{arm.median:.3f}", _share(seconds), first]) + " |"


def _ratios(arm: Arm, base: Arm | None) -> tuple[float | None, float | None]:
    """Peak and seconds over those of another arm."""
    if base is None:
        return None, None
    memory = arm.peak_bytes / base.peak_bytes if arm.peak_bytes and base.peak_bytes else None
    return memory, arm.median / base.median if arm.median and base.median else None


def _verdicts(result: Result) -> list[str]:
    """Whether ``"selective"`` does what it should."""
    lines = []
    for arm in result.arms:
        memory, seconds = _ratios(arm, result.base(arm.compiled))
        if arm.name != "selective" or memory is None or seconds is None:
            continue
        met = 1 - memory >= LEAST_SAVED and seconds - 1 <= MOST_TIME
        lines += [
            f"{_title(arm)}: peak {memory - 1:+.0%} at {seconds - 1:+.0%} time; the goal of {-LEAST_SAVED:+.0%} or "
            f"better at {MOST_TIME:+.0%} or less is {'met' if met else '**not** met'}.",
            "",
        ]
    return lines


def _title(arm: Arm) -> str:
    return arm.name + (", compiled" if arm.compiled else "")


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [arm.name for arm in PLAIN]
    parser.add_argument("--output", type=Path, default=RESULTS, help="the JSON file")
    parser.add_argument("--table-only", action="store_true", help="measure nothing, only write the page again")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="arms to measure")
    parser.add_argument("--no-compile", action="store_true", help="leave out the arms with compiled layers")
    parser.add_argument("--shape", choices=SHAPES, default="1.5B", help="of the model")
    parser.add_argument("--sequences", type=int, default=8, help="in a step")
    parser.add_argument("--tokens", type=int, default=1024, help="of a sequence")
    parser.add_argument("--steps", type=int, default=3, help="that count")
    parser.add_argument("--note", default="", help="a sentence for the page, on the circumstances of the run")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the JSON file, or write the page."""
    options = _parser().parse_args(arguments)
    if options.table_only:
        PAGE.write_text(page(load(RESULTS)))
        return
    print(page(measure(options)))


if __name__ == "__main__":
    main()
