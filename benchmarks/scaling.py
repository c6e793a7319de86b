"""Measures how a step scales: GRPO and PPO with the same work on each GPU, on one GPU and on two.

    python benchmarks/scaling.py --output docs/benchmarks/scaling.json
    python benchmarks/scaling.py --table-only

The first line starts every run by itself (`torchrun`, one after the other) and writes the JSON file. The second one
measures nothing and writes the page docs/benchmarks/scaling.md. On CPUs (gloo) it runs too, on a tiny model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from transformers import Qwen2Config

from lightning_verl import (
    GRPO,
    PPO,
    Actor,
    AsyncRolloutDataset,
    Critic,
    HybridDataFlow,
    HybridStrategy,
    Reference,
    RewardFunction,
    RLTrainer,
    SamplingParams,
)
from lightning_verl.testing import char_tokenizer, tiny_config

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "benchmarks" / "scaling.json"
PAGE = RESULTS.with_suffix(".md")
COMMAND = "python benchmarks/scaling.py --output docs/benchmarks/scaling.json"
ALGORITHMS = ("grpo", "ppo")
SIZES = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
"""Of Qwen2.5-0.5B."""


@dataclass(frozen=True)
class Work:
    """What each rank does in a step."""

    prompts: int
    samples: int
    response_tokens: int


@dataclass(frozen=True)
class Run:
    """One algorithm on so many ranks."""

    algorithm: str
    ranks: int
    step_seconds: float
    """Median of the steps after the first."""
    tokens: float
    """Response tokens of a step, over all ranks."""


@dataclass(frozen=True)
class Result:
    """All runs, and on what."""

    device: str
    model: str
    work: Work
    runs: list[Run]
    torch: str
    note: str = ""
    """What else a reader should know of the run."""

    def efficiency(self, algorithm: str) -> float:
        """Tokens a second and rank on all ranks, over those on one."""
        rates = {
            run.ranks: run.tokens / run.step_seconds / run.ranks for run in self.runs if run.algorithm == algorithm
        }
        return rates[max(rates)] / rates[min(rates)]


def length_reward(response: str) -> float:
    """Anything that differs between samples."""
    return len(set(response)) / 10


class _Recorder:
    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_step_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        self.steps.append(metrics)


def train(algorithm: str, model: str, work: Work, steps: int) -> tuple[Run, str] | None:
    """Take some steps on the ranks that this was started on; None but on rank 0."""
    recorder = _Recorder()
    on_cuda = torch.cuda.is_available()
    fabric = Fabric(
        accelerator="auto",
        strategy=HybridStrategy(),
        precision="bf16-mixed" if on_cuda else "32-true",  # type: ignore[arg-type]
        callbacks=[recorder],
    )
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    config = tiny_config("qwen2") if model == "tiny" else Qwen2Config(**SIZES, num_key_value_heads=2, vocab_size=151936)
    tokenizer = char_tokenizer()
    with fabric.device:
        flow = HybridDataFlow(
            actor=Actor(config, tokenizer=tokenizer),
            critic=Critic(config) if algorithm == "ppo" else None,
            reward=RewardFunction(length_reward),
            reference=Reference(config),
        )
    prompts = work.prompts * fabric.world_size
    data = AsyncRolloutDataset([{"prompt": f"Question {n}: {n}+{n}="} for n in range(prompts)], tokenizer=tokenizer)
    trainer = RLTrainer(
        fabric,
        flow,
        GRPO(kl=0.05) if algorithm == "grpo" else PPO(),
        data,
        rollout_batch_size=prompts,
        update_batch_size=max(prompts // 4, 1),
        samples_per_prompt=work.samples,
        sampling=SamplingParams(max_new_tokens=work.response_tokens),
    )
    trainer.fit(steps)
    ranks, is_first = fabric.world_size, fabric.is_global_zero
    name = torch.cuda.get_device_name() if on_cuda else "CPU"
    fabric.strategy.teardown()
    if not is_first:
        return None
    times = [metrics["time/step"] for metrics in recorder.steps[1:]]
    tokens = [metrics["rollout/response_tokens"] for metrics in recorder.steps[1:]]
    return Run(algorithm, ranks, statistics.median(times), statistics.median(tokens)), name


def measure(options: argparse.Namespace) -> Result:
    """Start every run and collect what it measured."""
    runs, device = [], ""
    with tempfile.TemporaryDirectory() as folder:
        for algorithm in ALGORITHMS:
            for ranks in (1, 2):
                part = Path(folder) / "run.json"
                words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
                words += ["--worker", algorithm, "--output", str(part), "--model", options.model]
                words += ["--steps", str(options.steps)]
                subprocess.run([sys.executable, *words], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
                entry = json.loads(part.read_text())
                device = entry.pop("device")
                runs.append(Run(**entry))
    return Result(device, options.model, _work(options.model), runs, torch.__version__, options.note)


def _work(model: str) -> Work:
    return Work(2, 2, 4) if model == "tiny" else Work(16, 8, 64)


def load(path: Path) -> Result:
    """Read a result."""
    entry = json.loads(path.read_text())
    runs, work = [Run(**run) for run in entry.pop("runs")], Work(**entry.pop("work"))
    return Result(runs=runs, work=work, **entry)


def page(result: Result) -> str:
    """The page about a result."""
    work = result.work
    lines = [
        "# Scaling",
        "",
        "Written by `python benchmarks/scaling.py --table-only`; do not edit.",
        "",
        f"{result.device}, {result.model} shape (Qwen2.5, random weights), torch {result.torch}. A rank has "
        f"{work.prompts} prompts, {work.samples} samples of each and at most {work.response_tokens} tokens a "
        "response, on one rank as on "
        f"two. Rollouts by the transformers engine. Measured with `{COMMAND}`. {result.note}".rstrip(),
        "",
        "| algorithm | ranks | seconds a step | response tokens a second and rank | weak scaling efficiency |",
        "|---|---|---|---|---|",
    ]
    for run in result.runs:
        rate = run.tokens / run.step_seconds / run.ranks
        share = f"{result.efficiency(run.algorithm):.2f}" if run.ranks > 1 else ""
        lines.append(f"| {run.algorithm.upper()} | {run.ranks} | {run.step_seconds:.2f} | {rate:,.0f} | {share} |")
    return "\n".join([*lines, ""])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS, help="the JSON file")
    parser.add_argument("--table-only", action="store_true", help="measure nothing, only write the page again")
    parser.add_argument("--model", choices=("0.5B", "tiny"), default="0.5B", help="what is trained")
    parser.add_argument("--steps", type=int, default=3, help="steps of each run; the first does not count")
    parser.add_argument("--note", default="", help="a sentence for the page, on the circumstances of the run")
    parser.add_argument("--worker", choices=ALGORITHMS, help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the JSON file, or write the page."""
    options = _parser().parse_args(arguments)
    if options.table_only:
        PAGE.write_text(page(load(RESULTS)))
    elif options.worker:
        done = train(options.worker, options.model, _work(options.model), options.steps)
        if done is not None:
            options.output.write_text(json.dumps({**asdict(done[0]), "device": done[1]}))
    else:
        result = measure(options)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(asdict(result), indent=2) + "\n")
        print(page(result))


if __name__ == "__main__":
    main()
