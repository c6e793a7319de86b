"""Two GPUs: a rank that hangs is named by the other, which ends; NCCL itself raises nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from lightning_verl.testing.launcher import _place

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(200)]

SCRIPT = Path(__file__).with_name("hung_rank.py")
TIMEOUT = 10.0
"""Seconds; that of hung_rank.py."""


def start(rank: int, port: int, accelerator: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start a rank that writes to files: pipes would stay open as long as anything that it has started."""
    with (folder / f"output{rank}").open("w") as output, (folder / f"errors{rank}").open("w") as errors:
        return subprocess.Popen(
            [sys.executable, SCRIPT, accelerator],
            stdout=output,
            stderr=errors,
            env={**os.environ, **_place(rank, 2, port), "PYTHONPATH": str(SCRIPT.parents[2])},
            start_new_session=True,
        )


def end(rank: subprocess.Popen[bytes]) -> None:
    """End a rank and whatever it has started."""
    with suppress(ProcessLookupError):
        os.killpg(rank.pid, signal.SIGKILL)
    rank.wait()


def check_hang(accelerator: str, folder: Path) -> None:
    """The first rank ends by itself, in time, and its stderr says which role, phase and rank it waited for."""
    # Held here, as torchrun's agent would: it must outlive the ranks.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=100))
    ranks = [start(rank, store.port, accelerator, folder) for rank in range(2)]
    try:
        code = ranks[0].wait(timeout=150)
        ended = time.time()
        assert ranks[1].poll() is None, (folder / "errors1").read_text()
    finally:
        for rank in ranks:
            end(rank)
    errors = (folder / "errors0").read_text()
    began = re.search(r"WAITS ([\d.]+)", (folder / "output0").read_text())
    assert began is not None, errors
    assert 0.5 * TIMEOUT < ended - float(began[1]) < 2 * TIMEOUT, errors
    assert code != 0
    backend = "gloo" if accelerator == "cpu" else "nccl"
    says = rf"CollectiveTimeoutError: actor 'update': a collective .* 10 s.*\({backend}:.*\)\. Missing ranks: \[1\]\. "
    assert re.search(says + "Rank 1 is in the same phase, but did not come to this collective", errors), errors


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two GPUs")
def test_a_rank_that_hangs_is_named_and_the_other_ends(tmp_path: Path) -> None:
    check_hang("cuda", tmp_path)
