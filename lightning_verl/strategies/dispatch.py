"""Moves rows between the layouts of two roles, and lets ranks wait for each other without a collective."""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from lightning_verl.data.experience import RowBatch, concat_rows
from lightning_verl.data.packing import RowSize
from lightning_verl.models.compat import all_gather_flat
from lightning_verl.strategies.diagnosis import is_collective_failure
from lightning_verl.strategies.hybrid import HybridStrategy
from lightning_verl.strategies.layout import RoleLayout
from lightning_verl.strategies.rows import Placement, incoming, outgoing, place_rows

T = TypeVar("T")
TBatch = TypeVar("TBatch", bound=RowBatch)


_GATES = itertools.count()


class AgreedError(RuntimeError):
    """An error that every rank raises together, so that all of them may still act in common (save, say)."""


Receipt = tuple[Placement, Placement] | None
"""What ``RowExchange.back`` needs of ``there``: where the rows were and where they went; None if nothing moved."""


class RowExchange:
    """Takes rows from the actor's data ranks to those of another role, or of the rollout, and results back.

    Rows are spread evenly by what they cost (``rows.place_rows``). A rank gets the rows that it needs and no others;
    one that holds a row already takes it from itself. The ranks of the two roles take part; the others only pass by.
    Everything goes over the group of the role's operation ``rows`` (the actor's, for the rollout), which is made at the
    role's set-up.

    Every rank of the world makes the same calls in the same order.

    Args:
        strategy: Knows the layouts and the groups.
    """

    def __init__(self, strategy: HybridStrategy) -> None:
        self._strategy = strategy

    def there(self, rows: TBatch, target: str, *, balance: bool = False) -> tuple[TBatch, Receipt]:
        """Move rows to the target's data ranks (a collective call of both roles).

        Where both roles lie alike, rows stay and no rank waits for another, unless ``balance`` is set and there are
        several data ranks.

        Args:
            rows: This rank's rows in the actor's layout, with ``sizes``; none on ranks without the actor.
            target: The role that wants them, or ``"rollout"``.
            balance: Whether rows also move between the data ranks of roles that lie alike, where some have much more
                than others (``rows.WORTH_MOVING``).

        Returns:
            This rank's rows in the target's layout (none on ranks without it), in the order of the actor's ranks, and
            what ``back`` needs.
        """
        held, wanted = self._strategy.layout("actor"), self._strategy.layout(target)
        if held.lies_like(wanted) and not balance:
            return rows, None
        group = self._group(target)
        if group is None:
            return rows if held.lies_like(wanted) else rows.select([]), None
        receipt = place_rows(self._sizes(rows, held, group), held, wanted)
        if held.lies_like(wanted) and receipt[0].shares == receipt[1].shares:
            return rows, None
        return self._move(rows, *receipt, group), receipt

    def back(self, rows: TBatch, receipt: Receipt, target: str) -> TBatch:
        """Bring results of the rows that ``there`` gave back to where the rows came from (collective if they moved).

        Args:
            rows: One result for every row, in the rows' order.
            receipt: What ``there`` gave.
            target: The role that worked on them.

        Returns:
            The results of this rank's own rows, in their order; none on ranks without the actor.
        """
        group = self._group(target)
        if group is None or receipt is None:
            return rows if self._strategy.layout("actor").lies_like(self._strategy.layout(target)) else rows.select([])
        held, wanted = receipt
        return self._move(rows, wanted, held, group)

    def _group(self, target: str) -> dist.ProcessGroup | None:
        """The ranks of actor and target; None where rows have one place only and on ranks of neither."""
        actor = self._strategy.layout("actor")
        if actor.lies_like(self._strategy.layout(target)) and actor.data_size == 1:
            return None
        return self._strategy.group("actor" if target == "rollout" else target, "rows")

    def _sizes(self, rows: RowBatch, layout: RoleLayout, group: dist.ProcessGroup) -> list[list[RowSize]]:
        """What each row costs on every data rank of a layout, with numbers of groups that are one rank's only."""
        own = rows.sizes() if layout.holds(self._strategy.global_rank) else []
        counts = gather_counts([len(own)], group)[:, 0].tolist()
        numbers = [number for row in own for number in (row.prompt, row.response, row.group)]
        padded = gather_counts([*numbers, *[0] * (3 * max(counts) - len(numbers))], group).view(group.size(), -1, 3)
        padded[..., 2] += torch.arange(group.size())[:, None] * max(counts)
        of_rank = {
            rank: [RowSize(*row) for row in padded[place, : counts[place]].tolist()]
            for place, rank in enumerate(dist.get_process_group_ranks(group))
        }
        return [of_rank[rank] for rank in layout.speakers]

    def _move(self, rows: TBatch, held: Placement, wanted: Placement, group: dist.ProcessGroup) -> TBatch:
        """Exchange rows between ranks; each gets its rows in the order in which it wants them."""
        rank, device = self._strategy.global_rank, self._strategy.root_device
        sent = {receiver: rows.select(places) for receiver, places in outgoing(held, wanted, rank).items()}
        own = sent.pop(rank, None)
        taken = incoming(held, wanted, rank)
        parts: dict[int, TBatch] = exchange_objects({peer: part.to("cpu") for peer, part in sent.items()}, group)
        if own is not None:
            parts[rank] = own
        if not taken:
            return rows.select([])
        whole = concat_rows([parts[sender].to(device) for sender in taken])
        place = {row: number for number, row in enumerate(itertools.chain.from_iterable(taken.values()))}
        return whole.select([place[row] for row in wanted.rows(rank)])


def exchange_objects(outgoing: Mapping[int, Any], group: dist.ProcessGroup) -> dict[int, Any]:
    """Give each rank of a group an object of its own (a collective call): bytes go from sender to receiver only.

    Args:
        outgoing: What to send, by world rank; picklable.
        group: The group.

    Returns:
        What arrived, by world rank.
    """
    on_cuda = dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    ranks = dist.get_process_group_ranks(group)
    texts = [pickle.dumps(outgoing[rank]) if rank in outgoing else b"" for rank in ranks]
    sizes = torch.tensor([len(text) for text in texts], device=device)
    coming = torch.empty_like(sizes)
    dist.all_to_all_single(coming, sizes, group=group)
    content = torch.from_numpy(np.frombuffer(bytearray(b"".join(texts)), dtype=np.uint8)).to(device)
    arrived = content.new_empty(int(coming.sum()))
    dist.all_to_all_single(arrived, content, coming.tolist(), sizes.tolist(), group=group)
    parts = arrived.cpu().split(coming.tolist())
    # pickle runs what it is told to: these bytes are those of our own ranks, as in torch's object collectives.
    return {rank: pickle.loads(part.numpy()) for rank, part in zip(ranks, parts, strict=True) if len(part)}  # noqa: S301


def share_from_speaker(result: T | None, strategy: HybridStrategy, role: str) -> T:
    """Give every rank of a data coordinate what the one that speaks computed (a collective call of the role's ranks).

    Args:
        result: What was computed; only that of the rank that speaks matters.
        strategy: Knows the layouts.
        role: The role whose tensor and pipeline axes are meant; this rank has a part of it.
    """
    box = [result]
    for operation, place in (("tensor", 0), ("pipeline", -1)):
        group = strategy.group(role, operation)
        if group is not None and group.size() > 1:
            source = dist.get_process_group_ranks(group)[place]
            dist.broadcast_object_list(box, src=source, group=group, device=strategy.root_device)
    return box[0]  # type: ignore[return-value]


class Gate:
    """A place where ranks wait for each other outside of any collective, and learn whether one of them failed.

    Work on the host (rewards) may take far longer than a collective may wait, and may fail on one rank alone.

    Args:
        strategy: Knows the ranks.
        timeout: Longest wait for the slowest rank.
    """

    def __init__(self, strategy: HybridStrategy, timeout: timedelta = timedelta(hours=2)) -> None:
        self._strategy = strategy
        self._timeout = timeout
        # Gates are made in the same order on every rank; two of them must not meet in the store.
        self._name = f"lightning_verl/gate{next(_GATES)}"
        self._passed = 0

    def meet(self, phase: str, error: BaseException | None) -> float:
        """Wait for every rank.

        Args:
            phase: What the ranks were doing, for messages.
            error: What went wrong on this rank.

        Returns:
            Seconds that this rank waited.

        Raises:
            AgreedError: A rank failed, on every rank, chained from the own error where there is one.
            RuntimeError: ``error`` itself, at once, where a collective failed: its missing ranks may never come here.
            TimeoutError: A rank did not come in time.
        """
        if error is not None and is_collective_failure(error):
            raise error
        started = time.perf_counter()
        problems = {0: _text(error)} if self._strategy.world_size == 1 else self._exchange(phase, _text(error))
        failed = {rank: text for rank, text in problems.items() if text}
        if failed:
            rank, text = next(iter(failed.items()))
            raise AgreedError(f"{phase} failed on rank {rank}: {text}") from error
        return time.perf_counter() - started

    def _exchange(self, phase: str, text: str) -> dict[int, str]:
        store = dist.distributed_c10d._get_default_store()
        own, ranks = self._strategy.global_rank, range(self._strategy.world_size)
        self._passed += 1
        keys = {rank: f"{self._name}/{self._passed}/{rank}" for rank in ranks}
        store.set(keys[own], text)
        try:
            store.wait(list(keys.values()), self._timeout)
        except dist.DistStoreError as failure:
            late = [rank for rank, key in keys.items() if not store.check([key])]
            raise TimeoutError(
                f"{phase}: ranks {late} did not finish within {self._timeout}. Give slow reward functions a time_limit."
            ) from failure
        # Everybody is here, so nobody still reads what was left at the gate before.
        store.delete_key(f"{self._name}/{self._passed - 1}/{own}")
        return {rank: store.get(key).decode() for rank, key in keys.items()}


def _text(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def gather_counts(values: list[int], group: dist.ProcessGroup | None) -> torch.Tensor:
    """Whole numbers of every rank of a group, int64 ``[ranks, values]`` on the CPU; one row without a group."""
    if group is None:
        return torch.tensor([values])
    on_cuda = dist.get_backend(group) == "nccl"
    own = torch.tensor(values, device=torch.device("cuda", torch.cuda.current_device()) if on_cuda else "cpu")
    gathered = own.new_empty(group.size() * len(values))
    all_gather_flat(gathered, own, group)
    return gathered.view(group.size(), -1).cpu()
