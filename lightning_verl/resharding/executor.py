"""Moves tensors between layouts: plans become buckets of bounded size, and each bucket one exchange."""

from __future__ import annotations

import functools
import itertools
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_verl.resharding.buckets import BUCKET_BYTES, Bucket, Move, Slices, make_buckets, rectangles
from lightning_verl.resharding.link import measure_link
from lightning_verl.resharding.planner import local_shape, volume


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
    """From the start until the report was asked for and, on CUDA, the device was through."""
    received_bytes: int
    """What came from other ranks."""
    copied_bytes: int
    """What was copied or cast on this rank."""
    aliased_bytes: int
    """What needed neither: the result is the source tensor."""
    buffer_bytes: int
    """Memory of the buckets, in use only meanwhile: for what cannot travel from source to result as it lies there."""
    link_bytes_per_second: float | None
    """What a bare exchange between the same ranks brought this one, measured before the first resharding; None where
    nothing comes from others."""
    groups: tuple[GroupTraffic, ...]
    """By kind of parameter, what travels; it is the same at every resharding."""

    @property
    def bytes_per_second(self) -> float:
        """Received bytes a second, 0 without any."""
        return self.received_bytes / self.seconds if self.received_bytes else 0.0

    @property
    def link_share(self) -> float | None:
        """``bytes_per_second`` as a share of the bare exchange's; None where there is none to compare with."""
        return None if self.link_bytes_per_second is None else self.bytes_per_second / self.link_bytes_per_second


@dataclass(frozen=True)
class _Want:
    """What this rank wants of one tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of its result."""
    in_place: bool
    """Whether it holds just that already."""
    own: tuple[tuple[Slices, Slices], ...]
    """What it copies to itself: rectangles of its source tensor and of its result."""

    @property
    def nbytes(self) -> int:
        """Of its result."""
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, name: str, move: Move, rank: int) -> _Want:
        """Read it from the plan of a tensor that the rank wants a part of."""
        held, need = move.plan.held(rank), move.plan.needed(rank)
        regions = [transfer.region for transfer in move.plan.receives(rank) if transfer.source == rank]
        pairs = (zip(rectangles(region, held), rectangles(region, need), strict=True) for region in regions)
        own = tuple(itertools.chain.from_iterable(pairs))
        return cls(name, move.dtype, local_shape(need), move.may_alias and held == need, own)


class _Exchange:
    """A bucket, bound to the tensors that this rank sends it from.

    Args:
        bucket: The bucket.
        tensors: The source tensors.
        fresh: What this rank wants and does not hold; what the bucket receives of it is taken out.
    """

    def __init__(self, bucket: Bucket, tensors: Mapping[str, Tensor], fresh: dict[str, _Want]) -> None:
        self.bucket = bucket
        self.sent: list[Tensor | None] = []
        """For each message what is sent as it lies in the source; None where it is packed or cast."""
        self.packed: list[Tensor] = []
        """All that is packed, part after part."""
        self.packed_sizes: list[int] = []
        """Elements of each message that is packed."""
        for message in bucket.sends:
            views = [tensors[part.name][part.slices] for part in message.parts]
            as_it_lies = len(views) == 1 and views[0].is_contiguous() and views[0].dtype == bucket.dtype
            self.sent.append(views[0] if as_it_lies else None)
            if not as_it_lies:
                self.packed += views
                self.packed_sizes.append(message.elements)
        scattered = [message for message in bucket.receives if not message.contiguous]
        self.unpacked = [part for message in scattered for part in message.parts]
        """All that does not lie in a result as it arrives, part after part."""
        self.unpacked_sizes = [message.elements for message in scattered]
        """Elements of each message that is unpacked."""
        names = dict.fromkeys(part.name for message in bucket.receives for part in message.parts)
        self.local = _Local([fresh.pop(name) for name in names if name in fresh], tensors)
        """The results that get their first part here."""
        self.buffer_bytes = (sum(self.packed_sizes) + sum(self.unpacked_sizes)) * bucket.dtype.itemsize
        """Memory for what is packed and unpacked."""


class _Local:
    """Results to be made, and what this rank copies to itself of them.

    Args:
        wants: The results.
        tensors: The source tensors.
    """

    def __init__(self, wants: Sequence[_Want], tensors: Mapping[str, Tensor]) -> None:
        self._wants = wants
        self._targets = [(want.name, target) for want in wants for _, target in want.own]
        self._sources = [tensors[want.name][source] for want in wants for source, _ in want.own]

    def open(self, results: dict[str, Tensor], device: torch.device) -> None:
        """Make the results."""
        for want in self._wants:
            results[want.name] = torch.empty(want.shape, dtype=want.dtype, device=device)

    def copy(self, results: Mapping[str, Tensor]) -> None:
        """Copy, and cast, what this rank holds of them."""
        _copy([results[name][slices] for name, slices in self._targets], self._sources)


class _Binding:
    """What follows from the tensors that are moved, but not from their values: the next time they are the same.

    Args:
        buckets: What is exchanged.
        wants: What this rank wants.
        tensors: The source tensors.
    """

    def __init__(self, buckets: Sequence[Bucket], wants: Iterable[_Want], tensors: Mapping[str, Tensor]) -> None:
        self._sources = _identities(tensors)
        self.device = next(iter(tensors.values())).device if tensors else torch.device("cpu")
        tensors = {name: tensor if tensor.dim() else tensor.view(1) for name, tensor in tensors.items()}
        self.kept: dict[str, Tensor] = {}
        """The results that are the source tensors themselves."""
        fresh: dict[str, _Want] = {}
        for want in wants:
            if want.in_place and tensors[want.name].dtype == want.dtype:
                self.kept[want.name] = tensors[want.name]
            else:
                fresh[want.name] = want
        self.kept_bytes = sum(tensor.nbytes for tensor in self.kept.values())
        self.made_bytes = sum(want.nbytes for want in fresh.values())
        self.exchanges = [_Exchange(bucket, tensors, fresh) for bucket in buckets]
        self.local = _Local(list(fresh.values()), tensors)
        """The results that nothing is received for."""
        self.slot_bytes = max((exchange.buffer_bytes for exchange in self.exchanges), default=0)

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether these are the same tensors, in the same memory."""
        return self._sources == _identities(tensors)


class Resharder:
    """Moves a set of tensors by their plans, again and again.

    Everything that does not depend on the tensors' values is derived once. A bucket is exchanged point to point, in
    one group of messages. A large part is sent from where it lies, if it has no gaps there and its dtype is the one
    that travels, and received where it belongs, if it has no gaps there; else it goes through a buffer. Two buckets are
    in flight: while one is exchanged, the next is packed and the one before is unpacked.

    Args:
        moves: By name. The same on every rank, in the same order.
        group: All ranks of the plans' grids; None if there is only this one.
        bucket_bytes: Most bytes of one bucket that go through buffers on a rank, sent and received ones together.

    Raises:
        ValueError: ``bucket_bytes`` is not positive.
    """

    def __init__(
        self, moves: Mapping[str, Move], group: dist.ProcessGroup | None, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"Resharder got bucket_bytes={bucket_bytes}; a bucket holds at least one byte.")
        self._group = group
        rank = dist.get_rank() if group is not None else 0
        self._buckets = make_buckets(moves, rank, bucket_bytes)
        self._wants = [_Want.of(name, move, rank) for name, move in moves.items() if move.plan.needed(rank)]
        self._scalars = [want.name for want in self._wants if not moves[want.name].plan.shape]
        self._kinds = tuple(_traffic(moves, rank))
        self._received = sum(kind.received_bytes for kind in self._kinds)
        self._binding: _Binding | None = None
        self._link: float | None = None
        self._started = 0.0

    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Move tensors (a collective call).

        On CUDA they are on their way when this returns, and in place for what follows on the current stream. Views of
        the source tensors are kept for the next time, as long as they are the same.

        Args:
            tensors: This rank's parts at the source, by name; one of a grid that this rank is not in may be missing.

        Returns:
            This rank's parts at the target, by name.
        """
        first = self._binding is None
        if self._binding is None or not self._binding.fits(tensors):
            self._binding = _Binding(self._buckets, self._wants, tensors)
        binding = self._binding
        if first and self._group is not None:
            self._link = measure_link(self._buckets, self._group, binding.device)
        self._started = time.perf_counter()
        results = dict(binding.kept)
        slots = [_Slot(binding) for _ in binding.exchanges[:2]]
        finish = None
        for number, exchange in enumerate(binding.exchanges):
            exchange.local.open(results, binding.device)
            slot = slots[number % 2]
            self._start(exchange, slot, results)
            if finish is not None:
                finish()
            finish = functools.partial(_finish, exchange, slot, results)
        binding.local.open(results, binding.device)
        binding.local.copy(results)
        if finish is not None:
            finish()
        for name in self._scalars:
            results[name] = results[name].view(())
        return results

    def report(self) -> ReshardReport:
        """What the last run cost, once it is through: on CUDA this waits for what the current stream does."""
        binding = self._binding
        if binding is None:
            raise RuntimeError("Resharder.report has nothing to tell before the first run; call run.")
        if binding.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return ReshardReport(
            seconds=time.perf_counter() - self._started,
            received_bytes=self._received,
            copied_bytes=binding.made_bytes - self._received,
            aliased_bytes=binding.kept_bytes,
            buffer_bytes=len(binding.exchanges[:2]) * binding.slot_bytes,
            link_bytes_per_second=self._link,
            groups=self._kinds,
        )

    def _start(self, exchange: _Exchange, slot: _Slot, results: Mapping[str, Tensor]) -> None:
        """Pack what others want and start the exchange."""
        send = slot.divide(exchange)
        _copy(_rooms(send, exchange.packed), exchange.packed)
        packed, unpacked = iter(send.split(exchange.packed_sizes)), iter(slot.received.split(exchange.unpacked_sizes))
        operations = [
            dist.P2POp(dist.isend, next(packed) if source is None else source, message.peer, self._group)
            for message, source in zip(exchange.bucket.sends, exchange.sent, strict=True)
        ]
        for message in exchange.bucket.receives:
            part = message.parts[0]
            room = results[part.name][part.slices] if message.contiguous else next(unpacked)
            operations.append(dist.P2POp(dist.irecv, room, message.peer, self._group))
        slot.works = dist.batch_isend_irecv(operations) if operations else []


class _Slot:
    """The memory of one bucket in flight, and the exchange that uses it.

    Args:
        binding: Knows how much.
    """

    def __init__(self, binding: _Binding) -> None:
        self._buffer = torch.empty(binding.slot_bytes, dtype=torch.uint8, device=binding.device)
        self.works: list[dist.Work] = []

    def divide(self, exchange: _Exchange) -> Tensor:
        """Put what will be received at the end, and return what is before it, to send from."""
        whole = self._buffer[: exchange.buffer_bytes].view(exchange.bucket.dtype)
        send: Tensor
        send, self.received = whole.split([sum(exchange.packed_sizes), sum(exchange.unpacked_sizes)])
        return send


def _finish(exchange: _Exchange, slot: _Slot, results: Mapping[str, Tensor]) -> None:
    """Copy what this rank has, meanwhile; then wait and unpack: the host on the CPU, on CUDA the current stream."""
    exchange.local.copy(results)
    for work in slot.works:
        work.wait()
    targets = [results[part.name][part.slices] for part in exchange.unpacked]
    _copy(targets, _rooms(slot.received, targets))


def _identities(tensors: Mapping[str, Tensor]) -> tuple[list[str], list[int]]:
    """Names and memory. What has the memory of a tensor that is kept is that tensor."""
    return list(tensors), [tensor.data_ptr() for tensor in tensors.values()]


def _rooms(buffer: Tensor, shaped: Sequence[Tensor]) -> list[Tensor]:
    """A buffer as tensors of given shapes."""
    if not shaped:
        return []
    flat = buffer.split([tensor.numel() for tensor in shaped])
    return [room.view(tensor.shape) for room, tensor in zip(flat, shaped, strict=True)]


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
