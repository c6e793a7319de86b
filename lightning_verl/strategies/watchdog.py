"""Where every rank is, and the error that says so when a collective hangs.

Each rank writes the phase that it enters to the store of the process group. When a collective fails in a phase, the
ranks that waited in it write that too; those that did not are missing, and the error names them. gloo raises in the
ranks that wait. NCCL does not: torch ends the process, so on CUDA a thread watches and prints the same text before.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist

from lightning_verl.strategies import recorder
from lightning_verl.strategies.diagnosis import (
    CollectiveTimeoutError,
    LayoutMismatchError,
    Note,
    how_it_failed,
    is_collective_failure,
    is_misplacement,
    misplacement_text,
    timeout_hints,
    timeout_text,
)
from lightning_verl.strategies.layout import ROLES
from lightning_verl.strategies.recorder import Collective

if TYPE_CHECKING:
    from lightning_verl.strategies.hybrid import HybridStrategy

TMethod = TypeVar("TMethod", bound=Callable[..., Any])

_BOARDS = itertools.count()
_STORE_PATIENCE = timedelta(seconds=10)
_LONGEST_GRACE = 10.0
"""Seconds that a rank whose collective failed gives the others to say that they wait too: a quarter of its timeout, but
at most these."""


def watched(phase: str, role: str | None = None) -> Callable[[TMethod], TMethod]:
    """Make a method of an object with a ``strategy`` a phase.

    Args:
        phase: Its name.
        role: Whose phase; None: the method's first argument says it.
    """

    def decorate(method: TMethod) -> TMethod:
        @functools.wraps(method)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            owner = role or (args[0] if args else kwargs["role"])
            with self.strategy.phase(owner, phase):
                return method(self, *args, **kwargs)

        return cast(TMethod, run)

    return decorate


class PhaseBoard:
    """The phase of every rank, in the store.

    Args:
        strategy: Knows the ranks and the layouts.
    """

    def __init__(self, strategy: HybridStrategy) -> None:
        self._strategy = strategy
        self._name = f"lightning_verl/board{next(_BOARDS)}"  # made in the same order on every rank, as gates are
        self._entered = 0
        self._open: list[Note] = []
        self._clone: dist.Store | None = None

    @contextmanager
    def phase(self, role: str, name: str) -> Iterator[None]:
        """Be in a phase; phases may be nested.

        Raises:
            CollectiveTimeoutError: A collective in it failed.
            LayoutMismatchError: Tensors in it lie on different devices or meshes.
        """
        self._entered += 1
        note = Note(self._entered, role, name)
        self._open.append(note)
        self._post(note)
        try:
            yield
        except (CollectiveTimeoutError, LayoutMismatchError):
            raise  # by a phase inside this one
        except Exception as error:
            explained = self._explained(note, error)
            if explained is None:
                raise
            raise explained from error
        else:
            if len(self._open) > 1:
                self._post(self._open[-2])
        finally:
            self._open.pop()

    def alarmed(self) -> bool:
        """Whether a rank has a collective that does not finish."""
        with suppress(RuntimeError):
            return self._store is not None and self._store.check([f"{self._name}/alarm"])
        return False

    def report(self, collective: Collective | None) -> Note:
        """Let the others know that this rank waits in a collective; returns what they read."""
        inside = self._open[-1] if self._open else Note(self._entered, "between", "phases")
        note = replace(inside, state="waiting", detail="" if collective is None else str(collective))
        self._post(note)
        with suppress(RuntimeError):
            if self._store is not None:
                self._store.set(f"{self._name}/alarm", "")
        return note

    def explain(self, failure: str, collective: Collective | None, grace: float) -> str:
        """Find out which ranks are missing.

        Args:
            failure: What happened, see ``diagnosis.how_it_failed``.
            collective: What this rank waits in.
            grace: Seconds that the other ranks get to say that they wait too.
        """
        strategy, note = self._strategy, self.report(collective)
        notes = self._notes(grace)
        members = [] if collective is None else collective.ranks()
        text = timeout_text(failure, strategy.global_rank, note, collective, notes, members)
        shape = strategy.mesh.mesh_shape if strategy.mesh is not None else (strategy.world_size, 1, 1, 1)
        nccl = torch.cuda.nccl.version() if self.on_nccl else None
        return f"{text}\n{timeout_hints(shape, 'nccl' if self.on_nccl else 'gloo', nccl, os.environ)}"

    @property
    def on_nccl(self) -> bool:
        """Whether collectives are NCCL's."""
        return dist.is_initialized() and "nccl" in dist.get_backend()

    def _explained(self, note: Note, error: Exception) -> Exception | None:
        if is_collective_failure(error):
            collective = recorder.last_collective(nccl=self.on_nccl)
            timeout = self._strategy.timeout.total_seconds() if collective is None else collective.timeout
            grace = min(timeout / 4, _LONGEST_GRACE)
            return CollectiveTimeoutError(self.explain(how_it_failed(error, collective), collective, grace))
        self._post(replace(note, state="failed", detail=f"{type(error).__name__}: {error}"[:500]))
        if is_misplacement(error) and note.role in ROLES:
            layout, device = self._strategy.layout(note.role), self._strategy.root_device
            return LayoutMismatchError(misplacement_text(note, layout, str(device), error))
        return None

    @property
    def _store(self) -> dist.Store | None:
        """A connection of its own, since another thread may sit in a long wait on the process group's."""
        if self._clone is None and dist.is_initialized() and self._strategy.world_size > 1:
            self._clone = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
            self._clone.set_timeout(_STORE_PATIENCE)
        return self._clone

    def _post(self, note: Note) -> None:
        with suppress(RuntimeError):  # a store that is gone must not hide the error that it went with
            if self._store is not None:
                self._store.set(f"{self._name}/{self._strategy.global_rank}", note.to_json())

    def _notes(self, grace: float) -> dict[int, Note | None]:
        """The notes of the other ranks, once all of them wait or have failed, or the time is up."""
        notes: dict[int, Note | None] = {
            rank: None for rank in range(self._strategy.world_size) if rank != self._strategy.global_rank
        }
        deadline = time.monotonic() + grace
        unsettled = list(notes)
        with suppress(RuntimeError):
            while unsettled:
                notes.update((rank, self._read(rank)) for rank in unsettled)
                unsettled = [rank for rank, note in notes.items() if note is None or note.state == "in"]
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        return notes

    def _read(self, rank: int) -> Note | None:
        key = f"{self._name}/{rank}"
        if self._store is None or not self._store.check([key]):
            return None
        return Note(**json.loads(self._store.get(key)))


class NCCLMonitor:
    """A thread that says why, before torch ends the process for an NCCL collective that does not finish.

    It looks only at how far groups are, until one has not moved for almost the shortest timeout there is: long phases
    are no concern of it. Shortly before a collective's timeout it prints the text of ``CollectiveTimeoutError``. Where
    torch has not ended the process at 1.5 times the timeout, it does, with exit code 1 (never under
    ``TORCH_NCCL_ASYNC_ERROR_HANDLING=0``).

    Args:
        board: The phases.
        period: Seconds between looks.
        end: Ends the process.
    """

    def __init__(self, board: PhaseBoard, period: float = 1.0, end: Callable[[int], Any] = os._exit) -> None:
        self._board, self._period, self._end = board, period, end
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lightning_verl NCCL monitor", daemon=True)

    def start(self) -> None:
        """Begin to watch, until ``stop`` or the end of the process."""
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()
        self._thread.join()
        atexit.unregister(self.stop)

    def _run(self) -> None:
        seen: dict[str, tuple[int, float]] = {}
        while not self._stopped.wait(self._period):
            now = time.monotonic()
            seen = {
                group: seen[group] if group in seen and seen[group][0] == done else (done, now)
                for group, done in recorder.backlog().items()
            }
            if not seen:
                continue
            if self._board.alarmed():
                self._board.report(recorder.last_collective(nccl=True))
            limit = _shortest_timeout()
            if now - min(since for _, since in seen.values()) >= limit - _lead(limit) - self._period:
                self._look()

    def _look(self) -> None:
        late = [c for c in recorder.pending_collectives() if c.age >= c.timeout - _lead(c.timeout)]
        if not late:
            return
        first = late[0]
        failure = f"a collective has not finished after {first.age:.0f} of the {first.timeout:g} s that it may take"
        text = self._board.explain(failure, first, _lead(first.timeout) / 2)
        if not _still_pending(first):
            return  # it came at the last moment
        print(f"CollectiveTimeoutError: {text}", file=sys.stderr, flush=True)
        self._stopped.wait(max(1.5 * first.timeout - first.age - _lead(first.timeout) / 2, 0.0))
        off = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0"
        if _still_pending(first) and not off and not self._stopped.is_set():
            self._end(1)


def _lead(timeout: float) -> float:
    """Seconds before the timeout at which the monitor speaks: torch may end the process right at it."""
    return min(timeout / 4, 5.0)


def _still_pending(collective: Collective) -> bool:
    same = (collective.group, collective.name, collective.number)
    return any((c.group, c.name, c.number) == same for c in recorder.pending_collectives())


def _shortest_timeout() -> float:
    """Seconds; of all groups of this process."""
    cuda = torch.device("cuda")
    groups = [group for group, (backend, _) in dist.distributed_c10d._world.pg_map.items() if "nccl" in backend]
    return min((group._get_backend(cuda).options._timeout.total_seconds() for group in groups), default=0.0)
