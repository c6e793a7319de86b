"""benchmarks/largest.py: trials on a CPU, what is foreseen, how a search goes, and the page."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from benchmark_scripts import load_parts

GIB = 2**30
PARTS = ("largest_results", "largest_trial", "largest_forecast")


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    yield load_parts(monkeypatch, "largest")
    for name in PARTS:
        sys.modules.pop(name, None)


def make_case(benchmark: ModuleType, tokens: int, **changes: Any) -> Any:
    return replace(benchmark.Case("full", "context", "1.5B", 1, tokens - 64, 64), **changes)


def make_result(benchmark: ModuleType, **changes: Any) -> Any:
    parameters = {"3B": 3.086, "7B": 7.616, "1.5B": 1.544}
    return benchmark.Result("GPU", 139.8, 128.0, "1.5B", "bf16-true", {"torch": "2.11"}, parameters, **changes)


def search(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, foreseen: Callable[[int], Any], fits: Callable[[int], str]
) -> tuple[list[int], Any]:
    """A search over 10, 20, ..., 90 tokens on a GPU of 100 bytes: the values in the order of the trials, its result."""
    cases = [make_case(benchmark, tokens) for tokens in range(70, 151, 10)]
    tried: list[int] = []

    def run(case: Any, forecast: Any) -> Any:
        tried.append(case.value)
        problem = fits(case.value)
        return benchmark.Trial(case, 0.0, 1.0, 1.0, 1.0, problem, "out of memory" in problem)

    monkeypatch.setattr(benchmark, "foresee", lambda case: foreseen(case.value))
    bounds = benchmark.Bounds(gpu_bytes=100, host_bytes=100, seconds=100)
    result = benchmark.search(make_result(benchmark), cases, bounds, run, lambda result: None, lambda forecast: True)
    return tried, result


# ---- trials ----------------------------------------------------------------------------------------------------------


def test_all_ways_run_and_the_file_is_gone_on_with(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "new" / "largest.json"
    words = ["--output", str(output), "--shape", "tiny", "--accelerator", "cpu"]
    benchmark.main([*words, "--quantities", "context"])
    result = benchmark.load(output)
    assert [(trial.case.way, trial.case.value, trial.problem) for trial in result.trials] == [
        ("full", 72, ""),
        ("offload", 72, ""),
        ("lora", 72, ""),
    ]
    for trial in result.trials:
        assert trial.tokens_per_second == pytest.approx(72 / trial.seconds), "the second step has the long row"
        assert trial.measured_gib is None
        assert 0 < trial.foreseen_gib < 0.1
    assert {search.limit for search in result.searches} == {"ladder"}
    assert "| lora |  |  | at least 72 [" in output.with_suffix(".md").read_text()
    ran: list[Any] = []
    monkeypatch.setattr(benchmark, "run_case", lambda case, *others: ran.append(case))
    benchmark.main([*words, "--quantities", "context"])
    assert ran == [], "nothing is run twice"
    assert benchmark.load(output).trials == result.trials


def test_every_quantity_is_the_work_that_it_says(benchmark: ModuleType, tmp_path: Path) -> None:
    from largest_trial import Probe, make_trainer, prompts_of

    shapes = {}
    for quantity in benchmark.QUANTITIES:
        case = benchmark.ladder(quantity, "lora", "tiny")[-1]
        trainer = make_trainer(case, "cpu", Probe(tmp_path / "record.json", 1, 1))
        roles = trainer.dataflow.modules
        assert set(roles) == {"actor", "critic", "reward"}
        assert all(parameter.element_size() == 2 for role in roles.values() for parameter in role.parameters())
        assert trainer.dataflow.max_tokens_per_micro_batch == case.tokens
        assert trainer.rollout_batch_size == trainer.update_batch_size == case.prompts
        shapes[quantity] = (case.value, [len(row["prompt"]) for row in prompts_of(case)])
    assert shapes == {
        "model": ("tiny", [6] * 6),
        "batch": (72, [1] * 3 + [16] * 6),  # three rows of 16 + 8
        "context": (72, [1, 64, 64]),
    }


def test_what_breaks_is_a_trial_that_does_not_fit(benchmark: ModuleType) -> None:
    case = replace(benchmark.ladder("model", "full", "tiny")[0], shape="none")
    trial = benchmark.run_case(case, benchmark.Forecast(2 * GIB, 0, 0.0), "cpu", None, 100.0)
    assert (trial.fits, trial.out_of_memory, trial.problem) == (False, False, "KeyError: 'none'")
    assert (trial.foreseen_gib, trial.measured_gib, trial.seconds) == (2.0, None, None)


# ---- what is foreseen ------------------------------------------------------------------------------------------------


def test_shapes_have_the_parameters_of_their_names(benchmark: ModuleType) -> None:
    sizes = {shape: round(benchmark.parameters_of(shape), 2) for shape in benchmark.MODELS}
    assert sizes == {"0.5B": 0.49, "1.5B": 1.54, "3B": 3.09, "7B": 7.62, "14B": 14.77, "32B": 32.76}


def test_a_forecast_counts_four_models(benchmark: ModuleType) -> None:
    full, offload, lora = (
        benchmark.foresee(benchmark.ladder("model", way, "1.5B")[benchmark.MODELS.index("7B")])
        for way in ("full", "offload", "lora")
    )
    actor, critic = 7.616e9, (7.616 - 0.545) * 1e9  # which has no head
    # Parameters of 2 bytes of four roles, two moments of 2 bytes of two, gradients of 2 bytes of one.
    held = 2 * (2 * actor + 2 * critic) + 4 * (actor + critic) + 2 * actor
    assert 0.999 * held < full.gpu_bytes < 1.01 * held
    assert full.host_bytes < 10 * GIB
    # Pinned are parameters and gradients; most of them are matrices of 130 MiB, which take 256.
    states = 4 * (actor + critic)
    assert states + 1.6 * (held - states) < offload.host_bytes - 8 * GIB < states + 2 * (held - states)
    assert offload.gpu_bytes == pytest.approx(2 * (2 * actor + 2 * critic), rel=0.01), "the roles before their set-up"
    # No reference; while it generates, a copy of the adapted matrices: all but embedding, head, norms and biases.
    frozen = 2 * (actor + 2 * critic) + 2 * (actor - 2 * 0.545e9)
    assert frozen < lora.gpu_bytes < 1.02 * frozen


def test_pinned_memory_comes_in_powers_of_two(benchmark: ModuleType) -> None:
    from largest_forecast import pinned

    assert [pinned(size) for size in (0, 1, 3, 4, 5, 2**20)] == [0, 1, 4, 4, 8, 2**20]


# ---- the search ------------------------------------------------------------------------------------------------------


def test_a_search_begins_where_it_is_foreseen_to_end(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def foreseen(tokens: int) -> Any:
        return benchmark.Forecast(gpu_bytes=tokens - 20, host_bytes=0, seconds=0)  # up to 97% of 100 bytes: 110

    up, result = search(benchmark, monkeypatch, foreseen, lambda tokens: "out of memory: " * (tokens > 120))
    assert up == [110, 120, 130]
    assert result.best("full", "context").case.value == 120
    assert result.limit("full", "context") == "memory"
    down, result = search(benchmark, monkeypatch, foreseen, lambda tokens: "out of memory: " * (tokens > 90))
    assert down == [110, 100, 90]
    assert result.best("full", "context").case.value == 90
    none, result = search(benchmark, monkeypatch, foreseen, lambda tokens: "out of memory")
    assert none == [110, 100, 90, 80, 70]
    assert (result.best("full", "context"), result.limit("full", "context")) == (None, "memory")
    every, result = search(benchmark, monkeypatch, foreseen, lambda tokens: "")
    assert every == [110, 120, 130, 140, 150]
    assert result.limit("full", "context") == "ladder"
    once, result = search(benchmark, monkeypatch, foreseen, lambda tokens: "RuntimeError: no kernel")
    assert (once, result.limit("full", "context")) == ([110], "error")


@pytest.mark.parametrize(("limit", "host", "seconds"), [("host", 91, 0), ("time", 0, 101)])
def test_what_the_host_or_time_forbids_is_not_tried(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, limit: str, host: int, seconds: int
) -> None:
    def foreseen(tokens: int) -> Any:
        beyond = tokens > 100
        return benchmark.Forecast(gpu_bytes=1, host_bytes=host * beyond, seconds=seconds * beyond)

    tried, result = search(benchmark, monkeypatch, foreseen, lambda tokens: "")
    assert (tried, result.limit("full", "context")) == ([100], limit)


def test_no_trial_begins_that_would_end_too_late(benchmark: ModuleType, tmp_path: Path) -> None:
    output = tmp_path / "largest.json"
    words = ["--output", str(output), "--shape", "tiny", "--accelerator", "cpu", "--quantities", "model"]
    benchmark.main([*words, "--seconds", "0"])
    result = benchmark.load(output)
    assert (result.trials, [search.limit for search in result.searches]) == ([], ["unfinished"] * 3)


def test_other_errors_than_memory_are_tried_again(benchmark: ModuleType, tmp_path: Path) -> None:
    output = tmp_path / "largest.json"
    options = benchmark._parser().parse_args(["--output", str(output), "--shape", "tiny", "--accelerator", "cpu"])
    cases = benchmark.ladder("batch", "full", "tiny")
    trials = [
        benchmark.Trial(cases[0], 0.1, problem="RuntimeError: no kernel"),
        benchmark.Trial(cases[1], 0.1, problem="out of memory", out_of_memory=True),
    ]
    empty = benchmark.begin(options, False)
    benchmark.save(output, replace(empty, trials=trials))
    assert benchmark.begin(options, False).trials == trials[1:]
    benchmark.save(output, replace(empty, trials=trials, memory_gib=1.0))  # another GPU: nothing to compare with
    assert benchmark.begin(options, False).trials == []


def test_on_a_gpu_its_memory_bounds_the_search(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Half of 140 GiB for this process; torch wants the number of the GPU for that."""

    def fraction(device: Any) -> float:
        assert (device.type, device.index) == ("cuda", 0)
        return 0.5

    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=140 * GIB))
    monkeypatch.setattr("torch.cuda.get_per_process_memory_fraction", fraction)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    options = benchmark._parser().parse_args(["--output", str(tmp_path / "largest.json"), "--shape", "1.5B"])
    result = benchmark.begin(options, True)
    assert (result.device, result.memory_gib, result.shape) == ("a GPU", 70.0, "1.5B")


# ---- the page --------------------------------------------------------------------------------------------------------


def test_the_page_shows_the_largest_and_why_no_larger(benchmark: ModuleType, tmp_path: Path) -> None:
    model = benchmark.Case("full", "model", "7B", 8, 128, 64)
    batch = benchmark.Case("lora", "batch", "1.5B", 100, 320, 64)
    trials = [
        benchmark.Trial(replace(model, shape="3B"), 51.7, 50.1, 1.0, 1536.0),
        benchmark.Trial(model, 123.6, 124.2, 2.0, 768.0),
        benchmark.Trial(batch, 80.0, 79.5, 10.0, 3840.0),
        benchmark.Trial(replace(batch, prompts=113), 90.0, problem="out of memory: CUDA | GPU", out_of_memory=True),
    ]
    searches = [benchmark.Search("full", "model", "memory"), benchmark.Search("lora", "batch", "unfinished")]
    path = tmp_path / "largest.json"
    result = make_result(benchmark, trials=trials, searches=[*searches, benchmark.Search("offload", "batch", "host")])
    benchmark.save(path, result)
    assert benchmark.load(path) == result
    page = benchmark.page(path)
    assert "| full | 7B (7.62) [124.2 GiB; the next does not fit on the GPU] |  |  |\n" in page
    assert "| offload |  | none [the next needs more host memory than there is] |  |\n" in page
    assert "| lora |  | at least 38,400 [79.5 GiB; the next was not tried] |  |\n" in page  # 100 x 384
    assert "TRL 1.12's PPO, which holds four full copies, is known not to fit in 140 GiB" in page
    assert "| full | model | 7B | 123.6 | 124.2 | 2.0 | 768 | fits |\n" in page
    assert "| lora | batch | 43,392 | 90.0 |  |  |  | out of memory |\n" in page
    assert "GPU with 139.8 GiB, 128 GiB of host memory, torch 2.11." in page


def test_the_page_is_that_of_the_results(benchmark: ModuleType) -> None:
    assert benchmark.RESULTS.with_suffix(".md").read_text() == benchmark.page(benchmark.RESULTS)
