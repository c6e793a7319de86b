"""Runs scripts in forks of a process that has imported torch and kin already, which spares ten seconds a script."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from lightning_verl.testing import run_ranks

_SET_BY_LAUNCHERS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""And whatever else says that a launcher has started the process."""


def _run(script: Path) -> None:
    for name in list(os.environ):
        if name in _SET_BY_LAUNCHERS or name.startswith(("MASTER_", "TORCHELASTIC_")):
            del os.environ[name]
    os.chdir(script.parent)
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def run_script(script: Path, timeout: float) -> None:
    """Run a script in its folder, as if it had been started by hand.

    Args:
        script: Its file.
        timeout: Seconds after which it is ended.

    Raises:
        RuntimeError: It raised, with its traceback.
        TimeoutError: It was still running.
    """
    run_ranks(_run, 1, script, timeout=timeout)
