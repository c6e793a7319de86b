"""``ProgressBar``: one line in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from lightning_verl.trainer import RLTrainer


class ProgressBar:
    """Shows steps, the mean reward (or else the actor's loss) and tokens a second, where rank 0 writes to a terminal.

    Tokens a second are those of ``Throughput``, which must stand before it in the list of callbacks. The bar is drawn
    at the end of a step, by no thread of its own; what the script prints meanwhile appears above it.

    Args:
        every_n_steps: Steps from one drawing to the next.

    Raises:
        ValueError: ``every_n_steps`` is below 1.
    """

    def __init__(self, every_n_steps: int = 1) -> None:
        if every_n_steps < 1:
            raise ValueError(f"ProgressBar got every_n_steps={every_n_steps}; it takes at least 1.")
        self.every_n_steps = every_n_steps
        self._progress: Progress | None = None

    def on_run_start(self, trainer: RLTrainer) -> None:
        """Draw the empty bar, if there is a terminal to draw it in."""
        self._stop()
        if not (trainer.fabric.is_global_zero and sys.stdout.isatty()):
            return
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=Console(file=sys.stdout),
            auto_refresh=False,
        )
        self._progress.add_task("", total=trainer.max_steps, completed=trainer.completed_steps)
        self._progress.start()

    def on_step_end(self, trainer: RLTrainer, metrics: dict[str, float]) -> None:
        """Draw the bar as it is now, at every ``every_n_steps``-th step and the last one."""
        if self._progress is None:
            return
        done = trainer.completed_steps
        if done % self.every_n_steps == 0 or done == trainer.max_steps:
            task = self._progress.task_ids[0]
            self._progress.update(task, completed=done, description=_summary(metrics), refresh=True)

    def on_run_end(self) -> None:
        """Leave the bar as it is and give the terminal back."""
        self._stop()

    def on_run_exception(self) -> None:
        """Give the terminal back, for the traceback."""
        self._stop()

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _summary(metrics: Mapping[str, float]) -> str:
    shown = {"reward": "reward/mean"} if "reward/mean" in metrics else {"loss": "actor/loss"}
    parts = [f"{label} {metrics[name]:.3f}" for label, name in shown.items() if name in metrics]
    if "throughput/tokens_per_second_per_gpu" in metrics:
        parts.append(f"{metrics['throughput/tokens_per_second_per_gpu']:,.0f} tokens/s/GPU")
    return ", ".join(parts)
