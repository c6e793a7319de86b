"""Run a function on several ranks of this machine, as torchrun would, and get the results back.

The ranks are forked from a server process that has imported torch, Lightning, transformers and the package once, so
that a launch takes tenths of a second. With CUDA each rank is a new process: imports ask for the devices, and CUDA does
not work in forks of a process that has asked. A rank that hangs or dies ends the launch, never the test session.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess, SpawnContext, SpawnProcess
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from lightning_verl import _EXPORTS

TResult = TypeVar("TResult")

_HOST = "127.0.0.1"
_GRACE = 2.0
"""Seconds that the other ranks get to report after the first failure; they usually wait for the failed one."""

_PRELOAD = [
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "lightning.fabric",
    "peft",
    "torchmetrics",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "pytest",
    "lightning_verl.callbacks",
    "lightning_verl.rollout.native.engine",
    *sorted({f"lightning_verl.{module}" for module in _EXPORTS.values()}),
]


@dataclass
class _Rank:
    """One running rank, seen from the parent."""

    number: int
    process: ForkServerProcess | SpawnProcess
    results: Connection

    def kill(self) -> None:
        """End the rank and every process that it started."""
        pid = self.process.pid
        if pid is not None and self.process.is_alive():
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:  # too young to lead a group of its own
                self.process.kill()
        self.process.join()
        self.process.close()
        self.results.close()


def run_ranks(
    function: Callable[..., TResult], world_size: int, *args: Any, timeout: float = 50.0, **kwargs: Any
) -> list[TResult]:
    """Run ``function(*args, **kwargs)`` on ``world_size`` new processes and return the results in rank order.

    Each rank has one thread and torchrun's environment variables, so ``Fabric`` finds its place by itself. The process
    group is left to ``function``; where it exists at the end it is destroyed. Arguments and results travel by value, a
    rank never shares a tensor with another one.

    Args:
        function: A function at the top level of an importable module.
        world_size: The number of ranks, at least 1.
        *args: Arguments for every rank.
        timeout: Seconds until the ranks count as hung; below the 60 of a test, so that this error is the one seen. The
            first launch of a process spends ten of them, or more on a busy machine, on the server's imports; with CUDA
            every launch does.
        **kwargs: Keyword arguments for every rank.

    Raises:
        ValueError: ``world_size`` is less than 1.
        TypeError: The function or an argument cannot be sent to another process.
        RuntimeError: A rank raised, with its traceback, or died.
        TimeoutError: Ranks were still running after ``timeout`` seconds; all of them are killed.
    """
    if world_size < 1:
        raise ValueError(f"run_ranks: world_size must be at least 1, got {world_size}.")
    call = _to_bytes(functools.partial(function, *args, **kwargs))
    deadline = time.monotonic() + timeout
    # The parent holds the store, as torchrun's agent does: its port cannot be taken in between, and no rank's end
    # takes it away from the others.
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    environment = dict(os.environ)  # a server's own is that of its first launch
    ranks: list[_Rank] = []
    try:
        with _environment({"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}):  # before any import
            context = _start_context()
            for number in range(world_size):
                ranks.append(_start_rank(context, environment | _place(number, world_size, store.port), call))
        return _collect(ranks, deadline, timeout)
    finally:
        for rank in ranks:
            rank.kill()


def _start_context() -> ForkServerContext | SpawnContext:
    """What ranks are started by; with one thread, since a process with more of them must not be forked."""
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    forkserver.ensure_running()
    return context


def _place(number: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun tells a rank."""
    return {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "GROUP_RANK": "0",
        "NODE_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "TORCHELASTIC_RUN_ID": "run_ranks",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _start_rank(context: ForkServerContext | SpawnContext, environment: dict[str, str], call: bytes) -> _Rank:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_rank_main, args=(environment, call, sender), name=f"rank {environment['RANK']}")
    process.start()
    sender.close()  # else the end of the rank would not show as the end of the pipe
    return _Rank(int(environment["RANK"]), process, receiver)


def _rank_main(environment: dict[str, str], call: bytes, results: Connection) -> None:
    """What a rank does: ``(True, result)`` or ``(False, traceback)`` is all that it says."""
    os.setpgrp()
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        result = pickle.loads(call)()  # noqa: S301 - made by our own parent
        if dist.is_initialized():
            dist.destroy_process_group()
        answer = _to_bytes((True, result))
    except BaseException:  # sent on: the parent raises it
        answer = _to_bytes((False, traceback.format_exc()))
    results.send_bytes(answer)


def _collect(ranks: list[_Rank], deadline: float, timeout: float) -> list[Any]:
    """Wait for every rank; on the first failure give the others a moment, then raise it."""
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    running = {rank.results: rank for rank in ranks}
    while running and (ready := wait(list(running), timeout=max(deadline - time.monotonic(), 0.0))):
        for connection in ready:
            rank = running.pop(connection)  # type: ignore[call-overload]
            succeeded, value = _receive(rank)
            (results if succeeded else failures)[rank.number] = value
        if failures:
            deadline = min(deadline, time.monotonic() + _GRACE)
    if failures:
        first, *others = failures
        also = f"\nRanks that failed after it: {others}." if others else ""
        raise RuntimeError(f"run_ranks: rank {first} of {len(ranks)} failed:\n{failures[first]}{also}")
    if running:
        hung = sorted(rank.number for rank in running.values())
        raise TimeoutError(
            f"run_ranks: ranks {hung} of {len(ranks)} hung: no result after {timeout:g} s, so all were killed. Ranks "
            "must enter the same collectives in the same order; raise `timeout` if they are only slow."
        )
    for rank in ranks:
        rank.process.join(_GRACE)  # they end by themselves, with their exit handlers
    return [results[rank.number] for rank in ranks]


def _receive(rank: _Rank) -> tuple[bool, Any]:
    try:
        return pickle.loads(rank.results.recv_bytes())  # type: ignore[no-any-return]  # noqa: S301 - our own child
    except EOFError:
        rank.process.join(_GRACE)
        return False, f"It died without an answer, exit code {rank.process.exitcode} (a negative one is a signal)."


def _to_bytes(value: object) -> bytes:
    """Plain pickle copies tensors; the pickler of pipes would share their memory between the ranks."""
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"run_ranks: cannot be sent between processes: {error}. Functions must stand at the top level of a module, "
            "arguments and results must be plain data or tensors."
        ) from error


@contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
