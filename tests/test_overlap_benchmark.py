"""benchmarks/overlap.py: cases run on a CPU too, and the page shows what was kept."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from benchmark_scripts import load_parts


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_parts(monkeypatch, "overlap")


def test_both_arms_of_every_case_run_and_agree(benchmark: ModuleType, tmp_path: Path) -> None:
    benchmark.REWARDS["a function that waits 0.2 s, in 16 threads"] = (benchmark.computing, 2)
    output = tmp_path / "overlap.json"
    small = ["--shape", "tiny", "--prompts", "2", "--new-tokens", "20", "--repeats", "1"]
    benchmark.main([*small, "--output", str(output)])
    lines = output.with_suffix(".md").read_text().splitlines()
    assert sum(line.startswith("| ") for line in lines) == 1 + len(benchmark.REWARDS) + 3


def test_arms_that_differ_end_the_run(benchmark: ModuleType) -> None:
    bench = object.__new__(benchmark.Bench)
    bench._repeats = 1
    torch = benchmark.torch
    arms = [lambda: (1.0, [torch.zeros(1)]), lambda: (1.0, [torch.ones(1)])]
    with pytest.raises(RuntimeError, match="the arms of 'x' differ in their results"):
        bench.compare("x", "y", arms)


def test_the_gain_is_that_of_the_medians(benchmark: ModuleType, tmp_path: Path) -> None:
    # medians 3 and 2.5
    case = benchmark.Comparison("x: y", "seconds", [2.0, 3.0, 9.0], [1.0, 2.5, 4.0])
    assert case.gain == 0.5
    benchmark.save(tmp_path / "a.json", benchmark.Work("tiny"), [case])
    page = benchmark.page(tmp_path / "a.json")
    assert "| x: y | seconds | 3.000 | 2.500 | +0.500 |\n" in page
    assert "Seconds, medians of 3 repeats" in page
