"""`lightning-verl tune`, on the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tuning_configs import make_run, record

from lightning_verl.cli import main
from lightning_verl.config import TrainConfig, read_config
from lightning_verl.planning.plan import Hardware
from lightning_verl.tuning.candidates import KNOBS, Start
from lightning_verl.tuning.files import write_config
from lightning_verl.tuning.record import Record


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_config(tmp_path / "run.yaml", make_run(tmp_path))
    return tmp_path / "run.yaml"


def trials(monkeypatch: pytest.MonkeyPatch, answers: Iterator[Record]) -> list[tuple[TrainConfig, dict[str, Any]]]:
    """Make up what trials measure; returns what they were asked."""
    asked: list[tuple[TrainConfig, dict[str, Any]]] = []

    def run(config: TrainConfig, **options: Any) -> Record:
        asked.append((config, options))
        return next(answers)

    monkeypatch.setattr("lightning_verl.tuning.tune.run_trial", run)
    return asked


def test_what_is_best_is_written(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = record(2.0, scores=[0.0, 1.0])
    # As given; ratio 1, slower; ratio 4, and as given once more; the offload, slower; LoRA, and ratio 4 once more.
    answers = [first, record(3.0), record(1.0), first, record(4.0), replace(first, seconds=[0.5]), record(1.0)]
    asked = trials(monkeypatch, iter(answers))
    words = ["tune", str(path), "--only", "lora", "ratio", "kv-offload", "--trial-steps", "2", "--memory", "40"]
    assert main([*words, "--seed", "5"]) == 0
    options = {"steps": 2, "warmup": 1, "memory_gib": 40.0, "time_limit": 900.0, "modules": path.parent}
    assert all(given == options for _, given in asked)
    assert [config.batch.rollout_batch_size for config, _ in asked] == [4, 2, 8, 4, 8, 8, 8]
    written = read_config([str(path.with_suffix(".tuned.yaml"))])
    given = read_config([str(path), "--seed", "5"])
    assert written == replace(
        given, batch=replace(given.batch, rollout_batch_size=8), model=replace(given.model, lora=written.model.lora)
    )
    assert written.model.lora is not None
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines()[:6]] == [
        "setting",
        "start",
        "ratio",
        "ratio",
        "kv-offload",
        "lora",
    ]
    assert "200 tokens a second and rank, 4.00 x the 50 of the config as given" in text
    assert "changes what is learned, so compare rewards over a few seeds: ratio, lora\n" in text
    assert f"written: {path.with_suffix('.tuned.yaml')}\n" in text


def test_a_config_that_does_not_run_is_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trials(monkeypatch, iter([record(problem="ValueError: no such column")]))
    assert main(["tune", str(path)]) == 2
    assert "lightning-verl tune: the config does not run as it stands: ValueError: no such" in capsys.readouterr().err
    assert not path.with_suffix(".tuned.yaml").exists()
    assert main(["tune", str(path.parent / "none.yaml")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_every_candidate_reads_as_it_was_written(path: Path) -> None:
    start = Start(read_config([str(path)]), 2, Hardware(8.0), wanted_tokens=100)
    again = path.with_name("again.yaml")
    tried = [candidate for knob in KNOBS for candidate in knob.candidates(start)]
    assert len(tried) > 10
    for candidate in tried:
        write_config(again, candidate.config)
        assert read_config([str(again)]) == candidate.config, candidate.name


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_whole_search_and_a_run_of_what_it_wrote(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    knobs = ["micro-batch", "checkpointing", "lora"]
    assert main(["tune", str(path), "--trial-steps", "2", "--only", *knobs]) == 0
    tried = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "  " in line]
    assert set(tried) == {"setting", "start", *knobs}
    sys.modules.pop("tuning_rewards", None)
    assert main(["train", str(path.with_suffix(".tuned.yaml")), "--steps", "1"]) == 0
    assert (path.parent / "out" / "model").is_dir()
