"""benchmarks/pipeline.py: it measures on gloo too, and its page says what was measured."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from benchmark_scripts import load_script

from lightning_verl.testing import run_ranks


def first_update(number: int) -> dict[str, Any] | None:
    script = load_script("pipeline")
    done = script.train(script.CASES[number], script.WORKS["tiny"], 2)
    return None if done is None else {**asdict(done[0]), "device": done[1]}


def test_every_layout_makes_the_same_update() -> None:
    runs = [run_ranks(first_update, 2, number)[0] for number in range(5)]
    script = load_script("pipeline")
    # 16 rows from 8 to 48 tokens, evenly: 16 x 28, less what is rounded down.
    assert {run["tokens"] for run in runs} == {int(script.make_rows(script.WORKS["tiny"]).rollout.lengths.sum())}
    for run in runs:
        assert run["device"] == "CPU"
        assert run["loss"] == pytest.approx(runs[0]["loss"], abs=1e-5)
        assert run["grad_norm"] == pytest.approx(runs[0]["grad_norm"], abs=1e-5)
        assert (run["bubble"] is not None) == (tuple(run["case"]["mesh"]) == (1, 1, 2, 1))


def test_runs_that_were_not_asked_for_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("pipeline")
    started: list[int] = []

    def run(words: list[str], **_: Any) -> Any:
        number = int(words[words.index("--worker") + 1])
        started.append(number)
        if number == 3:
            return subprocess.CompletedProcess(words, 1)
        done = script.Run(script.CASES[number], 2.0 + len(started), 1000, None, None, 1.0, 1.0)
        Path(words[words.index("--output") + 1]).write_text(json.dumps({**asdict(done), "device": "CPU"}))
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(script.subprocess, "run", run)
    output = tmp_path / "new" / "result.json"
    script.main(["--model", "tiny", "--output", str(output), "--only", "tensor", "gpipe"])
    script.main(["--model", "tiny", "--output", str(output), "--only", "data", "gpipe"])
    assert started == [2, 4, 2, 3], "in the order of the table"
    assert [(run.case.name, run.seconds) for run in script.load(output).runs] == [("gpipe", 5.0), ("tensor", 4.0)]


def test_the_page_of_a_result(tmp_path: Path) -> None:
    script = load_script("pipeline")
    runs = [
        script.Run(script.Case((1, 1, 2, 1)), 2.0, 1000, 0.125, 61.04, 11.93, 2.5),
        script.Run(script.Case((2, 1, 1, 1)), 1.0, 1000, None, 70.0, 11.93, 2.5),
    ]
    result = script.Result("H200", script.WORKS["7B"], runs, "2.13.0", "A note.")
    (tmp_path / "result.json").write_text(json.dumps(asdict(result)))
    assert script.load(tmp_path / "result.json") == result
    text = script.page(result)
    assert "| (1, 1, 2, 1) | 1f1b | 2.00 | 500 | 12% | 61.0 | 11.9300 | 2.5000 |" in text
    assert "| (2, 1, 1, 1) |  | 1.00 | 1,000 |  | 70.0 | 11.9300 | 2.5000 |" in text
    assert text.count("A note.") == 1
