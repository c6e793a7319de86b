"""GRPO on SmolLM2-135M-Instruct: small sums in its own chat format, with the task's verifier as the reward.

    python examples/smollm2/train.py --model build/smollm2/model --output runs/smollm2

README.md tells how to get the weights.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import reasoning_gym
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger

from lightning_verl import (
    GRPO,
    Actor,
    AsyncRolloutDataset,
    HybridDataFlow,
    HybridStrategy,
    RewardFunction,
    RLTrainer,
    SamplingParams,
)
from lightning_verl.callbacks import Checkpoint, ProgressBar, RewardEMA, Throughput

MAX_PROMPT_LENGTH = 96
"""The questions have up to 60 tokens, the chat format included."""


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the folder that prepare.py wrote")
    parser.add_argument("--output", type=Path, default=Path("runs/smollm2"), help="folder for logs and checkpoints")
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--rollout-batch-size", type=int, default=32, help="prompts of a step")
    parser.add_argument("--samples-per-prompt", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--learning-rate", type=float, default=5e-6)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--precision", default="32-true", help="bf16-mixed on a GPU")
    return parser.parse_args()


def main() -> None:
    """Train."""
    options = parse_options()
    task = reasoning_gym.create_dataset(
        "chain_sum", size=4096, seed=0, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    rows = [{"prompt": [{"role": "user", "content": entry["question"]}], "entry": entry} for entry in task]

    def score(response: str, entry: dict[str, Any]) -> float:
        numbers = re.findall(r"-?\d+", response)  # the last one is the answer, as in "4 - 1 = 3"
        return float(task.score_answer(numbers[-1], entry)) if numbers else 0.0

    fabric = Fabric(
        accelerator=options.accelerator,
        precision=options.precision,
        strategy=HybridStrategy(),
        loggers=[CSVLogger(options.output, name="logs", flush_logs_every_n_steps=10)],
        callbacks=[RewardEMA(), Throughput(), ProgressBar(), Checkpoint(options.output / "checkpoints")],
    )
    fabric.launch()
    actor = Actor(options.model, learning_rate=options.learning_rate)
    dataflow = HybridDataFlow(actor=actor, reward=RewardFunction(score))
    data = AsyncRolloutDataset(rows, tokenizer=dataflow.tokenizer, max_prompt_length=MAX_PROMPT_LENGTH)
    trainer = RLTrainer(
        fabric,
        dataflow,
        GRPO(clip=(0.2, 0.28)),
        data,
        rollout_batch_size=options.rollout_batch_size,
        update_batch_size=max(1, options.rollout_batch_size // 4),
        samples_per_prompt=options.samples_per_prompt,
        sampling=SamplingParams(max_new_tokens=options.max_new_tokens),
        warmup_steps=5,
    )
    metrics = trainer.fit(options.max_steps)
    dataflow.save_pretrained(options.output / "model")
    fabric.logger.finalize("success")
    fabric.print(f"reward in step {options.max_steps}: {metrics['reward/mean']:.3f}")


if __name__ == "__main__":
    main()
