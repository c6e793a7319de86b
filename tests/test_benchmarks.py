"""benchmarks/quickstart.py: results are read from the last line, merged, and stand in README.md as they are kept."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from benchmark_scripts import load_script

VERSIONS = {"python": "3.11.1", "torch": "2.13.0", "transformers": "5.19.0", "lightning": "2.6.6"}


@pytest.fixture
def benchmark() -> ModuleType:
    return load_script("quickstart")


def make_run(benchmark: ModuleType, algorithm: str, seed: int, after: float, **changes: Any) -> Any:
    values = {"seconds": 70.4, "threads": 1, "jobs": 1, "versions": VERSIONS, **changes}
    return benchmark.Run(algorithm, seed, 0.625, after, **values)


def test_the_result_is_the_last_line(benchmark: ModuleType) -> None:
    output = "greedy accuracy: 0.10 -> 0.20\nstep 1\ngreedy accuracy: 0.68 -> 1.00\n"
    assert benchmark.parse_accuracies(output) == (0.68, 1.0)


@pytest.mark.parametrize("output", ["", "greedy accuracy: 0.68 -> 0.96\nTraceback", "greedy accuracy: nan -> 0.96"])
def test_another_last_line_is_refused(benchmark: ModuleType, output: str) -> None:
    with pytest.raises(ValueError, match="a run ends with 'greedy accuracy: 0.12 -> 0.34'"):
        benchmark.parse_accuracies(output)


def test_a_new_result_takes_the_place_of_the_same_algorithm_and_seed(benchmark: ModuleType) -> None:
    kept = [make_run(benchmark, "ppo", 0, 0.5), make_run(benchmark, "grpo", 1, 0.6)]
    new = [make_run(benchmark, "ppo", 0, 0.9), make_run(benchmark, "grpo", 0, 0.7)]
    merged = benchmark.merge(kept, new)
    assert [(run.algorithm, run.seed, run.rl_accuracy) for run in merged] == [
        ("grpo", 0, 0.7),
        ("grpo", 1, 0.6),
        ("ppo", 0, 0.9),
    ]


def test_results_are_kept_as_they_are(benchmark: ModuleType, tmp_path: Path) -> None:
    assert benchmark.load(tmp_path / "results.json") == []
    runs = [make_run(benchmark, "grpo", 0, 0.96)]
    benchmark.save(tmp_path / "results.json", runs)
    assert benchmark.load(tmp_path / "results.json") == runs
    assert json.loads((tmp_path / "results.json").read_text())["runs"][0]["versions"] == VERSIONS


def test_the_table_has_a_row_a_seed_and_a_column_an_algorithm(benchmark: ModuleType) -> None:
    runs = [
        make_run(benchmark, "ppo", 1, 0.9),
        make_run(benchmark, "grpo", 0, 0.964, seconds=99.6, threads=2),
        make_run(benchmark, "ppo", 0, 0.88, versions={**VERSIONS, "torch": "2.14.0"}),
    ]
    assert benchmark.table(runs) == (
        "| seed | GRPO | PPO |\n"
        "|---|---|---|\n"
        "| 0 | 0.62 -> 0.96 | 0.62 -> 0.88 |\n"
        "| 1 |  | 0.62 -> 0.90 |\n"
        "\n"
        "70 s a run, more where others share the cores; 1 or 2 thread(s), 1 at a time;\n"
        "python 3.11.1, torch 2.13.0 or 2.14.0, transformers 5.19.0, lightning 2.6.6.\n"
    )


def test_only_what_is_between_the_markers_changes(benchmark: ModuleType) -> None:
    page = f"before {benchmark.START} old {benchmark.END} behind\n"
    once = benchmark.insert(page, "new\n")
    assert once == f"before {benchmark.START}\n\nnew\n\n{benchmark.END} behind\n"
    assert benchmark.insert(once, "new\n") == once


@pytest.mark.parametrize("page", ["", "{start}", "{end} {start}", "{start} {end} {start}"])
def test_a_page_without_the_place_is_refused(benchmark: ModuleType, page: str) -> None:
    with pytest.raises(ValueError, match="each once"):
        benchmark.insert(page.format(start=benchmark.START, end=benchmark.END), "new\n")


def test_table_only_runs_nothing(benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "README", tmp_path / "README.md")
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(benchmark, "run", lambda *arguments: pytest.fail("nothing is to be run"))
    benchmark.README.write_text(f"{benchmark.START}{benchmark.END}")
    benchmark.main(["--table-only"])
    assert "Not measured yet" in benchmark.README.read_text()


def test_every_pair_is_run_and_kept_at_once(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "README", tmp_path / "README.md")
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path / "results.json")
    benchmark.README.write_text(f"{benchmark.START}{benchmark.END}")

    def run(algorithm: str, seed: int, threads: int, jobs: int) -> Any:
        if (algorithm, seed) == ("grpo", 3):
            raise RuntimeError("out of memory")
        return make_run(benchmark, algorithm, seed, 0.9, threads=threads, jobs=jobs)

    monkeypatch.setattr(benchmark, "run", run)
    with pytest.raises(RuntimeError, match="out of memory"):
        benchmark.main(["--seeds", "3", "4"])
    kept = {(run.algorithm, run.seed): (run.threads, run.jobs) for run in benchmark.load(benchmark.RESULTS)}
    assert kept == {("ppo", 3): (1, 1), ("grpo", 4): (1, 1), ("ppo", 4): (1, 1)}
    benchmark.main(["--seeds", "5", "--algorithms", "grpo", "--jobs", "2", "--threads", "2"])
    assert "| 5 | 0.62 -> 0.90 |" in benchmark.README.read_text()


def test_a_failed_run_shows_its_error(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = benchmark.subprocess.CompletedProcess([], 1, "", "ValueError: no such algorithm")
    monkeypatch.setattr(benchmark.subprocess, "run", lambda *arguments, **options: failed)
    with pytest.raises(RuntimeError, match="grpo, seed 0 failed:\nValueError: no such algorithm"):
        benchmark.run("grpo", 0, 1, 1)


def test_the_table_in_the_readme_is_that_of_the_kept_results(benchmark: ModuleType) -> None:
    page = benchmark.README.read_text()
    assert page == benchmark.insert(page, benchmark.table(benchmark.load(benchmark.RESULTS)))
