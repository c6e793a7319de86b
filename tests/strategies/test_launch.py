"""The same script under every launcher."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ports import free_port

SCRIPT = """
import json, sys
import torch.distributed as dist
from lightning.fabric import Fabric
import lightning_verl

options = {"accelerator": "cpu", "devices": 2} if "devices" in sys.argv else {}
if "bare" not in sys.argv:
    options["strategy"] = "hybrid" if "name" in sys.argv else lightning_verl.HybridStrategy()
fabric = Fabric(**options)
if "cli" not in sys.argv:
    fabric.launch()
total = fabric.all_reduce(fabric.to_device(__import__("torch").tensor(float(fabric.global_rank))), reduce_op="sum")
groups = [dist.new_group() for _ in range(3)]  # without leave_groups_at_exit every other run aborts at its end
for group in groups:
    dist.all_reduce(total.clone(), group=group)
facts = [fabric.world_size, type(fabric.strategy).__name__, fabric.strategy.layout("actor").data_size, float(total)]
print("FACTS " + json.dumps([fabric.global_rank, *facts]), flush=True)
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def start(*command: str | Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def facts(*processes: subprocess.Popen[str]) -> list[list[object]]:
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(outputs)
    # Ranks share a pipe, so two of them may end up on one line.
    return sorted(json.loads(found) for output in outputs for found in re.findall(r"FACTS (\[[^\]]*\])", output))


TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
TWO = [[0, 2, "HybridStrategy", 2, 1.0], [1, 2, "HybridStrategy", 2, 1.0]]


def test_torchrun(script: Path) -> None:
    assert facts(start(*TORCHRUN, "--nproc-per-node", "2", "--master-port", str(free_port()), script)) == TWO


def test_torchrun_on_two_nodes(script: Path) -> None:
    common = (*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d")
    endpoint = ("--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "test")
    nodes = [start(*common, *endpoint, "--local-addr", "127.0.0.1", script) for _ in range(2)]
    # 0 + 1 + 2 + 3 = 6
    assert facts(*nodes) == [[rank, 4, "HybridStrategy", 4, 6.0] for rank in range(4)]


@pytest.mark.parametrize("how", ["instance", "name"])
def test_fabrics_own_launcher(script: Path, how: str) -> None:
    assert facts(start(sys.executable, script, "devices", how)) == TWO


def test_fabric_run(script: Path) -> None:
    fabric = Path(sys.executable).parent / "fabric"
    port = str(free_port())
    command = (fabric, "run", "--accelerator", "cpu", "--devices", "2", "--main-port", port, script, "cli")
    assert facts(start(*command)) == TWO


def test_our_own_run_knows_the_strategy_by_name(script: Path) -> None:
    command = (sys.executable, "-m", "lightning_verl", "run", "--strategy", "hybrid", "--accelerator", "cpu")
    assert facts(start(*command, "--devices", "2", "--main-port", str(free_port()), script, "cli", "bare")) == TWO
