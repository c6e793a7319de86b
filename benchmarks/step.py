"""Measures one step of GRPO: lightning_verl and TRL's GRPOTrainer, on the same work in one run, on one GPU.

One step of PPO too (``--only ppo-0.5B ppo``), beside the last PPOTrainer of TRL, which 1.13 removed. TRL 1.12 cannot be
in one environment with the TRL of GRPO: ``--trl-ppo`` names a folder with its wheel unpacked.

    python benchmarks/step.py --output docs/benchmarks/step.json
    python benchmarks/step.py --only 1.5B --micro-batches 16
    python -m zipfile -e trl-1.12.0-py3-none-any.whl trl112
    python benchmarks/step.py --only ppo-0.5B ppo --trl-ppo trl112
    python benchmarks/step.py --table-only

The first line measures every case and writes the JSON file, after each side of each case. With ``--only`` other cases
stay in the file as they are. The last line measures nothing and writes the page docs/benchmarks/step.md from
docs/benchmarks/step.json. Models have the shapes of Qwen2.5 and random weights. Each side runs in a process of its own,
so that none holds memory while another runs. Where TRL or vLLM is not installed its columns stay empty. On a CPU it
runs too, on a tiny model (``--only tiny tiny-drawn tiny-ppo``).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from os import environ, pathsep
from pathlib import Path

from rollout_results import Work
from rollout_vllm import SETTINGS
from step_results import Case, Result, Side, load, load_side, page, save

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parent / "docs" / "benchmarks" / "step.json"
PAGE = RESULTS.with_suffix(".md")

CASES = {
    case.name: case
    for case in (
        Case("1.5B", Work("1.5B"), "bf16-true"),
        Case("0.5B", Work("0.5B"), "bf16-true"),
        Case("drawn", Work("1.5B", new_tokens=1024, drawn=True), "bf16-true"),
        Case("mixed", Work("1.5B"), "bf16-mixed"),
        Case("ppo-0.5B", Work("0.5B"), "bf16-true", "ppo"),
        Case("ppo", Work("1.5B"), "bf16-true", "ppo"),
        Case("tiny", Work("tiny", 4, 4, 12, 16), "bf16-true"),
        Case("tiny-drawn", Work("tiny", 4, 4, 12, 32, drawn=True), "bf16-mixed"),
        Case("tiny-ppo", Work("tiny", 4, 4, 12, 16), "bf16-true", "ppo"),
    )
}
DEFAULT_CASES = ("1.5B", "0.5B", "drawn", "mixed", "ppo-0.5B", "ppo")
WARMUP = 2
"""Steps of lightning_verl that do not count: it compiles kernels in the first, and settles memory in the second."""
TRL_WARMUP = 1
"""Of TRL, which compiles nothing."""
TIME_LIMIT = 420
"""Seconds of a process."""
ENVIRONMENT = {
    **SETTINGS,
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Of the processes: no network."""


def run_side(
    script: str, case: Case, micro_batch: int, words: Sequence[str], first_on_path: Path | None = None
) -> Side:
    """Run one side in a process of its own.

    Args:
        script: Its file.
        case: What is done.
        micro_batch: Rows for TRL, tokens for lightning_verl.
        words: More options.
        first_on_path: A folder that it imports from before all others.

    Returns:
        What it measured, with ``problem`` where it failed, be it at the start or at the end: in its own words if it
        wrote any.
    """
    environment = {**environ, **ENVIRONMENT}
    if first_on_path is not None:
        others = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = pathsep.join([str(first_on_path.resolve()), *([others] if others else [])])
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "side.json"
        command = [sys.executable, str(FOLDER / script), "--work", json.dumps(asdict(case.work)), *words]
        command += ["--precision", case.precision, "--micro-batch", str(micro_batch), "--output", str(output)]
        try:
            # What it prints goes to stderr: the page alone is for stdout.
            status = subprocess.run(command, env=environment, timeout=TIME_LIMIT, stdout=2).returncode
            problem = f"its process ended with status {status}" if status else ""
        except subprocess.TimeoutExpired:
            problem = f"its process took longer than {TIME_LIMIT} s"
        side = load_side(output) if output.exists() else Side(micro_batch)
    return replace(side, problem=side.problem or problem)


def run_ours(case: Case, options: argparse.Namespace) -> Side:
    """lightning_verl."""
    words = ["--algorithm", case.algorithm, "--warmup", str(WARMUP), "--steps", str(options.steps), "--profile"]
    return run_side("step_ours.py", case, options.micro_batch_tokens, words)


class TRLSide:
    """TRL in one case.

    Args:
        case: What is done.
        micro_batches: Rows that it takes the best of; those that do not divide its rows are left out.
        steps: Of a whole measurement.
        run: Runs its script with a micro-batch and options; it is given the engine too.
    """

    def __init__(
        self, case: Case, micro_batches: Sequence[int], steps: int, run: Callable[[str, int, list[str]], Side]
    ) -> None:
        self._steps, self._run_script = steps, run
        rows = case.work.prompts * case.work.n
        self._micro_batches = [size for size in micro_batches if rows % size == 0]
        if not self._micro_batches:
            option = "--micro-batches" if case.algorithm == "grpo" else "--ppo-micro-batches"
            raise ValueError(f"{case.name}: none of {option} {micro_batches} divides its {rows} rows.")

    def sweep(self) -> dict[str, float | None]:
        """Seconds of one step with ``generate`` by micro-batch; nothing where there is only one to choose."""
        if len(self._micro_batches) == 1:
            return {}
        found: dict[str, float | None] = {}
        for size in self._micro_batches:
            side = self._run("generate", size, steps=1)
            found[str(size)] = side.seconds if side.steps else None
            print(f"TRL, one step with {size} rows: {found[str(size)]} s {side.problem}", file=sys.stderr, flush=True)
        return found

    def best(self, sweep: dict[str, float | None]) -> int:
        """The fastest micro-batch; the first where none was measured."""
        times = {int(size): seconds for size, seconds in sweep.items() if seconds is not None}
        return min(times, key=times.__getitem__) if times else self._micro_batches[0]

    def measure(self, engine: str, micro_batch: int) -> Side:
        """With an engine, in full."""
        return self._run(engine, micro_batch, self._steps, "--profile")

    def _run(self, engine: str, micro_batch: int, steps: int, *words: str) -> Side:
        return self._run_script(engine, micro_batch, ["--warmup", str(TRL_WARMUP), "--steps", str(steps), *words])


def measure_case(case: Case, options: argparse.Namespace, keep: Callable[[Case], None]) -> None:
    """One case on every side; ``keep`` gets it after each."""
    started = time.perf_counter()

    def report(case: Case, name: str, side: Side) -> None:
        spent = time.perf_counter() - started
        figures = f"{side.seconds:.2f} s a step" if side.steps else "nothing measured"
        print(f"[{spent:4.0f} s] {case.name}, {name}: {figures} {side.problem}".rstrip(), file=sys.stderr, flush=True)
        keep(case)

    ours = run_ours(case, options)
    case = replace(case, ours=ours)
    report(case, "lightning_verl", ours)
    (measure_trl if case.algorithm == "grpo" else measure_trl_ppo)(case, options, report)


def measure_trl(case: Case, options: argparse.Namespace, report: Callable[[Case, str, Side], None]) -> None:
    """TRL's GRPO with both engines; model and tokenizer are made once."""
    missing = [name for name in ("trl", "vllm") if find_spec(name) is None]
    with tempfile.TemporaryDirectory() as folder:

        def run(engine: str, micro_batch: int, words: list[str]) -> Side:
            return run_side("step_trl.py", case, micro_batch, ["--engine", engine, "--folder", folder, *words])

        trl, size = TRLSide(case, options.micro_batches, options.steps, run), options.micro_batches[0]
        for engine, needs in (("generate", ["trl"]), ("vLLM", ["trl", "vllm"])):
            lacking = ", ".join(name for name in needs if name in missing)
            if lacking:
                side = Side(size, problem=f"not installed: {lacking}")
            else:
                if engine == "generate":
                    case = replace(case, sweep=trl.sweep())
                    size = trl.best(case.sweep)
                side = trl.measure(engine, size)
            case = replace(case, trl={**case.trl, engine: side})
            report(case, f"TRL, {engine}", side)


def measure_trl_ppo(case: Case, options: argparse.Namespace, report: Callable[[Case, str, Side], None]) -> None:
    """TRL's PPO from the folder that was named; it generates and scores the first number of rows at once that fits."""
    if options.trl_ppo is None:
        side = Side(options.ppo_micro_batches[0], problem="no folder with TRL 1.12 was named by `--trl-ppo`")
        report(replace(case, trl={"generate": side}), "TRL", side)
        return
    rows = case.work.prompts * case.work.n
    for at_once in dict.fromkeys(min(size, rows) for size in options.ppo_rollout_rows):

        def run(_: str, micro_batch: int, words: list[str], at_once: int = at_once) -> Side:
            words = ["--rollout-rows", str(at_once), *words]
            return run_side("step_trl_ppo.py", case, micro_batch, words, options.trl_ppo)

        trl = TRLSide(case, options.ppo_micro_batches, options.steps, run)
        sweep = trl.sweep()
        side = trl.measure("generate", trl.best(sweep))
        report(replace(case, trl={"generate": side}, sweep=sweep), f"TRL, {at_once} rows at once", side)
        if side.steps:
            return


def measure(options: argparse.Namespace) -> Result:
    """All cases that were asked for; the file is written after each side."""
    result = load(options.output) if options.output.exists() else Result([])
    result = replace(result, note=options.note or result.note)

    def keep(case: Case) -> None:
        nonlocal result
        result = result.with_cases([case])
        save(options.output, result)

    for name in options.only:
        measure_case(CASES[name], options, keep)
    return result


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS, help="the JSON file")
    parser.add_argument("--table-only", action="store_true", help="measure nothing, only write the page again")
    parser.add_argument("--only", nargs="+", choices=CASES, default=DEFAULT_CASES, help="cases to measure")
    parser.add_argument("--steps", type=int, default=3, help="steps of each side, after those that do not count")
    parser.add_argument(
        "--micro-batches", type=int, nargs="+", default=[8, 16, 32], help="rows that TRL takes the best of"
    )
    parser.add_argument("--trl-ppo", type=Path, help="a folder with TRL 1.12 unpacked, the last one with PPO")
    parser.add_argument(
        "--ppo-micro-batches", type=int, nargs="+", default=[16], help="rows that TRL's PPO takes the best of"
    )
    parser.add_argument(
        "--ppo-rollout-rows",
        type=int,
        nargs="+",
        default=[256, 64],
        help="rows that TRL's PPO generates and scores at once: the first that fits",
    )
    parser.add_argument(
        "--micro-batch-tokens", type=int, default=16_384, help="of ours; fixed, so that the peak means something"
    )
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
