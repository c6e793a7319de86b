"""The loader of prompt batches: an endless stream of prompts, tokenised ahead beside the training thread."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType
from typing import Self

import torch

from lightning_verl.data.experience import PromptBatch
from lightning_verl.data.rows import EncodedPrompt, Prompt, PromptEncoder, PromptRows

_ORPHAN_CHECK_SECONDS = 2.0
"""How often a worker looks whether its parent still lives: a killed parent cannot tell its workers to stop."""


class PromptStream:
    """Which row of the data stands at each place of the stream of prompts, which runs on over epochs.

    With ``shuffle`` each epoch has its own order, a function of the seed and the epoch alone: every rank and every
    resumed run has the same.

    Args:
        rows: Rows of an epoch, at least 1.
        seed: Seed of the orders.
        shuffle: Whether to shuffle.
        epochs: Passes over the rows; None never ends.
    """

    def __init__(self, rows: int, *, seed: int, shuffle: bool, epochs: int | None) -> None:
        self.rows = rows
        self.seed = seed
        self.shuffle = shuffle
        self.length = None if epochs is None else rows * epochs
        """Prompts of the whole stream, None for an endless one."""
        self._order = lru_cache(maxsize=2)(self._make_order)  # two: a batch may reach over the end of an epoch

    def row(self, position: int) -> int:
        """The row at an absolute position of the stream."""
        epoch, offset = divmod(position, self.rows)
        return self._order(epoch)[offset]

    def _make_order(self, epoch: int) -> Sequence[int]:
        if not self.shuffle:
            return range(self.rows)
        order = array("q", range(self.rows))
        # A text keeps seed and epoch apart; torch's CPU generator uses only the low 32 bits of its seed.
        random.Random(f"{self.seed}/{epoch}").shuffle(order)  # noqa: S311 - an order, not a secret
        return order


class EncodePool:
    """Tokenises lists of prompts, spread over worker processes, or in the calling thread where there are none.

    Workers only tokenise: rows are read, and batches are put together, in the main process. They are forked on Linux,
    because the other ways of starting a process run the user's script again, which a script without
    ``if __name__ == "__main__"`` does not survive; they touch neither CUDA nor process groups.

    Args:
        encoder: What tokenises.
        num_workers: Worker processes, started at once; 0 makes none.
    """

    def __init__(self, encoder: PromptEncoder, num_workers: int) -> None:
        self._encoder = encoder
        self._num_workers = num_workers
        self._processes: ProcessPoolExecutor | None = None
        if num_workers:
            self._processes = ProcessPoolExecutor(
                num_workers,
                mp_context=multiprocessing.get_context("fork" if sys.platform == "linux" else None),
                initializer=_start_worker,
                initargs=(encoder, os.getpid()),
            )
            self._processes.submit(os.getpid)  # the pool starts its processes with its first task

    def encode(self, prompts: Sequence[Prompt], places: Sequence[str]) -> list[EncodedPrompt]:
        """Tokenise prompts, in their order.

        Args:
            prompts: Any number of prompts.
            places: Where each stands in the source, for error messages.

        Raises:
            ValueError: A prompt could not be tokenised; its place is named.
            RuntimeError: A worker process died.
        """
        if not prompts:
            return []
        if self._processes is None:
            return self._encoder.encode(prompts, places)
        size = -(-len(prompts) // self._num_workers)
        chunks = [slice(start, start + size) for start in range(0, len(prompts), size)]
        try:
            parts = self._processes.map(
                _encode_in_worker, [prompts[chunk] for chunk in chunks], [places[chunk] for chunk in chunks]
            )
            return [encoded for part in parts for encoded in part]
        except BrokenProcessPool as error:
            raise RuntimeError(
                f"AsyncRolloutDataset: one of {self._num_workers} tokenising workers died between {places[0]} and "
                f"{places[-1]} (killed for memory?); try a smaller num_workers, or 0 to see a crash where it happens."
            ) from error

    def close(self) -> None:
        """Stop the workers and wait for their end; tasks that have not begun are cancelled."""
        if self._processes is not None:
            self._processes.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


_worker_encoder: PromptEncoder | None = None  # set once in each worker process, never in the main one


def _start_worker(encoder: PromptEncoder, parent: int) -> None:
    global _worker_encoder
    _worker_encoder = encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the main one stops its workers itself
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the trainer's handler, which a fork inherits
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the workers are the parallelism
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()


def _exit_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_ORPHAN_CHECK_SECONDS)
    os._exit(1)


def _encode_in_worker(prompts: Sequence[Prompt], places: Sequence[str]) -> list[EncodedPrompt]:
    if _worker_encoder is None:
        raise RuntimeError("_encode_in_worker runs in a process that _start_worker has set up.")
    return _worker_encoder.encode(prompts, places)


@dataclass(frozen=True)
class BatchBuilder:
    """Puts batches of prompts together; it holds no state, so any batch can be built at any time."""

    rows: PromptRows
    encoded: Sequence[EncodedPrompt] | None
    """Every row tokenised, or None to tokenise as batches are built."""
    encoder: PromptEncoder
    stream: PromptStream
    batch_size: int
    """Prompts of a global batch."""
    positions: Sequence[int]
    """The positions of a global batch that are built."""
    pad_token_id: int

    def build(self, number: int, pool: EncodePool) -> PromptBatch:
        """Build global batch ``number``, counted from 0.

        Args:
            number: The global batch.
            pool: What tokenises.
        """
        indices = [number * self.batch_size + position for position in self.positions]
        rows = [self.stream.row(index) for index in indices]
        if self.encoded is None:
            encoded = pool.encode([self.rows.prompt(row) for row in rows], [self.rows.place(row) for row in rows])
        else:
            encoded = [self.encoded[row] for row in rows]
        lengths = [len(prompt.ids) for prompt in encoded]
        ids = torch.full((len(rows), max(lengths, default=1)), self.pad_token_id, dtype=torch.int64)
        for place, prompt in enumerate(encoded):
            ids[place, : len(prompt.ids)] = torch.tensor(prompt.ids, dtype=torch.int64)
        return PromptBatch(
            ids=ids,
            lengths=torch.tensor(lengths, dtype=torch.int64),
            indices=torch.tensor(indices, dtype=torch.int64),
            texts=[prompt.text for prompt in encoded],
            fields=[self.rows.fields(row) for row in rows],
        )


class PromptLoader(Iterator[PromptBatch]):
    """Yields the batches of a stream of prompts, made by `AsyncRolloutDataset.loader`.

    A batch may reach over the end of an epoch. An endless stream never stops; a finite one stops with its last whole
    batch, so that every batch has the agreed size on every rank: `dropped` prompts at its end are not yielded.

    One background thread prepares up to ``prefetch_factor`` batches ahead, in order, and hands the tokenising to
    ``num_workers`` processes where there are any. Tensors are pinned where CUDA is available. The loader is an
    iterator: a second ``for`` goes on where the first one stopped. Thread and processes end with the stream, with
    `close` (also as a context manager), or with the loader itself. After an error the same batch is tried again.

    Args:
        builder: What builds a batch.
        prefetch_factor: Batches ready ahead, in total; with 0 each is built when it is asked for.
        num_workers: Tokenising processes.

    Raises:
        ValueError: The whole stream is shorter than one batch.
    """

    def __init__(self, builder: BatchBuilder, *, prefetch_factor: int, num_workers: int) -> None:
        stream = builder.stream
        self.num_batches = None if stream.length is None else stream.length // builder.batch_size
        """Global batches of the whole stream, None for an endless one."""
        self.dropped = 0 if stream.length is None else stream.length % builder.batch_size
        """Prompts at the end of a finite stream that fill no whole batch."""
        if self.num_batches == 0:
            raise ValueError(
                f"PromptLoader: the stream of {stream.length} prompts ({stream.rows} rows an epoch) fills no batch "
                f"of batch_size={builder.batch_size}; lower the batch size or raise epochs (None is endless)."
            )
        self.consumed = 0
        """Global batches yielded since the start of the stream, those before a resume included."""
        self.wait_seconds = 0.0
        """Seconds that the last batch was waited for."""
        self._builder = builder
        self._prefetch_factor = prefetch_factor
        self._num_workers = num_workers
        self._pin = torch.cuda.is_available()
        self._ahead: deque[Future[PromptBatch]] = deque()
        self._closed = False
        self._crew: _Crew | None = None
        self._start()  # early, while the process has few threads to fork beside

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PromptBatch:
        """Return the next batch.

        Raises:
            RuntimeError: The loader is closed, or a worker process died.
            ValueError: A prompt could not be tokenised.
        """
        if self._closed:
            raise RuntimeError("PromptLoader: it is closed; make another one with dataset.loader(...).")
        if self.num_batches is not None and self.consumed >= self.num_batches:
            self._stop()
            raise StopIteration
        started = time.perf_counter()
        try:
            self._fill(max(self._prefetch_factor, 1))
            batch = self._ahead.popleft().result()
        except BaseException:
            self._stop()  # also forgets the batches behind the failed one, so that none is ever passed over
            raise
        if self._pin:  # in this thread, whose CUDA device is the right one
            batch = batch.pin_memory()
        self.wait_seconds = time.perf_counter() - started
        self.consumed += 1
        self._fill(self._prefetch_factor)
        return batch

    def state_dict(self) -> dict[str, int]:
        """The position in the stream and what it depends on.

        ``batches`` is the number of global batches yielded; those that are ready ahead count as not consumed. It does
        not depend on the number of ranks.
        """
        return {"batches": self.consumed, **self._fingerprint()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to the position of a saved state.

        Args:
            state: What `state_dict` gave.

        Raises:
            ValueError: The state was taken over another stream: other number of rows, seed, batch size or shuffling.
        """
        here = self._fingerprint()
        missing = [key for key in ("batches", *here) if key not in state]
        if missing:
            raise ValueError(f"PromptLoader: the state lacks {missing}; pass what PromptLoader.state_dict() gave.")
        changed = [f"{key}: saved {state[key]}, here {value}" for key, value in here.items() if state[key] != value]
        if changed:
            raise ValueError(
                f"PromptLoader: the state is of another stream of prompts ({'; '.join(changed)}), so its position "
                "means nothing here; resume with the same data, seed, shuffle and batch size, or start without a state."
            )
        self._forget()
        self.consumed = state["batches"]

    def close(self) -> None:
        """Stop the background thread and the worker processes; the loader yields nothing more. Safe to call twice."""
        self._closed = True
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _fingerprint(self) -> dict[str, int]:
        stream = self._builder.stream
        return {
            "rows": stream.rows,
            "seed": stream.seed,
            "shuffle": int(stream.shuffle),
            "batch_size": self._builder.batch_size,
        }

    def _fill(self, depth: int) -> None:
        """Have ``depth`` batches under way, fewer at the end of the stream."""
        crew = self._start()
        while len(self._ahead) < depth:
            number = self.consumed + len(self._ahead)
            if self.num_batches is not None and number >= self.num_batches:
                return
            self._ahead.append(crew.thread.submit(self._builder.build, number, crew.pool))

    def _start(self) -> _Crew:
        if self._crew is None:
            self._crew = _Crew(self._builder.encoder, self._num_workers)
        return self._crew

    def _forget(self) -> None:
        for future in self._ahead:
            future.cancel()
        self._ahead.clear()

    def _stop(self) -> None:
        self._forget()
        if self._crew is not None:
            self._crew.stop()
            self._crew = None


class _Crew:
    """The background thread that builds batches, and the processes that it hands tokenising to.

    Nothing here refers to the loader: when a loader is dropped, its executors are too, and end by themselves.
    """

    def __init__(self, encoder: PromptEncoder, num_workers: int) -> None:
        self.pool = EncodePool(encoder, num_workers)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="prompt-loader")

    def stop(self) -> None:
        self.pool.close()  # first: the thread may be waiting for it
        self.thread.shutdown(cancel_futures=True)
