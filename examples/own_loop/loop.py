"""GRPO with the loop in your own hands: everything that RLTrainer does, spelled out.

python examples/own_loop/loop.py
torchrun --nproc-per-node 2 examples/own_loop/loop.py
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger

from lightning_verl import (
    GRPO,
    Actor,
    AsyncRolloutDataset,
    HybridDataFlow,
    HybridStrategy,
    RewardFunction,
    SamplingParams,
)
from lightning_verl.data.sharding import local_minibatch_sizes, rollout_rows
from lightning_verl.rollout.batch import join_rollouts
from lightning_verl.testing import char_tokenizer, tiny_model

ROLLOUT_BATCH, UPDATE_BATCH = 16, 4
"""Prompts of a step and of a mini-batch, over all ranks."""
SAMPLING = SamplingParams(n=4, max_new_tokens=4)


class PrintReward:
    """A callback of your own: any object with a method named after a hook. Fabric passes what the method names."""

    def on_step_end(self, step: int, metrics: dict[str, float], fabric: Fabric) -> None:
        """Called by the loop below."""
        fabric.print(f"step {step}: reward {metrics['reward/mean']:.3f}, loss {metrics['actor/loss']:.4f}")


def score(response: str, answer: str) -> float:
    """The reward: how many of the answer's characters are in their place."""
    return sum(given == right for given, right in zip(response, answer, strict=False)) / len(answer)


def rows_of_minibatches(sizes: list[int], samples: int) -> list[list[int]]:
    """The rows of each mini-batch on this rank; the samples of a prompt are adjacent and stay together."""
    starts = [samples * sum(sizes[:number]) for number in range(len(sizes))]
    return [list(range(start, start + samples * size)) for start, size in zip(starts, sizes, strict=True)]


def main() -> None:
    """Train, save, and load what was saved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/own_loop"), help="where everything is written")
    parser.add_argument("--max-steps", type=int, default=10)
    options = parser.parse_args()

    strategy = HybridStrategy()
    logger = CSVLogger(options.folder, name="logs")
    fabric = Fabric(accelerator="cpu", strategy=strategy, loggers=[logger], callbacks=[PrintReward()])
    fabric.launch()

    # Roles. `setup` creates process groups and shards the models, then the optimizers are made.
    tokenizer = char_tokenizer()
    actor = Actor(tiny_model("qwen3", vocab_size=len(tokenizer)), tokenizer=tokenizer, learning_rate=1e-3)
    dataflow = HybridDataFlow(actor=actor, reward=RewardFunction(score))
    dataflow.setup(fabric)
    dataflow.setup_optimizers()
    algorithm = GRPO()

    # Data. Each data rank loads its own rows of every global batch.
    rows = [
        {"prompt": f"{first}+{second}=", "answer": str(first + second)} for first in range(9) for second in range(9)
    ]
    place = (ROLLOUT_BATCH, UPDATE_BATCH, strategy.layout("actor").data_size, strategy.data_rank("actor"))
    data = AsyncRolloutDataset(rows, tokenizer=tokenizer)
    minibatches = rows_of_minibatches(local_minibatch_sizes(*place), SAMPLING.n)

    state: dict[str, Any] = {"actor": actor, "optimizer": dataflow.optimizers["actor"], "step": 0}
    with data.loader(ROLLOUT_BATCH, rollout_rows(*place)) as loader:
        for step, prompts in zip(range(options.max_steps), loader, strict=False):
            prompts = prompts.to(fabric.device)
            with strategy.rollout(actor) as engine:
                rollouts = engine.generate(prompts, SAMPLING, step=step)
            batch = join_rollouts(prompts, rollouts, tokenizer, SAMPLING, skip_special_tokens=True)

            experience = dataflow.score(batch)
            experience.old_logprobs = dataflow.logprobs(batch)  # several updates follow: ratios are against these
            algorithm.compute_advantages(experience, strategy.group("actor", "scores"))
            algorithm.update(dataflow, experience, minibatches)

            metrics = dataflow.metrics.compute()
            fabric.call("on_step_end", step=step, metrics=metrics, fabric=fabric)
            fabric.log_dict(metrics, step=step)
            state["step"] = step + 1

    fabric.save(options.folder / "checkpoint", state)
    rest = fabric.load(options.folder / "checkpoint", {"actor": actor, "optimizer": dataflow.optimizers["actor"]})
    fabric.print(f"saved and loaded the state after step {rest['step']}")
    logger.finalize("success")


if __name__ == "__main__":
    main()
