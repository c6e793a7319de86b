"""benchmarks/groups.py: it measures on gloo too, and docs/benchmarks/groups.md is what the kept result gives."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from benchmark_scripts import load_script

from lightning_verl.testing import run_ranks


@pytest.fixture
def benchmark() -> ModuleType:
    return load_script("groups")


def _measure(output: Path) -> dict[str, tuple[float, float]]:
    script = load_script("groups")
    dist.init_process_group("gloo")
    sizes = script.Sizes(gathers=2, gather_mib=0.25, reduce_mib=0.125, repeats=3, warmup=1)
    result = script.measure(sizes, torch.device("cpu"))
    if dist.get_rank() == 0:
        script.save(output, result)
    return {kind: (took.mean, took.largest) for kind, took in result.latencies.items()}


def test_two_ranks_measure_the_same_and_keep_it(benchmark: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "results" / "groups.json"
    first, second = run_ranks(_measure, 2, path)
    assert first == second
    assert list(first) == list(benchmark.KINDS)
    assert all(0 < mean <= largest for mean, largest in first.values())
    kept = benchmark.load(path)
    assert {kind: (took.mean, took.largest) for kind, took in kept.latencies.items()} == first
    assert (kept.device, kept.ranks, kept.sizes.repeats) == ("cpu", 2, 3)
    assert kept.ratio == first["shared"][0] / first["isolated"][0]
    assert f'"ratio": {kept.ratio}' in path.read_text()


def test_the_page_shows_means_largest_and_the_ratio(benchmark: ModuleType) -> None:
    latencies = {
        "shared": benchmark.Latency(21.2, 21.34),
        "isolated": benchmark.Latency(2.0, 21.3),
        "isolated, high priority": benchmark.Latency(1.8, 2.0),
    }
    result = benchmark.Result(benchmark.Sizes(), latencies, "Some GPU", 2, {"torch": "2.13.0", "nccl": "2.28.9"})
    text = benchmark.page(result)
    assert (
        "| shared | 21.20 | 21.34 |\n| isolated | 2.00 | 21.30 |\n| isolated, high priority | 1.80 | 2.00 |\n" in text
    )
    # 21.2 / 2.0
    assert "is 10.6 times faster" in text
    # 21.2 - 2.0, and a twentieth of it
    assert "The difference, 19.20 of 21.20 ms, is 0.96 ms for each of the 20 gathers." in text
    assert "the mean little (2.00 to 1.80 ms); the slowest of 30 took 2.00 ms instead of 21.30." in text
    assert "30 repeats after 5, the kinds in turn; 2 x Some GPU; torch 2.13.0, nccl 2.28.9." in text


def test_table_only_needs_no_result_and_no_ranks(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path / "groups.json")
    monkeypatch.setattr(benchmark, "PAGE", tmp_path / "groups.md")
    benchmark.main(["--table-only"])
    assert "Not measured yet" in benchmark.PAGE.read_text()
    assert benchmark.COMMAND in benchmark.PAGE.read_text()


def test_the_page_is_that_of_the_kept_result(benchmark: ModuleType) -> None:
    assert benchmark.PAGE.read_text() == benchmark.page(benchmark.load(benchmark.RESULTS))
