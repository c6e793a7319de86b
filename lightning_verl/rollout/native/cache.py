"""The key-value cache: one tensor in blocks, sized by what a rollout needs and what memory is free."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_verl.strategies.cache import KVDtype

_DTYPES = {"bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class CacheShape:
    """What one token takes in the cache; found by running the model once."""

    layers: int
    """Layers with attention."""
    heads: int
    """Key-value heads of a layer, on this rank."""
    head_dim: int
    """Size of a head."""
    dtype: torch.dtype
    """What the model computes keys and values in."""

    def stored(self, wanted: KVDtype) -> torch.dtype:
        """What they are kept as."""
        return _DTYPES.get(wanted, self.dtype)

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block over all layers, keys and values."""
        return 2 * self.layers * self.heads * self.head_dim * block_size * dtype.itemsize


class KVCache:
    """Keys and values of all layers, and a place in host memory for blocks that have to go.

    Args:
        shape: What one token takes.
        blocks: How many blocks, block 0 for padding included.
        block_size: Tokens in a block.
        dtype: What keys and values are kept as.
        device: Where.
        host_blocks: Blocks in host memory, block 0 (not used) included; 0 for none. Pinned where the device is CUDA.
    """

    def __init__(
        self,
        shape: CacheShape,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        host_blocks: int = 0,
    ) -> None:
        self.block_size, self.blocks, self.host_blocks = block_size, blocks, host_blocks
        outer, inner = (shape.layers, 2), (shape.heads, block_size, shape.head_dim)
        # Zeros, since a padding row may read block 0 before it was written, and 0 x NaN is NaN.
        self.data = torch.zeros(*outer, blocks, *inner, dtype=dtype, device=device)
        """``[layers, 2, blocks, key-value heads, block_size, head_dim]``, keys before values."""
        pinned = device.type == "cuda"
        self._host = torch.empty(host_blocks, *outer, *inner, dtype=dtype, pin_memory=pinned) if host_blocks else None

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.data.nbytes // self.blocks

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, from and to."""
        if pairs:
            source, target = self._indices(pairs)
            data = as_bytes(self.data)
            data.index_copy_(2, target, data.index_select(2, source))

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of the device (from) to host memory (to), without waiting for it."""
        if pairs and self._host is not None:
            data, host = as_bytes(self.data), as_bytes(self._host)
            gathered = data.index_select(2, self._indices(pairs)[0]).movedim(2, 0).contiguous()
            for place, (_, target) in enumerate(pairs):
                host[target].copy_(gathered[place], non_blocking=True)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of host memory (from) to the device (to)."""
        if pairs and self._host is not None:
            data, host = as_bytes(self.data), as_bytes(self._host)
            arriving = torch.empty(len(pairs), *host.shape[1:], dtype=host.dtype, device=data.device)
            for place, (source, _) in enumerate(pairs):
                arriving[place].copy_(host[source], non_blocking=True)
            data.index_copy_(2, self._indices(pairs)[1], arriving.movedim(0, 2))

    def _indices(self, pairs: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        both = torch.tensor(pairs, dtype=torch.int64).T.contiguous()
        source, target = both.to(self.data.device, non_blocking=True)
        return source, target


def as_bytes(data: Tensor) -> Tensor:
    """Float8 has no index operations; its bytes have."""
    return data.view(torch.uint8) if data.dtype.itemsize == 1 else data


def free_bytes(device: torch.device) -> int:
    """Memory that tensors could take now: free on the device, or reserved by torch and unused.

    What ``torch.cuda.set_per_process_memory_fraction`` allows bounds it. On the CPU, where no call tells this
    everywhere, it is a quarter of the machine's memory.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return unreserved_bytes(device) + unused
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4


def unreserved_bytes(device: torch.device) -> int:
    """Memory of a GPU that torch could still reserve."""
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device)) - torch.cuda.memory_reserved(device)
    return min(free, allowed)
