"""``PrefetchLoader``: batches of prompts that wait on the device before they are asked for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, fields
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from lightning_verl.data.experience import PromptBatch

_THREAD_PREFIX = "prefetch-loader"


class BatchLoader(Protocol):
    """What is wrapped, such as ``data.loader.PromptLoader``. After an error it yields the same batch again."""

    def __next__(self) -> PromptBatch:
        """The next batch."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last batch that was yielded."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position."""
        ...

    def close(self) -> None:
        """Stop threads and processes."""
        ...


class PrefetchLoader:
    """Keeps batches of the training loader ready on the device.

    The dataset's ``prefetch_factor`` counts batches in host memory; these are copied on from there, by a background
    thread and, on CUDA, on a stream of its own, so that the copies run beside the training step.

    Args:
        depth: Batches ready on the device or on their way to it.

    Raises:
        ValueError: ``depth`` is below 1.
    """

    def __init__(self, depth: int = 4) -> None:
        if depth < 1:
            raise ValueError(
                f"PrefetchLoader got depth={depth}; it takes at least 1 batch (leave the callback out for none)."
            )
        self.depth = depth

    def on_loader_setup(self, loaders: dict[str, Any], device: torch.device) -> None:
        """Wrap ``loaders["train"]``."""
        loaders["train"] = DeviceLoader(loaders["train"], self.depth, device)


@dataclass(frozen=True)
class _Fetched:
    """A batch on the device."""

    batch: PromptBatch
    state: dict[str, Any]
    """The inner loader's position behind it."""
    copied: torch.cuda.Event | None
    """When its copy is done; None on the CPU."""


class DeviceLoader(Iterator[PromptBatch]):
    """Yields the batches of another loader on a device, up to ``depth`` of them fetched ahead.

    Its position counts the batches that were yielded; those fetched ahead count as not consumed. After an error, which
    is raised where its batch would have come, the same batch is tried again. The other loader belongs to this one from
    now on: it is only used by one background thread, and closed with it.

    Args:
        inner: The loader to take batches from.
        depth: Batches fetched ahead.
        device: Where to.
    """

    def __init__(self, inner: BatchLoader, depth: int, device: torch.device) -> None:
        self.wait_seconds = 0.0
        """Seconds that the last batch was waited for."""
        self._inner = inner
        self._depth = depth
        self._device = device
        self._state = inner.state_dict()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ahead: deque[Future[_Fetched]] = deque()
        # Each task fetches one batch, so that an idle thread waits for nothing and ends by itself with its executor.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=_THREAD_PREFIX, initializer=self._initializer())
        self._closed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PromptBatch:
        """Return the next batch, ready for the current stream.

        Raises:
            RuntimeError: The loader is closed.
            Exception: Whatever the inner loader raised.
        """
        if self._closed:
            raise RuntimeError("PrefetchLoader: the loader is closed; RLTrainer.fit makes and closes one for each run.")
        started = time.perf_counter()
        try:
            self._fill()
            fetched = self._ahead[0].result()  # it stays in the queue: an interrupted wait must still know of it
            self._ahead.popleft()
        except BaseException:
            self._rewind(self._state)  # what was fetched behind the failed batch must not be passed over
            raise
        self.wait_seconds = time.perf_counter() - started
        self._state = fetched.state
        self._fill()
        if fetched.copied is not None:
            _hand_over(fetched.batch, fetched.copied, self._device)
        return fetched.batch

    def state_dict(self) -> dict[str, Any]:
        """The inner loader's position behind the last batch that was yielded."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position.

        Args:
            state: What ``state_dict`` of this or of the inner loader gave.

        Raises:
            ValueError: The inner loader refuses the state.
        """
        self._rewind(state)

    def close(self) -> None:
        """Stop the background thread, then the inner loader. Safe to call twice."""
        self._closed = True
        self._forget()
        self._thread.shutdown(wait=True)
        self._inner.close()

    def _fill(self) -> None:
        while len(self._ahead) < self._depth:
            self._ahead.append(self._thread.submit(_fetch, self._inner, self._device, self._stream))

    def _forget(self) -> None:
        wait([future for future in self._ahead if not future.cancel()])
        self._ahead.clear()

    def _rewind(self, state: Mapping[str, Any]) -> None:
        self._forget()
        self._inner.load_state_dict(state)
        self._state = dict(state)

    def _initializer(self) -> Any:
        """What the thread does first: CUDA's current device is a setting of each thread."""
        device = self._device
        return (lambda: torch.cuda.set_device(device)) if device.type == "cuda" else None


def _fetch(inner: BatchLoader, device: torch.device, stream: torch.cuda.Stream | None) -> _Fetched:
    batch, state = next(inner), inner.state_dict()
    if stream is None:
        return _Fetched(batch.to(device), state, None)
    with torch.cuda.stream(stream):
        return _Fetched(batch.to(device, non_blocking=True), state, stream.record_event())


def _hand_over(batch: PromptBatch, copied: torch.cuda.Event, device: torch.device) -> None:
    """Let the current stream wait for the copy, and keep the copy's memory until that stream is done with it."""
    stream = torch.cuda.current_stream(device)
    stream.wait_event(copied)
    for item in fields(batch):
        value = getattr(batch, item.name)
        if isinstance(value, Tensor):
            value.record_stream(stream)
