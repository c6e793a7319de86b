"""Compares the memory that `lightning-verl plan` foresees with what a GPU takes, phase by phase.

    torchrun --nproc-per-node 2 benchmarks/plan_memory.py --output docs/benchmarks/plan_memory.json
    python benchmarks/plan_memory.py --table-only

The first line runs two steps of each case on so many GPUs, and puts the peaks of the second one, and what was planned,
into the JSON file; results for another number of GPUs stay there. The second one measures nothing and writes the page
docs/benchmarks/plan_memory.md. Weights are drawn at random from configs of known shapes, so nothing is downloaded.
Layers and log-probs run compiled where they do by default, which is what is planned. The measure is
`torch.cuda.max_memory_allocated` of rank 0, reset where a phase begins (callback `Throughput`). On CPUs the cases run
too, tiny ones with `--tiny`, and nothing is measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from transformers import PretrainedConfig, Qwen2Config

from lightning_verl import (
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
from lightning_verl.callbacks import Throughput
from lightning_verl.config import (
    BatchConfig,
    DataConfig,
    ModelConfig,
    RewardConfig,
    StrategyConfig,
    TrainConfig,
    make_algorithm,
    role_sources,
)
from lightning_verl.planning.plan import make_plan
from lightning_verl.testing import char_tokenizer, tiny_config

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "benchmarks" / "plan_memory.json"
PAGE = RESULTS.with_suffix(".md")
COMMANDS = [f"torchrun --nproc-per-node {ranks} benchmarks/plan_memory.py" for ranks in (1, 2)]

SHAPES: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "Qwen2.5-1.5B": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
    },
}


@dataclass(frozen=True)
class Case:
    """One run."""

    name: str
    """What it is called in the table."""
    shape: str
    """A key of ``SHAPES``."""
    algorithm: dict[str, Any]
    """As in a config."""
    checkpointing: Any = None
    """As in a config."""
    precision: Any = "bf16-mixed"
    """As in a config."""
    prompts: int = 32
    """Prompts of a step, in two mini-batches."""
    prompt_tokens: int = 128
    """Tokens of a prompt, begin token included."""
    response_tokens: int = 256
    """Tokens of a response."""
    strategies: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By number of ranks, arguments of ``StrategyConfig``; ranks left out: everything along the data axis."""


GRPO: dict[str, Any] = {"name": "grpo", "kl": 0.04}
CASES = (
    Case("0.5B GRPO", "Qwen2.5-0.5B", GRPO),
    Case("0.5B PPO, checkpointing full", "Qwen2.5-0.5B", {"name": "ppo", "kl": 0.01}, "full"),
    Case("1.5B GRPO, selective", "Qwen2.5-1.5B", GRPO, "selective"),
    Case("1.5B GRPO, tensor axis", "Qwen2.5-1.5B", GRPO, strategies={2: {"mesh_shape": (1, 2, 1, 1)}}),
    Case(
        "1.5B GRPO, rollout over 2", "Qwen2.5-1.5B", GRPO, strategies={2: {"hybrid_engine_config": {"rollout_tp": 2}}}
    ),
)
TINY = (Case("tiny PPO", "tiny", {"name": "ppo", "kl": 0.01}, prompts=4, prompt_tokens=8, response_tokens=4),)


@dataclass(frozen=True)
class Comparison:
    """One phase of one run."""

    ranks: int
    """GPUs."""
    case: str
    """The run's name."""
    phase: str
    """The phase."""
    planned_gib: float
    """What is planned for a rank."""
    measured_gib: float | None
    """What it took; None on a CPU."""

    @property
    def error(self) -> float | None:
        """How far the plan is above (or, negative, below) the measurement, relative to it."""
        return None if self.measured_gib is None else self.planned_gib / self.measured_gib - 1


def model_config(case: Case) -> PretrainedConfig:
    """The model of a case, of which no weights exist."""
    if case.shape == "tiny":
        return tiny_config("qwen2")
    common = {"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True, "eos_token_id": None}
    return Qwen2Config(**SHAPES[case.shape], **common)


def train_config(case: Case, ranks: int, folder: str) -> TrainConfig:
    """The config that describes a case."""
    return TrainConfig(
        model=ModelConfig(folder, activation_checkpointing=case.checkpointing),
        data=DataConfig("none", max_prompt_length=case.prompt_tokens),
        algorithm=case.algorithm,
        steps=2,
        output="none",
        rewards=RewardConfig(["none:none"]),
        sampling=SamplingParams(max_new_tokens=case.response_tokens),
        batch=BatchConfig(rollout_batch_size=case.prompts, update_batch_size=case.prompts // 2),
        strategy=StrategyConfig(**case.strategies.get(ranks, {})),
        precision=case.precision,
    )


def run(case: Case, ranks: int) -> list[Comparison]:
    """Plan a case and run it (a collective call of all ranks)."""
    with tempfile.TemporaryDirectory() as folder:
        model_config(case).save_pretrained(folder)
        config = train_config(case, ranks, folder)
        plan = make_plan(config, ranks)
    gc.collect()  # what an earlier case left in reference cycles
    before = torch.cuda.memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    metrics = measure(case, config, ranks)
    result = []
    for phase in plan.memory[0].phases:
        peak = metrics.get(f"memory/{phase.name}_gib")
        measured = None if peak is None else peak - before
        result.append(Comparison(ranks, case.name, phase.name, phase.peak.bytes / 2**30, measured))
    return result


def measure(case: Case, config: TrainConfig, ranks: int) -> dict[str, float]:
    """Run two steps and return the metrics of the second one."""
    layouts = config.strategy
    strategy = HybridStrategy(layouts.mesh_shape, layouts.parallelism_config, layouts.hybrid_engine_config)
    fabric = Fabric(devices=ranks, strategy=strategy, precision=config.precision, callbacks=[Throughput()])
    fabric.launch()
    algorithm = make_algorithm(config.algorithm)
    roles = role_sources(config, algorithm)
    options = {"activation_checkpointing": case.checkpointing}
    flow = HybridDataFlow(
        Actor(model_config(case), tokenizer=char_tokenizer(), **options),
        Critic(model_config(case), **options) if "critic" in roles else None,
        RewardFunction(lambda response: float(len(response))),
        Reference(model_config(case)) if "reference" in roles else None,
        max_tokens_per_micro_batch=config.batch.max_tokens_per_micro_batch,
        packing=config.batch.packing,
    )
    rows = [{"prompt": f"{number:0{case.prompt_tokens - 1}d}"} for number in range(2 * case.prompts)]
    data = AsyncRolloutDataset(rows, tokenizer=flow.tokenizer, max_prompt_length=case.prompt_tokens)
    sizes = {"rollout_batch_size": case.prompts, "update_batch_size": config.batch.update_batch_size}
    return RLTrainer(fabric, flow, algorithm, data, sampling=config.sampling, **sizes).fit(2)


def save(path: Path, new: Sequence[Comparison], device: str) -> None:
    """Put results into a file, in place of those for as many ranks."""
    kept = json.loads(path.read_text())["phases"] if path.is_file() else []
    kept = [entry for entry in kept if entry["ranks"] not in {comparison.ranks for comparison in new}]
    phases = [*kept, *({**asdict(c), "error": c.error} for c in new)]
    phases.sort(key=lambda entry: entry["ranks"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"device": device, "torch": str(torch.__version__), "phases": phases}, indent=2) + "\n")


def page(path: Path) -> str:
    """The Markdown page of a file of results."""
    head = (
        "# Planned and measured memory\n\nWritten by `python benchmarks/plan_memory.py --table-only`; do not edit.\n\n"
    )
    if not path.is_file():
        return f"{head}Not measured yet:\n\n```bash\n" + "\n".join(COMMANDS) + "\n```\n"
    kept = json.loads(path.read_text())
    lines = ["| GPUs | run | phase | planned GiB | measured GiB | error |", "|---|---|---|---|---|---|"]
    for entry in kept["phases"]:
        measured = "" if entry["measured_gib"] is None else f"{entry['measured_gib']:.2f}"
        error = "" if entry["error"] is None else f"{entry['error']:+.1%}"
        cells = (entry["ranks"], entry["case"], entry["phase"], f"{entry['planned_gib']:.2f}", measured, error)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    errors = [abs(entry["error"]) for entry in kept["phases"] if entry["error"] is not None]
    largest = f"The largest error is {max(errors):.1%}. " if errors else ""
    return head + "\n".join([*lines, "", f"{largest}{kept['device']}, torch {kept['torch']}.", ""])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description="Compare planned with measured memory; start it with torchrun.")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the JSON file to write")
    parser.add_argument("--table-only", action="store_true", help="measure nothing, only write the page again")
    parser.add_argument("--tiny", action="store_true", help="a tiny case, to try the script on CPUs")
    given = parser.parse_args(arguments)
    if given.table_only:
        PAGE.write_text(page(RESULTS))
        return
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    results: list[Comparison] = []
    for case in TINY if given.tiny else CASES:
        results += run(case, ranks)
        if os.environ.get("RANK", "0") == "0":
            save(given.output, results, device)  # after each case: a later one may not fit
            print(*(f"{line} {line.error}" for line in results if line.case == case.name), sep="\n", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
