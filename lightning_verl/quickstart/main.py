"""Runs the quick start: SFT, then RL on the same roles, with an evaluation before and after RL.

It needs neither a GPU nor a network, and works under one process or several (``torchrun``, ``lightning-verl run``).
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from transformers import PreTrainedModel

from lightning_verl.algorithms.base import Algorithm
from lightning_verl.algorithms.grpo import GRPO
from lightning_verl.algorithms.ppo import PPO
from lightning_verl.algorithms.sft import SFT
from lightning_verl.callbacks import Checkpoint, ProgressBar, Throughput
from lightning_verl.data.prompts import AsyncRolloutDataset
from lightning_verl.dataflow import HybridDataFlow
from lightning_verl.quickstart.curves import draw_curves, read_logs
from lightning_verl.quickstart.evaluation import greedy_accuracy
from lightning_verl.quickstart.progress import ProgressLines
from lightning_verl.quickstart.task import MAX_NEW_TOKENS, Row, exact, make_split, task_tokenizer
from lightning_verl.roles.actor import Actor
from lightning_verl.roles.critic import Critic
from lightning_verl.roles.reward_function import RewardFunction
from lightning_verl.rollout.sampling import SamplingParams
from lightning_verl.strategies.hybrid import HybridStrategy
from lightning_verl.testing.tiny import tiny_model
from lightning_verl.trainer import RLTrainer

_MOST_THREADS = 2
"""More threads than this slow a model of this size down, and let equal seeds give other results on other machines."""

_BETAS = (0.9, 0.98)
"""Adam's: a second moment that forgets faster than usual, for a run of a hundred steps."""
_ACCURACY = "evaluation/greedy_accuracy"


@dataclass(frozen=True)
class Quickstart:
    """What to run, one setting for both algorithms."""

    output: Path
    """Folder for logs, checkpoints, the trained model and the picture."""
    algorithm: Literal["grpo", "ppo"] = "grpo"
    """How to learn from rewards."""
    engine: str = "auto"
    """What generates, see ``Actor``."""
    seed: int = 0
    """Seed of weights, data and samples."""
    sft_steps: int = 22
    """Steps of learning from examples: too few to master the task, enough for samples that earn a reward."""
    rl_steps: int = 150
    """Steps of learning from rewards."""
    sft_batch_size: int = 256
    """Examples of a step."""
    rl_batch_size: int = 128
    """Prompts of a step, over all ranks."""
    samples_per_prompt: int = 8
    """Samples of a prompt."""
    minibatches: int = 2
    """Updates of a step."""
    training_rows: int = 16_384
    """Prompts to train on."""
    held_out_rows: int = 512
    """Prompts to evaluate on."""
    sft_learning_rate: float = 2e-3
    """Of the actor, while it learns from examples."""
    rl_learning_rate: float = 2e-4
    """Of the actor, while it learns from rewards."""
    critic_learning_rate: float = 1e-3
    """Of the critic (PPO)."""

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.output / "checkpoints"


class RunFolderError(Exception):
    """The folder of a run is not in the state that was expected."""


def run_quickstart(config: Quickstart, resume: bool = False) -> tuple[float, float]:
    """Train the model, evaluate it, and leave everything in ``config.output``.

    Args:
        config: What to run.
        resume: Whether to go on from the last checkpoint in the folder, whichever phase it is of.

    Returns:
        Greedy accuracy on the held-out prompts before and after RL.

    Raises:
        RunFolderError: The folder is not empty and ``resume`` is False, or there is nothing to resume.
    """
    latest = _starting_point(config, resume)
    fabric = Fabric(
        accelerator="cpu",
        strategy=HybridStrategy(compile_layers=False),  # compiling would take longer than training
        loggers=[CSVLogger(config.output, name="logs", flush_logs_every_n_steps=1)],
        callbacks=[Throughput(), ProgressBar(), ProgressLines(), Checkpoint(config.checkpoints, every_n_steps=20)],
    )
    if os.environ.get("LT_CLI_USED") != "1":  # Fabric's own launcher has done it, and forbids to do it again
        fabric.launch()
    if fabric.world_size == 1:
        torch.set_num_threads(min(torch.get_num_threads(), _MOST_THREADS))
    dataflow = _make_roles(config)
    split = make_split(config.seed, config.training_rows, config.held_out_rows)
    step = 0 if latest is None else int(latest.name.removeprefix("step-"))
    if step <= config.sft_steps:
        _make_sft(config, fabric, dataflow, list(split.training)).fit(config.sft_steps, resume_from=latest)
        before = _evaluate(config, fabric, dataflow, list(split.held_out), config.sft_steps)
        latest = None
    else:
        before = fabric.broadcast(_logged_accuracy(config))
    trainer = _make_rl(config, fabric, dataflow, list(split.training))
    trainer.fit(config.rl_steps, resume_from=latest)
    after = _evaluate(config, fabric, dataflow, list(split.held_out), config.sft_steps + config.rl_steps)
    _finish(config, fabric, dataflow, before, after)
    return before, after


def _starting_point(config: Quickstart, resume: bool) -> Path | None:
    """The checkpoint to go on from; None for a new run."""
    latest: Path | None = Checkpoint.latest(config.checkpoints)
    if resume and latest is None:
        raise RunFolderError(f"{config.checkpoints} holds no checkpoint to resume from; leave --resume out.")
    if not resume and config.output.exists() and any(config.output.iterdir()):
        raise RunFolderError(
            f"the folder {config.output} is not empty; go on with its run with --resume, or choose another --output."
        )
    return latest


def _make_roles(config: Quickstart) -> HybridDataFlow:
    tokenizer = task_tokenizer()

    def model(seed: int) -> PreTrainedModel:
        sizes = {"hidden_size": 96, "intermediate_size": 384, "max_position_embeddings": 64}
        if config.engine == "vllm":  # its attention on the CPU takes heads of 32, 64, ... only, not of 96 / 4
            sizes["head_dim"] = 32
        return tiny_model(
            "qwen3",
            seed=seed,
            vocab_size=len(tokenizer),
            tie_word_embeddings=True,
            initializer_range=0.02,
            **sizes,
        )

    critic = Critic(model(config.seed + 1), learning_rate=config.critic_learning_rate)
    return HybridDataFlow(
        actor=Actor(model(config.seed), tokenizer=tokenizer, betas=_BETAS, engine=config.engine),
        critic=critic if config.algorithm == "ppo" else None,
        reward=RewardFunction(exact),
        skip_special_tokens=False,  # a special token in an answer makes it wrong
    )


def _make_sft(config: Quickstart, fabric: Fabric, dataflow: HybridDataFlow, rows: list[Row]) -> RLTrainer:
    return RLTrainer(
        fabric,
        dataflow,
        SFT(response_field="answer"),
        AsyncRolloutDataset(rows, tokenizer=dataflow.tokenizer, seed=config.seed),
        rollout_batch_size=config.sft_batch_size,
        learning_rates={"actor": config.sft_learning_rate},
        warmup_steps=50,
    )


def _make_rl(config: Quickstart, fabric: Fabric, dataflow: HybridDataFlow, rows: list[Row]) -> RLTrainer:
    algorithm: Algorithm = GRPO() if config.algorithm == "grpo" else PPO()
    with warnings.catch_warnings():
        # Two updates of a rollout batch are enough here, and there is no idle time to win.
        warnings.filterwarnings("ignore", message="RLTrainer: one rollout batch feeds")
        return RLTrainer(
            fabric,
            dataflow,
            algorithm,
            AsyncRolloutDataset(rows, tokenizer=dataflow.tokenizer, seed=config.seed + 1),
            rollout_batch_size=config.rl_batch_size,
            update_batch_size=config.rl_batch_size // config.minibatches,
            samples_per_prompt=config.samples_per_prompt,
            sampling=SamplingParams(max_new_tokens=MAX_NEW_TOKENS, seed=config.seed),
            learning_rates={"actor": config.rl_learning_rate},
            warmup_steps=10,
            first_step=config.sft_steps,
        )


def _evaluate(config: Quickstart, fabric: Fabric, dataflow: HybridDataFlow, rows: list[Row], step: int) -> float:
    """Greedy accuracy on held-out rows, in the log too, where a resumed run finds it."""
    accuracy = greedy_accuracy(dataflow, rows, max_new_tokens=MAX_NEW_TOKENS)
    fabric.log(_ACCURACY, accuracy, step=step)
    fabric.logger.save()
    say(fabric, f"greedy accuracy after step {step}: {accuracy:.2f}")
    return accuracy


def _logged_accuracy(config: Quickstart) -> float:
    """Greedy accuracy before RL, from the log of the run that is resumed."""
    return read_logs(config.output / "logs")[config.sft_steps][_ACCURACY]


def _finish(config: Quickstart, fabric: Fabric, dataflow: HybridDataFlow, before: float, after: float) -> None:
    """Leave the trained model and the picture, and say how it went."""
    dataflow.save_pretrained(config.output / "model")
    fabric.logger.finalize("success")
    if fabric.is_global_zero:
        title = f"quick start: {config.algorithm.upper()}, seed {config.seed}"
        draw_curves(config.output / "logs", config.output / "curves.png", title)
    say(fabric, f"logs, checkpoints, model and curves.png are in {config.output}")
    say(fabric, f"greedy accuracy: {before:.2f} -> {after:.2f}")
    fabric.barrier()


def say(fabric: Fabric, line: str) -> None:
    """Print a line on rank 0."""
    if fabric.is_global_zero:
        print(line, flush=True)
