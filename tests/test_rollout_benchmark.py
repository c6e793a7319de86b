"""benchmarks/rollout.py: it measures on the CPU too, and its page says what the result holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from benchmark_scripts import FOLDER, load_parts


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_parts(monkeypatch, "rollout")


def test_everything_is_measured_and_kept(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rollout.json"
    parts = ["tiny", "tiny drawn", "log-probs", "offload"]
    benchmark.main(["--only", *parts, "--main-shape", "tiny", "--repeats", "1", "--output", str(path)])
    result = benchmark.load(path)
    fixed, drawn = result.cases
    assert list(fixed.native) == ["default", "layers not compiled", "no graphs", "fp8 cache"]
    assert list(drawn.native) == ["default"]
    # 4 prompts x 4 samples x 16 tokens, and lengths of 16 to 32
    speed = fixed.native["default"]
    assert speed.tokens_per_second * speed.seconds == pytest.approx(256)
    speed = drawn.native["default"]
    assert 16 * 16 < speed.tokens_per_second * speed.seconds < 16 * 32
    assert fixed.vllm == {}
    assert fixed.floor_seconds is None
    assert result.gaps[0].largest < 1e-5
    assert result.divergence.differing == 0
    # 40% of the cache: samples step back, what they say stays the same
    assert result.offload.bytes_offloaded < 0.45 * result.offload.bytes_whole
    assert result.offload.preemptions > 0
    assert result.offload.swapped_bytes > 0
    assert result.offload.same_tokens == 1
    assert benchmark.page(result) in capsys.readouterr().out
    results = benchmark.import_module("rollout_results")
    results.save(path, replace(result, note="About these figures."))
    benchmark.main(["--only", "tiny drawn", "offload", "--repeats", "1", "--output", str(path)])
    again = benchmark.load(path)
    assert again.note == ""
    assert again.cases[0] == result.cases[0]
    assert again.cases[1].work == result.cases[1].work
    assert again.cases[1] != result.cases[1], "other seconds"
    assert again.gaps == result.gaps
    assert again.offload.swapped_bytes == result.offload.swapped_bytes


def test_the_page_shows_multiples_and_shares(benchmark: ModuleType) -> None:
    results = benchmark.import_module("rollout_results")
    work = results.Work("1.5B")
    speeds = {"with log-probs": results.Speed(2.0, 30_000.0, 60.0, 0.1, 10**9)}
    case = results.Case(work, {"default": results.Speed(1.0, 60_000.0, 9.0, 0.05, 0)}, None, speeds, 0.3)
    offload = results.Offload(work, 40 * 10**9, 30 * 10**9, 1000.0, 900.0, 2 * 10**9, 5, 0.999)
    text = benchmark.page(
        results.Result("Some GPU", 4e12, [case], [results.Gap("bfloat16", 0.12, 0.023)], None, offload, {"torch": "2"})
    )
    # 60,000 / 30,000, and 0.3 s of 1 s
    assert "| 1.5B, 32 x 8, 128 + 256 tokens | 60,000 tokens/s |  | 30,000 (2.00x) |  | 30% |\n" in text
    assert "| vLLM with log-probs: 1.5B, 32 x 8, 128 + 256 tokens | 30,000 | 60.00 s | 0.10 s | 1.00 GB |" in text
    assert "bfloat16, 8 responses: largest difference 0.12, mean 0.023." in text
    # 1 - 30 / 40 and 1 - 900 / 1000
    assert "(25% less) at 10% fewer tokens a second; 5 samples stepped back" in text
    assert "99.9% of the tokens are the same. With the smaller cache fewer rows run together" in text


@pytest.mark.parametrize(("without", "verdict"), [(40_500.0, "counts"), (40_400.0, "does **not** count")])
def test_a_run_counts_where_vllm_is_as_fast_as_known(benchmark: ModuleType, without: float, verdict: str) -> None:
    results = benchmark.import_module("rollout_results")
    speeds = {"with log-probs": results.Speed(2.0, 29_000.0), "without": results.Speed(2.0, without)}
    case = results.Case(results.Work("1.5B"), {"default": results.Speed(1.0, 60_000.0)}, None, speeds, None)
    text = benchmark.page(results.Result("Some GPU", 4e12, [case]))
    # 40,500 / 45,000 = 0.9; 40,400 / 45,000 = 0.898
    assert f"it made 100% of 29,000 with log-probs and 90% of 45,000 without here, so the run {verdict} (at" in text


def test_the_page_says_why_figures_are_not_what_one_expects(benchmark: ModuleType) -> None:
    results = benchmark.import_module("rollout_results")

    def case(drawn: bool, tokens: int, *seconds: float) -> object:
        work = results.Work("1.5B", 2, 2, 8, tokens, drawn)
        own, logprobs, without = (results.Speed(spent, sum(work.lengths()) / spent) for spent in seconds)
        native = {"default": own, **({} if drawn else {"no graphs": own})}
        return results.Case(work, native, None, {"with log-probs": logprobs, "without": without}, None)

    drawn = results.Work("1.5B", 2, 2, 8, 64, True).lengths()
    longest = max(drawn)
    cases = [case(False, 16, 0.16, 0.32, 0.24), case(True, 64, longest * 9e-3, longest * 12e-3, longest * 0.01)]
    offload = results.Offload(results.Work("1.5B"), 40, 30, 10.0, 9.0, 2, 5, 1.0)
    gaps = [results.Gap("float32", 2.4e-5, 1e-6)]
    text = benchmark.page(results.Result("Some GPU", 4e12, cases, gaps, None, offload, {"torch": "2"}))
    rows = f"{sum(drawn) / longest:.0f} rows a step on average, of 4 at the start"
    assert f"{sum(drawn)} tokens in the {longest} steps of the longest response are {rows}" in text
    # 0.16, 0.32 and 0.24 s by 16 tokens
    steps = "10.00 and 9.00 ms in the native engine, 20.00 and 12.00 ms in vLLM with log-probs, 15.00 and 10.00 ms in"
    assert f"takes {steps} vLLM without." in text
    # ln 151,936 = 11.93 lies between 8 and 16, where fp32 has steps of 8 / 2^23; 2.4e-5 / 11.93
    assert "-ln(151,936) = -11.9: fp32 numbers of that size are 9.5e-07 apart, and 2.4e-05 is 2e-06 of it" in text
    assert "100.0% of the tokens are the same.\n" in text
    small = [results.Gap("float32", 1e-5, 1e-6)]
    text = benchmark.page(results.Result("Some GPU", 4e12, cases[:1], small, None, None, {"torch": "2"}))
    assert "-ln(" not in text, "the tests hold that"
    assert "With drawn lengths" not in text


def test_the_page_is_that_of_the_kept_result(benchmark: ModuleType) -> None:
    assert benchmark.PAGE.read_text() == benchmark.page(benchmark.load(benchmark.RESULTS))


def test_the_readme_says_what_was_measured(benchmark: ModuleType) -> None:
    case = next(case for case in benchmark.load(benchmark.RESULTS).cases if case.work.name.startswith("1.5B"))
    own, other = (round(speed.tokens_per_second, -2) for speed in (case.native["default"], case.vllm["with log-probs"]))
    text = (FOLDER.parent / "README.md").read_text().replace("\n", " ")
    assert f"make {own:,.0f} tokens a second, vLLM with log-probs {other:,.0f}." in text
