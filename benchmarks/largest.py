"""Measures the largest model, micro-batch and row that one GPU takes in PPO, with all four roles as models.

    python benchmarks/largest.py
    python benchmarks/largest.py --only full lora --quantities model
    python benchmarks/largest.py --table-only

The first line searches on one GPU, in three ways: full fine-tuning, full fine-tuning with everything in host memory
that can be there, and LoRA. With ``--only`` and ``--quantities`` other searches stay in the file as they are. A trial
is two steps in a process of its own, so that what does not fit ends only that trial; a search begins at the largest
value that the planner says will fit, and goes up or down until one fits and the next does not. The file
docs/benchmarks/largest.json is written after each trial, and trials that are in it are not run again: a call that was
ended goes on. The page docs/benchmarks/largest.md is written with it, and alone by the last line. Weights are random.
On a CPU it runs too (``--shape tiny``), without figures of memory.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import metadata
from pathlib import Path

import torch
from largest_forecast import foresee, host_memory
from largest_results import GIB, QUANTITIES, WAYS, Case, Forecast, Result, Search, Trial, load, page, save
from largest_trial import PRECISION, run_case

from lightning_verl import __version__
from lightning_verl.tuning.probe import memory_of_rank
from lightning_verl.tuning.shapes import SHAPES

RESULTS = Path(__file__).parents[1] / "docs" / "benchmarks" / "largest.json"
MODELS = [shape for shape in SHAPES if shape != "tiny"]
NEW_TOKENS = 64
MODEL_WORK, TINY_WORK = (8, 128), (2, 6)
"""Prompts, and tokens of each, while the model grows."""
ROW, TINY_ROW = 384, 24
"""Tokens of a row while the micro-batch grows."""
LADDER = [round(2 ** (12 + step / 6)) for step in range(6 * 8 + 1)]
"""Tokens that are tried: 4,096 to 1,048,576, each 12% more than the one before."""
TINY_LADDER = [48, 72]
USABLE = 0.97
"""The share of the GPU up to which a value is expected to fit; the planner's own 0.9 leaves room for surprises."""
HOST_USABLE = 0.9
"""The share of the host's memory that may be used."""
TIME_LIMIT = 240.0
"""Seconds that a trial may take, from the start of its process."""
START_SECONDS, STEPS_WORTH = 25.0, 1.2
"""Seconds that a trial is expected to take beside its steps, and its steps in ones that count."""


def ladder(quantity: str, way: str, shape: str) -> list[Case]:
    """The cases of a search, from the smallest on."""
    tiny = shape == "tiny"
    new_tokens = 8 if tiny else NEW_TOKENS
    if quantity == "model":
        work = TINY_WORK if tiny else MODEL_WORK
        return [Case(way, quantity, name, *work, new_tokens) for name in (["tiny"] if tiny else MODELS)]
    row = TINY_ROW if tiny else ROW
    steps = TINY_LADDER if tiny else LADDER
    if quantity == "batch":
        return [Case(way, quantity, shape, tokens // row, row - new_tokens, new_tokens) for tokens in steps]
    return [Case(way, quantity, shape, 1, tokens - new_tokens, new_tokens) for tokens in steps]


# ---- searching -------------------------------------------------------------------------------------------------------


class Bounds:
    """What a case may take.

    Args:
        gpu_bytes: Of the GPU.
        host_bytes: Of the machine.
        seconds: Of a step.
    """

    def __init__(self, gpu_bytes: float, host_bytes: float, seconds: float) -> None:
        self._gpu_bytes, self._host_bytes, self._seconds = gpu_bytes, host_bytes, seconds

    def refusal(self, forecast: Forecast) -> str | None:
        """Why a case is not tried: what would end more than the trial, or take too long."""
        if forecast.host_bytes > HOST_USABLE * self._host_bytes:
            return "host"
        return "time" if forecast.seconds > self._seconds else None

    def expects(self, forecast: Forecast) -> bool:
        """Whether a case is expected to fit."""
        return self.refusal(forecast) is None and forecast.gpu_bytes <= USABLE * self._gpu_bytes


def next_case(
    cases: Sequence[Case], tried: Mapping[Case, Trial], forecast: Callable[[Case], Forecast], bounds: Bounds
) -> Case | str:
    """What a search tries next, or why it is over, a key of ``LIMITS``.

    Args:
        cases: From the smallest to the largest.
        tried: The trials so far.
        forecast: What a case will take; more than one before it.
        bounds: What it may take.
    """
    known = [number for number, case in enumerate(cases) if case in tried]
    if any(tried[cases[number]].problem and not tried[cases[number]].out_of_memory for number in known):
        return "error"
    fitting = [number for number in known if tried[cases[number]].fits]
    if not known:
        number = max(0, _count(cases, lambda case: bounds.expects(forecast(case))) - 1)
    elif fitting:
        number = fitting[-1] + 1
    else:
        number = known[0] - 1
    if number == len(cases):
        return "ladder"
    if number < 0 or number in known:
        return "memory"
    return bounds.refusal(forecast(cases[number])) or cases[number]


def _count(cases: Sequence[Case], holds: Callable[[Case], bool]) -> int:
    """How many cases from the first on hold, where none does behind one that does not."""
    low, high = 0, len(cases)
    while low < high:
        middle = (low + high) // 2
        if holds(cases[middle]):
            low = middle + 1
        else:
            high = middle
    return low


def search(
    result: Result,
    cases: Sequence[Case],
    bounds: Bounds,
    run: Callable[[Case, Forecast], Trial],
    keep: Callable[[Result], None],
    in_time: Callable[[Forecast], bool],
) -> Result:
    """Run trials until one fits and the next does not.

    Args:
        result: What is known already.
        cases: From the smallest to the largest.
        bounds: What they may take.
        run: Runs one.
        keep: Called after each trial.
        in_time: Whether a trial may still begin.
    """
    forecast = cache(foresee)
    way, quantity = cases[0].way, cases[0].quantity
    while True:
        tried = {trial.case: trial for trial in result.of(way, quantity)}
        found = next_case(cases, tried, forecast, bounds)
        if isinstance(found, Case) and not in_time(forecast(found)):
            found = "unfinished"
        result = result.with_search(Search(way, quantity, found if isinstance(found, str) else "unfinished"))
        keep(result)
        if isinstance(found, str):
            print(f"{way}, {quantity}: {found}", file=sys.stderr, flush=True)
            return result
        trial = run(found, forecast(found))
        figures = trial.problem or f"{trial.seconds:.1f} s, peak {trial.measured_gib or 0:.1f} GiB"
        print(
            f"{way}, {quantity}, {found.value}: foreseen {trial.foreseen_gib:.1f} GiB; {figures}",
            file=sys.stderr,
            flush=True,
        )
        result = result.with_trial(trial)


# ---- the command -----------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> None:
    """All searches that were asked for."""
    started = time.perf_counter()
    on_cuda = options.accelerator != "cpu" and torch.cuda.is_available()
    result = begin(options, on_cuda)
    bounds = Bounds(result.memory_gib * GIB, result.host_gib * GIB, options.step_seconds)

    def run(case: Case, forecast: Forecast) -> Trial:
        return run_case(case, forecast, options.accelerator, options.memory, TIME_LIMIT)

    def keep(result: Result) -> None:
        save(options.output, result)
        options.output.with_suffix(".md").write_text(page(options.output))

    def in_time(forecast: Forecast) -> bool:
        expected = START_SECONDS + STEPS_WORTH * forecast.seconds
        return time.perf_counter() - started + expected <= options.seconds

    for quantity in options.quantities:
        for way in options.only:
            result = search(result, ladder(quantity, way, options.shape), bounds, run, keep, in_time)


def begin(options: argparse.Namespace, on_cuda: bool) -> Result:
    """The result so far: what the file has of the same kind, without trials that ended in another error than memory."""
    device = torch.device("cuda", 0) if on_cuda else torch.device("cpu")
    memory = memory_of_rank(device, 1) / GIB
    shapes = ["tiny"] if options.shape == "tiny" else MODELS
    result = Result(
        device=torch.cuda.get_device_name() if on_cuda else "CPU",
        memory_gib=min(memory, options.memory or memory),
        host_gib=host_memory() / GIB if options.host_memory is None else options.host_memory,
        shape=options.shape,
        precision=PRECISION,
        versions={
            **{name: metadata.version(name) for name in ("torch", "transformers")},
            "lightning_verl": __version__,
        },
        parameters={shape: parameters_of(shape) for shape in shapes},
    )
    if options.output.exists():
        before = load(options.output)
        if result.comparable(before):
            kept = [trial for trial in before.trials if trial.fits or trial.out_of_memory]
            return replace(result, trials=kept, searches=before.searches)
    return result


def parameters_of(shape: str) -> float:
    """Parameters of the actor, in 10^9."""
    hidden, layers, heads, kv_heads, inner, vocabulary, tied = SHAPES[shape]
    keys = hidden // heads * kv_heads
    layer = 2 * hidden * (hidden + keys) + 3 * hidden * inner + hidden + 2 * keys + 2 * hidden  # biases, norms
    return (layers * layer + vocabulary * hidden * (1 if tied else 2) + hidden) / 1e9


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_cuda = torch.cuda.is_available()
    parser.add_argument("--output", type=Path, default=RESULTS, help="the JSON file; the page lies beside it")
    parser.add_argument("--table-only", action="store_true", help="measure nothing, only write the page again")
    parser.add_argument("--only", nargs="+", choices=list(WAYS), default=list(WAYS), help="ways to measure")
    parser.add_argument("--quantities", nargs="+", choices=QUANTITIES, default=QUANTITIES, help="what to search for")
    parser.add_argument(
        "--shape",
        choices=tuple(SHAPES),
        default="1.5B" if on_cuda else "tiny",
        help="of micro-batch and row; tiny: of the model too (default: 1.5B on a GPU)",
    )
    parser.add_argument("--memory", type=float, metavar="GIB", help="most of the GPU's memory (default: all of it)")
    parser.add_argument(
        "--host-memory", type=float, metavar="GIB", help="memory of the machine (default: what it says of itself)"
    )
    parser.add_argument(
        "--step-seconds", type=float, default=90.0, help="what would take longer, by its FLOPs, is not tried"
    )
    parser.add_argument(
        "--seconds", type=float, default=400.0, help="no trial begins that would end later (default: 400)"
    )
    parser.add_argument("--accelerator", choices=("auto", "cpu"), default="auto", help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or only write the page."""
    options = _parser().parse_args(arguments)
    if not options.table_only:
        measure(options)
    options.output.with_suffix(".md").write_text(page(options.output))


if __name__ == "__main__":
    main()
