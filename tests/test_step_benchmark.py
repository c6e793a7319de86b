"""benchmarks/step.py: its arithmetic, its page, how the sides are run, and our side on a CPU. TRL is not needed."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from benchmark_scripts import FOLDER, load_parts

from lightning_verl.tuning.profile import Kernel

GIB = 2**30


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_parts(monkeypatch, "step")


@pytest.fixture
def results(benchmark: ModuleType) -> ModuleType:
    return import_module("step_results")


@pytest.fixture
def common(benchmark: ModuleType) -> ModuleType:
    return import_module("step_common")


@pytest.fixture
def trl_side(benchmark: ModuleType) -> ModuleType:
    return import_module("step_trl")


def make_side(results: ModuleType, *seconds: float, update: float = 1.0, **changes: Any) -> Any:
    steps = [results.Step(value, {"update": update, "generation": value - update}, 1200, 3 * GIB) for value in seconds]
    return results.Side(16, steps, **{"update_flops": 98.9e12, "busy": 0.5, "device": "GPU", **changes})


# ---- results ---------------------------------------------------------------------------------------------------------


def test_figures_of_a_side_are_medians(results: ModuleType) -> None:
    steps = [
        results.Step(4.0, {"update": 1.0}, 1200, 5 * GIB),
        results.Step(2.0, {"update": 0.5}, 1200, 7 * GIB),
        results.Step(3.0, {"update": 0.4}, 1200, 6 * GIB),
    ]
    side = results.Side(16, steps, update_flops=98.9e12, device="GPU")
    assert side.seconds == 3.0
    assert side.phase("update") == 0.5
    assert side.phase("weights") == 0.0
    assert side.tokens_per_second == 1200 / 3
    assert side.peak_bytes == 7 * GIB
    # 98.9e12 FLOPs / 0.5 s / 989e12 FLOP/s
    assert side.mfu == pytest.approx(0.2)
    assert results.Side(16, steps, update_flops=98.9e12).mfu is None  # on a CPU


@pytest.mark.parametrize(
    ("engine", "seconds", "counts"),
    [
        ("generate", 10.5, True),  # 9.57 x 1.1 = 10.527
        ("generate", 10.6, False),
        ("generate", 8.7, True),  # 9.57 x 0.9 = 8.613
        ("generate", 8.6, False),
        ("vLLM", 8.1, True),  # 7.41 x 1.1 = 8.151
        ("vLLM", 8.2, False),
    ],
)
def test_a_run_counts_where_trl_is_as_fast_as_known(
    benchmark: ModuleType, results: ModuleType, engine: str, seconds: float, counts: bool
) -> None:
    side = make_side(results, seconds)
    case = results.Case("1.5B", results.Work("1.5B"), "bf16-true", trl={engine: side})
    assert results.Result([case]).counts()[engine] is counts
    other = results.Case("0.5B", results.Work("0.5B"), "bf16-true", trl={engine: side})
    assert other.counts(engine) is None
    assert results.Result([other]).counts() == {"generate": None, "vLLM": None}
    unmeasured = results.Case("1.5B", results.Work("1.5B"), "bf16-true", trl={engine: results.Side(16)})
    assert unmeasured.counts(engine) is None


def make_case(results: ModuleType) -> Any:
    ours = make_side(results, 2.0, update=0.4, busy=0.9)
    trl = {"generate": make_side(results, 9.0), "vLLM": results.Side(16, problem="not installed: vllm")}
    return results.Case("1.5B", results.Work("1.5B"), "bf16-true", "grpo", ours, trl, {"16": 9.1, "32": None})


def test_the_page_shows_ratios_goals_and_what_is_missing(results: ModuleType) -> None:
    text = results.page(results.Result([make_case(results)], "A note."))
    title = "1.5B, 32 x 8, 128 + 256 tokens, bf16-true"
    # 9 s / 2 s; the same peak; 0.25 / 0.1, and 98.9 / (0.4 x 989) = 0.25; 0.4 s / 1 s; 0.9 / 0.5
    assert (
        f"| {title} | `generate` | 4.50x (at least 3.0x) | 1.00x (at most 0.75x) | 2.50x, 0.25 (at least 0.5) | 0.40x "
        "| 1.80x |\n"
    ) in text
    # 2 s, of them 1.6 s of generation and 0.4 s of the update; 1200 tokens / 2 s; 3 x 2**30 bytes
    assert "|  | seconds a step | generation | update | tokens a second | peak | update MFU | GPU busy |\n" in text
    assert "| lightning_verl, 16 tokens | 2.00 | 1.60 | 0.40 | 600 | 3.2 GB | 0.25 | 90% |\n" in text
    assert "| TRL, `generate`, 16 rows | 9.00 | 8.00 |" in text
    assert "here it took 9.00 s, so the run counts (within 10%)" in text
    assert "TRL with vLLM is known to take 7.41 s a step at 1.5B; it was not measured in this run." in text
    assert "one step by rows of a micro-batch: 16: 9.10 s, 32: failed." in text
    assert f"- {title}, TRL, vLLM, 16 rows: not installed: vllm\n" in text
    assert "step.json`. A note.\n" in text
    no_gpu = replace(make_case(results), ours=make_side(results, 2.0, device="CPU", busy=None))
    assert "| 4.50x (at least 3.0x) | 1.00x (at most 0.75x) |  | 1.00x |  |\n" in results.page(results.Result([no_gpu]))
    slower = results.Case("1.5B", results.Work("1.5B"), "bf16-true", trl={"generate": make_side(results, 12.0)})
    assert "so the run does **not** count" in results.page(results.Result([slower]))


def test_ppo_stands_alone_on_the_page(results: ModuleType) -> None:
    case = results.Case("ppo", results.Work("1.5B"), "bf16-true", "ppo", make_side(results, 4.0))
    text = results.page(results.Result([case]))
    assert "## PPO, 1.5B, 32 x 8, 128 + 256 tokens, bf16-true\n" in text
    assert "PPO is measured for lightning_verl alone" in text
    assert "no folder with its 1.12 was named by `--trl-ppo`: its columns stay empty." in text
    assert "| PPO, 1.5B, 32 x 8, 128 + 256 tokens, bf16-true | " not in text
    assert "Not measured" not in text
    assert "PPO" not in results.page(results.Result([make_case(results)]))


def test_results_are_kept_as_they_are_and_say_whether_they_count(results: ModuleType, tmp_path: Path) -> None:
    result = results.Result([make_case(results)], "A note.")
    results.save(tmp_path / "new" / "step.json", result)
    assert results.load(tmp_path / "new" / "step.json") == result
    entry = json.loads((tmp_path / "new" / "step.json").read_text())
    assert entry["counts"] == {"generate": True, "vLLM": None}


def test_new_cases_take_the_place_of_old_ones(results: ModuleType) -> None:
    first, second = (results.Case(name, results.Work("tiny"), "bf16-true") for name in ("first", "second"))
    new = results.Case("first", results.Work("0.5B"), "bf16-true")
    third = results.Case("third", results.Work("tiny"), "bf16-true")
    assert results.Result([first, second]).with_cases([third, new]).cases == [new, second, third]


def test_the_page_is_that_of_the_kept_result(benchmark: ModuleType) -> None:
    assert benchmark.PAGE.exists() == benchmark.RESULTS.exists()
    if benchmark.RESULTS.exists():
        assert benchmark.PAGE.read_text() == benchmark.page(benchmark.load(benchmark.RESULTS))


def test_the_readme_says_what_was_measured(benchmark: ModuleType) -> None:
    case = next(case for case in benchmark.load(benchmark.RESULTS).cases if case.name == "1.5B")
    text = " ".join((FOLDER.parent / "README.md").read_text().split())
    ours, generate, vllm = (side.seconds for side in (case.ours, case.trl["generate"], case.trl["vLLM"]))
    assert f"takes {ours:.1f} s, in TRL {generate:.1f} s with `generate` and {vllm:.1f} s with vLLM;" in text


# ---- running the sides -----------------------------------------------------------------------------------------------


def installed(*names: str) -> Any:
    return lambda name: object() if name in names else None


def test_the_best_micro_batch_is_measured_in_full(
    benchmark: ModuleType, results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, path = [], tmp_path / "step.json"
    seconds = {("step_ours.py", 4096): 1.0, ("step_trl.py", 8): 3.0, ("step_trl.py", 16): 2.0}

    def run_side(script: str, case: Any, micro_batch: int, words: list[str]) -> Any:
        engine = words[words.index("--engine") + 1] if "--engine" in words else ""
        runs.append((script, micro_batch, engine, words[words.index("--steps") + 1], "--profile" in words))
        return make_side(results, seconds[script, micro_batch])

    monkeypatch.setattr(benchmark, "run_side", run_side)
    monkeypatch.setattr(benchmark, "find_spec", installed("trl", "vllm"))
    words = ["--only", "tiny", "--output", str(path), "--micro-batch-tokens", "4096", "--steps", "4"]
    benchmark.main([*words, "--micro-batches", "8", "16", "32"])
    assert runs == [
        ("step_ours.py", 4096, "", "4", True),
        ("step_trl.py", 8, "generate", "1", False),  # 32 does not divide the 16 rows
        ("step_trl.py", 16, "generate", "1", False),
        ("step_trl.py", 16, "generate", "4", True),
        ("step_trl.py", 16, "vLLM", "4", True),
    ]
    case = benchmark.load(path).cases[0]
    assert case.sweep == {"8": 3.0, "16": 2.0}
    assert [side.seconds for side in (case.ours, case.trl["generate"], case.trl["vLLM"])] == [1.0, 2.0, 2.0]
    runs.clear()
    benchmark.main([*words, "--micro-batches", "16"])
    assert [run[:3] for run in runs[1:]] == [("step_trl.py", 16, "generate"), ("step_trl.py", 16, "vLLM")]
    with pytest.raises(ValueError, match=r"tiny: none of --micro-batches \[32\] divides its 16 rows"):
        benchmark.main([*words, "--micro-batches", "32"])


def test_columns_of_missing_libraries_stay_empty(
    benchmark: ModuleType, results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "run_side", lambda *_: make_side(results, 1.0))
    monkeypatch.setattr(benchmark, "find_spec", installed())
    benchmark.main(["--only", "tiny", "--output", str(tmp_path / "step.json")])
    case = benchmark.load(tmp_path / "step.json").cases[0]
    assert case.ours.steps
    problems = {engine: (side.steps, side.problem) for engine, side in case.trl.items()}
    assert problems == {
        "generate": ([], "not installed: trl"),
        "vLLM": ([], "not installed: trl, vllm"),
    }


def test_a_failed_process_leaves_what_it_measured(
    benchmark: ModuleType, results: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **options: Any) -> Any:
        assert json.loads(command[command.index("--work") + 1])["shape"] == "tiny"
        if "--profile" in command:
            output = Path(command[command.index("--output") + 1])
            output.write_text(json.dumps(results.asdict(make_side(results, 2.0))))
        if "--late" in command:
            raise subprocess.TimeoutExpired(command, options["timeout"])
        return SimpleNamespace(returncode=-9)

    monkeypatch.setattr(benchmark.subprocess, "run", run)
    case = benchmark.CASES["tiny"]
    side = benchmark.run_side("step_trl.py", case, 16, ["--profile"])
    assert (side.seconds, side.problem) == (2.0, "its process ended with status -9")
    side = benchmark.run_side("step_trl.py", case, 16, ["--late"])
    assert (side.steps, side.problem) == ([], "its process took longer than 420 s")


def test_our_side_is_measured_on_a_cpu(benchmark: ModuleType, results: ModuleType, tmp_path: Path) -> None:
    path, work = tmp_path / "side.json", benchmark.CASES["tiny-drawn"].work
    words = ["--precision", "bf16-true", "--micro-batch", "4096", "--steps", "2", "--output", str(path)]
    import_module("step_ours").main(["--work", json.dumps(results.asdict(work)), *words])
    side = results.load_side(path)
    assert len(side.steps) == 2
    for step in side.steps:
        assert step.tokens == 16 * 12 + sum(work.lengths())  # 16 rows with a prompt of 12 tokens
        assert sum(step.phases.values()) == pytest.approx(step.seconds)
        assert min(step.phases[name] for name in ("generation", "reference", "reward", "update")) > 0
    # 2 layers of q (64 x 64), k, v (64 x 32), o (64 x 64) and three of 64 x 128; the head has 512 x 64
    matrices = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) + 512 * 64
    lengths = [12 + length for length in work.lengths()]
    attention = 2 * 64 * sum(length**2 for length in lengths)
    assert side.update_flops == 3 * (2 * matrices * sum(lengths) + 2 * attention)


def test_ppo_of_ours_is_measured_on_a_cpu(benchmark: ModuleType, results: ModuleType, tmp_path: Path) -> None:
    path, work = tmp_path / "side.json", json.dumps(results.asdict(benchmark.CASES["tiny-ppo"].work))
    words = ["--work", work, "--precision", "bf16-true", "--micro-batch", "4096", "--algorithm", "ppo"]
    import_module("step_ours").main([*words, "--steps", "1", "--output", str(path)])
    (step,) = results.load_side(path).steps
    assert min(step.phases[name] for name in ("generation", "scoring", "reward", "critic update", "update")) > 0
    assert step.phases["reference"] == 0


def test_what_throughput_measured_becomes_phases(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, ended = import_module("step_ours"), []
    monkeypatch.setattr(ours, "check_tokens", lambda *_: None)
    monkeypatch.setattr(ours.UpdateCost, "of", lambda model: SimpleNamespace(flops=lambda lengths: lengths.sum()))
    meter = SimpleNamespace(end_step=lambda *figures: ended.append(figures))
    recorder = ours.Recorder(SimpleNamespace(), meter, "grpo")
    recorder.on_rollout_end(SimpleNamespace(lengths=torch.tensor([3, 4])))
    seconds = {"time/rollout": 5.0, "time/reshard": 1.0, "time/reward": 2.0, "time/scoring": 3.0}
    tokens = {"rollout/prompt_tokens": 4.0, "rollout/response_tokens": 3.0}
    peaks = {"memory/rollout_gib": 2.0, "memory/actor_update_gib": 3.0}
    trainer = SimpleNamespace(dataflow=SimpleNamespace(modules={"actor": SimpleNamespace(model=None)}))
    recorder.on_step_end(trainer, {**seconds, "time/actor_update": 6.0, **tokens, **peaks})
    phases = {"generation": 4.0, "weights": 1.0, "reward": 2.0, "reference": 3.0, "critic update": 0.0, "update": 6.0}
    assert ended == [(7, phases, 7.0, [2 * GIB, 3 * GIB])]


# ---- clocks and lengths ----------------------------------------------------------------------------------------------


def test_the_last_step_is_profiled_on_a_gpu(
    common: ModuleType, results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, calls, path = [0.0], [], tmp_path / "side.json"
    monkeypatch.setattr(common.time, "perf_counter", lambda: clock[0])
    cuda = SimpleNamespace(is_available=lambda: True, synchronize=lambda: None, max_memory_allocated=lambda: 3 * GIB)
    cuda.reset_peak_memory_stats = lambda: calls.append("reset")
    monkeypatch.setattr(common.torch, "cuda", cuda)
    profiler = SimpleNamespace(start=lambda: calls.append("start"), stop=lambda: calls.append("stop"))
    monkeypatch.setattr(common.torch.profiler, "profile", lambda activities: profiler)
    seen = [Kernel("gemm", 0, 10**9)]
    monkeypatch.setattr(common, "kernels_of", lambda given: seen if given is profiler else [])
    meter = common.StepMeter(results.Side(16, device="GPU"), path, warmup=1, steps=2, profile=True)
    assert meter.total == 4
    meter.begin()
    for number, (seconds, peaks) in enumerate([(9.0, []), (3.0, [5 * GIB]), (2.0, []), (4.0, [])]):
        assert path.exists() == (number == 3)  # what stands is kept before the profiler runs
        clock[0] += seconds
        meter.end_step(100 + number, {"generation": 1.5}, 7.0, peaks)
    assert calls == ["reset", "reset", "reset", "start", "reset", "stop", "reset"]
    side = results.load_side(path)
    assert [(step.seconds, step.tokens, step.peak_bytes) for step in side.steps] == [
        (3.0, 101, 5 * GIB),
        (2.0, 102, 3 * GIB),
    ]
    assert [step.phases["other"] for step in side.steps] == [1.5, 0.5]
    assert (side.busy, side.update_flops) == (0.25, 7.0)  # a kernel of 1 s in a step of 4 s


def test_a_step_with_other_lengths_is_refused(common: ModuleType, results: ModuleType) -> None:
    work = results.Work("tiny", 2, 3, 5, 17)
    common.check_tokens(work, 2 * 3 * (5 + 17))
    with pytest.raises(RuntimeError, match="had 131 tokens of prompts and responses, it should have 132"):
        common.check_tokens(work, 131)


def test_an_end_token_is_forced_at_the_length(trl_side: ModuleType) -> None:
    forced = trl_side.ForcedLengths([1, 3], eos=2, prompt_tokens=4)
    ends = [forced(torch.zeros(2, 4 + produced), torch.zeros(2, 3))[:, 2].tolist() for produced in range(3)]
    never = -torch.inf
    assert ends == [[1e4, never], [1e4, never], [1e4, 1e4]]


def test_each_response_has_a_limit_of_its_own_with_vllm(trl_side: ModuleType, results: ModuleType) -> None:
    given, work = [], results.Work("tiny", 2, 2, 4, 32, drawn=True)

    def generate(prompts: list[int], sampling_params: Any, use_tqdm: bool) -> str:
        given.append((prompts, [parameters.max_tokens for parameters in sampling_params], use_tqdm))
        return "answers"

    llm = SimpleNamespace(generate=generate)
    trainer = SimpleNamespace(use_vllm=True, vllm_generation=SimpleNamespace(llm=llm))
    trl_side.draw_lengths(trainer, work)
    parameters = SimpleNamespace(max_tokens=32, clone=lambda: SimpleNamespace(max_tokens=32))
    assert llm.generate([1, 1, 2, 2], sampling_params=parameters, use_tqdm=False) == "answers"
    assert given == [([1, 1, 2, 2], work.lengths(), False)]


class StandIn:
    """A trainer with the methods of TRL's, whose parts take known seconds."""

    use_vllm = True
    ref_model = "reference"

    def __init__(self, wait: Any) -> None:
        self.wait = wait
        self.vllm_generation = SimpleNamespace(sync_weights=lambda: wait(2))

    def add_callback(self, callback: Any) -> None:
        self.callback = callback

    def _generate_single_turn(self, prompt_ids: list[list[int]]) -> Any:
        self.vllm_generation.sync_weights()
        self.wait(10)
        return [[7, 7], [7]], None

    def _get_per_token_logps_and_entropies(self, model: Any) -> None:
        self.wait({"policy": 3, "reference": 4}[model])

    def _calculate_rewards(self) -> None:
        self.wait(5)

    def _generate_and_score_completions(self) -> None:
        self.wait(1)
        self._generate_single_turn([[1], [1, 1]])
        with torch.no_grad():
            self._get_per_token_logps_and_entropies("policy")
            self._get_per_token_logps_and_entropies("reference")
        self._calculate_rewards()

    def training_step(self) -> None:
        self._generate_and_score_completions()
        self._get_per_token_logps_and_entropies("policy")
        self.wait(20)


def test_each_second_of_trl_is_in_one_phase(trl_side: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def wait(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(trl_side.Phases, "_now", staticmethod(lambda: clock[0]))
    trainer, ended = StandIn(wait), []
    meter = SimpleNamespace(end_step=lambda *figures: ended.append(figures))
    monkeypatch.setattr(trl_side, "check_tokens", lambda *_: None)
    monkeypatch.setattr(trl_side.UpdateCost, "of", lambda model: None)
    trl_side.watch(trainer, SimpleNamespace(), meter)
    trainer.training_step()
    trainer.callback.on_pre_optimizer_step()
    wait(6)
    trainer.callback.on_optimizer_step()
    trainer.callback.on_step_end(model=None)
    # the update: 20 s, 3 s of the policy with gradients, and 6 s of the optimizer
    phases = {"generation": 10, "weights": 2, "old log-probs": 3, "reference": 4, "reward": 5, "other": 1, "update": 29}
    # sequences of 1 + 2 and 2 + 1 tokens
    assert ended == [(6, phases, 0.0)]
