"""``lightning-verl tune``: the settings that are fastest here for a config, and the file that has them."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path

import torch

from lightning_verl.config import read_config
from lightning_verl.tuning.candidates import KNOBS
from lightning_verl.tuning.files import write_config
from lightning_verl.tuning.search import Row, search
from lightning_verl.tuning.trial import run_trial
from lightning_verl.tuning.tune_report import head, line, summary

WARMUP = 1
"""Steps of a trial that do not count."""
CUDA_WARMUP = 2
"""The same on a GPU, where kernels are compiled in the first one, and memory settles in the second."""


def tune(
    words: list[str],
    output: Path,
    *,
    only: Collection[str] = (),
    steps: int = 3,
    memory_gib: float | None = None,
    time_limit: float = 900.0,
) -> None:
    """Search, print what was tried, and write the config that was best.

    Args:
        words: The config's path, then options that go before what it says.
        output: The file to write.
        only: Names of the settings to try; empty: all.
        steps: Steps of a trial that count.
        memory_gib: Most memory of a GPU, in GiB; None: all of it.
        time_limit: Seconds that a trial may take.

    Raises:
        ConfigError: A mistake in the config.
        TuneError: It does not run as it stands, or nothing that was tried does.
    """
    config = read_config(words)
    modules = Path(words[0]).parent.resolve()
    on_cuda = torch.cuda.is_available() and config.accelerator != "cpu"
    warmup = CUDA_WARMUP if on_cuda else WARMUP
    run = partial(run_trial, modules=modules, steps=steps, warmup=warmup, memory_gib=memory_gib, time_limit=time_limit)

    def report(row: Row) -> None:
        print(line(row), flush=True)

    print(head(), flush=True)
    knobs = [knob for knob in KNOBS if not only or knob.name in only]
    outcome = search(config, run, report, knobs)
    altering = {knob.name for knob in knobs if knob.alters_learning}
    altered = dict.fromkeys(row.knob for row in outcome.rows if row.kept and row.knob in altering)
    write_config(output, outcome.config, f"Written by `lightning-verl tune {words[0]}`.")
    print(f"\n{summary(outcome)}")
    if altered:
        print(f"changes what is learned, so compare rewards over a few seeds: {', '.join(altered)}")
    print(f"written: {output}")
