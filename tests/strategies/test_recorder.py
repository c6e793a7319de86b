"""What is made of the flight recorder's entries."""

from __future__ import annotations

import time
from typing import Any

import pytest

from lightning_verl.strategies import recorder


def entry(name: str, number: int, is_p2p: bool, age: float) -> dict[str, Any]:
    return {
        "profiling_name": name,
        "process_group": ["7", "actor/reshard:[0, 1]"],
        "is_p2p": is_p2p,
        "collective_seq_id": 0 if is_p2p else number,
        "p2p_seq_id": number if is_p2p else 0,
        "time_created_ns": time.time_ns() - int(age * 1e9),
        "timeout_ms": 60_000,
    }


def test_an_exchange_counts_as_one_and_its_messages_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        entry("nccl:all_reduce", 4, False, 9.0),
        entry("nccl:send 0->1", 2, True, 5.0),
        entry("nccl:recv 0<-1", 2, True, 5.0),
        entry("nccl:coalesced", 2, True, 4.0),
    ]
    monkeypatch.setattr(recorder, "_dump", lambda nccl, collectives, active: {"entries": entries})
    assert [str(c) for c in recorder.pending_collectives()] == [
        "nccl:all_reduce, number 4 of group 'actor/reshard:[0, 1]'",
        "nccl:coalesced, number 2 of group 'actor/reshard:[0, 1]'",
    ]
    last = recorder.last_collective(nccl=True)
    assert last is not None
    assert (last.name, last.timeout) == ("nccl:coalesced", 60.0)
    assert 4 <= last.age < 5


@pytest.mark.parametrize(("enqueued", "completed", "waiting"), [(5, 4, True), (5, 5, False), (3, 60, True)])
def test_a_group_waits_where_the_last_operation_is_not_the_last_finished(
    monkeypatch: pytest.MonkeyPatch, enqueued: int, completed: int, waiting: bool
) -> None:
    state = {"last_enqueued_collective": str(enqueued), "last_completed_collective": str(completed)}
    monkeypatch.setattr(recorder, "_dump", lambda nccl, collectives, active: {"pg_status": {"7": state}})
    assert recorder.backlog() == ({"7": completed} if waiting else {})
