"""Runs the quick start for several algorithms and seeds, keeps the results, and puts their table into README.md.

    python benchmarks/quickstart.py --seeds 0 1 2 --jobs 1

Every run is a process of its own, `lightning-verl quickstart`; its last line is the result. Results are merged into
docs/benchmarks/quickstart.json, where a run takes the place of an earlier one of the same algorithm and seed.
``--table-only`` runs nothing and only writes the table again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "docs" / "benchmarks" / "quickstart.json"
START, END = "<!-- quickstart-table:start -->", "<!-- quickstart-table:end -->"
ALGORITHMS = ("grpo", "ppo")

_LIBRARIES = ("torch", "transformers", "lightning")
_LAST_LINE = re.compile(r"greedy accuracy: ([01]\.\d+) -> ([01]\.\d+)")


@dataclass(frozen=True)
class Run:
    """The result of one run."""

    algorithm: str
    """ "grpo" or "ppo"."""
    seed: int
    """Seed of weights, data and samples."""
    sft_accuracy: float
    """Greedy accuracy on unseen prompts after SFT, before RL."""
    rl_accuracy: float
    """The same after RL."""
    seconds: float
    """Wall time of the whole process."""
    threads: int
    """Threads of the process (OMP_NUM_THREADS)."""
    jobs: int
    """Runs that shared the machine."""
    versions: dict[str, str]
    """Versions of Python and of the libraries that decide the numbers."""


def parse_accuracies(output: str) -> tuple[float, float]:
    """Return the accuracies in the last line of a run's output.

    Args:
        output: What the run printed.

    Raises:
        ValueError: The last line is not a result.
    """
    lines = output.strip().splitlines()
    match = _LAST_LINE.fullmatch(lines[-1].strip()) if lines else None
    if match is None:
        raise ValueError(
            f"benchmarks/quickstart.py: the last line is {lines[-1] if lines else ''!r}, but a run ends with "
            "'greedy accuracy: 0.12 -> 0.34'."
        )
    return float(match[1]), float(match[2])


def run(algorithm: str, seed: int, threads: int, jobs: int) -> Run:
    """Run the quick start once.

    Args:
        algorithm: "grpo" or "ppo".
        seed: Seed of the run.
        threads: Threads of its process.
        jobs: Runs that share the machine, for the record.

    Raises:
        RuntimeError: The run failed.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "lightning_verl", "quickstart", "--algorithm", algorithm, "--seed", str(seed)]
        command += ["--output", str(Path(folder) / "run")]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"benchmarks/quickstart.py: {algorithm}, seed {seed} failed:\n{done.stderr[-4000:]}")
    before, after = parse_accuracies(done.stdout)
    return Run(algorithm, seed, before, after, round(time.perf_counter() - started, 1), threads, jobs, versions())


def versions() -> dict[str, str]:
    """Return the versions that decide the numbers."""
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in _LIBRARIES}}


def load(path: Path) -> list[Run]:
    """Read the results kept so far; none without a file."""
    return [Run(**entry) for entry in json.loads(path.read_text())["runs"]] if path.is_file() else []


def save(path: Path, runs: Iterable[Run]) -> None:
    """Write results, in the order of the table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"runs": [asdict(run) for run in runs]}, indent=2) + "\n")


def merge(kept: Iterable[Run], new: Iterable[Run]) -> list[Run]:
    """Put new results in the place of earlier ones of the same algorithm and seed; sorted by algorithm and seed."""
    runs = {(run.algorithm, run.seed): run for run in [*kept, *new]}
    return [runs[key] for key in sorted(runs)]


def table(runs: Sequence[Run]) -> str:
    """Return the Markdown table of the results: a row for each seed, a column for each algorithm."""
    if not runs:
        return "Not measured yet: `python benchmarks/quickstart.py --seeds 0 1 2` fills this in.\n"
    algorithms = sorted({run.algorithm for run in runs})
    found = {(run.algorithm, run.seed): f"{run.sft_accuracy:.2f} -> {run.rl_accuracy:.2f}" for run in runs}
    lines = [
        f"| seed | {' | '.join(algorithm.upper() for algorithm in algorithms)} |",
        f"|---|{'---|' * len(algorithms)}",
    ]
    for seed in sorted({run.seed for run in runs}):
        cells = [found.get((algorithm, seed), "") for algorithm in algorithms]
        lines.append(f"| {seed} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_conditions(runs), ""])


def _conditions(runs: Sequence[Run]) -> list[str]:
    """What the numbers were measured with."""
    seconds = [run.seconds for run in runs]
    libraries = [f"{name} {_listed(run.versions[name] for run in runs)}" for name in ("python", *_LIBRARIES)]
    return [
        f"{min(seconds):.0f} s a run, more where others share the cores; {_listed(str(run.threads) for run in runs)} "
        f"thread(s), {_listed(str(run.jobs) for run in runs)} at a time;",
        f"{', '.join(libraries)}.",
    ]


def _listed(values: Iterable[str]) -> str:
    return " or ".join(sorted(set(values)))


def insert(page: str, content: str) -> str:
    """Return a page with what stands between the two markers replaced.

    Args:
        page: The page's text.
        content: What to put there, with a newline at its end.

    Raises:
        ValueError: The page has not each marker once, in their order.
    """
    if page.count(START) != 1 or page.count(END) != 1 or page.index(START) > page.index(END):
        raise ValueError(f"benchmarks/quickstart.py: the page must hold {START} and behind it {END}, each once.")
    before, rest = page.split(START)
    return f"{before}{START}\n\n{content}\n{END}{rest.split(END)[1]}"


def measure(
    algorithms: Sequence[str], seeds: Sequence[int], jobs: int, threads: int, keep: Callable[[Run], None]
) -> None:
    """Run every pair of algorithm and seed, at most ``jobs`` at a time, and hand each result over when it is there.

    Raises:
        RuntimeError: A run failed; raised when the others are through.
        ValueError: A run ended without a result; raised then too.
    """
    failed: list[Exception] = []
    with ThreadPoolExecutor(jobs) as pool:
        pending = [pool.submit(run, algorithm, seed, threads, jobs) for seed in seeds for algorithm in algorithms]
        try:
            for future in as_completed(pending):
                try:
                    keep(future.result())
                except (RuntimeError, ValueError) as error:
                    failed.append(error)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # interrupted: start nothing more
    if failed:
        raise failed[0]


def _keep(result: Run) -> None:
    print(
        f"{result.algorithm}, seed {result.seed}: {result.sft_accuracy:.2f} -> {result.rl_accuracy:.2f} "
        f"in {result.seconds:.0f} s",
        flush=True,
    )
    save(RESULTS, merge(load(RESULTS), [result]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure the quick start and put the table into README.md.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds to run")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS), help="what to run")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; they share the cores")
    parser.add_argument("--threads", type=int, default=1, help="threads of a run; other numbers give other results")
    parser.add_argument("--table-only", action="store_true", help="run nothing, only write the table again")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, unless only the table is wanted, and write the table."""
    options = _parser().parse_args(arguments)
    if not options.table_only:
        measure(options.algorithms, options.seeds, options.jobs, options.threads, _keep)
    README.write_text(insert(README.read_text(), table(load(RESULTS))))


if __name__ == "__main__":
    main()
