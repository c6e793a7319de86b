"""Runs many calls, each with its own time limit, in this thread or in a few daemon threads.

Threads rather than processes: reward functions are often lambdas, closures or methods of live objects, which cannot be
sent to another process. Daemon threads of our own rather than ``concurrent.futures``, whose threads are joined when the
interpreter exits, so that one stuck call would keep the program alive.

The limit is kept from the thread that waits, so it works on any thread, unlike ``signal.alarm``. A thread whose call
ran out of time is given up and replaced, and asked to end by an exception raised inside it: an endless Python loop ends
at its next bytecode, where it would otherwise slow down every operation of the trainer for the rest of the run; a
blocking C call (``time.sleep``, a socket) ends when it returns. No exception is raised in the midst of an import or of
Python's own lock handling, for it could leave a lock taken; such a thread goes on in the background.

One thing no thread can interrupt: C code that keeps the interpreter lock, for instance a regular expression that
backtracks without end. The whole process waits for it; call such code in a subprocess.
"""

from __future__ import annotations

import ctypes
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

THREAD_PREFIX = "lightning-verl-reward"
"""How the name of every thread that this module starts begins."""

_LOCKING_MODULES = frozenset({"_frozen_importlib", "importlib", "logging", "queue", "threading"})
"""Modules that take a lock in one bytecode and see to its release in a later one: an exception in between leaves it
taken, and with logging's lock the whole process stops at its next message."""
_INTERRUPT_TRIES = 5
"""How often a thread found in one of these modules is looked at again, 1 ms later each time."""


class CallInterrupted(BaseException):
    """Raised inside a call that ran out of time; no ``Exception``, so that a scorer's own handlers let it pass."""


@dataclass(frozen=True)
class Call:
    """One thing to run."""

    run: Callable[[], Any]
    """What to call."""
    time_limit: float = math.inf
    """Seconds from the moment a thread takes it up; only kept with ``workers > 0``."""


@dataclass(frozen=True)
class Outcome:
    """How a call ended."""

    value: Any = None
    """What it returned."""
    error: BaseException | None = None
    """What it raised, or None."""
    timed_out: bool = False
    """Whether its time limit passed first."""


class CallQueue:
    """Calls that may still come while others run, see ``run_queue``. ``add`` and ``close`` are for one other thread."""

    def __init__(self, calls: Sequence[Call] = ()) -> None:
        self.calls = list(calls)
        self.closed = False
        self.events: SimpleQueue[tuple[_Worker, Outcome] | None] = SimpleQueue()
        """What the thread that keeps the books waits for: outcomes, and None where there is news here."""

    def add(self, calls: Sequence[Call]) -> None:
        """Let calls run behind those that came before."""
        self.calls.extend(calls)
        self.events.put(None)

    def close(self) -> None:
        """No further call will come."""
        self.closed = True
        self.events.put(None)


def run_calls(calls: Sequence[Call], *, workers: int, stop_on_error: bool = False) -> list[Outcome]:
    """Run every call and return the outcomes in the order of the calls.

    No thread outlives this function, except those whose call is stuck beyond its limit.

    Args:
        calls: What to run.
        workers: Threads to run them in; 0 runs them one after another in this thread, without any limit.
        stop_on_error: Start no further call once one has raised.

    Returns:
        One outcome a call. Calls start in order; those that ``stop_on_error`` held back are missing at the end.

    Raises:
        BaseException: What a call raised, if it is no ``Exception`` (``SystemExit`` for example), as it is.
    """
    if workers > 0:
        queue = CallQueue(calls)
        queue.closed = True
        return run_queue(queue, min(workers, len(calls)), stop_on_error)
    outcomes = []
    for call in calls:
        outcomes.append(run_here(call))
        if stop_on_error and outcomes[-1].error is not None:
            break
    return outcomes


def run_here(call: Call) -> Outcome:
    """Run a call in this thread, without any limit.

    Raises:
        BaseException: What it raised, if it is no ``Exception``.
    """
    outcome = _attempt(call.run)
    _raise_unless_exception(outcome)
    return outcome


def run_queue(queue: CallQueue, workers: int, stop_on_error: bool) -> list[Outcome]:
    """Run the calls of a queue in threads until it is closed and all have ended; see ``run_calls``.

    Args:
        queue: The calls.
        workers: Threads, at least 1 if a call comes.
        stop_on_error: Start no further call once one has raised.
    """
    # All bookkeeping happens in this thread. The workers share nothing but queues written in C, which stay whole when
    # an exception is raised inside a worker at an arbitrary bytecode; a lock could be left taken.
    outcomes: dict[int, Outcome] = {}
    started, stopped = 0, False
    idle = [_Worker(queue.events) for _ in range(workers)]
    running: dict[_Worker, tuple[int, float]] = {}  # call number, deadline
    try:
        while True:
            closed = queue.closed  # before the look at the calls: what comes before it is closed is seen
            while started < len(queue.calls) and idle and not stopped:
                worker, call = idle.pop(), queue.calls[started]
                running[worker] = (started, time.monotonic() + call.time_limit)
                worker.inbox.put(call.run)
                started += 1
            if not running and (closed or stopped):
                break
            for worker, outcome in _collect(queue.events, min((end for _, end in running.values()), default=math.inf)):
                if worker not in running:
                    continue  # given up before, and late
                index, _ = running.pop(worker)
                idle.append(worker)
                _raise_unless_exception(outcome)
                outcomes[index] = outcome
                stopped = stopped or (stop_on_error and outcome.error is not None)
            now = time.monotonic()
            for worker in [worker for worker, (_, deadline) in running.items() if deadline <= now]:
                index, _ = running.pop(worker)
                outcomes[index] = Outcome(timed_out=True)
                worker.give_up()
                idle.append(_Worker(queue.events))
    finally:
        for worker in running:  # only when leaving by an exception
            worker.give_up()
        for worker in idle:
            worker.close()
    return [outcomes[index] for index in sorted(outcomes)]


class _Worker:
    """A daemon thread that takes one call at a time from its inbox."""

    def __init__(self, done: SimpleQueue[tuple[_Worker, Outcome] | None]) -> None:
        self.inbox: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._done = done
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.name = f"{THREAD_PREFIX}-{self._thread.name}"
        self._thread.start()

    def close(self) -> None:
        """End the idle thread and wait for it."""
        self.inbox.put(None)
        self._thread.join()

    def give_up(self) -> None:
        """Leave the busy thread to itself, and ask it to end as soon as it can."""
        for _ in range(_INTERRUPT_TRIES):
            if _interrupt(self._thread.ident or 0):
                break
            time.sleep(0.001)
        # Only now: until it has the None the thread lives on, so its id cannot have passed to another thread.
        self.inbox.put(None)

    def _work(self) -> None:
        try:
            while (run := self.inbox.get()) is not None:
                self._done.put((self, _attempt(run)))
        except CallInterrupted:
            return  # given up: nobody waits for the outcome


def _interrupt(ident: int) -> bool:
    """Raise `CallInterrupted` in the call that a thread is in, unless a lock could be left taken there.

    The exception is raised at the very bytecode that is looked at here, because this thread holds the interpreter lock
    from the look to the order.
    """
    frame = sys._current_frames().get(ident)
    while frame is not None and frame.f_code is not _attempt.__code__:
        if frame.f_globals.get("__name__", "").partition(".")[0] in _LOCKING_MODULES:
            return False
        frame = frame.f_back
    if frame is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(CallInterrupted))
    return True


def _attempt(run: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(value=run())
    except CallInterrupted:
        raise
    except BaseException as error:  # it must reach the thread that waits, whatever it is
        return Outcome(error=error)


def _raise_unless_exception(outcome: Outcome) -> None:
    if outcome.error is not None and not isinstance(outcome.error, Exception):
        raise outcome.error


def _collect(events: SimpleQueue[tuple[_Worker, Outcome] | None], deadline: float) -> list[tuple[_Worker, Outcome]]:
    """Wait for news until the deadline, then take all that are there: a call that ended in time is never late."""
    timeout = None if math.isinf(deadline) else max(0.0, deadline - time.monotonic())
    collected = []
    try:
        collected.append(events.get(timeout=timeout))
        while True:
            collected.append(events.get_nowait())
    except Empty:
        return [event for event in collected if event is not None]
