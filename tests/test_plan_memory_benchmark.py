"""benchmarks/plan_memory.py: cases run, results of several numbers of ranks are kept, and the page shows them."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist
from benchmark_scripts import load_script


@pytest.fixture
def benchmark() -> ModuleType:
    return load_script("plan_memory")


def test_a_case_is_planned_and_run(benchmark: ModuleType) -> None:
    results = benchmark.run(benchmark.TINY[0], 1)
    dist.destroy_process_group()  # mixed precision has one on one rank too
    assert [line.phase for line in results] == ["rollout", "scoring", "critic_update", "actor_update"]
    assert all(line.planned_gib > 0 and line.measured_gib is None and line.error is None for line in results)


def test_cases_can_be_planned_on_one_and_two_ranks(benchmark: ModuleType, tmp_path: Path) -> None:
    for case in benchmark.CASES:
        benchmark.model_config(case).save_pretrained(tmp_path / case.name)
        for ranks in (1, 2):
            config = benchmark.train_config(case, ranks, str(tmp_path / case.name))
            plan = benchmark.make_plan(config, ranks)
            assert plan.memory[0].worst.peak.bytes < 120 * 2**30, "an H200 has 139 GiB"
            assert plan.roles["actor"].batch.rows[0] == plan.roles["actor"].batch.rows[1], "every rank is like rank 0"


def test_results_are_kept_by_ranks_and_shown(benchmark: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    benchmark.save(path, [benchmark.Comparison(2, "a", "rollout", 1.1, 1.0)], "H200")
    benchmark.save(path, [benchmark.Comparison(1, "a", "rollout", 9.0, None)], "H200")
    benchmark.save(path, [benchmark.Comparison(1, "a", "rollout", 1.9, 2.0)], "H200")
    kept = json.loads(path.read_text())["phases"]
    assert [(entry["ranks"], entry["planned_gib"]) for entry in kept] == [(1, 1.9), (2, 1.1)]
    page = benchmark.page(path)
    assert "| 1 | a | rollout | 1.90 | 2.00 | -5.0% |\n| 2 | a | rollout | 1.10 | 1.00 | +10.0% |\n" in page
    assert "The largest error is 10.0%. H200, torch " in page


def test_the_page_is_that_of_the_results(benchmark: ModuleType) -> None:
    assert benchmark.PAGE.read_text() == benchmark.page(benchmark.RESULTS)
