"""Every example runs: here with one process and few steps, and as `slow` tests under several ranks."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_verl.cli import main
from lightning_verl.config import read_config
from lightning_verl.quickstart.curves import read_logs
from lightning_verl.quickstart.task import task_tokenizer
from lightning_verl.testing import tiny_model

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def test_every_example_has_a_page_and_something_to_run() -> None:
    folders = [folder for folder in EXAMPLES.iterdir() if folder.is_dir()]
    assert {folder.name for folder in folders} == {"train_script", "own_loop", "grpo_yaml", "plan", "smollm2"}
    for folder in folders:
        assert (folder / "README.md").is_file()
        assert [*folder.glob("*.py"), *folder.glob("*.yaml")]


def run_script(monkeypatch: pytest.MonkeyPatch, script: str, *words: str) -> None:
    """Run a script in this process, as `python script words...` would."""
    monkeypatch.setattr(sys, "argv", [script, *words])
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")


def run_under_ranks(ranks: int, script: str, *words: str) -> str:
    """Run a script under torchrun and return what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command += [str(EXAMPLES / script), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=230, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_train_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_script(monkeypatch, "train_script/train.py", "--folder", str(tmp_path), "--max-steps", "2")
    assert re.fullmatch(r"reward in step 2: 0\.\d{3}", capsys.readouterr().out.splitlines()[-1])
    logs = read_logs(tmp_path / "logs")
    assert list(logs) == [0, 1]
    assert {"actor/loss", "critic/loss", "rollout/kl", "reward/ema_mean"} <= set(logs[1])


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("ranks", [4])
def test_train_script_under_ranks(tmp_path: Path, ranks: int) -> None:
    output = run_under_ranks(ranks, "train_script/train.py", "--folder", str(tmp_path), "--max-steps", "2")
    assert len(re.findall(r"^reward in step 2: 0\.\d{3}$", output, re.MULTILINE)) == 1
    assert list(read_logs(tmp_path / "logs")) == [0, 1]


def test_own_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_script(monkeypatch, "own_loop/loop.py", "--folder", str(tmp_path), "--max-steps", "2")
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[-3:-1]] == ["step 0", "step 1"]
    assert lines[-1] == "saved and loaded the state after step 2"
    assert list(read_logs(tmp_path / "logs")) == [0, 1]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_own_loop_under_ranks(tmp_path: Path) -> None:
    output = run_under_ranks(2, "own_loop/loop.py", "--folder", str(tmp_path), "--max-steps", "2")
    assert output.count("saved and loaded the state after step 2") == 1


def make_quickstart_model(folder: Path) -> None:
    """A model as the quick start leaves it, but untrained and with one layer."""
    tokenizer = task_tokenizer()
    model = tiny_model("qwen3", vocab_size=len(tokenizer), num_hidden_layers=1, max_position_embeddings=64)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(str(folder))


def test_grpo_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delitem(sys.modules, "rewards", raising=False)
    make_quickstart_model(tmp_path / "model")
    options = {
        "--model.actor": str(tmp_path / "model"),
        "--output": str(tmp_path / "out"),
        "--steps": "2",
        "--batch.rollout_batch_size": "4",
        "--batch.update_batch_size": "1",
    }
    words = [word for pair in options.items() for word in pair]
    assert main(["train", "examples/grpo_yaml/train.yaml", *words]) == 0
    assert "GRPO step 2/2: reward/mean" in capsys.readouterr().out
    logs = read_logs(tmp_path / "out" / "logs")
    assert {"reward/right", "reward/right_digits", "actor/kl"} <= set(logs[1])


def test_grpo_yaml_as_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = read_config(["examples/grpo_yaml/train.yaml"])
    assert Path(config.data.source).is_file()
    assert config.strategy.mesh_shape is None
    assert config.rewards.weights == [1.0, 0.5]
