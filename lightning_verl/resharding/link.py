"""Measures what the links between ranks can do, as the limit for what a resharding makes of them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from lightning_verl.resharding.buckets import Bucket

_EXCHANGES = 4
"""Exchanges that are timed together, so that starting and awaiting them weighs little."""


def measure_link(buckets: Sequence[Bucket], group: dist.ProcessGroup, device: torch.device) -> float | None:
    """The rate of a bare exchange between the ranks that exchange these buckets (a collective call of the group).

    Plain memory goes the ways that the buckets go: to each rank its mean over the buckets.

    Args:
        buckets: As many on each rank of the group.
        group: All ranks that take part.
        device: Of the memory.

    Returns:
        Bytes a second that arrive at this rank; None where nothing does.
    """
    # All ranks make the communicator together; in the exchanges some may have nothing to do.
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    sent: dict[int, int] = {}
    received: dict[int, int] = {}
    for bucket in buckets:
        for load, messages in ((sent, bucket.sends), (received, bucket.receives)):
            for message in messages:
                load[message.peer] = load.get(message.peer, 0) + message.elements * bucket.dtype.itemsize
    operations = []
    for action, load in ((dist.isend, sent), (dist.irecv, received)):
        for peer, nbytes in load.items():
            room = torch.empty(-(-nbytes // len(buckets)), dtype=torch.uint8, device=device)
            operations.append(dist.P2POp(action, room, peer, group))
    if not operations:
        return None
    _seconds(operations, device)  # the first time links are set up
    arrived = sum(-(-nbytes // len(buckets)) for nbytes in received.values())
    seconds = _seconds(operations, device)  # a rank that only sends takes part too
    return _EXCHANGES * arrived / seconds if arrived else None


def _seconds(operations: list[dist.P2POp], device: torch.device) -> float:
    _synchronize(device)
    started = time.perf_counter()
    for _ in range(_EXCHANGES):
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    _synchronize(device)
    return time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
