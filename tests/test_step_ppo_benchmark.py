"""TRL's PPO in benchmarks/step.py: its page, how it is run, and its side. TRL is not needed."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from benchmark_scripts import load_parts

GIB = 2**30


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_parts(monkeypatch, "step")


@pytest.fixture
def results(benchmark: ModuleType) -> ModuleType:
    return import_module("step_results")


@pytest.fixture
def ppo_side(benchmark: ModuleType) -> ModuleType:
    return import_module("step_trl_ppo")


# ---- the page --------------------------------------------------------------------------------------------------------


def test_ppo_of_trl_is_on_the_page(results: ModuleType, tmp_path: Path) -> None:
    step = {"seconds": 2.0, "tokens": 1200, "peak_bytes": 3 * GIB}
    own_phases, phases = {"update": 0.4, "critic update": 0.6}, {"update": 2.0}
    side = {"update_flops": 98.9e12, "device": "GPU", "busy": 0.5, "problem": ""}
    ours = {**side, "micro_batch": 4096, "steps": [{**step, "phases": own_phases}]}
    trl = {**side, "micro_batch": 16, "steps": [{**step, "seconds": 9.0, "phases": phases}], "rollout_rows": 256}
    failed = {**trl, "steps": [], "rollout_rows": 64, "problem": "OutOfMemoryError: CUDA out of memory."}
    small = {"name": "ppo-0.5B", "work": {"shape": "0.5B"}, "precision": "bf16-true", "algorithm": "ppo"}
    large = {**small, "name": "ppo", "work": {"shape": "1.5B"}}
    cases = [{**small, "ours": ours, "trl": {"generate": trl}}, {**large, "ours": ours, "trl": {"generate": failed}}]
    (tmp_path / "step.json").write_text(json.dumps({"cases": cases, "note": ""}))
    text = results.page(results.load(tmp_path / "step.json"))
    title = "32 x 8, 128 + 256 tokens, bf16-true"
    # 9 s / 2 s; 0.25, the actor's, against 98.9 / (2 x 989) = 0.05; the 1.0 s of both updates against 2 s
    assert (
        f"| PPO, 0.5B, {title} | `generate` | 4.50x (at least 4.0x) | 1.00x | 5.00x, 0.25 | 0.50x | 1.00x |\n" in text
    )
    assert "| TRL, `generate`, 16 rows, 256 at once | 9.00 |" in text
    assert f"| PPO, 1.5B, {title} | `generate`" not in text
    assert (
        f"- PPO, 1.5B, {title}, TRL, `generate`, 16 rows, 64 at once: OutOfMemoryError: CUDA out of memory.\n" in text
    )
    assert "TRL's is the PPOTrainer of 1.12" in text
    assert "for lightning_verl alone" not in text


def test_the_ppo_that_is_compared_has_its_goal_for_a_case_that_is_measured(
    benchmark: ModuleType, results: ModuleType
) -> None:
    assert results.TOKENS_GOALS["ppo-0.5B"] == {"generate": 4.0}
    assert set(results.TOKENS_GOALS) <= set(benchmark.DEFAULT_CASES) <= set(benchmark.CASES)
    small, large = benchmark.CASES["ppo-0.5B"], benchmark.CASES["ppo"]
    assert (small.work.shape, small.algorithm, small.precision) == ("0.5B", "ppo", "bf16-true")
    assert replace(small.work, shape="1.5B") == large.work


# ---- running it ------------------------------------------------------------------------------------------------------

FAKE_SIDE = """
import json, os, sys
option = lambda name: sys.argv[sys.argv.index(name) + 1]
rows = int(option("--rollout-rows")) if "--rollout-rows" in sys.argv else None
seconds = {"4": 3.0, "8": 2.0}.get(option("--micro-batch"), 1.0)
steps = [{"seconds": seconds, "phases": {"update": 0.5}, "tokens": 448}] * int(option("--steps"))
problem = "OutOfMemoryError: no room" if rows is not None and rows > int(os.environ["FITS"]) else ""
side = {"micro_batch": int(option("--micro-batch")), "steps": [] if problem else steps, "problem": problem}
side["versions"] = {"path": os.environ.get("PYTHONPATH", ""), "profile": str("--profile" in sys.argv)}
with open(option("--output"), "w") as file:
    json.dump({**side, "rollout_rows": rows}, file)
with open(os.environ["LOG"], "a") as file:
    print(os.path.basename(sys.argv[0]), option("--micro-batch"), rows, len(steps), file=file)
sys.exit(1 if problem else 0)
"""


@pytest.fixture
def fake_sides(benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Scripts in place of the sides, and the file they log to; up to FITS rows at once fit in TRL's PPO."""
    for name in ("step_ours.py", "step_trl_ppo.py"):
        (tmp_path / name).write_text(FAKE_SIDE)
    monkeypatch.setattr(benchmark, "FOLDER", tmp_path)
    monkeypatch.setenv("PYTHONPATH", "before")
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setenv("FITS", "16")
    return tmp_path / "log"


def test_ppo_of_trl_runs_from_its_folder(benchmark: ModuleType, tmp_path: Path, fake_sides: Path) -> None:
    path, folder = tmp_path / "step.json", tmp_path / "trl112"
    words = ["--only", "tiny-ppo", "--output", str(path), "--trl-ppo", str(folder), "--steps", "2"]
    benchmark.main([*words, "--ppo-micro-batches", "4", "8", "32"])  # 32 does not divide the 16 rows
    # 256 and 64 rows at once are one try, with the 16 that there are; a sweep of 1 step, and a measurement of 2
    assert fake_sides.read_text().split("\n")[:-1] == [
        "step_ours.py 16384 None 2",
        "step_trl_ppo.py 4 16 1",
        "step_trl_ppo.py 8 16 1",
        "step_trl_ppo.py 8 16 2",
    ]
    case = benchmark.load(path).cases[0]
    assert (case.sweep, case.trl["generate"].seconds, case.trl["generate"].rollout_rows) == (
        {"4": 3.0, "8": 2.0},
        2,
        16,
    )
    assert case.trl["generate"].versions == {"path": f"{folder}:before", "profile": "True"}
    assert case.ours.versions["path"] == "before"
    with pytest.raises(ValueError, match=r"tiny-ppo: none of --ppo-micro-batches \[32\] divides its 16 rows"):
        benchmark.main([*words, "--ppo-micro-batches", "32"])


def test_ppo_of_trl_takes_the_most_rows_at_once_that_fit(
    benchmark: ModuleType, tmp_path: Path, fake_sides: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "step.json"
    words = ["--only", "tiny-ppo", "--output", str(path), "--trl-ppo", str(tmp_path), "--ppo-rollout-rows"]
    monkeypatch.setenv("FITS", "4")
    benchmark.main([*words, "8", "4", "2"])
    assert [line.split()[2] for line in fake_sides.read_text().splitlines()] == ["None", "8", "4"]
    side = benchmark.load(path).cases[0].trl["generate"]
    assert (side.micro_batch, side.rollout_rows, side.problem, len(side.steps)) == (16, 4, "", 3)
    monkeypatch.setenv("FITS", "0")
    benchmark.main([*words, "8", "4"])
    side = benchmark.load(path).cases[0].trl["generate"]
    # its own words, not that its process ended with status 1
    assert (side.rollout_rows, side.problem, side.steps) == (4, "OutOfMemoryError: no room", [])


def test_without_its_folder_ppo_of_trl_stays_empty(benchmark: ModuleType, tmp_path: Path, fake_sides: Path) -> None:
    path = tmp_path / "step.json"
    benchmark.main(["--only", "tiny-ppo", "--output", str(path)])
    assert fake_sides.read_text() == "step_ours.py 16384 None 3\n"
    case = benchmark.load(path).cases[0]
    assert len(case.ours.steps) == 3
    problem = "no folder with TRL 1.12 was named by `--trl-ppo`"
    assert (case.trl["generate"].steps, case.trl["generate"].problem) == ([], problem)
    text = benchmark.page(benchmark.load(path))
    assert f"TRL, `generate`, 16 rows: {problem}\n" in text
    assert "PPO is measured for lightning_verl alone" in text


# ---- its side --------------------------------------------------------------------------------------------------------


def test_each_second_of_ppo_of_trl_is_in_one_phase(
    benchmark: ModuleType, ppo_side: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, ended = [0.0], []

    def takes(seconds: Any, answer: Any = None) -> Any:
        def called(model: Any = None) -> Any:
            clock[0] += seconds[model] if isinstance(seconds, dict) else seconds
            return answer

        return called

    monkeypatch.setattr(ppo_side.Phases, "_now", staticmethod(lambda: clock[0]))
    monkeypatch.setattr(
        ppo_side.UpdateCost, "of", lambda model: SimpleNamespace(flops=lambda tokens: model * tokens.sum())
    )
    rows = torch.tensor([[3, 4, 5, 9], [3, 4, 9, 9]])  # 9 is padding
    functions = SimpleNamespace(
        batch_generation=takes(10, (rows, None)),
        forward=takes({"reference": 4, "both": 20}),
        get_reward=takes({"critic": 5, "reward model": 6}),
        selective_log_softmax=takes(1),
    )
    meter = SimpleNamespace(end_step=lambda *figures: ended.append(figures))
    recorder = ppo_side.Recorder(benchmark.Work("tiny", 1, 2, 1, 2), meter, "critic", pad=9)
    recorder.watch(functions)
    monkeypatch.setattr(ppo_side, "check_tokens", lambda work, tokens: None)
    for _ in range(2):
        with torch.no_grad():
            functions.batch_generation()
            functions.selective_log_softmax()
            functions.forward("reference")
            functions.selective_log_softmax()
            functions.get_reward("critic")
            functions.get_reward("reward model")
        takes(7)()  # advantages
        functions.forward("both")
        functions.selective_log_softmax()
        takes(30)()  # backward pass and optimizer
        recorder.on_step_end(model=SimpleNamespace(policy=2, value_model=3))
    # scoring: old log-probs 1 s, the reference 4 s and 1 s, values 5 s; the 7 s are nobody's; (2 + 3) x 5 tokens
    phases = {"generation": 10, "scoring": 11, "reward": 6, "update": 51}
    assert ended == [(5, phases, 25.0)] * 2


def test_trl_is_given_a_padding_token_that_cannot_be_sampled(benchmark: ModuleType, ppo_side: ModuleType) -> None:
    tokenizer = ppo_side.tokenizer_for(benchmark.CASES["tiny-ppo"].work)
    assert tokenizer.pad_token_id == 512  # tokens of the tiny shape are 0 to 511
    assert tokenizer("w2 w511")["input_ids"] == [2, 511]


def test_the_four_models_of_ppo_have_one_shape(benchmark: ModuleType, ppo_side: ModuleType) -> None:
    models = ppo_side.make_models(benchmark.CASES["tiny-ppo"].work, torch.bfloat16)
    assert list(models) == ["model", "ref_model", "value_model", "reward_model"]
    states = {name: model.state_dict() for name, model in models.items()}
    assert {weight.dtype for state in states.values() for weight in state.values()} == {torch.bfloat16}
    assert all(torch.equal(weight, states["ref_model"][name]) for name, weight in states["model"].items())
    for name in ("value_model", "reward_model"):
        assert models[name].score.weight.shape == (1, 64)
        shapes = {key: weight.shape for key, weight in states[name].items() if key.startswith("model.")}
        assert shapes == {key: weight.shape for key, weight in states["model"].items() if key.startswith("model.")}


def test_an_error_of_ppo_of_trl_is_kept_with_its_first_line(
    ppo_side: ModuleType, results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "side.json"

    def measure(options: Any, meter: Any) -> None:
        meter.side = replace(meter.side, rollout_rows=options.rollout_rows)
        raise torch.OutOfMemoryError("no room for 37 GiB\nat a line")

    monkeypatch.setattr(ppo_side, "measure", measure)
    words = ["--work", "{}", "--precision", "bf16-true", "--micro-batch", "16", "--rollout-rows", "64"]
    with pytest.raises(torch.OutOfMemoryError):
        ppo_side.main([*words, "--output", str(path)])
    side = results.load_side(path)
    assert (side.problem, side.rollout_rows, side.steps) == ("OutOfMemoryError: no room for 37 GiB", 64, [])
