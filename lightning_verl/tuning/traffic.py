"""Bytes that collectives bring to a rank, from torch's flight recorder, and how fast a plain one is."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from lightning_verl.models.compat import all_gather_flat
from lightning_verl.strategies import recorder

RECORDER_SIZE = 2**16
"""Collectives that the recorder must hold: more than one step has."""
_ELEMENT_BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "BFloat16": 2, "Half": 2, "Short": 2}
"""By torch's names of dtypes; all others have one byte."""
_GATHERED_BYTES = {"cuda": 2**28, "cpu": 2**22}
"""What the plain collective gathers, by device."""
_ROUNDS = 4
"""Collectives that are timed together."""


class TrafficMeter:
    """Counts the bytes that collectives bring to this rank, from one reading to the next.

    What collectives inside of a CUDA graph bring is not seen: the recorder knows of their capture alone.
    """

    def __init__(self) -> None:
        self._seen = -1

    def read(self) -> int | None:
        """Bytes since the last reading; those of the whole process the first time.

        0 without a process group; None where the recorder no longer holds all of them.
        """
        if not dist.is_initialized():
            return 0
        entries = recorder.recorded(nccl=dist.get_backend() == "nccl")
        new = [entry for entry in entries if int(entry["record_id"]) > self._seen]
        lost = bool(new) and int(new[0]["record_id"]) != self._seen + 1
        self._seen = max((int(entry["record_id"]) for entry in entries), default=self._seen)
        if lost:
            return None
        return sum(received_bytes(entry, size) for entry, size in zip(new, _group_sizes(new), strict=True))


def received_bytes(entry: Mapping[str, Any], ranks: int) -> int:
    """What one collective brings to a rank, by the ring that moves least.

    All-gather: n - 1 of the n parts of its output. Reduce-scatter: as much of its input. All-reduce: both. All-to-all:
    what comes from the others. Broadcast and receive: the output.

    Args:
        entry: Of the recorder.
        ranks: n, those of its group.
    """
    name = entry["profiling_name"].partition(":")[2].lower()
    given = _nbytes(entry["input_sizes"], entry["input_dtypes"])
    got = _nbytes(entry["output_sizes"], entry["output_dtypes"])
    if name.startswith(("send", "barrier")):
        return 0
    if name.startswith(("recv", "broadcast")):
        return got
    moved = 2 * got if name.startswith(("all_reduce", "allreduce")) else given if "reduce_scatter" in name else got
    return moved * (ranks - 1) // ranks


def _nbytes(sizes: Iterable[Iterable[int]], dtypes: Iterable[str]) -> int:
    return sum(math.prod(size) * _ELEMENT_BYTES.get(dtype, 1) for size, dtype in zip(sizes, dtypes, strict=False))


def _group_sizes(entries: Iterable[Mapping[str, Any]]) -> list[int]:
    """Ranks of the group of each entry; 1 where the group is gone."""
    names = dist.distributed_c10d._world.pg_names
    sizes = {name: group.size() for group, name in names.items()}
    return [sizes.get(entry["process_group"][0], 1) for entry in entries]


def collective_bandwidth(device: torch.device) -> float | None:
    """Bytes a second that all-gathers over all ranks bring to this one (a collective call); None on one rank.

    Args:
        device: Of this rank.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks == 1:
        return None
    part = torch.zeros(_GATHERED_BYTES[device.type] // ranks, dtype=torch.uint8, device=device)
    whole = part.new_empty(part.numel() * ranks)
    for rounds in (1, _ROUNDS):  # the first time makes the communicator, and ranks meet in it
        _synchronize(device)
        started = time.perf_counter()
        for _ in range(rounds):
            all_gather_flat(whole, part)
        _synchronize(device)
    return _ROUNDS * part.numel() * (ranks - 1) / (time.perf_counter() - started)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
