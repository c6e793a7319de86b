"""Optimizer states and gradients wait in host memory while the actor generates."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_verl.resharding.layouts import local_part


@dataclass(frozen=True)
class OffloadReport:
    """What the last trip to host memory and back cost on this rank."""

    moved_bytes: int
    """What was moved, each way."""
    out_seconds: float
    """Copying to the host; it runs while the weights are resharded."""
    back_seconds: float
    """Copying back; it runs while rewards are scored, and the next optimizer step waits for it."""


class StateOffload:
    """Moves the memory behind optimizer states and gradients to pinned host memory and back.

    The tensors stay the objects they are and lose their storage meanwhile; nobody may use states until ``wait``. On
    CUDA the copies run on a stream of their own.

    Args:
        device: Where the states live.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._on_cuda else None
        self._away: list[tuple[UntypedStorage, Tensor]] = []
        self._pinned: dict[int, Tensor] = {}
        self._out, self._back = _Stopwatch(self._on_cuda), _Stopwatch(self._on_cuda)
        self._bytes = 0
        self._gradients_away = False

    @property
    def report(self) -> OffloadReport:
        """What the last trip cost; on CUDA this waits for it."""
        return OffloadReport(self._bytes, self._out.seconds(), self._back.seconds())

    def start(self, optimizers: Iterable[Optimizer]) -> None:
        """Begin to copy out; the memory is still there until ``free``."""
        self.wait()
        gradients, states = _tensors(optimizers)
        self._gradients_away = bool(gradients)
        storages = {storage.data_ptr(): storage for storage in _storages([*gradients, *states])}
        self._bytes = sum(storage.nbytes() for storage in storages.values())
        with self._on_own_stream(), self._out:
            self._away = [
                (storage, self._copy_out(number, storage)) for number, storage in enumerate(storages.values())
            ]

    def free(self) -> None:
        """Give the device memory back, once the copies are through."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        for storage, _ in self._away:
            storage.resize_(0)

    def bring_back(self) -> None:
        """Begin to copy back. ``wait`` before the states are used; gradients are back for what follows already."""
        for storage, host in self._away:
            storage.resize_(host.nbytes)
        with self._on_own_stream(), self._back:
            for storage, host in self._away:
                _as_bytes(storage).copy_(host, non_blocking=True)
        if self._gradients_away:  # the next backward pass adds to them, and asks nobody
            self.wait()

    def wait(self) -> None:
        """Let what follows on the device see the states that were brought back."""
        if self._stream is not None and self._away:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._away = []

    def _copy_out(self, number: int, storage: UntypedStorage) -> Tensor:
        """The host's copy, in a buffer that is kept for the next time: pinning memory is slow."""
        host = self._pinned.get(number)
        if host is None or host.nbytes != storage.nbytes():
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._on_cuda)
            self._pinned[number] = host
        return host.copy_(_as_bytes(storage), non_blocking=True)

    def _on_own_stream(self) -> torch.cuda.StreamContext:
        """The own stream, behind what the current one has done so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)


class _Stopwatch:
    """Takes the time of a block: the device's on CUDA, the host's otherwise."""

    def __init__(self, on_cuda: bool) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_cuda else []
        self._seconds = 0.0
        self._used = False

    def __enter__(self) -> None:
        self._started, self._used = time.perf_counter(), True
        if self._events:
            self._events[0].record()

    def __exit__(self, *error: object) -> None:
        self._seconds = time.perf_counter() - self._started
        if self._events:
            self._events[1].record()

    def seconds(self) -> float:
        """Seconds of the last block; 0 before the first."""
        if self._events and self._used:
            self._events[1].synchronize()
            return float(self._events[0].elapsed_time(self._events[1])) / 1000
        return self._seconds


def _tensors(optimizers: Iterable[Optimizer]) -> tuple[list[Tensor], list[Tensor]]:
    """All gradients, and all states."""
    gradients: list[Tensor] = []
    states: list[Tensor] = []
    for optimizer in optimizers:
        gradients += [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        states += [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return gradients, states


def _storages(tensors: Iterable[Tensor]) -> Iterator[UntypedStorage]:
    """The memory of tensors; single numbers, such as step counts, stay."""
    for tensor in tensors:
        for part in _plain_parts(local_part(tensor)):
            if part.numel() > 1:
                yield part.untyped_storage()


def _plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold a tensor's memory: of 8-bit moments the codes, their scales and the table of values."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from _plain_parts(getattr(tensor, name))


def _as_bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
