"""Draws the learning curves from the CSV logs of a run."""

from __future__ import annotations

import csv
from pathlib import Path

Curve = tuple[list[int], list[float]]
"""Steps and values."""


def draw_curves(logs: Path, image: Path, title: str) -> None:
    """Draw loss, reward and greedy accuracy over the steps to a PNG.

    Args:
        logs: A folder of CSVLogger with one ``version_<n>`` for each start of the run.
        image: Where to write the picture.
        title: What stands above it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_logs(logs)
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    losses, rewards = figure.subplots(1, 2)
    losses.plot(*_curve({step: row for step, row in rows.items() if "reward/mean" not in row}, "actor/loss"))
    losses.set(title="learning from examples", xlabel="step", ylabel="loss", ylim=(0, None))
    rewards.plot(*_curve(rows, "reward/mean"), label="reward of samples")
    rewards.plot(*_curve(rows, "evaluation/greedy_accuracy"), "o", label="greedy accuracy, unseen prompts")
    rewards.set(title="learning from rewards", xlabel="step", ylim=(0, 1))
    rewards.legend(loc="lower right")
    figure.savefig(image, dpi=120)


def read_logs(logs: Path) -> dict[int, dict[str, float]]:
    """Read the CSV files of a run, those of later starts over those of earlier ones.

    Returns:
        For each step in ascending order its figures; a figure that was not logged there is left out.
    """
    found: dict[int, dict[str, float]] = {}
    for file in sorted(logs.glob("version_*/metrics.csv"), key=lambda path: int(path.parent.name.split("_")[1])):
        with file.open(newline="") as lines:
            for row in csv.DictReader(lines):
                figures = {name: float(value) for name, value in row.items() if value and name != "step"}
                found.setdefault(int(row["step"]), {}).update(figures)
    return dict(sorted(found.items()))


def _curve(rows: dict[int, dict[str, float]], name: str) -> Curve:
    steps = [step for step, row in rows.items() if name in row]
    return steps, [rows[step][name] for step in steps]
