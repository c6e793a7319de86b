"""Trials in processes of their own: what they measure, and how they fail."""

from __future__ import annotations

import sys
import textwrap
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from tuning_configs import make_run

from lightning_verl.testing import run_ranks
from lightning_verl.tuning import trial
from lightning_verl.tuning.files import write_config
from lightning_verl.tuning.record import Record, load, save
from lightning_verl.tuning.trial import limit_memory, record_path, reporting, run_process, run_trial


def check_tiny_trial(found: Record, folder: Path) -> None:
    assert found.problem == ""
    assert (found.device, found.ranks, len(found.seconds)) == ("CPU", 1, 2)
    # 8 rows of 5 prompt tokens, the start token and "n+1=", and 1 to 4 of a response
    assert all(8 * 5 < tokens <= 8 * (5 + 4) for tokens in found.tokens)
    assert len(found.scores) == 2 * 8
    assert set(found.scores) <= {0.0, 0.25, 0.5, 0.75, 1.0}
    assert len(set(found.scores)) > 1
    assert found.micro_batch_tokens == 16_384
    assert (found.bandwidth, found.received_bytes, found.profile) == (None, 0, None)
    assert found.peak > 100 * 2**20
    assert found.metrics["cache/cache_bytes"] > 0
    assert found.metrics["cache/swapped_bytes"] == 0
    assert found.metrics["time/step"] == pytest.approx(sum(found.seconds) / 2)
    assert not (folder / "out").exists()


def test_the_process_measures_steps_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "tuning_rewards", raising=False)
    write_config(tmp_path / "config.yaml", make_run(tmp_path))
    trial.main([str(tmp_path), str(tmp_path), "--steps", "2", "--warmup", "1"])
    check_tiny_trial(load(record_path(tmp_path)), tmp_path)


def take_trial(folder: Path) -> None:
    trial.main([str(folder), str(folder), "--steps", "2", "--warmup", "1"])


def test_two_ranks_put_their_figures_together(tmp_path: Path) -> None:
    write_config(tmp_path / "config.yaml", make_run(tmp_path, devices=2))
    run_ranks(take_trial, 2, tmp_path)
    found = load(record_path(tmp_path))
    assert (found.ranks, len(found.seconds), len(found.scores)) == (2, 2, 2 * 8)
    assert found.rates[0] == pytest.approx(found.tokens[0] / found.seconds[0] / 2)
    assert found.bandwidth is not None
    assert found.bandwidth > 1e6
    # Half of the weights comes at least twice in each of two updates, for both passes, and half of the gradients.
    weights = safetensors.torch.load_file(tmp_path / "model" / "model.safetensors")
    held = sum(tensor.nbytes for tensor in weights.values())
    assert 2 * 3 * held / 2 <= found.received_bytes <= 2 * 8 * held / 2


@pytest.mark.slow
def test_a_trial_is_a_process_of_its_own(tmp_path: Path) -> None:
    found = run_trial(make_run(tmp_path), tmp_path, steps=2, warmup=1, memory_gib=None, time_limit=55)
    check_tiny_trial(found, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_trial_on_two_ranks(tmp_path: Path) -> None:
    found = run_trial(make_run(tmp_path, devices=2), tmp_path, steps=1, warmup=1, memory_gib=None, time_limit=120)
    assert (found.problem, found.ranks, len(found.scores)) == ("", 2, 8)
    assert found.bandwidth is not None
    assert found.received_bytes > 0


def run_script(folder: Path, code: str, time_limit: float = 30.0) -> Record:
    return run_process([sys.executable, "-c", textwrap.dedent(code)], folder, time_limit)


def write_record(folder: Path, seconds: str = "[1.0]") -> str:
    fields = (
        f'"device": "CPU", "ranks": 1, "memory_bytes": 9, "seconds": {seconds}, "tokens": {seconds}, "profile": null'
    )
    return f"open({str(record_path(folder))!r}, 'w').write('''{{{fields}}}''')\n"


def test_what_a_process_wrote_is_read(tmp_path: Path) -> None:
    assert run_script(tmp_path, write_record(tmp_path)) == Record("CPU", 1, 9, [1.0], [1.0])


@pytest.mark.parametrize(
    ("code", "problem", "out_of_memory"),
    [
        ("import sys; print('the last words'); sys.exit(3)", "the last words", False),
        ("import sys; sys.exit(3)", "status 3", False),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "out of memory: the system ended the", True),
        ("", "it ended before the steps that count", False),
    ],
)
def test_failures_are_records(tmp_path: Path, code: str, problem: str, out_of_memory: bool) -> None:
    found = run_script(tmp_path, write_record(tmp_path, "[]") + code)
    assert found.problem.startswith(problem)
    assert (found.out_of_memory, found.ranks) == (out_of_memory, 1)


def test_a_process_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    code = f"""
    import subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
    time.sleep(60)
    """
    found = run_script(tmp_path, code, time_limit=3.0)
    assert found == Record(problem="it took longer than 3 s")
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 5
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(child)


def _runs(process: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_rank_says_what_ended_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(torch.OutOfMemoryError), reporting(tmp_path):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    assert (tmp_path / "problem-1").read_text() == "out of memory: CUDA out of memory. Tried to allocate 2.00 GiB."
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ValueError, match="wrong"), reporting(tmp_path):
        raise ValueError("wrong")
    found = run_script(tmp_path, "import sys; sys.exit(1)")
    assert found.problem.startswith("out of memory: CUDA")  # the others failed because of it
    assert found.out_of_memory
    (tmp_path / "problem-1").unlink()
    assert run_script(tmp_path, "import sys; sys.exit(1)").problem == "ValueError: wrong"


def test_memory_is_limited_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: type("Properties", (), {"total_memory": 80 * 2**30})
    )
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: calls.append(share))
    limit_memory(torch.device("cpu"), 40.0)
    limit_memory(torch.device("cuda", 0), None)
    limit_memory(torch.device("cuda", 0), 40.0)
    limit_memory(torch.device("cuda", 0), 100.0)
    assert calls == [0.5, 1.0]


def test_a_record_goes_to_a_file_and_back(tmp_path: Path) -> None:
    record = Record("GPU", 2, 9, [1.0, 3.0, 2.0], [8.0, 12.0, 12.0], {"rollout": 5, "actor_update": 7})
    save(tmp_path / "record.json", record)
    assert load(tmp_path / "record.json") == record
    assert record.rates == [4.0, 2.0, 3.0]  # 8 / 1 / 2, 12 / 3 / 2, 12 / 2 / 2
    assert (record.rate, record.peak) == (3.0, 7)
    assert (Record().rate, Record().peak) == (0.0, 0)
