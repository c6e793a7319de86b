"""Moves rows between the layouts of two roles, and lets ranks wait for each other without a collective."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from lightning_verl.data.experience import RowBatch, concat_rows
from lightning_verl.data.sharding import split
from lightning_verl.models.compat import all_gather_flat
from lightning_verl.strategies.diagnosis import is_collective_failure
from lightning_verl.strategies.hybrid import HybridStrategy
from lightning_verl.strategies.layout import RoleLayout

T = TypeVar("T")
TBatch = TypeVar("TBatch", bound=RowBatch)


_GATES = itertools.count()


class AgreedError(RuntimeError):
    """An error that every rank raises together, so that all of them may still act in common (save, say)."""


class RowExchange:
    """Takes rows from the data ranks of one role to those of another.

    The rows of all source ranks, in their order, are cut evenly over the target's data ranks. Where both roles lie on
    the same data ranks nothing moves.

    Args:
        strategy: Knows the layouts.
    """

    def __init__(self, strategy: HybridStrategy) -> None:
        self._strategy = strategy

    def there(self, rows: TBatch, source: str, target: str) -> tuple[TBatch, list[int]]:
        """Move rows to the target's data ranks (a collective call unless nothing moves).

        Args:
            rows: This rank's rows in the source's layout.
            source: The role whose layout they lie in.
            target: The role that wants them.

        Returns:
            This rank's rows in the target's layout, and how many each source rank had (for ``back``).
        """
        if self._same(source, target):
            return rows, []
        parts = self._gather(rows, self._strategy.layout(source))
        counts = [len(part) for part in parts]
        wanted = split(sum(counts), self._strategy.layout(target).data_size, self._strategy.data_rank(target))
        return concat_rows(parts).select(list(wanted)).to(self._strategy.root_device), counts

    def back(self, rows: TBatch, counts: Sequence[int], source: str, target: str) -> TBatch:
        """Bring results, one for each row that ``there`` gave, back to where the rows came from."""
        if self._same(source, target):
            return rows
        whole = concat_rows(self._gather(rows, self._strategy.layout(target)))
        own = self._strategy.data_rank(source)
        start = sum(counts[:own])
        return whole.select(list(range(start, start + counts[own]))).to(self._strategy.root_device)

    def _same(self, source: str, target: str) -> bool:
        a, b = self._strategy.layout(source), self._strategy.layout(target)
        return (a.ranks, a.data_size, a.tensor) == (b.ranks, b.data_size, b.tensor)

    def _gather(self, rows: TBatch, layout: RoleLayout) -> list[TBatch]:
        """The rows of every data rank of a layout, on every rank."""
        gathered: list[TBatch | None] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, rows.to("cpu"))
        speakers = [line[0] for line in layout.lines("tensor")]
        return [part for rank in speakers if (part := gathered[rank]) is not None]


def share_from_first_tensor_rank(result: T | None, strategy: HybridStrategy, role: str) -> T:
    """Give every tensor rank of a data coordinate what its first one computed (a collective call of the tensor axis).

    Args:
        result: What was computed; only the first rank's matters.
        strategy: Knows the layouts.
        role: The role whose tensor axis is meant.
    """
    group = strategy.group(role, "tensor")
    box = [result]
    if group is not None and group.size() > 1:
        first = dist.get_process_group_ranks(group)[0]
        dist.broadcast_object_list(box, src=first, group=group, device=strategy.root_device)
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
