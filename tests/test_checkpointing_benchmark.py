"""benchmarks/checkpointing.py: its arms on a CPU, its arithmetic and its page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from benchmark_scripts import FOLDER, load_parts

from lightning_verl.parallel import compiling

TINY = ["--shape", "tiny", "--sequences", "2", "--tokens", "16", "--steps", "1"]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_parts(monkeypatch, "checkpointing")


def make_result(benchmark: ModuleType, *arms: Any) -> Any:
    return benchmark.Result("GPU", "2.13", "1.5B", 8, 1024, list(arms))


def make_arm(benchmark: ModuleType, name: str, gigabytes: float, seconds: float, *, compiled: bool = False) -> Any:
    arm = next(arm for arm in benchmark.ARMS if arm.key == (name, compiled))
    times = [seconds, 9 * seconds, seconds / 2]
    return replace(arm, seconds=times, first_seconds=20.0, peak_bytes=int(gigabytes * 1e9))


def test_every_arm_runs(benchmark: ModuleType, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "BACKEND", "eager")
    output = tmp_path / "new" / "result.json"
    benchmark.main(["--output", str(output), *TINY])
    result = benchmark.load(output)
    assert [arm.key for arm in result.arms] == [arm.key for arm in benchmark.ARMS]
    assert len(result.arms) == 12
    assert not any(arm.problem for arm in result.arms)
    assert all(len(arm.seconds) == 1 and arm.peak_bytes is None for arm in result.arms)
    assert "| selective | yes |  |  | 0." in capsys.readouterr().out


def test_an_arm_that_fails_is_a_row(benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, prepare = tmp_path / "result.json", benchmark.prepare_layers

    def fail(module: Any, checkpointing: Any, *others: Any) -> None:
        if checkpointing is None:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        if checkpointing == "full":
            raise RuntimeError("no kernel\nand more")
        prepare(module, checkpointing, *others)

    monkeypatch.setattr(benchmark, "prepare_layers", fail)
    benchmark.main(["--output", str(output), "--no-compile", "--only", "none", "selective", "full", *TINY])
    result = benchmark.load(output)
    assert [(arm.name, arm.problem) for arm in result.arms] == [
        ("none", "out of memory"),
        ("selective", ""),
        ("full", "RuntimeError: no kernel"),
    ]
    text = benchmark.page(result)
    assert "| none | no | out of memory |  |  |  |  |\n" in text
    assert "| selective | no |  |  | 0." in text
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(FOLDER))
    benchmark.main(["--output", str(output), "--no-compile", "--only", "none", *TINY])
    again = benchmark.load(output)
    assert [arm.problem for arm in again.arms] == ["", "", "RuntimeError: no kernel"]
    assert again.arms[1] == result.arms[1]  # it was not measured again
    benchmark.main(["--output", str(output), "--no-compile", "--only", "none", *TINY[:-1], "2", "--tokens", "12"])
    assert [arm.name for arm in benchmark.load(output).arms] == ["none"]  # other work: nothing to compare with


def test_the_page_compares_with_the_arm_without_any(benchmark: ModuleType) -> None:
    result = make_result(
        benchmark,
        make_arm(benchmark, "none", 40.0, 0.4),
        make_arm(benchmark, "selective", 24.0, 0.44),
        make_arm(benchmark, "none", 36.0, 0.3, compiled=True),
        make_arm(benchmark, "selective", 27.0, 0.33, compiled=True),
    )
    text = benchmark.page(result)
    assert "| none | no | 40.0 GB | 100% | 0.400 | 100% | 20.0 s |\n" in text
    assert "| selective | no | 24.0 GB | 60% | 0.440 | 110% | 20.0 s |\n" in text  # 24 / 40; 0.44 / 0.4
    assert "| selective | yes | 27.0 GB | 75% | 0.330 | 110% | 20.0 s |\n" in text  # 27 / 36; 0.33 / 0.3
    goal = "the goal of -35% or better at +12% or less is"
    assert f"selective: peak -40% at +10% time; {goal} met.\n" in text
    assert f"selective, compiled: peak -25% at +10% time; {goal} **not** met.\n" in text
    slow = make_result(
        benchmark, make_arm(benchmark, "none", 40.0, 0.4), make_arm(benchmark, "selective", 24.0, 0.46)
    )  # 0.46 / 0.4 = 1.15
    assert f"selective: peak -40% at +15% time; {goal} **not** met.\n" in benchmark.page(slow)


def test_the_page_is_written_from_the_file(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = make_result(benchmark, make_arm(benchmark, "none", 40.0, 0.4))
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path / "result.json")
    monkeypatch.setattr(benchmark, "PAGE", tmp_path / "result.md")
    benchmark.save(tmp_path / "result.json", result)
    benchmark.main(["--table-only"])
    assert (tmp_path / "result.md").read_text() == benchmark.page(result)


def test_the_committed_page_is_that_of_the_committed_results(benchmark: ModuleType) -> None:
    """Both or none are there."""
    assert benchmark.RESULTS.exists() == benchmark.PAGE.exists()
    if benchmark.RESULTS.exists():
        assert benchmark.PAGE.read_text() == benchmark.page(benchmark.load(benchmark.RESULTS))
