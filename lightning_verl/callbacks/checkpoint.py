"""``Checkpoint``: saves the run now and then, at its end and when it breaks, and keeps the last few."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_verl.strategies.dispatch import AgreedError

if TYPE_CHECKING:
    from lightning_verl.trainer import RLTrainer

_logger = logging.getLogger("lightning_verl")
_NAME = re.compile(r"step-(\d{6,})")


class Checkpoint:
    """Saves everything that a resumed run needs to ``<folder>/step-<n>``, n being the steps that are finished.

    n has at least six digits and counts on from the trainer's ``first_step``, as the steps in the log do. Resume with::

        trainer.fit(max_steps=200, resume_from=Checkpoint.latest("checkpoints"))

    A run that stops in the middle of a step is saved with that step not counted: a resumed run takes its prompts once
    more, on the weights as they were when it stopped (mini-batches that were through by then have left their mark on
    them, as have the step's scores on a ``RewardEMA``).

    Args:
        folder: Where checkpoints go, reachable for all ranks.
        every_n_steps: Steps from one save to the next.
        keep: How many to keep. Older ones named ``step-<n>`` in the folder are removed once a newer one is whole; None
            keeps all.
        save_on_exception: Save when the run breaks, if steps were finished since the last save. It is done where ranks
            are sure to act together: with one process, or on an ``AgreedError`` (a failed reward, say), which every
            rank raises. On any other error of one rank among several, the rest may be in the middle of something, and a
            common save would hang.
        save_at_end: Save at the end, if steps were finished since the last save.

    Raises:
        ValueError: ``every_n_steps`` or ``keep`` is below 1.
    """

    def __init__(
        self,
        folder: str | Path,
        every_n_steps: int = 50,
        keep: int | None = 2,
        save_on_exception: bool = True,
        save_at_end: bool = True,
    ) -> None:
        if every_n_steps < 1:
            raise ValueError(f"Checkpoint got every_n_steps={every_n_steps}; it takes at least 1.")
        if keep is not None and keep < 1:
            raise ValueError(f"Checkpoint got keep={keep}; it takes at least 1, or None to keep all.")
        self.folder = Path(folder)
        self.every_n_steps = every_n_steps
        self.keep = keep
        self.save_on_exception = save_on_exception
        self.save_at_end = save_at_end
        self._saved_step = 0

    @staticmethod
    def latest(folder: str | Path) -> Path | None:
        """The checkpoint of the latest step in a folder; None if there is none, or no such folder."""
        return next(reversed(_checkpoints(Path(folder)).values()), None)

    def on_run_start(self, trainer: RLTrainer) -> None:
        """Look whether the folder belongs to this run.

        Raises:
            FileExistsError: It holds checkpoints of later steps: ``latest`` would find them instead of this run's, and
                those of this run would count as the oldest and be removed. Raised on every rank.
        """
        self._saved_step = trainer.global_step
        latest = trainer.fabric.broadcast(max(_checkpoints(self.folder), default=0))
        if latest > trainer.global_step:
            raise FileExistsError(
                f"Checkpoint: {self.folder} holds a checkpoint of step {latest}, but this run starts at step "
                f"{trainer.global_step}. Resume with fit(..., resume_from=Checkpoint.latest(folder)), take another "
                "folder, or move the later checkpoints away."
            )

    def on_step_end(self, trainer: RLTrainer) -> None:
        """Save every ``every_n_steps`` steps."""
        if trainer.global_step % self.every_n_steps == 0:
            self._save(trainer)

    def on_run_end(self, trainer: RLTrainer) -> None:
        """Save what is not saved yet."""
        if self.save_at_end and trainer.global_step > self._saved_step:
            self._save(trainer)

    def on_run_exception(self, trainer: RLTrainer, exception: BaseException) -> None:
        """Save what is not saved yet, if it is safe to. Never raises an error of its own: the exception goes on."""
        if not self.save_on_exception or trainer.global_step <= self._saved_step:
            return
        if trainer.fabric.world_size > 1 and not isinstance(exception, AgreedError):
            _logger.warning(
                "Checkpoint: not saved after %s on rank %d, as not all ranks may take part; the last save is step %d.",
                type(exception).__name__,
                trainer.fabric.global_rank,
                self._saved_step,
            )
            return
        try:
            self._save(trainer)
        except Exception:  # the run's own exception is the one to see
            _logger.exception("Checkpoint: saving after %s failed too.", type(exception).__name__)

    def _save(self, trainer: RLTrainer) -> None:
        trainer.save(self.folder / f"step-{trainer.global_step:06d}")
        self._saved_step = trainer.global_step
        if self.keep is not None and trainer.fabric.is_global_zero:
            for path in list(_checkpoints(self.folder).values())[: -self.keep]:
                _remove(path)


def _checkpoints(folder: Path) -> dict[int, Path]:
    """The whole checkpoints in a folder by step, ascending; unfinished ones have other names."""
    if not folder.is_dir():
        return {}
    found = {int(m[1]): path for path in folder.iterdir() if (m := _NAME.fullmatch(path.name)) and path.is_dir()}
    return dict(sorted(found.items()))


def _remove(path: Path) -> None:
    """Remove a checkpoint; first it loses its name, so that whatever is named like one is whole."""
    doomed = path.with_name(path.name + ".incomplete")
    try:
        path.rename(doomed)
        shutil.rmtree(doomed)
    except OSError as error:  # only rank 0 is here: raising would leave the others waiting in their next collective
        _logger.warning("Checkpoint: could not remove the old %s: %s", path, error)
