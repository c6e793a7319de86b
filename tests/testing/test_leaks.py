"""The checks of tests/conftest.py, run over a file of tests that leak on purpose."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LEAKS = """
import os, threading
import pytest, torch, torch.distributed as dist

release = threading.Event()

@pytest.fixture(scope="module", autouse=True)
def end_thread():
    yield
    release.set()

def test_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)

def test_thread():
    threading.Thread(target=release.wait, name="forgotten").start()

def test_variable():
    os.environ["FORGOTTEN"] = "1"
    del os.environ["HOME"]
    os.environ["PL_GLOBAL_SEED"] = "1"

def test_dtype():
    torch.set_default_dtype(torch.float64)

def test_everything_is_restored(monkeypatch):
    assert not dist.is_initialized()
    assert "FORGOTTEN" not in os.environ and "HOME" in os.environ and "PL_GLOBAL_SEED" not in os.environ
    assert torch.get_default_dtype() == torch.float32
    monkeypatch.setenv("PLACED", "1")

def test_random_first():
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(torch.get_num_threads() + 1)
    test_random_first.seen = torch.rand(1), torch.get_num_threads() - 1

def test_random_second():
    assert not torch.are_deterministic_algorithms_enabled()
    assert (torch.rand(1), torch.get_num_threads()) == test_random_first.seen
"""


@pytest.mark.slow
def test_every_leak_fails_its_test_and_no_other(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parents[1] / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_leaking.py").write_text(LEAKS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_leaking.py"]
    output = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=50).stdout
    assert "7 passed, 4 errors" in output
    reported = dict(re.findall(r"^ERROR test_leaking.py::(\w+) - (?:Failed: )?(.*)", output, re.MULTILINE))
    assert set(reported) == {"test_group", "test_thread", "test_variable", "test_dtype"}
    assert "The test left a process group" in output
    assert "The test left threads running: ['forgotten']" in output
    assert "The test changed environment variables: ['FORGOTTEN', 'HOME']" in output
    assert "default dtype from torch.float32 to torch.float64" in output
