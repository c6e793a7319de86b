"""Moves tensors between layouts: plans become buckets of bounded size, and each bucket one exchange."""

from __future__ import annotations

import functools
import itertools
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_verl.resharding.buckets import BUCKET_BYTES, Bucket, Move, Slices, make_buckets, rectangles
from lightning_verl.resharding.link import measure_link
from lightning_verl.resharding.planner import local_shape, volume

_BLOCK_BYTES = 2**28
"""Most bytes of results that share one allocation, since memory in one piece may be hard to find."""

_ALIGNMENT = 256
"""Bytes that a result's address is a multiple of within its block."""


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


_View = tuple[tuple[int, ...], tuple[int, ...], int]
"""What ``Tensor.as_strided`` takes: shape, strides, offset. One call, where slicing is one for each dim."""

_Copy = tuple[str | None, _View, Tensor | _View, bool]
"""To which result (None: the buffer) and where; from which tensor, or where in the buffer; whether as 8-byte words."""


class _Copies:
    """Copies that are made together, each from a source tensor or a place of a buffer to a place of a result or buffer.

    Those without gaps are apart from the others: CUDA makes them in one go.
    """

    def __init__(self) -> None:
        self._kinds: tuple[list[_Copy], list[_Copy]] = ([], [])

    def add(self, target: str | None, view: _View, source: Tensor | _View, dtype: torch.dtype) -> None:
        """Add one to a place of a result, or (None) of the buffer, which have this dtype."""
        origin = source if isinstance(source, tuple) else _view_of(source)
        dense = all(_whole(shape, 0)[1] == strides for shape, strides, _ in (view, origin))
        same = isinstance(source, tuple) or source.dtype == dtype
        words = [_in_words(place, dtype.itemsize) if same and not dense else None for place in (view, origin)]
        if words[0] is not None and words[1] is not None:
            source = words[1] if isinstance(source, tuple) else source.view(torch.int64)
            self._kinds[1].append((target, words[0], source, True))
        else:
            self._kinds[not dense].append((target, view, source, False))

    def make(self, results: Mapping[str, Tensor], buffer: Tensor | None = None) -> None:
        """Make them, and cast; a call for each would take longer than the copies."""
        memory: dict[Any, Tensor] = {**results} if buffer is None else {**results, None: buffer}

        def place(name: str | None, view: _View, in_words: bool) -> Tensor:
            return (memory[name].view(torch.int64) if in_words else memory[name]).as_strided(*view)

        for copies in self._kinds:
            if copies:
                torch._foreach_copy_(
                    [place(target, view, in_words) for target, view, _, in_words in copies],
                    [s if isinstance(s, Tensor) else place(None, s, in_words) for _, _, s, in_words in copies],
                )


@dataclass
class _Block:
    """Memory that some results of one dtype share: allocations cost the host more than views."""

    dtype: torch.dtype
    elements: int = 0
    views: dict[str, _View] = field(default_factory=dict)
    """The results, by name."""

    def add(self, want: _Want) -> _View:
        """Make room for a result, aligned like an allocation of its own."""
        view = _whole(want.shape, self.elements)
        self.views[want.name] = view
        self.elements += _room_for(want)
        return view

    def make(self, results: dict[str, Tensor], device: torch.device) -> None:
        """Allocate it, and put the results into ``results``."""
        memory = torch.empty(self.elements, dtype=self.dtype, device=device)
        for name, view in self.views.items():
            results[name] = memory.as_strided(*view)


class _Local:
    """Memory of some results, and what this rank copies into them from its own source tensors.

    Args:
        wants: The results.
        tensors: The source tensors.
        places: Where in their blocks the results lie; those of these ones are added.
    """

    def __init__(self, wants: Iterable[_Want], tensors: Mapping[str, Tensor], places: dict[str, _View]) -> None:
        wants = list(wants)
        self.blocks = _blocks(wants, places)
        self.copies = _Copies()
        for want in wants:
            for source, target in want.own:
                self.copies.add(want.name, _inside(places[want.name], target), tensors[want.name][source], want.dtype)

    def allocate(self, results: dict[str, Tensor], device: torch.device) -> None:
        """Put the results, still without values, into ``results``."""
        for block in self.blocks:
            block.make(results, device)


class _Exchange:
    """A bucket, bound to the tensors that this rank sends it from.

    Args:
        bucket: The bucket.
        tensors: The source tensors.
        places: Where in their blocks the results lie.
    """

    def __init__(self, bucket: Bucket, tensors: Mapping[str, Tensor], places: Mapping[str, _View]) -> None:
        self.dtype = bucket.dtype
        self.sends: list[tuple[int, Tensor | _View]] = []
        """To which rank goes what: a source as it lies, or what is in a place of the buffer."""
        self.receives: list[tuple[int, str | None, _View]] = []
        """From which rank comes what, into a place of which result; None for the buffer."""
        self.packed, self.unpacked = _Copies(), _Copies()
        """From sources to the buffer, and from there to results."""
        filled = 0
        for message in bucket.sends:
            sources = [tensors[part.name][part.slices] for part in message.parts]
            if len(sources) == 1 and sources[0].is_contiguous() and sources[0].dtype == bucket.dtype:
                self.sends.append((message.peer, sources[0]))
                continue
            self.sends.append((message.peer, _flat(message.elements, filled)))
            for source in sources:
                self.packed.add(None, _whole(source.shape, filled), source, bucket.dtype)
                filled += source.numel()
        for message in bucket.receives:
            if message.contiguous:
                name, offset = message.parts[0].name, _inside(places[message.parts[0].name], message.parts[0].slices)[2]
                self.receives.append((message.peer, name, _flat(message.elements, offset)))
                continue
            self.receives.append((message.peer, None, _flat(message.elements, filled)))
            for part in message.parts:
                place = _inside(places[part.name], part.slices)
                self.unpacked.add(part.name, place, _whole(part.shape, filled), bucket.dtype)
                filled += part.elements
        self.buffer_bytes = filled * bucket.dtype.itemsize
        """Memory for what is packed and unpacked."""


@dataclass(frozen=True)
class _Step:
    """One bucket."""

    local: _Local
    """The results that get their first part in it."""
    exchange: _Exchange


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
        self.steps: list[_Step] = []
        """The buckets, in order."""
        places: dict[str, _View] = {}
        left = dict(fresh)
        for bucket in buckets:
            names = dict.fromkeys(part.name for message in bucket.receives for part in message.parts)
            begun = [left.pop(name) for name in names if name in left]
            local = _Local(begun, tensors, places)
            self.steps.append(_Step(local, _Exchange(bucket, tensors, places)))
        self.rest = _Local(left.values(), tensors, places)
        """The results that nothing is received for."""
        self.slot_bytes = max((step.exchange.buffer_bytes for step in self.steps), default=0)

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether these are the same tensors, in the same memory."""
        return self._sources == _identities(tensors)


class Resharder:
    """Moves a set of tensors by their plans, again and again.

    Everything that does not depend on the tensors' values is derived once. A bucket is exchanged point to point, in
    one group of messages. A large part is sent from where it lies, if it has no gaps there and its dtype is the one
    that travels, and received where it belongs, if it has no gaps there; else it goes through a buffer. Two buckets are
    in flight: while one is exchanged, the next is packed and the one before is unpacked. What a rank copies to itself
    is copied while the bucket travels that brings the first part of the same results.

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
        self._measured = False
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
        if self._binding is None or not self._binding.fits(tensors):
            self._binding = _Binding(self._buckets, self._wants, tensors)
        binding = self._binding
        if self._group is not None and binding.device.type == "cpu":
            dist.barrier(self._group)  # gloo records no messages between two ranks: a rank that is missing shows here
        if self._group is not None and not self._measured:
            self._measured = True
            self._link = measure_link(self._buckets, self._group, binding.device)
        self._started = time.perf_counter()
        results = dict(binding.kept)
        slots = [_Slot(binding) for _ in binding.steps[:2]]
        finish = None
        for number, step in enumerate(binding.steps):
            step.local.allocate(results, binding.device)
            slot = slots[number % 2]
            self._start(step.exchange, slot, results)
            step.local.copies.make(results)  # while the bucket travels
            if finish is not None:
                finish()
            finish = functools.partial(_finish, step.exchange, slot, results)
        binding.rest.allocate(results, binding.device)
        binding.rest.copies.make(results)
        if finish is not None:
            finish()
        for name in self._scalars:
            results[name] = results[name].view(())
        return results

    def forget(self) -> None:
        """Let go of the source tensors, where they are others the next time."""
        self._binding = None

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
            buffer_bytes=len(binding.steps[:2]) * binding.slot_bytes,
            link_bytes_per_second=self._link,
            groups=self._kinds,
        )

    def _start(self, exchange: _Exchange, slot: _Slot, results: Mapping[str, Tensor]) -> None:
        """Pack what others want and start the exchange."""
        buffer = slot.memory.view(exchange.dtype)
        exchange.packed.make(results, buffer)
        operations = []
        for peer, sent in exchange.sends:
            tensor = sent if isinstance(sent, Tensor) else buffer.as_strided(*sent)
            operations.append(dist.P2POp(dist.isend, tensor, peer, self._group))
        for peer, name, view in exchange.receives:
            tensor = (buffer if name is None else results[name]).as_strided(*view)
            operations.append(dist.P2POp(dist.irecv, tensor, peer, self._group))
        slot.works = dist.batch_isend_irecv(operations) if operations else []


class _Slot:
    """The memory of one bucket in flight, and the exchange that uses it.

    Args:
        binding: Knows how much.
    """

    def __init__(self, binding: _Binding) -> None:
        self.memory = torch.empty(-(-binding.slot_bytes // 8), dtype=torch.int64, device=binding.device)
        self.works: list[dist.Work] = []


def _finish(exchange: _Exchange, slot: _Slot, results: Mapping[str, Tensor]) -> None:
    """Wait for an exchange and unpack: the host does on the CPU, the current stream on CUDA."""
    for work in slot.works:
        work.wait()
    exchange.unpacked.make(results, slot.memory.view(exchange.dtype))


def _blocks(wants: Iterable[_Want], places: dict[str, _View]) -> list[_Block]:
    """Divide results into blocks, and note where they lie; one above the limit of a block has its own."""
    blocks: list[_Block] = []
    for want in sorted(wants, key=lambda want: str(want.dtype)):
        size = _room_for(want) * want.dtype.itemsize
        last = blocks[-1] if blocks else None
        if last is None or last.dtype != want.dtype or last.elements * want.dtype.itemsize + size > _BLOCK_BYTES:
            blocks.append(_Block(want.dtype))
        places[want.name] = blocks[-1].add(want)
    return blocks


def _room_for(want: _Want) -> int:
    """Elements of a result, rounded up so that the next one is aligned."""
    unit = _ALIGNMENT // want.dtype.itemsize
    return -(-math.prod(want.shape) // unit) * unit


def _whole(shape: Sequence[int], offset: int) -> _View:
    return tuple(shape), torch.empty(shape, device="meta").stride(), offset


def _view_of(tensor: Tensor) -> _View:
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def _flat(elements: int, offset: int) -> _View:
    return (elements,), (1,), offset


def _inside(whole: _View, slices: Slices) -> _View:
    """A rectangle of a view."""
    _, strides, offset = whole
    shape = tuple(part.stop - part.start for part in slices)
    return shape, strides, offset + sum(part.start * step for part, step in zip(slices, strides, strict=True))


def _identities(tensors: Mapping[str, Tensor]) -> tuple[list[str], list[int]]:
    """Names and memory. What has the memory of a tensor that is kept is that tensor."""
    return list(tensors), [tensor.data_ptr() for tensor in tensors.values()]


def _in_words(view: _View, itemsize: int) -> _View | None:
    """A view in numbers of 8 bytes, if its rows allow it: where they have gaps CUDA copies number by number."""
    shape, strides, offset = view
    unit = max(8 // itemsize, 1)
    if itemsize > 8 or strides[-1] != 1 or any(n % unit for n in (shape[-1], offset, *strides[:-1])):
        return None
    return (*shape[:-1], shape[-1] // unit), (*(step // unit for step in strides[:-1]), 1), offset // unit


def _traffic(moves: Mapping[str, Move], rank: int) -> Iterator[GroupTraffic]:
    kinds: dict[str, list[Move]] = {}
    for name, move in moves.items():
        kinds.setdefault(re.sub(r"\.\d+(?=\.)", "", name), []).append(move)
    for kind, members in kinds.items():
        wanted = sum(volume(move.plan.needed(rank)) * move.dtype.itemsize for move in members)
        yield GroupTraffic(kind, wanted, sum(move.plan.received(rank) * move.dtype.itemsize for move in members))
