"""Progress for where there is no terminal to draw a bar in."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_verl.trainer import RLTrainer


class ProgressLines:
    """Prints a line now and then on rank 0, where the output is no terminal (there ``ProgressBar`` draws).

    Args:
        every_n_steps: Steps from one line to the next; the last step always has one.
    """

    def __init__(self, every_n_steps: int = 10) -> None:
        self.every_n_steps = every_n_steps

    def on_step_end(self, trainer: RLTrainer, metrics: Mapping[str, float]) -> None:
        """Print the step, with the mean reward or else the actor's loss."""
        done = trainer.completed_steps
        if sys.stdout.isatty() or not trainer.fabric.is_global_zero:
            return
        if done % self.every_n_steps == 0 or done == trainer.max_steps:
            name = "reward/mean" if trainer.algorithm.needs_reward else "actor/loss"
            figure = f"{name} {metrics[name]:.3f}" if name in metrics else f"no {name}"
            print(f"{type(trainer.algorithm).__name__} step {done}/{trainer.max_steps}: {figure}", flush=True)
