"""Moves tensors between layouts: plans become buckets of bounded size, and each bucket one exchange."""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_verl.resharding.planner import Region, TensorPlan, Transfer, local_shape, local_slices, split, volume

BUCKET_BYTES = 256 * 2**20
"""Most bytes that one bucket sends and receives on a rank, taken together."""


@dataclass(frozen=True)
class Move:
    """One tensor on its way: where to, and as what."""

    plan: TensorPlan
    """Its transfers."""
    dtype: torch.dtype
    """What it is cast to, before it travels."""
    may_alias: bool = True
    """Whether the result may be the source tensor itself, where a rank wants just what it holds in this dtype."""


@dataclass(frozen=True)
class GroupTraffic:
    """What parameters of one kind, over all layers, cost this rank."""

    name: str
    """Their name without the number of the layer."""
    wanted_bytes: int
    """What this rank wants of them."""
    received_bytes: int
    """What of that comes from other ranks; 0 where update and rollout shards agree."""


@dataclass(frozen=True)
class ReshardReport:
    """What one resharding cost on this rank."""

    seconds: float
    """From the call until the last tensor was in place; on CUDA the device was waited for."""
    received_bytes: int
    """What came from other ranks."""
    copied_bytes: int
    """What was copied or cast on this rank."""
    aliased_bytes: int
    """What needed neither: the result is the source tensor."""
    buffer_bytes: int
    """Memory of the buckets, in use only meanwhile."""
    groups: tuple[GroupTraffic, ...]
    """By kind of parameter, what travels; it is the same at every resharding."""

    @property
    def bytes_per_second(self) -> float:
        """Received bytes a second, 0 without any."""
        return self.received_bytes / self.seconds if self.received_bytes else 0.0


@dataclass(frozen=True)
class _Part:
    """A rectangle of a local tensor that is sent or received."""

    name: str
    slices: tuple[slice, ...]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Of the rectangle."""
        return tuple(part.stop - part.start for part in self.slices)

    @cached_property
    def elements(self) -> int:
        """In the rectangle."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class _Want:
    """What this rank wants of one tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] | None
    """Of its result; None where it wants nothing."""
    in_place: bool
    """Whether it holds just that already."""
    own: tuple[tuple[tuple[slice, ...], tuple[slice, ...]], ...]
    """What it copies to itself: rectangles of its source tensor and of its result."""

    @classmethod
    def of(cls, name: str, move: Move, rank: int) -> _Want:
        """Read it from a plan."""
        held, need = move.plan.held(rank), move.plan.needed(rank)
        regions = [transfer.region for transfer in move.plan.receives(rank) if transfer.source == rank]
        pairs = (zip(_rectangles(region, held), _rectangles(region, need), strict=True) for region in regions)
        shape = local_shape(need) if need else None
        return cls(
            name, move.dtype, shape, move.may_alias and held == need, tuple(itertools.chain.from_iterable(pairs))
        )


@dataclass(frozen=True)
class _Bucket:
    """One exchange, seen from this rank: what it packs, rank after rank, and what it unpacks."""

    dtype: torch.dtype
    sends: tuple[_Part, ...]
    receives: tuple[_Part, ...]
    send_sizes: tuple[int, ...]
    """Elements that go to each rank of the group."""
    receive_sizes: tuple[int, ...]
    """Elements that come from each rank of the group."""

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers."""
        return (sum(self.send_sizes) + sum(self.receive_sizes)) * self.dtype.itemsize


@dataclass(frozen=True)
class _Piece:
    """A share of one tensor's transfers: each of them is divided by ``count``, and this is number ``index``."""

    name: str
    count: int
    index: int


class Resharder:
    """Moves a set of tensors by their plans, again and again.

    Everything that does not depend on the tensors' values is derived once. Two buckets are in flight on CUDA: while
    one is exchanged, the next is packed and the one before is unpacked. The exchange is ``all_to_all_single``.

    Args:
        moves: By name. The same on every rank, in the same order.
        group: All ranks of the plans' grids; None if there is only this one.
        bucket_bytes: Most bytes that one bucket sends and receives on a rank, taken together.

    Raises:
        ValueError: ``bucket_bytes`` is not positive.
    """

    def __init__(
        self, moves: Mapping[str, Move], group: dist.ProcessGroup | None, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"Resharder got bucket_bytes={bucket_bytes}; a bucket holds at least one byte.")
        self._moves = dict(moves)
        self._group = group
        self._rank = dist.get_rank() if group is not None else 0
        ranks = dist.get_process_group_ranks(group) if group is not None else [0]
        self._buckets = [
            _bucket([(piece, self._moves[piece.name]) for piece in pieces], ranks, self._rank)
            for pieces in _fill_buckets(self._moves, bucket_bytes)
        ]
        self._wants = [_Want.of(name, move, self._rank) for name, move in self._moves.items()]
        self._kinds = tuple(_traffic(self._moves, self._rank))
        self._received = sum(group.received_bytes for group in self._kinds)

    def run(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], ReshardReport]:
        """Move tensors (a collective call).

        Args:
            tensors: This rank's parts at the source, by name; one of a grid that this rank is not in may be missing.

        Returns:
            This rank's parts at the target, by name, and what it cost.
        """
        started = time.perf_counter()
        tensors = {name: tensor if tensor.dim() else tensor.view(1) for name, tensor in tensors.items()}
        device = next(iter(tensors.values())).device if tensors else torch.device("cpu")
        results, fresh = self._allocate(tensors, device)
        size = max((bucket.nbytes for bucket in self._buckets), default=0)
        slots = [_Slot(size, device) for _ in self._buckets[:2]]
        lanes = _Lanes(device)
        for number, bucket in enumerate(self._buckets):
            slot = slots[number % 2]
            with lanes.packing(slot):
                self._exchange(bucket, tensors, slot)
            with lanes.unpacking(slot):
                _unpack(bucket, slot, results)
        _copy(
            [results[want.name][target] for want in fresh for _, target in want.own],
            [tensors[want.name][source] for want in fresh for source, _ in want.own],
        )
        lanes.join()
        report = self._report(started, results, fresh, sum(slot.buffer.nbytes for slot in slots))
        scalars = {name: results[name].view(()) for name in results if not self._moves[name].plan.shape}
        return {**results, **scalars}, report

    def _allocate(self, tensors: Mapping[str, Tensor], device: torch.device) -> tuple[dict[str, Tensor], list[_Want]]:
        """The results, and which of them are not the source tensors themselves."""
        results: dict[str, Tensor] = {}
        fresh: list[_Want] = []
        for want in self._wants:
            source = tensors.get(want.name)
            if want.in_place and source is not None and source.dtype == want.dtype:
                results[want.name] = source
            elif want.shape is not None:
                results[want.name] = torch.empty(want.shape, dtype=want.dtype, device=device)
                fresh.append(want)
        return results, fresh

    def _exchange(self, bucket: _Bucket, tensors: Mapping[str, Tensor], slot: _Slot) -> None:
        """Pack what others want and start the exchange."""
        send, receive = slot.divide(bucket)
        sources = [tensors[part.name][part.slices] for part in bucket.sends]
        _copy(_rooms(send, bucket.sends), sources)
        width = bucket.dtype.itemsize  # as bytes: not every backend knows every dtype
        slot.work = dist.all_to_all_single(
            receive.view(torch.uint8),
            send.view(torch.uint8),
            [size * width for size in bucket.receive_sizes],
            [size * width for size in bucket.send_sizes],
            group=self._group,
            async_op=True,
        )

    def _report(
        self, started: float, results: Mapping[str, Tensor], fresh: Sequence[_Want], buffers: int
    ) -> ReshardReport:
        if results and next(iter(results.values())).is_cuda:
            torch.cuda.current_stream().synchronize()
        made = sum(results[want.name].nbytes for want in fresh)
        everything = sum(result.nbytes for result in results.values())
        return ReshardReport(
            seconds=time.perf_counter() - started,
            received_bytes=self._received,
            copied_bytes=made - self._received,
            aliased_bytes=everything - made,
            buffer_bytes=buffers,
            groups=self._kinds,
        )


class _Slot:
    """The memory of one bucket in flight, and what still uses it."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.buffer = torch.empty(size, dtype=torch.uint8, device=device)
        self.work: dist.Work | None = None
        self.free: torch.cuda.Event | None = None

    def divide(self, bucket: _Bucket) -> tuple[Tensor, Tensor]:
        """A buffer to send from and one to receive into."""
        whole = self.buffer[: bucket.nbytes].view(bucket.dtype)
        send, receive = whole.split([sum(bucket.send_sizes), sum(bucket.receive_sizes)])
        return send, receive


class _Lanes:
    """Two CUDA streams beside the current one, for packing and for unpacking; on the CPU everything is in order."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        if self._on_cuda:
            self._pack, self._unpack = torch.cuda.Stream(device), torch.cuda.Stream(device)
            for stream in (self._pack, self._unpack):  # they see what the current one has done
                stream.wait_stream(torch.cuda.current_stream())

    def join(self) -> None:
        """Let the current stream see what both have done; memory of theirs may be reused from then on."""
        if self._on_cuda:
            torch.cuda.current_stream().wait_stream(self._pack)
            torch.cuda.current_stream().wait_stream(self._unpack)

    @contextmanager
    def packing(self, slot: _Slot) -> Iterator[None]:
        """Pack and start an exchange once the slot is free."""
        if not self._on_cuda:
            yield
            return
        with torch.cuda.stream(self._pack):
            if slot.free is not None:
                slot.free.wait()
            yield

    @contextmanager
    def unpacking(self, slot: _Slot) -> Iterator[None]:
        """Unpack once the exchange is through, and free the slot."""
        if not self._on_cuda:
            _wait(slot)
            yield
            return
        with torch.cuda.stream(self._unpack):
            _wait(slot)
            yield
            slot.free = torch.cuda.Event()
            slot.free.record()


def _wait(slot: _Slot) -> None:
    """Wait for the exchange: the host does on the CPU, on CUDA the current stream does."""
    if slot.work is not None:
        slot.work.wait()


def _unpack(bucket: _Bucket, slot: _Slot, results: Mapping[str, Tensor]) -> None:
    targets = [results[part.name][part.slices] for part in bucket.receives]
    _copy(targets, _rooms(slot.divide(bucket)[1], bucket.receives))


def _rooms(buffer: Tensor, parts: Sequence[_Part]) -> list[Tensor]:
    """A buffer as one tensor for each part, in its shape."""
    flat = buffer.split([part.elements for part in parts])
    return [room.view(part.shape) for part, room in zip(parts, flat, strict=True)]


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy many tensors, casting them: one call, since the calls would take longer than the copies."""
    if targets:
        torch._foreach_copy_(targets, sources)


def _traffic(moves: Mapping[str, Move], rank: int) -> Iterator[GroupTraffic]:
    kinds: dict[str, list[Move]] = {}
    for name, move in moves.items():
        kinds.setdefault(re.sub(r"\.\d+(?=\.)", "", name), []).append(move)
    for kind, members in kinds.items():
        wanted = sum(volume(move.plan.needed(rank)) * move.dtype.itemsize for move in members)
        yield GroupTraffic(kind, wanted, sum(move.plan.received(rank) * move.dtype.itemsize for move in members))


def _fill_buckets(moves: Mapping[str, Move], limit: int) -> Iterator[list[_Piece]]:
    """Divide tensors into buckets, the same on every rank.

    The busiest rank decides how much of a tensor fits. A bucket has one dtype. A transfer is cut along its longest dim
    only, so that a limit below one slice of it is passed over.
    """
    for _, group in itertools.groupby(sorted(moves, key=lambda name: str(moves[name].dtype)), lambda n: moves[n].dtype):
        pieces: list[_Piece] = []
        filled = 0
        for name in group:
            size = moves[name].plan.largest * moves[name].dtype.itemsize
            count = -(-size // limit)
            for index in range(count):
                if pieces and filled + -(-size // count) > limit:
                    yield pieces
                    pieces, filled = [], 0
                pieces.append(_Piece(name, count, index))
                filled += -(-size // count)
        if pieces:
            yield pieces


def _bucket(pieces: Sequence[tuple[_Piece, Move]], ranks: Sequence[int], own: int) -> _Bucket:
    """What this rank packs and unpacks of some pieces: rank after rank, and for each of them piece after piece."""
    sends: dict[int, list[_Part]] = {rank: [] for rank in ranks}
    receives: dict[int, list[_Part]] = {rank: [] for rank in ranks}
    for piece, move in pieces:
        for transfer in move.plan.sends(own):
            sends[transfer.target].extend(_parts(piece, transfer, move.plan.held(own)))
        for transfer in move.plan.receives(own):
            if transfer.source != own:
                receives[transfer.source].extend(_parts(piece, transfer, move.plan.needed(own)))
    return _Bucket(
        dtype=pieces[0][1].dtype,
        sends=tuple(part for rank in ranks for part in sends[rank]),
        receives=tuple(part for rank in ranks for part in receives[rank]),
        send_sizes=tuple(sum(part.elements for part in sends[rank]) for rank in ranks),
        receive_sizes=tuple(sum(part.elements for part in receives[rank]) for rank in ranks),
    )


def _parts(piece: _Piece, transfer: Transfer, local: Region) -> Iterator[_Part]:
    """The rectangles of one piece of a transfer in the tensor that holds ``local``.

    Both ends list them alike: an interval of the region lies in one interval of what either of them holds.
    """
    region = split(transfer.region, piece.count, piece.index)
    for slices in _rectangles(region, local) if region else ():
        yield _Part(piece.name, slices)


def _rectangles(region: Region, local: Region) -> list[tuple[slice, ...]]:
    dims = [[slice(*interval) for interval in intervals] for intervals in local_slices(region, local)]
    return list(itertools.product(*dims))
