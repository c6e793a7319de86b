"""Tests of the runner: order, time limits, stuck threads, and what is left behind."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_verl.rewards import pool
from lightning_verl.rewards.pool import THREAD_PREFIX, Call, Outcome, run_calls


def alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(THREAD_PREFIX)]


class Sink(logging.Handler):
    """A handler that takes its lock and drops the message."""

    def emit(self, record: logging.LogRecord) -> None:
        pass


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "waited 10 s in vain"
        time.sleep(0.01)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What stuck calls wait for, up to 30 s; opened at the end so that no thread outlives the test."""
    event = threading.Event()
    yield event
    event.set()
    wait_until(lambda: not alive())


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_outcomes_come_in_the_order_of_the_calls(workers: int) -> None:
    delays = [0.05, 0.0, 0.02, 0.0]
    calls = [Call(lambda i=i: time.sleep(delays[i]) or i) for i in range(4)]
    assert run_calls(calls, workers=workers) == [Outcome(value=i) for i in range(4)]
    assert alive() == []


@pytest.mark.parametrize("workers", [0, 2])
def test_no_calls_give_no_outcomes(workers: int) -> None:
    assert run_calls([], workers=workers) == []


def test_calls_run_in_this_thread_without_workers_and_in_others_with() -> None:
    here = threading.get_ident()
    assert run_calls([Call(threading.get_ident)], workers=0) == [Outcome(value=here)]
    calls = [Call(lambda: (threading.get_ident(), threading.current_thread().name))] * 5
    results = [outcome.value for outcome in run_calls(calls, workers=2)]
    assert here not in {ident for ident, _ in results}
    assert all(name.startswith(THREAD_PREFIX) for _, name in results)


def test_as_many_calls_run_at_once_as_there_are_workers() -> None:
    barrier = threading.Barrier(3, timeout=10)  # breaks unless three calls are in it together
    outcomes = run_calls([Call(barrier.wait)] * 3, workers=3)
    assert sorted(outcome.value for outcome in outcomes) == [0, 1, 2]


def test_a_stuck_call_runs_out_of_time_and_the_others_do_not(gate: threading.Event) -> None:
    calls = [Call(lambda: 1, 5.0), Call(lambda: gate.wait(30), 0.2), Call(lambda: 2, 5.0)]
    assert run_calls(calls, workers=1) == [Outcome(value=1), Outcome(timed_out=True), Outcome(value=2)]


def test_more_stuck_calls_than_workers_do_not_block_the_rest(gate: threading.Event) -> None:
    calls = [Call(lambda: gate.wait(30), 0.1)] * 5 + [Call(lambda: 7, 5.0)]
    assert run_calls(calls, workers=2) == [Outcome(timed_out=True)] * 5 + [Outcome(value=7)]
    assert len(alive()) == 5  # each still waits at the gate; the idle ones have gone


def test_an_endless_python_loop_is_ended() -> None:
    def spin() -> None:
        while True:
            with contextlib.suppress(Exception):  # what many scorers do; it must not keep the loop alive
                sum(range(10))

    assert run_calls([Call(spin, 0.1)], workers=1) == [Outcome(timed_out=True)]
    wait_until(lambda: not alive())


def test_the_limit_works_off_the_main_thread(gate: threading.Event) -> None:
    outcomes: list[Outcome] = []
    runner = threading.Thread(
        target=lambda: outcomes.extend(run_calls([Call(lambda: gate.wait(30), 0.1)], workers=1)), daemon=True
    )
    runner.start()
    runner.join(timeout=10)
    assert outcomes == [Outcome(timed_out=True)]


def test_the_limit_counts_from_the_start_of_a_call_and_not_from_its_submission() -> None:
    # Four calls of 0.1 s after one another take 0.4 s, beyond the limit of 0.3 s that each keeps.
    outcomes = run_calls([Call(lambda: time.sleep(0.1), 0.3)] * 4, workers=1)
    assert outcomes == [Outcome()] * 4


@pytest.mark.parametrize("workers", [0, 1])
def test_an_exception_is_an_outcome(workers: int) -> None:
    error = KeyError("x")

    def fail() -> None:
        raise error

    assert run_calls([Call(fail), Call(lambda: 1)], workers=workers) == [Outcome(error=error), Outcome(value=1)]


@pytest.mark.parametrize("workers", [0, 1])
def test_no_call_starts_after_an_error_when_asked(workers: int) -> None:
    ran: list[int] = []
    calls = [Call(lambda: ran.append(0)), Call(lambda: 1 / 0), Call(lambda: ran.append(2))]
    outcomes = run_calls(calls, workers=workers, stop_on_error=True)
    assert len(outcomes) == 2
    assert isinstance(outcomes[1].error, ZeroDivisionError)
    assert ran == [0]


@pytest.mark.parametrize("workers", [0, 2])
def test_system_exit_in_a_call_reaches_the_caller(workers: int) -> None:
    with pytest.raises(SystemExit, match="3"):
        run_calls([Call(lambda: sys.exit(3)), Call(lambda: 1)], workers=workers)
    wait_until(lambda: not alive())


def test_a_stuck_call_does_not_keep_the_interpreter_alive() -> None:
    # The module alone: to import the package takes longer than everything else here.
    script = (
        f"import sys, time; sys.path.insert(0, {str(Path(pool.__file__).parent)!r}); from pool import Call, run_calls;"
        "print(run_calls([Call(lambda: time.sleep(60), 0.1)], workers=1)[0].timed_out)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=40)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "True", "")


def test_a_lock_of_logging_is_never_left_taken() -> None:
    # A loop that is inside logging nearly all the time; an exception at an arbitrary bytecode would soon leave the lock
    # of a handler taken, and the last line would wait for it for ever.
    stop = threading.Event()
    logger = logging.getLogger("chatter")
    logger.propagate = False
    handler = Sink()
    logger.addHandler(handler)

    def chatter() -> None:
        while not stop.is_set():
            logger.warning("still at it")

    outcomes = run_calls([Call(chatter, 0.02)] * 20, workers=4)
    assert outcomes == [Outcome(timed_out=True)] * 20
    stop.set()
    wait_until(lambda: not alive())
    assert handler.lock is not None
    assert handler.lock.acquire(timeout=5)
    handler.lock.release()
    logger.removeHandler(handler)
