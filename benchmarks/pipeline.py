"""Measures updates of one model on two ranks: cut by layers, beside cut over data and cut by matrices.

    python benchmarks/pipeline.py --output docs/benchmarks/pipeline.json
    python benchmarks/pipeline.py --only data tensor
    python benchmarks/pipeline.py --table-only

The first line starts every run by itself (`torchrun`, one after the other) and writes the JSON file, after each. With
``--only`` other runs stay in the file as they are. The last line measures nothing and writes the page
docs/benchmarks/pipeline.md. On CPUs (gloo) it runs too, on a tiny model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from transformers import Qwen2Config

from lightning_verl import SFT, Actor, HybridDataFlow, HybridStrategy
from lightning_verl.data.experience import Experience, RolloutBatch
from lightning_verl.data.sharding import split
from lightning_verl.testing import tiny_config

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "benchmarks" / "pipeline.json"
PAGE = RESULTS.with_suffix(".md")
COMMAND = "python benchmarks/pipeline.py --output docs/benchmarks/pipeline.json"
SHAPES: dict[str, Any] = {
    "tiny": tiny_config("qwen2", num_hidden_layers=4),
    "7B": Qwen2Config(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
        tie_word_embeddings=False,
        max_position_embeddings=32768,
    ),
}
"""Of Qwen2.5-7B, and one for CPUs."""


@dataclass(frozen=True)
class Case:
    """A layout of two ranks."""

    mesh: tuple[int, int, int, int]
    """Ranks of the axes data, tensor, pipeline, expert."""
    schedule: str = "1f1b"
    """The order of micro-batches, where there are stages."""

    @property
    def name(self) -> str:
        """On the command line."""
        return self.schedule if self.mesh[2] > 1 else "tensor" if self.mesh[1] > 1 else "data"


CASES = (
    Case((1, 1, 2, 1), "1f1b"),
    Case((1, 1, 2, 1), "interleaved"),
    Case((1, 1, 2, 1), "gpipe"),
    Case((2, 1, 1, 1)),
    Case((1, 2, 1, 1)),
)


@dataclass(frozen=True)
class Work:
    """What an update is made of."""

    shape: str
    """A key of ``SHAPES``."""
    rows: int
    """Rows of a mini-batch, over all ranks."""
    shortest: int
    """Tokens of the shortest row, an eighth of which is the prompt."""
    longest: int
    """Tokens of the longest row; lengths are even between the two, in a random order."""
    micro_batch_tokens: int
    """Most tokens of a micro-batch."""
    checkpointing: str | None = None
    """What is recomputed."""


WORKS = {"tiny": Work("tiny", 16, 8, 48, 64), "7B": Work("7B", 32, 256, 2048, 8192, "full")}


@dataclass(frozen=True)
class Run:
    """What one layout took."""

    case: Case
    seconds: float
    """Median of the updates after the first, optimizer step included."""
    tokens: int
    """Tokens of an update, over all ranks."""
    bubble: float | None
    """Mean share of an update in which a rank ran neither a forward nor a backward pass; None without stages."""
    peak_gib: float | None
    """Most memory that tensors took on a rank; None on CPUs."""
    loss: float
    """Of the first update: the same on every layout."""
    grad_norm: float
    """Of the first update: the same on every layout."""


@dataclass(frozen=True)
class Result:
    """All runs, and on what."""

    device: str
    work: Work
    runs: list[Run]
    torch: str
    note: str = ""
    """What else a reader should know of the run."""


def make_rows(work: Work) -> Experience:
    """Random rows, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(work.shortest, work.longest, work.rows).long()
    lengths = lengths[torch.randperm(work.rows, generator=generator)]
    prompts = lengths // 8
    responses = lengths - prompts
    vocabulary = SHAPES[work.shape].vocab_size
    rollout = RolloutBatch(
        input_ids=torch.randint(3, vocabulary, (work.rows, work.longest), generator=generator),
        prompt_lengths=prompts,
        response_lengths=responses,
        rollout_logprobs=torch.zeros(work.rows, int(responses.max())),
        group_ids=torch.arange(work.rows),
        truncated=torch.zeros(work.rows, dtype=torch.bool),
        prompt_texts=[""] * work.rows,
        response_texts=[""] * work.rows,
        fields=[{} for _ in range(work.rows)],
    )
    return Experience(rollout, torch.zeros(work.rows), torch.ones(work.rows, dtype=torch.bool))


def train(case: Case, work: Work, steps: int) -> tuple[Run, str] | None:
    """Take some updates on the ranks that this was started on; None but on rank 0."""
    on_cuda = torch.cuda.is_available()
    strategy = HybridStrategy(case.mesh, pipeline_schedule=case.schedule)  # type: ignore[arg-type]
    precision: Any = "bf16-mixed" if on_cuda else "32-true"
    fabric = Fabric(accelerator="auto", strategy=strategy, precision=precision)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    with fabric.device:
        actor = Actor(SHAPES[work.shape], activation_checkpointing=work.checkpointing)
    flow = HybridDataFlow(actor, max_tokens_per_micro_batch=work.micro_batch_tokens)
    flow.setup(fabric)
    flow.setup_optimizers()
    layout, rank = strategy.layout("actor"), strategy.data_rank("actor")
    everything = make_rows(work)
    rows = everything.select(list(split(work.rows, layout.data_size, rank))).to(fabric.device)
    algorithm = SFT()
    algorithm.compute_advantages(rows, None)
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds, metrics = [], []
    for _ in range(steps):
        fabric.barrier()
        started = time.perf_counter()
        algorithm.update(flow, rows)
        if on_cuda:
            torch.cuda.synchronize()
        fabric.barrier()
        seconds.append(time.perf_counter() - started)
        metrics.append(flow.step_metrics())
    name = torch.cuda.get_device_name() if on_cuda else "CPU"
    peak = fabric.all_reduce(
        torch.tensor(float(torch.cuda.max_memory_allocated()) if on_cuda else 0.0), reduce_op="max"
    )
    is_first = fabric.is_global_zero
    strategy.teardown()
    if not is_first:
        return None
    bubbles = [figures["actor/bubble"] for figures in metrics[1:] if "actor/bubble" in figures]
    run = Run(
        case=case,
        seconds=statistics.median(seconds[1:]),
        tokens=int(everything.rollout.lengths.sum()),
        bubble=statistics.mean(bubbles) if bubbles else None,
        peak_gib=float(peak) / 2**30 if on_cuda else None,
        loss=metrics[0]["actor/loss"],
        grad_norm=metrics[0]["actor/grad_norm"],
    )
    return run, name


def measure(work: Work, steps: int, note: str, output: Path, names: Sequence[str]) -> Result:
    """Start every run that was asked for and collect what it measured; the file is written after each."""
    result = Result("", work, [], torch.__version__, note)
    if output.exists() and (before := load(output)).work == work:  # else runs do not compare
        result = replace(before, note=note or before.note)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(CASES):
            if case.name not in names:
                continue
            part = Path(folder) / f"{number}.json"
            words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
            words += ["--worker", str(number), "--output", str(part), "--work", json.dumps(asdict(work))]
            words += ["--steps", str(steps)]
            status = subprocess.run([sys.executable, *words], env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode
            if status:  # the others go on
                print(f"{case.name}: its processes ended with status {status}", file=sys.stderr, flush=True)
                continue
            entry = json.loads(part.read_text())
            result = replace(result, device=entry.pop("device"))
            runs = {run.case: run for run in result.runs} | {case: _run(entry)}
            result = replace(result, runs=[runs[other] for other in CASES if other in runs])
            output.write_text(json.dumps(asdict(result), indent=2) + "\n")
    return result


def _run(entry: dict[str, Any]) -> Run:
    case = entry.pop("case")
    return Run(case=Case(tuple(case["mesh"]), case["schedule"]), **entry)


def load(path: Path) -> Result:
    """Read a result."""
    entry = json.loads(path.read_text())
    return Result(runs=[_run(run) for run in entry.pop("runs")], work=Work(**entry.pop("work")), **entry)


def page(result: Result) -> str:
    """The page about a result."""
    work = result.work
    lines = [
        "# Cut by layers, by data, by matrices",
        "",
        "Written by `python benchmarks/pipeline.py --table-only`; do not edit.",
        "",
        f"Two {result.device}, {work.shape} shape (Qwen2.5, random weights), torch {result.torch}. An update of "
        f"{work.rows} rows of {work.shortest} to {work.longest} tokens, micro-batches of at most "
        f"{work.micro_batch_tokens:,} tokens, activation checkpointing {work.checkpointing}, AdamW. Seconds are of a "
        "whole update, with its optimizer step; the bubble is the share of its passes in which a rank ran no stage. "
        f"Loss and gradient norm are of the first update. Measured with `{COMMAND}`. {result.note}".rstrip(),
        "",
        "| mesh | schedule | seconds | tokens a second | bubble | peak memory, GiB | loss | gradient norm |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in result.runs:
        staged = run.case.mesh[2] > 1
        bubble = "" if run.bubble is None else f"{run.bubble:.0%}"
        peak = "" if run.peak_gib is None else f"{run.peak_gib:.1f}"
        lines.append(
            f"| {run.case.mesh} | {run.case.schedule if staged else ''} | {run.seconds:.2f} | "
            f"{run.tokens / run.seconds:,.0f} | {bubble} | {peak} | {run.loss:.4f} | {run.grad_norm:.4f} |"
        )
    return "\n".join([*lines, ""])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS, help="the JSON file")
    parser.add_argument("--table-only", action="store_true", help="measure nothing, only write the page again")
    parser.add_argument("--model", choices=tuple(WORKS), default="7B", help="what is trained")
    names = [case.name for case in CASES]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="runs to measure; others stay")
    parser.add_argument("--rows", type=int, help="rows of an update")
    parser.add_argument("--micro-batch-tokens", type=int, help="most tokens of a micro-batch")
    parser.add_argument("--checkpointing", choices=("selective", "full"), help="what is recomputed")
    parser.add_argument("--steps", type=int, default=3, help="updates of each run; the first does not count")
    parser.add_argument("--note", default="", help="a sentence for the page, on the circumstances of the run")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the JSON file, or write the page."""
    options = _parser().parse_args(arguments)
    if options.table_only:
        PAGE.write_text(page(load(RESULTS)))
    elif options.worker is not None:
        done = train(CASES[options.worker], Work(**options.work), options.steps)
        if done is not None:
            options.output.write_text(json.dumps({**asdict(done[0]), "device": done[1]}))
    else:
        given = {
            "rows": options.rows,
            "micro_batch_tokens": options.micro_batch_tokens,
            "checkpointing": options.checkpointing,
        }
        work = replace(WORKS[options.model], **{name: value for name, value in given.items() if value is not None})
        print(page(measure(work, options.steps, options.note, options.output, options.only)))


if __name__ == "__main__":
    main()
