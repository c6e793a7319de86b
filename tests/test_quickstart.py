"""The quick start: its task, its evaluation, its picture, and the run itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor

from lightning_verl import Actor, HybridDataFlow, HybridStrategy, SamplingParams
from lightning_verl.cli import main
from lightning_verl.data.experience import PromptBatch
from lightning_verl.quickstart.curves import draw_curves, read_logs
from lightning_verl.quickstart.evaluation import greedy_accuracy
from lightning_verl.quickstart.main import Quickstart, RunFolderError, run_quickstart
from lightning_verl.quickstart.progress import ProgressLines
from lightning_verl.quickstart.task import Split, exact, make_split, task_tokenizer
from lightning_verl.rollout.base import FinishReason, Rollouts
from lightning_verl.testing import run_ranks, tiny_model

ROOT = Path(__file__).parents[1]
LAST_LINE = re.compile(r"greedy accuracy: [01]\.\d\d -> [01]\.\d\d")
TINY = Quickstart(
    output=Path("unused"),
    sft_steps=2,
    rl_steps=2,
    sft_batch_size=4,
    rl_batch_size=4,
    samples_per_prompt=2,
    training_rows=64,
    held_out_rows=6,
)

# ---- task ------------------------------------------------------------------------------------------------------------


def test_rows_are_different_digits_and_the_same_in_order() -> None:
    split = make_split(seed=3, training=200, held_out=50)
    assert len(split.training) == 200
    assert len({row["prompt"] for row in split.held_out}) == 50
    for row in [*split.training, *split.held_out]:
        assert re.fullmatch(r"\d{3,6}>", row["prompt"])
        assert len(set(row["prompt"])) == len(row["prompt"])
        assert row["answer"] == "".join(sorted(row["prompt"][:-1]))
    assert {len(row["answer"]) for row in split.training} == {3, 4, 5, 6}


def test_equal_seeds_give_equal_rows_and_others_do_not() -> None:
    assert make_split(0, 20, 10) == make_split(0, 20, 10)
    assert make_split(0, 20, 10) != make_split(1, 20, 10)


def test_training_never_sees_a_held_out_prompt() -> None:
    split = make_split(seed=0, training=20_000, held_out=512)  # 128 of the 720 prompts with three digits are held out
    assert not {row["prompt"] for row in split.training} & {row["prompt"] for row in split.held_out}
    with pytest.raises(ValueError, match="Split: 1 prompts, such as '312>', are both in training and held out"):
        Split([{"prompt": "312>", "answer": "123"}], [{"prompt": "312>", "answer": "123"}])


def test_reward_is_exact() -> None:
    assert exact("1234", "1234") == 1.0
    assert exact("1234", "12345") == exact("", "1") == 0.0


# ---- evaluation ------------------------------------------------------------------------------------------------------


class _ScriptedEngine:
    """Answers "1" to prompts that begin with a digit below 5, and "2" to the others."""

    weight_version = 0

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self.asked: list[SamplingParams | None] = []

    def generate(self, prompts: PromptBatch, sampling: SamplingParams | None = None, *, step: int = 0) -> Rollouts:
        self.asked.append(sampling)
        tokenizer = self.actor.require_tokenizer()
        answers = ["1" if int(text[0]) < 5 else "2" for text in prompts.texts]
        ids = [[*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for text in answers]
        rows = len(ids)
        lengths = torch.full((rows,), 2)
        reasons = [FinishReason.EOS] * rows
        return Rollouts(torch.tensor(ids), lengths, torch.zeros(rows, 2), reasons, torch.arange(rows), 0)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.weight_version = version

    def release(self) -> None: ...


def scripted_accuracy() -> tuple[float, bool]:
    """Evaluate on 5 rows, of which the engine gets 3 right: "1" to 1 and 4, "2" to 7, but "1" to 2 and "2" to 9."""
    fabric = Fabric(accelerator="cpu", strategy=HybridStrategy())
    fabric.launch()
    tokenizer = task_tokenizer()
    actor = Actor(tiny_model("qwen3", vocab_size=len(tokenizer), num_hidden_layers=1), tokenizer=tokenizer)
    engine = _ScriptedEngine(actor)
    dataflow = HybridDataFlow(actor=actor)
    dataflow.setup(fabric)
    actor._engine = engine  # type: ignore[assignment]
    answers = {"1>": "1", "4>": "1", "7>": "2", "2>": "2", "9>": "1"}
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in answers.items()]
    accuracy = greedy_accuracy(dataflow, rows, max_new_tokens=3)
    return accuracy, engine.asked == [SamplingParams(max_new_tokens=3, temperature=0.0)]


def test_accuracy_is_the_share_of_right_greedy_answers() -> None:
    assert scripted_accuracy() == (3 / 5, True)


def test_accuracy_is_the_same_on_every_rank() -> None:
    assert run_ranks(scripted_accuracy, 2) == [(3 / 5, True)] * 2  # ranks hold 2 and 3 of the rows


# ---- curves ----------------------------------------------------------------------------------------------------------


def write_logs(folder: Path, version: int, text: str) -> None:
    (folder / f"version_{version}").mkdir(parents=True)
    (folder / f"version_{version}" / "metrics.csv").write_text(text)


def test_later_starts_of_a_run_win_in_its_logs(tmp_path: Path) -> None:
    write_logs(tmp_path, 2, "actor/loss,reward/mean,step\n2.5,,1\n,0.5,2\n")
    write_logs(tmp_path, 10, "reward/mean,step\n0.75,2\n")
    assert read_logs(tmp_path) == {1: {"actor/loss": 2.5}, 2: {"reward/mean": 0.75}}


def test_picture_is_a_png(tmp_path: Path) -> None:
    write_logs(tmp_path, 0, "actor/loss,reward/mean,evaluation/greedy_accuracy,step\n2.5,,,0\n0.1,0.5,0.25,1\n")
    draw_curves(tmp_path, tmp_path / "curves.png", "title")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


# ---- the run ---------------------------------------------------------------------------------------------------------


def weights_of(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model" / "model.safetensors")


def assert_equal_runs(first: Path, second: Path) -> None:
    """Equal weights and, but for times, equal logs, bit for bit."""
    expected, found = weights_of(first), weights_of(second)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    expected_logs, found_logs = (
        [{k: v for k, v in row.items() if not k.startswith(("time/", "throughput/"))} for row in logs.values()]
        for logs in (read_logs(first / "logs"), read_logs(second / "logs"))
    )
    assert expected_logs == found_logs


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    output = tmp_path_factory.mktemp("quickstart") / "whole"
    run_quickstart(replace(TINY, output=output))
    return output


def test_run_leaves_logs_checkpoint_model_and_picture(whole_run: Path) -> None:
    logs = read_logs(whole_run / "logs")
    assert list(logs) == [0, 1, 2, 3, 4]  # two of SFT, two of RL, and the evaluation at the end
    assert ["reward/mean" in row for row in logs.values()] == [False, False, True, True, False]
    assert [step for step, row in logs.items() if "evaluation/greedy_accuracy" in row] == [2, 4]
    assert (whole_run / "checkpoints" / "step-000004").is_dir()
    assert (whole_run / "curves.png").read_bytes().startswith(b"\x89PNG")
    actor = Actor(whole_run / "model")
    assert sum(parameter.numel() for parameter in actor.parameters()) == 278_496
    assert actor.require_tokenizer().decode([4, 5]) == "01"


class _Interruption(Exception):
    pass


def interrupt_at(monkeypatch: pytest.MonkeyPatch, global_step: int) -> None:
    """Let a run break before a step."""

    def on_step_start(self: ProgressLines, step: int) -> None:
        if step == global_step:
            raise _Interruption

    monkeypatch.setattr(ProgressLines, "on_step_start", on_step_start, raising=False)


@pytest.mark.parametrize("step", [1, 2, 3], ids=["in SFT", "between", "in RL"])
def test_resumed_run_equals_the_uninterrupted_one(
    whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    config = replace(TINY, output=tmp_path / "run")
    with monkeypatch.context() as patch:
        interrupt_at(patch, step)
        with pytest.raises(_Interruption):
            run_quickstart(config)
    assert (config.checkpoints / f"step-{step:06d}").is_dir()
    run_quickstart(config, resume=True)
    assert_equal_runs(whole_run, config.output)


def test_finished_run_can_be_asked_again(whole_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = replace(TINY, output=whole_run)
    first = run_quickstart(config, resume=True)
    assert run_quickstart(config, resume=True) == first
    assert LAST_LINE.fullmatch(capsys.readouterr().out.splitlines()[-1])


def test_folder_in_another_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"checkpoints holds no checkpoint to resume from; leave --resume out"):
        run_quickstart(replace(TINY, output=tmp_path), resume=True)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(RunFolderError, match=r"is not empty; go on with its run with --resume, or choose another"):
        run_quickstart(replace(TINY, output=tmp_path))


def test_ppo_trains_a_critic_too(tmp_path: Path) -> None:
    run_quickstart(replace(TINY, output=tmp_path / "run", algorithm="ppo", rl_steps=1))
    logs = read_logs(tmp_path / "run" / "logs")
    assert "critic/loss" in logs[2]
    assert "critic/loss" not in logs[1]


def test_command_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["quickstart", "--algorithm", "ppo", "--resume"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("lightning-verl quickstart: runs/quickstart-ppo/checkpoints holds no checkpoint")


def run_command(*words: str, launcher: tuple[str, ...] = (sys.executable,), timeout: float) -> str:
    """Run the quick start in processes of its own, one thread each, and return what it printed."""
    command = [*launcher, "-m", "lightning_verl", "quickstart", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_several_ranks_run_it(tmp_path: Path, algorithm: str) -> None:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    words = ("--algorithm", algorithm, "--sft-steps", "2", "--rl-steps", "2", "--output", str(tmp_path / "run"))
    lines = run_command(*words, launcher=launcher, timeout=230).splitlines()
    assert LAST_LINE.fullmatch(lines[-1])
    assert sum("greedy accuracy: " in line for line in lines) == 1  # rank 0 alone speaks
    assert list(read_logs(tmp_path / "run" / "logs")) == [0, 1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_model_learns_from_rewards(tmp_path: Path) -> None:
    """The whole quick start; `benchmarks/quickstart.py` runs it for both algorithms and more seeds."""
    line = run_command("--output", str(tmp_path / "run"), timeout=890).splitlines()[-1]
    assert LAST_LINE.fullmatch(line)
    before, after = map(float, re.findall(r"[01]\.\d\d", line))
    assert before <= 0.75
    assert after >= 0.97


def test_an_engine_without_its_library_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # type: ignore[arg-type]  # how Python marks a missing module
    assert main(["quickstart", "--engine", "vllm", "--output", str(tmp_path / "run")]) == 2
    assert re.search(
        r"quickstart: lightning_verl needs vllm>=0\.22, but vllm is not installed", capsys.readouterr().err
    )
    assert not (tmp_path / "run").exists()
