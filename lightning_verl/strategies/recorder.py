"""What torch's flight recorder knows: the collectives of this process, and how far each group is."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Collective:
    """One collective that this process issued."""

    name: str
    """Backend and operation, such as ``"gloo:all_reduce"``."""
    group: str
    """torch's name of the process group."""
    purpose: str
    """The group's description, such as ``"critic/reduce:[0, 1]"``."""
    number: int
    """It is the group's how-manieth, from 1; exchanges between pairs of ranks are counted apart."""
    age: float
    """Seconds since it was issued."""
    timeout: float
    """Seconds that it may take."""

    def __str__(self) -> str:
        return f"{self.name}, number {self.number} of group {self.purpose!r}"

    def ranks(self) -> list[int]:
        """World ranks of its group; none where the group is gone."""
        groups = dist.distributed_c10d._world.pg_names
        return next((dist.get_process_group_ranks(group) for group, name in groups.items() if name == self.group), [])


def last_collective(nccl: bool) -> Collective | None:
    """The collective that was issued last; None where nothing is recorded (``TORCH_FR_BUFFER_SIZE=0``)."""
    return min(_collectives(_dump(nccl, True, False)), key=lambda collective: collective.age, default=None)


def pending_collectives() -> list[Collective]:
    """Unfinished NCCL collectives, the oldest first. Asks CUDA for events, which a graph capture does not bear."""
    return sorted(_collectives(_dump(True, True, True)), key=lambda collective: -collective.age)


def backlog() -> dict[str, int]:
    """NCCL groups with unfinished collectives, and the number of the last one that has finished; asks CUDA nothing."""
    status = _dump(True, False, False).get("pg_status", {})
    finished = {group: int(state["last_completed_collective"]) for group, state in status.items()}
    # Exchanges between pairs have lower numbers of their own, so that "other" is all that can be said.
    return {group: done for group, done in finished.items() if int(status[group]["last_enqueued_collective"]) != done}


def recorded(nccl: bool) -> list[dict[str, Any]]:
    """All entries that the recorder still holds, as it writes them, the oldest first."""
    entries: list[dict[str, Any]] = _dump(nccl, True, False).get("entries", [])
    return sorted(entries, key=lambda entry: int(entry["record_id"]))


def _dump(nccl: bool, collectives: bool, active: bool) -> dict[str, Any]:
    name = "_dump_nccl_trace_json" if nccl else "_dump_fr_trace_json"
    dump = getattr(torch._C._distributed_c10d, name, None)  # NCCL's is not in builds for the CPU
    return {} if dump is None else json.loads(dump(collectives, active))


def _collectives(trace: dict[str, Any]) -> list[Collective]:
    now = time.time_ns()
    return [
        Collective(
            name=entry["profiling_name"],
            group=entry["process_group"][0],
            purpose=entry["process_group"][1],
            number=entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"],
            age=(now - entry["time_created_ns"]) / 1e9,
            timeout=entry["timeout_ms"] / 1e3,
        )
        for entry in trace.get("entries", [])
        # The messages of an exchange never count as finished; the exchange itself is the entry behind them.
        if not entry["is_p2p"] or entry["profiling_name"] == "nccl:coalesced"
    ]
