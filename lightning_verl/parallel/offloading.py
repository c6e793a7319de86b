"""What layers keep for their backward pass, held in host memory meanwhile.

torch has ``save_on_cpu`` for that, which copies on the stream that computes, and takes parameters and a tensor that is
kept by three operators three times. Here copies run on a stream of their own, each tensor once, and are back before the
backward pass of their layer begins.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lightning_verl.parallel.structure import decoder_layers

LEAST_BYTES = 2**20
"""Smaller tensors stay: a copy of them costs more to start than to make."""


def offload_activations(module: nn.Module, least_bytes: int | None = None) -> None:
    """Have the decoder layers of a role keep large activations in host memory, in place.

    To be called after checkpointing is in place and layers are compiled: what goes to the host is what they then keep.
    Parameters stay where they are, and so does what several layers share (masks, rotary embeddings). Activations of at
    most two layers wait on the device for their copies.

    Args:
        module: The role.
        least_bytes: Smaller tensors stay; None: ``LEAST_BYTES``.

    Raises:
        ValueError: A role whose decoder layers cannot be found.
    """
    layers = decoder_layers(module)
    if not layers:
        raise ValueError(
            f"activation_offload=True: {type(module).__name__} has no decoder layers that could be found; leave it out."
        )
    host = _Host(LEAST_BYTES if least_bytes is None else least_bytes)
    for number, layer in enumerate(layers):
        layer.forward = _offloaded(layer, host, first=number == 0)


@dataclass
class _Copy:
    """A piece of memory on its way to the host, or there."""

    host: Tensor
    """On the host, pinned where there is CUDA, flat."""
    uses: int = 0
    """How often the backward pass will ask for it."""
    device: Tensor | None = None
    """Back on the device, flat; None: not yet, or not any more."""


@dataclass
class _Packed:
    """What autograd holds in place of a tensor."""

    page: _Page
    copy: _Copy
    shape: tuple[torch.Size, tuple[int, ...], int]
    """Size, stride and offset in the copy."""


@dataclass(eq=False)
class _Page:
    """What one run of a layer keeps on the host."""

    before: weakref.ref[_Page] | None
    """That of the layer before it, whose backward pass comes next."""
    device: torch.device
    """Where it comes from."""
    copies: list[_Copy] = field(default_factory=list)
    """In the order in which they were begun."""
    begun: dict[tuple[int, torch.dtype], _Copy] = field(default_factory=dict)
    """The same by the address of the memory on the device, while the layer runs."""
    waiting: list[Tensor] = field(default_factory=list)
    """Kept on the device until the copies are made."""
    made: torch.cuda.Event | None = None
    """When they are; None on a CPU."""
    back: torch.cuda.Event | None = None
    """When they are on the device again."""
    fetched: bool = False
    """Whether they are on their way back, or there."""


class _Host:
    """The traffic of a role with its host.

    Args:
        least_bytes: Smaller tensors stay.
    """

    def __init__(self, least_bytes: int) -> None:
        self._least_bytes = least_bytes
        self._stream: torch.cuda.Stream | None = None
        self._last: weakref.ref[_Page] | None = None
        self._leaving: list[_Page] = []
        self._ahead: _Page | None = None

    def open(self, device: torch.device, first: bool) -> _Page:
        """Begin a layer's page; of those before it one may still be on its way."""
        self._catch_up()
        page = _Page(None if first else self._last, device)
        self._last = weakref.ref(page)
        while len(self._leaving) > 1:
            self._let_go(self._leaving.pop(0))
        return page

    def close(self, page: _Page) -> None:
        """The layer has run: its copies were all begun."""
        if self._stream is not None and page.waiting:
            page.made = self._stream.record_event()
        page.begun.clear()
        self._leaving.append(page)

    def finish(self) -> None:
        """The backward pass begins: nothing need wait on the device any more."""
        while self._leaving:
            self._let_go(self._leaving.pop(0))

    def pack(self, page: _Page, stays: set[int], tensor: Tensor) -> Tensor | _Packed:
        """Begin to copy a tensor; what is small, shared, or a small part of something larger is returned as it is."""
        plain = type(tensor) in (Tensor, nn.Parameter)  # neither a DTensor nor what a compiler traces
        if not plain or tensor.device != page.device:
            return tensor
        memory = tensor.untyped_storage()
        address, size = memory.data_ptr(), memory.nbytes() // tensor.element_size()
        if memory.nbytes() < self._least_bytes or address in stays or 2 * tensor.numel() < size:
            return tensor
        copy = page.begun.get((address, tensor.dtype))
        if copy is None:
            flat = tensor.detach().as_strided((size,), (1,), 0)
            copy = page.begun[address, tensor.dtype] = _Copy(self._to_host(flat))
            page.copies.append(copy)
            page.waiting.append(flat)
        copy.uses += 1
        return _Packed(page, copy, (tensor.shape, tensor.stride(), int(tensor.storage_offset())))

    def unpack(self, packed: Tensor | _Packed) -> Tensor:
        """The tensor again. The first of a page fetches that page, and begins with the one before."""
        if isinstance(packed, Tensor):
            return packed
        page, copy = packed.page, packed.copy
        self.finish()
        self._fetch(page)
        if page.back is not None:
            torch.cuda.current_stream(page.device).wait_event(page.back)
        previous = page.before() if page.before is not None else None
        if previous is not None:
            self._fetch(previous)
        flat = copy.device
        if flat is None:  # a second backward pass over the same graph
            flat = copy.host.to(page.device)
        copy.uses -= 1
        if copy.uses <= 0:
            copy.device = None
        return flat.as_strided(*packed.shape)

    def _to_host(self, flat: Tensor) -> Tensor:
        if not flat.is_cuda:
            return flat.clone()
        if self._stream is None:
            self._stream = torch.cuda.Stream(flat.device)
        host = torch.empty_like(flat, device="cpu", pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.stream(self._stream):
            host.copy_(flat, non_blocking=True)
        return host

    def _let_go(self, page: _Page) -> None:
        """Free on the device what is on the host: what computes next may write there, once the copies are made."""
        if page.made is not None:
            torch.cuda.current_stream(page.device).wait_event(page.made)
        page.waiting.clear()

    def _fetch(self, page: _Page) -> None:
        if page.fetched or not page.copies:
            return
        self._catch_up()
        page.fetched, self._ahead = True, page
        stream = self._stream
        # Memory is taken on the stream that computes, and is free for the copies once that stream has come this far.
        targets = [torch.empty_like(copy.host, device=page.device) for copy in page.copies]
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(page.device))
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for copy, target in zip(page.copies, targets, strict=True):
                copy.device = target.copy_(copy.host, non_blocking=True)
        if stream is not None:
            page.back = stream.record_event()

    def _catch_up(self) -> None:
        """Let what computes wait for the last page that was fetched: it may be freed and written over from now on."""
        if self._ahead is not None and self._ahead.back is not None:
            torch.cuda.current_stream(self._ahead.device).wait_event(self._ahead.back)
        self._ahead = None


def _offloaded(layer: nn.Module, host: _Host, first: bool) -> Callable[..., Any]:
    forward = layer.forward

    @functools.wraps(forward)
    def offloaded(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        stays = _addresses([*layer.parameters(), *tree_leaves(kwargs)])
        page = host.open(next(layer.parameters()).device, first)
        try:
            with saved_tensors_hooks(functools.partial(host.pack, page, stays), host.unpack):
                return forward(*args, **kwargs)
        finally:
            host.close(page)

    return offloaded


def _addresses(values: list[Any]) -> set[int]:
    """Where the memory of the tensors among some values begins."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    with torch.no_grad():
        parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return {part.untyped_storage().data_ptr() for part in parts}
