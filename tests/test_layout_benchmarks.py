"""benchmarks/reshard.py and scaling.py: they measure on gloo too. Pages are what the kept results give."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
from benchmark_scripts import load_script

from lightning_verl.testing import run_ranks


@pytest.mark.parametrize("name", ["reshard", "scaling", "pipeline", "checkpointing"])
def test_the_page_is_that_of_the_kept_result(name: str) -> None:
    script = load_script(name)
    assert script.PAGE.read_text() == script.page(script.load(script.RESULTS))


def measure_resharding(path: Path) -> None:
    script = load_script("reshard")
    result = script.measure("tiny", "tiny", "32-true", 1)
    script.save(path, result)


def test_resharding_is_measured_on_two_ranks(tmp_path: Path) -> None:
    run_ranks(measure_resharding, 2, tmp_path / "reshard.json")
    script = load_script("reshard")
    result = script.load(tmp_path / "reshard.json")
    crossed, aligned, copies = result.moved
    # o_proj (64 x 64) and down_proj (64 x 128) of 2 layers: a rank wants half of each and lacks half of that. The
    # norms are whole in the rollout and halved in training: 5 x 64 / 2 numbers.
    norms = 5 * 64 // 2 * 4
    assert crossed.received_bytes == 2 * (64 * 64 + 64 * 128) // 4 * 4 + norms
    assert aligned.received_bytes == norms
    assert copies.received_bytes > crossed.received_bytes
    assert min(case.seconds for case in result.moved) > 0 < crossed.full_tensor_seconds
    assert aligned.full_tensor_seconds is None
    assert "| FSDP2(2), aligned, to TP2 | 0.0 MB |" in script.page(result)


@pytest.mark.slow
def test_steps_are_measured_on_one_and_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("scaling")
    monkeypatch.setattr(script, "ALGORITHMS", ("grpo",))
    result = script.measure(Namespace(model="tiny", steps=2, note="On a small machine."))
    assert [(run.algorithm, run.ranks) for run in result.runs] == [("grpo", 1), ("grpo", 2)]
    assert all(run.step_seconds > 0 < run.tokens for run in result.runs)


def test_weak_scaling_compares_rates_of_a_rank() -> None:
    script = load_script("scaling")
    runs = [script.Run("grpo", 1, 2.0, 100.0), script.Run("grpo", 2, 2.5, 200.0)]
    result = script.Result("GPU", "0.5B", script.Work(1, 2, 3), runs, "2.13.0", "A note.")
    assert result.efficiency("grpo") == (200 / 2.5 / 2) / (100 / 2.0) == 0.8
    assert "| GRPO | 2 | 2.50 | 40 | 0.80 |" in script.page(result)
    assert script.page(result).count("A note.") == 1
