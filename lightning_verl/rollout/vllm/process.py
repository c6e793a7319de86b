"""What vLLM does to the process that it starts in, and how it is undone.

vLLM is written for a process of its own. Started inside the trainer's, it sets environment variables, seeds every
random generator, replaces ``torch.set_num_threads`` by a function that does nothing (on the CPU), and destroys the
process group when it ends, whoever made it.
"""

from __future__ import annotations

import os
import random
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lightning_verl.models.compat import check_versions

_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process, where the weights are
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
_LOGGING = ("VLLM_LOGGING_LEVEL", "ERROR")
"""Set where the user has not: each weight update warns of layers that have no weights."""


@contextmanager
def vllm_environment() -> Iterator[None]:
    """Set the variables that vLLM is imported and started with, and put the environment back as it was."""
    before = dict(os.environ)
    os.environ.update(_VARIABLES)
    os.environ.setdefault(*_LOGGING)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


def check_vllm() -> None:
    """Check that vLLM is there and new enough.

    Raises:
        ImportError: It is not.
    """
    with vllm_environment():
        check_versions(vllm=True)


@contextmanager
def torch_random_kept() -> Iterator[None]:
    """Put torch's random state back: vLLM draws from it beside the seeds of the requests, and throws that away."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        yield


@contextmanager
def process_kept() -> Iterator[None]:
    """Let vLLM start, and put back what that changes.

    These are environment variables, the random states of torch, NumPy and Python, torch's number of threads and its
    ``set_num_threads``. A process group that vLLM makes, where there was none, stays until the engine is closed.
    """
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with vllm_environment(), torch_random_kept(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # vLLM looks at names of torch that are on their way out
            yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextmanager
def own_shared_memory() -> Iterator[None]:
    """Let the ranks of this run share memory under a name that no other run has (a collective call of all processes).

    On the CPU vLLM's tensor ranks meet in a shared memory that under ``external_launcher`` has the same name in every
    run of the machine, and stays behind: a second run, or one after a run that was killed, could not start. Here its
    name is taken away as soon as all ranks have it open.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    name = [uuid.uuid4().hex]
    dist.broadcast_object_list(name, src=0)

    def distributed_args(self: Any) -> tuple[str, int, int]:
        """The address is not used, because there is a process group; what follows its colon becomes the name."""
        return f"env:{name[0]}", dist.get_rank(), int(os.environ.get("LOCAL_RANK", dist.get_rank()))

    executor: Any = ExecutorWithExternalLauncher
    original = executor._distributed_args
    executor._distributed_args = distributed_args
    try:
        yield
        dist.barrier()
    finally:
        executor._distributed_args = original
        for path in Path("/dev/shm").glob(f"{name[0]}-*"):  # noqa: S108 - where Linux has it
            path.unlink(missing_ok=True)


@contextmanager
def groups_of_ranks(parallel_state: Any, order: Sequence[int]) -> Iterator[None]:
    """Let vLLM make its groups of other ranks than those that follow each other.

    Args:
        parallel_state: The module ``vllm.distributed.parallel_state``.
        order: Rank ``order[i]`` takes the place that rank i has in vLLM's groups.
    """
    original = parallel_state.init_model_parallel_group

    def of_other_ranks(group_ranks: Sequence[Sequence[int]], *arguments: Any, **options: Any) -> Any:
        placed = [[order[rank] for rank in ranks] for ranks in group_ranks]
        return original(placed, *arguments, **options)

    parallel_state.init_model_parallel_group = of_other_ranks
    try:
        yield
    finally:
        parallel_state.init_model_parallel_group = original


def spare_process_group(parallel_state: Any) -> None:
    """Let vLLM's end leave the process group alone, if there is one before vLLM starts.

    Its tear-down, which also runs when an engine is collected as garbage, destroys the default group of the process;
    afterwards no other group of the process works.

    Args:
        parallel_state: The module ``vllm.distributed.parallel_state``.
    """
    original: Callable[[], None] = getattr(
        parallel_state.destroy_distributed_environment, "original", parallel_state.destroy_distributed_environment
    )

    def destroy_own_groups() -> None:
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
            parallel_state._WORLD = None

    destroy_own_groups.original = original  # type: ignore[attr-defined]
    parallel_state.destroy_distributed_environment = destroy_own_groups if dist.is_initialized() else original
