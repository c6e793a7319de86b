"""What every test is held to: it leaves no process group, thread, environment variable or changed default behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

THREAD_GRACE = 2.0
"""Seconds that a thread gets to end after the test that started it."""

LIBRARY_THREADS = (
    "fsspecIO",  # fsspec keeps one event loop for the whole process
    "TMonitor",  # tqdm's monitor of its bars
    "tqdm_monitor",  # the same, in newer releases
    "InductorSubproc",  # torch's compiler keeps its processes
    "subproc_worker_timer",  # the same
    "Dummy-",  # not Python's own: autograd keeps one for each GPU, which shows once it has run a hook
)
LIBRARY_VARIABLES = frozenset(
    {
        "CUBLAS_WORKSPACE_CONFIG",  # Lightning, for deterministic runs
        "CUDA_MODULE_LOADING",  # torch, when it first uses a GPU
        "KMP_DUPLICATE_LIB_OK",  # OpenMP, at import
        "KMP_INIT_AT_FORK",  # OpenMP, at import
        "PL_GLOBAL_SEED",  # fabric.seed_everything
        "PL_SEED_WORKERS",  # fabric.seed_everything
        "PYTEST_CURRENT_TEST",
        "PYTORCH_NVML_BASED_CUDA_CHECK",  # Lightning, at import
        "TORCHINDUCTOR_CACHE_DIR",  # torch's compiler, at import
        "TRITON_CACHE_DIR",  # torch's compiler, at import
        "TRITON_PTXAS_PATH",  # torch's compiler, for its first kernel
        "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",  # torch's compiler, while it tries out kernels
    }
)
"""Variables that libraries set rightfully; they are restored all the same."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the server of ``run_ranks`` import its libraries before the first test that needs it starts its clock."""
    if any(hasattr(getattr(item, "module", None), "run_ranks") for item in session.items):
        from lightning_verl.testing import run_ranks

        run_ranks(os.getpid, 1, timeout=300)


@pytest.fixture(autouse=True)
def no_process_group_left() -> Iterator[None]:
    """Fail a test that leaves ``torch.distributed`` initialised, and destroy the group."""
    yield
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("The test left a process group; call torch.distributed.destroy_process_group().")


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """Fail a test that leaves threads running."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + THREAD_GRACE
    while (left := _new_threads(before)) and time.monotonic() < deadline:
        time.sleep(0.02)
    if left:
        pytest.fail(f"The test left threads running: {[thread.name for thread in left]}; end and join them.")


def _new_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    alive = [thread for thread in threading.enumerate() if thread not in before]
    return [thread for thread in alive if not thread.name.startswith(LIBRARY_THREADS)]


@pytest.fixture(autouse=True)
def no_variable_left() -> Iterator[None]:
    """Fail a test that changes environment variables, and restore them."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    os.environ.clear()
    os.environ.update(before)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    if changed := changed - LIBRARY_VARIABLES:
        pytest.fail(f"The test changed environment variables: {sorted(changed)}; use monkeypatch.setenv.")


@pytest.fixture(autouse=True)
def same_default_dtype() -> Iterator[None]:
    """Fail a test that changes torch's default dtype, and restore it."""
    before = torch.get_default_dtype()
    yield
    after = torch.get_default_dtype()
    torch.set_default_dtype(before)
    if after != before:
        pytest.fail(f"The test changed torch's default dtype from {before} to {after}.")


@pytest.fixture(autouse=True)
def restored_torch_state() -> Iterator[None]:
    """Restore what libraries change rightfully: random state, deterministic flags, number of threads."""
    random_state = torch.get_rng_state()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    threads = torch.get_num_threads()
    yield
    torch.set_rng_state(random_state)
    torch.set_num_threads(threads)
    now = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if now != (deterministic, warn_only):  # the call imports torch's compiler, so not after every test
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
