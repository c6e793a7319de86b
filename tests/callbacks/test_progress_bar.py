"""ProgressBar: what it draws, where it keeps quiet, and that it gives the terminal back."""

from __future__ import annotations

import io
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_verl.callbacks import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Put a terminal in place of stdout; in the test itself, as pytest sets stdout anew between fixtures and tests."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")  # numbers are coloured piece by piece otherwise
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    return screen


def make_trainer(max_steps: int | None = 3, completed: int = 0, first_rank: bool = True) -> Any:
    return SimpleNamespace(
        fabric=SimpleNamespace(is_global_zero=first_rank), max_steps=max_steps, completed_steps=completed
    )


def run_step(bar: ProgressBar, trainer: Any, **metrics: float) -> None:
    trainer.completed_steps += 1
    bar.on_step_end(trainer, {name.replace("__", "/"): value for name, value in metrics.items()})


def test_shows_steps_reward_and_speed(monkeypatch):
    terminal = open_terminal(monkeypatch)
    bar, trainer = ProgressBar(), make_trainer()
    bar.on_run_start(trainer)
    assert "0/3" in terminal.getvalue()
    run_step(bar, trainer, reward__mean=0.25, actor__loss=9.0, throughput__tokens_per_second_per_gpu=12345.6)
    bar.on_run_end()
    assert "1/3" in terminal.getvalue()
    assert "reward 0.250, 12,346 tokens/s/GPU" in terminal.getvalue()
    assert "loss" not in terminal.getvalue()


def test_shows_the_loss_where_there_is_no_reward(monkeypatch):
    terminal = open_terminal(monkeypatch)
    bar, trainer = ProgressBar(), make_trainer()
    bar.on_run_start(trainer)
    run_step(bar, trainer, actor__loss=1.5)
    bar.on_run_end()
    assert "loss 1.500" in terminal.getvalue()
    assert "tokens" not in terminal.getvalue()


def test_starts_at_the_steps_of_a_resumed_run(monkeypatch):
    terminal = open_terminal(monkeypatch)
    bar = ProgressBar()
    bar.on_run_start(make_trainer(max_steps=9, completed=4))
    bar.on_run_end()
    assert "4/9" in terminal.getvalue()


def test_total_may_be_unknown(monkeypatch):
    terminal = open_terminal(monkeypatch)
    bar, trainer = ProgressBar(), make_trainer(max_steps=None)
    bar.on_run_start(trainer)
    run_step(bar, trainer)
    bar.on_run_end()
    assert "1/?" in terminal.getvalue()


def test_draws_every_n_steps_and_the_last(monkeypatch):
    terminal = open_terminal(monkeypatch)
    bar, trainer = ProgressBar(every_n_steps=2), make_trainer(max_steps=5)
    bar.on_run_start(trainer)
    for step in range(1, 6):
        run_step(bar, trainer, reward__mean=float(step))
    bar.on_run_end()
    drawn = [f"reward {step}.000" in terminal.getvalue() for step in range(1, 6)]
    assert drawn == [False, True, False, True, True]


@pytest.mark.parametrize("stop", [ProgressBar.on_run_end, ProgressBar.on_run_exception])
def test_gives_the_terminal_back(monkeypatch, stop):
    terminal = open_terminal(monkeypatch)
    threads = threading.active_count()
    bar, trainer = ProgressBar(), make_trainer()
    bar.on_run_start(trainer)
    assert sys.stdout is not terminal  # rich stands between, so that prints appear above the bar
    stop(bar)
    assert sys.stdout is terminal
    assert terminal.getvalue().rindex("\x1b[?25h") > terminal.getvalue().rindex("\x1b[?25l")  # cursor shown again
    assert threading.active_count() == threads
    shown = terminal.getvalue()
    run_step(bar, trainer)
    stop(bar)
    assert terminal.getvalue() == shown


def test_second_run_starts_anew(monkeypatch):
    terminal = open_terminal(monkeypatch)
    bar = ProgressBar()
    bar.on_run_start(make_trainer())
    bar.on_run_start(make_trainer(max_steps=7))
    bar.on_run_end()
    assert sys.stdout is terminal
    assert "0/7" in terminal.getvalue()


def test_other_ranks_are_quiet(monkeypatch):
    terminal = open_terminal(monkeypatch)
    bar, trainer = ProgressBar(), make_trainer(first_rank=False)
    bar.on_run_start(trainer)
    run_step(bar, trainer, reward__mean=1.0)
    bar.on_run_end()
    assert terminal.getvalue() == ""


def test_files_and_pipes_get_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    bar, trainer = ProgressBar(), make_trainer()
    bar.on_run_start(trainer)
    run_step(bar, trainer, reward__mean=1.0)
    bar.on_run_exception()
    assert sys.stdout.getvalue() == ""


def test_every_n_steps_out_of_range():
    with pytest.raises(ValueError, match=r"ProgressBar got every_n_steps=0; it takes at least 1"):
        ProgressBar(every_n_steps=0)
