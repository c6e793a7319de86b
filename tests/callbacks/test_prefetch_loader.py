"""PrefetchLoader: batches fetched ahead, positions, errors and cleaning up."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from lightning_verl.callbacks import PrefetchLoader
from lightning_verl.callbacks.prefetch_loader import DeviceLoader
from lightning_verl.data.experience import PromptBatch
from lightning_verl.data.prompts import AsyncRolloutDataset
from lightning_verl.testing import char_tokenizer

CPU = torch.device("cpu")


class CountingLoader:
    """Yields batches whose index is their number. `fail_at` raises once, as a dead worker would."""

    def __init__(self, batches: int | None = None, fail_at: int | None = None, error: BaseException | None = None):
        self.consumed = 0
        self.closed = 0
        self.threads: set[str] = set()
        self._batches, self._fail_at = batches, fail_at
        self._error = error or ValueError("no such prompt")

    def __next__(self) -> PromptBatch:
        self.threads.add(threading.current_thread().name)
        if self.consumed == self._batches:
            raise StopIteration
        if self.consumed == self._fail_at:
            self._fail_at = None
            raise self._error
        self.consumed += 1
        number = torch.tensor([self.consumed - 1])
        return PromptBatch(ids=number[:, None], lengths=number, indices=number, texts=["x"], fields=[{}])

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.consumed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.consumed = state["batches"]

    def close(self) -> None:
        self.closed += 1


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def take(loader: Any, count: int | None = None) -> list[int]:
    return [int(batch.indices[0]) for batch in itertools.islice(loader, count)]


def wrap(inner: Any, depth: int = 4) -> DeviceLoader:
    loaders = {"train": inner, "other": inner}
    PrefetchLoader(depth).on_loader_setup(loaders, CPU)
    assert loaders["other"] is inner
    return loaders["train"]


def test_yields_every_batch_in_order_and_stops():
    loader = wrap(CountingLoader(batches=6))
    assert iter(loader) is loader
    assert take(loader) == [0, 1, 2, 3, 4, 5]
    assert take(loader) == []
    loader.close()


@pytest.mark.parametrize("depth", [1, 3])
def test_keeps_depth_batches_ready(depth):
    inner = CountingLoader()
    loader = wrap(inner, depth)
    take(loader, 2)
    assert wait_until(lambda: inner.consumed == 2 + depth)
    time.sleep(0.05)  # long enough to fetch far more
    assert inner.consumed == 2 + depth
    loader.close()


def test_batches_are_fetched_by_one_thread_beside_the_main_one():
    inner = CountingLoader()
    loader = wrap(inner)
    take(loader, 5)
    loader.close()
    assert inner.threads == {"prefetch-loader_0"}


def test_state_counts_only_batches_that_were_yielded():
    inner = CountingLoader()
    inner.consumed = 7  # resumed before it was wrapped
    loader = wrap(inner, depth=3)
    assert loader.state_dict() == {"batches": 7}
    take(loader, 2)
    assert wait_until(lambda: inner.consumed == 12)
    assert loader.state_dict() == {"batches": 9}
    loader.close()
    assert loader.state_dict() == {"batches": 9}


def test_load_state_drops_what_was_fetched():
    loader = wrap(CountingLoader())
    take(loader, 5)
    loader.load_state_dict({"batches": 2})
    assert loader.state_dict() == {"batches": 2}
    assert take(loader, 3) == [2, 3, 4]
    loader.close()


def test_changing_a_state_does_not_move_the_loader():
    loader = wrap(CountingLoader())
    take(loader, 1)
    loader.state_dict()["batches"] = 99
    assert loader.state_dict() == {"batches": 1}
    loader.close()


def test_error_comes_in_its_place_and_its_batch_is_tried_again():
    loader = wrap(CountingLoader(fail_at=2))
    assert take(loader, 2) == [0, 1]
    with pytest.raises(ValueError, match="no such prompt"):
        next(loader)
    assert loader.state_dict() == {"batches": 2}
    assert take(loader, 3) == [2, 3, 4]
    loader.close()


def test_interrupt_while_waiting_loses_no_batch(monkeypatch):
    loader = wrap(CountingLoader())
    take(loader, 1)
    with monkeypatch.context() as patch:
        patch.setattr("concurrent.futures.Future.result", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            next(loader)
    assert take(loader, 2) == [1, 2]
    loader.close()


def test_close_stops_thread_and_inner_loader():
    inner = CountingLoader()
    loader = wrap(inner)
    take(loader, 1)
    loader.close()
    loader.close()
    assert inner.closed == 2  # PromptLoader.close may be called twice too
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch-loader")]
    with pytest.raises(RuntimeError, match="PrefetchLoader: the loader is closed"):
        next(loader)


def test_loader_that_is_dropped_leaves_no_thread():
    loader = wrap(CountingLoader())
    take(loader, 1)
    del loader
    gc.collect()
    assert wait_until(lambda: not any(t.name.startswith("prefetch-loader") for t in threading.enumerate()))


def test_wait_is_measured():
    gate = threading.Event()

    class SlowLoader(CountingLoader):
        def __next__(self) -> PromptBatch:
            gate.wait(10)
            return super().__next__()

    loader = wrap(SlowLoader(), depth=2)
    threading.Timer(0.1, gate.set).start()
    next(loader)
    assert 0.05 < loader.wait_seconds < 5
    assert wait_until(lambda: loader._ahead[0].done())
    next(loader)
    assert loader.wait_seconds < 0.05
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_around_the_datasets_own_loader(num_workers):
    rows = [{"prompt": letter} for letter in "abcdefghij"]

    def loader() -> Any:
        data = AsyncRolloutDataset(rows, tokenizer=char_tokenizer(), epochs=3, num_workers=num_workers)
        return data.loader(2)

    with loader() as plain:
        expected = [batch.texts for batch in plain]
    first = wrap(loader())
    seen = [batch.texts for batch in itertools.islice(first, 7)]
    state = first.state_dict()
    first.close()
    inner = loader()
    inner.load_state_dict(state)
    second = wrap(inner)
    seen += [batch.texts for batch in second]
    second.close()
    assert seen == expected
    assert len(seen) == 15


def test_depth_out_of_range():
    with pytest.raises(ValueError, match=r"PrefetchLoader got depth=0; it takes at least 1 batch"):
        PrefetchLoader(depth=0)
