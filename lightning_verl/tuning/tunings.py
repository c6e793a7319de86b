"""``lightning-verl tunings``: what each tuning is worth on this machine, by the same work without and with it."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import torch

from lightning_verl import __version__
from lightning_verl.tuning.arm_process import run_arm
from lightning_verl.tuning.arms import TUNINGS, Arm, Tuning, Work, arms_of, key_of
from lightning_verl.tuning.shapes import SHAPES
from lightning_verl.tuning.tunings_results import Result, load, page, save

WARMUP = 2
"""Steps of an arm that do not count: kernels are compiled in the first, and memory settles in the second."""
TIME_LIMIT = 300.0
"""Seconds that an arm may take."""
_TINY = Work("tiny", prompts=2, samples=2, prompt_tokens=6, new_tokens=8, memory_gib=None)


def main(
    words: Sequence[str] | None = None, program: str = "lightning-verl tunings", output: Path | None = None
) -> None:
    """Measure, write the result and print its page; or only write the page of a result.

    Args:
        words: Options; None takes those of the process.
        program: What it is called.
        output: The file that is written where no option says another one; the page lies beside it.
    """
    options = _parser(program, output or Path("runs/tunings.json")).parse_args(words)
    if options.table_only:
        result = load(options.output)
        result = replace(result, notes={**result.notes, **dict(options.note)})
        save(options.output, result)
        options.output.with_suffix(".md").write_text(page(result, program))
        return
    print(page(measure(options), program))


def measure(options: argparse.Namespace) -> Result:
    """All rows that were asked for; the file is written after each arm, and arms that rows share run once."""
    work = _work(options)
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    result = Result(options.ranks, work, versions={**versions, "lightning_verl": __version__})
    if options.output.exists():
        before = load(options.output)
        if (before.ranks, before.work) == (result.ranks, work):
            result = replace(result, arms=before.arms, notes=before.notes)
    result = replace(result, notes={**result.notes, **dict(options.note)})
    for key, arm in _wanted_arms(options.only, options.ranks, work).items():
        with tempfile.TemporaryDirectory() as folder:
            record = run_arm(arm, work, options.accelerator, options.steps, WARMUP, TIME_LIMIT, Path(folder))
        figures = record.problem or f"{record.rate:,.0f} tokens/s/GPU, peak {record.peak / 2**30:.1f} GiB"
        print(f"{key}: {figures}", file=sys.stderr, flush=True)
        result = result.with_arm(key, record)
        save(options.output, result)
    return result


def _wanted_arms(names: Sequence[str], ranks: int, work: Work) -> dict[str, Arm]:
    """Of rows, those of both sides, each once."""
    rows: list[Tuning] = [tuning for tuning in TUNINGS if tuning.name in names and tuning.needs_ranks <= ranks]
    return {key_of(arm): arm for tuning in rows for arm in arms_of(tuning, ranks, work)}


def _work(options: argparse.Namespace) -> Work:
    if options.model == "tiny":
        return replace(_TINY, micro_batch_tokens=options.micro_batch_tokens)
    return Work(options.model, memory_gib=options.memory, micro_batch_tokens=options.micro_batch_tokens)


def _parser(program: str, output: Path) -> argparse.ArgumentParser:
    on_cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog=program,
        description="Do the same work with one tuning off and on, then all of them off and on, within the same memory, "
        "and print a table. Each side runs in processes of its own. A CPU takes the tiny model.",
    )
    names = [tuning.name for tuning in TUNINGS]
    parser.add_argument("--output", type=Path, default=output, help=f"the JSON file (default: {output})")
    parser.add_argument(
        "--table-only", action="store_true", help="measure nothing, write the page beside the JSON file"
    )
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="rows to measure; others stay")
    parser.add_argument(
        "--ranks",
        type=int,
        default=min(2, torch.cuda.device_count()) or 1,
        help="GPUs, or processes (default: up to 2)",
    )
    parser.add_argument(
        "--model",
        choices=tuple(SHAPES),
        default="1.5B" if on_cuda else "tiny",
        help="the shape (default: 1.5B on a GPU)",
    )
    parser.add_argument(
        "--memory", type=float, default=40.0, metavar="GIB", help="most of a GPU's memory (default: 40)"
    )
    parser.add_argument(
        "--micro-batch-tokens", type=int, help="of both sides; left out, memory that is saved buys larger micro-batches"
    )
    parser.add_argument("--steps", type=int, default=3, help="steps that count (default: 3)")
    parser.add_argument(
        "--note", nargs=2, action="append", default=[], metavar=("ROW", "TEXT"), help="a sentence for the page on a row"
    )
    parser.add_argument("--accelerator", choices=("auto", "cpu"), default="auto", help=argparse.SUPPRESS)
    return parser
