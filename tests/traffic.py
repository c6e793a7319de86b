"""What collectives run on, as torch issues them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = {
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "alltoall": "all-to-all",
}


class Traffic(TorchDispatchMode):
    """Records the collectives that are issued while it is open: (kind, name of the group)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, str]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # its collectives come by as operations on plain tensors
        kind = _kind(func.__name__)
        if kind and func.namespace == "_c10d_functional":
            self.seen.add((kind, next(arg for arg in reversed(args) if isinstance(arg, str))))
        elif kind and func.namespace == "c10d":
            group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
            self.seen.add((kind, group.group_name))
        return func(*args, **(kwargs or {}))


def _kind(operation: str) -> str | None:
    letters = operation.split(".")[0].replace("_", "")
    return next((kind for start, kind in KINDS.items() if letters.startswith(start)), None)
