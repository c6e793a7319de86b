"""`lightning-verl tunings` and benchmarks/tunings.py: figures and pages by hand, and real arms on the CPU."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from benchmark_scripts import load_script

from lightning_verl.cli import main
from lightning_verl.tuning import arm_process, tunings
from lightning_verl.tuning.arms import TUNINGS, Arm, Tuning, Work, arms_of, key_of
from lightning_verl.tuning.profile import Profile
from lightning_verl.tuning.record import Record
from lightning_verl.tuning.record import load as load_record
from lightning_verl.tuning.tunings_results import Figures, Result, load, page, save

TINY = Work("tiny", 2, 2, 6, 8, "bf16-true", None)


def row(name: str) -> Tuning:
    return next(tuning for tuning in TUNINGS if tuning.name == name)


def make_record(seconds: float = 2.0, **changes: Any) -> Record:
    values: dict[str, Any] = {
        "device": "Some GPU",
        "ranks": 2,
        "seconds": [seconds] * 3,
        "tokens": [8000.0] * 3,
        "peaks": {"rollout": 20 * 10**9, "actor_update": 40 * 10**9},
        "metrics": {"time/reward_score": 0.1, "time/reward_wait": 0.042, "time/data_wait": 0.001, "actor/loss": 1.0},
        "received_bytes": 16_000_000,
        "micro_batch_tokens": 2560,
        "profile": Profile(0.63, 100, 0.087, 0.11),
        "scores": [1.0],
        **changes,
    }
    return Record(**values)


def test_figures_by_hand() -> None:
    figures = Figures.of(make_record(), reward_apart=False)
    # 8,000 tokens / 2 s / 2 GPUs; 16 MB / 8,000 tokens
    assert (figures.rate, figures.seconds, figures.received) == (2000.0, 1 / 2000, 2000.0)
    assert (figures.peak, figures.rollout_peak, figures.micro_batch) == (40.0, 20.0, 2560)
    assert (figures.mean_latency, figures.largest_latency, figures.busy) == (87.0, 110.0, 0.63)
    assert (figures.scoring, figures.data_wait) == (pytest.approx(142.0), 1.0)
    # Beside other work only the wait counts.
    assert Figures.of(make_record(), reward_apart=True).scoring == pytest.approx(42.0)
    on_cpu = Figures.of(make_record(profile=None, peaks={"process": 10**9}), reward_apart=False)
    assert (on_cpu.busy, on_cpu.mean_latency, on_cpu.rollout_peak, on_cpu.peak) == (None, None, None, 1.0)


def make_result(name: str, on: Record, ranks: int = 2) -> Result:
    result = Result(ranks, Work(), versions={"torch": "2.13.0"})
    off, with_it = arms_of(row(name), ranks, Work())
    return result.with_arm(key_of(off), make_record()).with_arm(key_of(with_it), on)


def test_the_page_has_both_sides_and_the_claims() -> None:
    on = make_record(
        1.0,
        peaks={"rollout": 20 * 10**9, "actor_update": 30 * 10**9},
        received_bytes=12_000_000,
        profile=Profile(0.9, 50, 0.02, 0.05),
    )
    text = page(make_result("layout", on), "command")
    assert "Written by `command --table-only`; do not edit." in text
    assert "2 x Some GPU, torch 2.13.0. PPO with actor" in text
    assert (
        "| mesh layout | 2,000 → 4,000 (2.00x) | 40.0 → 30.0 | 20.0 → 20.0 | 2,560 → 2,560 | 2.0 → 1.5 | "
        "87.00 → 20.00 | 110.0 → 50.0 | 142.0 → 142.0 | 63% → 90% | 1.00 → 1.00 | 78 to 61 GB, -40% traffic |\n"
    ) in text
    # 61 / 78 is -22%; 12 / 16 is -25%
    assert "| mesh layout | 78 to 61 GB | peak, GB: 40.0 → 30.0 (-25%) | yes |\n" in text
    assert "| mesh layout | -40% traffic | received, KB a token: 2.0 → 1.5 (-25%) | no |\n" in text
    assert "- LoRA: not in this run.\n" in text
    noted = replace(make_result("layout", on), notes={"layout": "Gathers are small."})
    assert "\nmesh layout: Gathers are small.\n" in page(noted, "command")


@pytest.mark.parametrize(
    ("name", "on", "line"),
    [
        ("checkpointing", make_record(2.2), "at +12% time | time a token, µs: 500 → 550 (+10%) | yes"),
        ("checkpointing", make_record(2.4), "at +12% time | time a token, µs: 500 → 600 (+20%) | no"),
        ("checkpointing-list", make_record(peaks={"update": 31 * 10**9}), "-9 GB | peak, GB: 40.0 → 31.0 | yes"),
        ("checkpointing-list", make_record(peaks={"update": 32 * 10**9}), "-9 GB | peak, GB: 40.0 → 32.0 | no"),
        ("reward", make_record(), "142 to 33 ms | rewards, ms: 142.0 → 42.0 (-70%) | no"),
        ("ratio", make_record(profile=Profile(0.93, 1, 0.1, 0.1)), "63 to 92% busy | busy: 63% → 93% | yes"),
        ("ratio", make_record(profile=Profile(0.80, 1, 0.1, 0.1)), "63 to 92% busy | busy: 63% → 80% | no"),
        ("ratio", make_record(profile=None), "63 to 92% busy | not on this device | "),
        ("groups", make_record(profile=Profile(0.6, 1, 0.02, 0.1)), "110 to 28 ms largest | largest: 110.0 → 100.0"),
        ("all", make_record(0.9), "1.2 to 2.5 tokens/s/GPU | tokens/s/GPU: 2,000 → 4,444 (+122%) | yes"),
        ("all", make_record(1.0), "1.2 to 2.5 tokens/s/GPU | tokens/s/GPU: 2,000 → 4,000 (+100%) | no"),
    ],
)
def test_claims_hold_or_not(name: str, on: Record, line: str) -> None:
    assert f"| {row(name).title} | {line}" in page(make_result(name, on), "command")


def test_what_was_not_measured_is_said() -> None:
    failed = make_record(seconds=1.0, problem="out of memory: 2 GiB")
    text = page(make_result("lora", failed), "command")
    assert "- LoRA: on: out of memory: 2 GiB.\n" in text
    assert "| LoRA |" not in text
    alone = page(make_result("ratio", make_record(), ranks=1), "command")
    assert "- mesh layout: it takes 2 GPUs.\n" in alone
    assert "- isolated groups: it takes 2 GPUs.\n" in alone
    assert "| batch ratio 4:1 for 1:1 | 2,000" in alone
    assert "at most 40 GiB of a GPU" in alone
    whole = replace(make_result("ratio", make_record()), work=Work(memory_gib=None, micro_batch_tokens=4096))
    assert "all of the GPU's memory" in page(whole, "command")
    assert "tokens of a micro-batch: 4,096." in page(whole, "command")


def test_results_are_kept_without_what_the_page_does_not_need(tmp_path: Path) -> None:
    result = replace(make_result("layout", make_record(1.0)), notes={"layout": "Note."})
    save(tmp_path / "deep" / "tunings.json", result)
    assert load(tmp_path / "deep" / "tunings.json") == result
    kept = result.arms[key_of(Arm(2))]
    assert kept.scores == []
    assert set(kept.metrics) == {"time/reward_score", "time/reward_wait", "time/data_wait"}


def test_the_kept_page_is_that_of_the_kept_result() -> None:
    kept = load_script("tunings").RESULTS
    assert kept.with_suffix(".md").read_text() == page(load(kept), "python benchmarks/tunings.py")


# ---- the command -----------------------------------------------------------------------------------------------------


def made_up(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Arm, Work]]:
    asked: list[tuple[Arm, Work]] = []

    def run(arm: Arm, work: Work, accelerator: str, steps: int, *more: Any) -> Record:
        asked.append((arm, work))
        return make_record(ranks=arm.ranks, seconds=float(steps))

    monkeypatch.setattr(tunings, "run_arm", run)
    return asked


def test_arms_that_rows_share_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, path = made_up(monkeypatch), tmp_path / "tunings.json"
    words = ["--output", str(path), "--ranks", "2", "--model", "1.5B", "--memory", "30", "--steps", "4"]
    assert main(["tunings", *words, "--only", "lora", "ratio"]) == 0
    assert [arm for arm, _ in asked] == [Arm(2), arms_of(row("lora"), 2, Work())[1], Arm(2, ratio=4)]
    assert all(work == Work(memory_gib=30.0) for _, work in asked)
    printed = capsys.readouterr()
    assert "| LoRA | 1,000 → 1,000 (1.00x)" in printed.out
    assert "ranks=2, ratio=4: 1,000 tokens/s/GPU, peak 37.3 GiB\n" in printed.err
    # Another row of the same work stays beside them, other work does not.
    assert main(["tunings", *words, "--only", "prefetch", "--note", "lora", "A note."]) == 0
    assert "| LoRA |" in capsys.readouterr().out
    assert load(path).notes == {"lora": "A note."}
    assert main(["tunings", *words, "--only", "prefetch", "--micro-batch-tokens", "2048"]) == 0
    assert "| LoRA |" not in capsys.readouterr().out
    asked.clear()
    assert main(["tunings", *words, "--ranks", "1"]) == 0
    assert len(asked) == 8  # three rows take two ranks; of the others each has one arm, and all share one


def test_the_benchmark_is_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    benchmark = load_script("tunings")
    assert benchmark.RESULTS.name == "tunings.json"
    assert benchmark.RESULTS.parent.name == "benchmarks"
    path = tmp_path / "tunings.json"
    save(path, make_result("lora", make_record()))
    words = ["--output", str(path), "--table-only", "--note", "lora", "A note."]
    benchmark.main(words, program="python benchmarks/tunings.py", output=benchmark.RESULTS)
    text = path.with_suffix(".md").read_text()
    assert "Written by `python benchmarks/tunings.py --table-only`" in text
    assert "LoRA: A note." in text
    assert capsys.readouterr().out == ""


def test_the_page_is_that_of_the_kept_result() -> None:
    results = load_script("tunings").RESULTS
    assert results.exists() == results.with_suffix(".md").exists()
    if results.exists():
        assert results.with_suffix(".md").read_text() == page(load(results), "python benchmarks/tunings.py")


def test_the_process_does_the_work(tmp_path: Path) -> None:
    found = run_in_process(Arm(prefetch=True, ratio=2, lora={"r": 4, "target_modules": "all-linear"}), tmp_path)
    # 2 mini-batches of 2 prompts x 2 samples, each of 6 + 8 tokens
    assert found.tokens == [2 * 4 * 14]
    assert found.metrics["cache/cache_bytes"] > 0
    assert found.metrics["cache/host_bytes"] == 0
    assert {"time/reward_score", "time/reward_wait", "time/data_wait"} <= set(found.metrics)


def run_in_process(arm: Arm, folder: Path) -> Record:
    work = replace(TINY, precision="32-true")
    given = {"arm": asdict(arm), "work": asdict(work), "accelerator": "cpu", "steps": 1, "warmup": 1}
    (folder / "given.json").write_text(json.dumps(given))
    arm_process.main([str(folder)])
    return load_record(folder / "record.json")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("ranks", "names"), [(1, ["all"]), (2, ["reward"])])
def test_arms_run_on_a_cpu(tmp_path: Path, ranks: int, names: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tunings.json"
    words = ["--output", str(path), "--ranks", str(ranks), "--model", "tiny", "--steps", "1", "--accelerator", "cpu"]
    assert main(["tunings", *words, "--only", *names]) == 0
    result = load(path)
    assert all(record.problem == "" and record.ranks == ranks for record in result.arms.values())
    assert all(result.figures(row(name)) is not None for name in names)
    text = capsys.readouterr().out
    assert all(f"| {row(name).title} | " in text for name in names)
