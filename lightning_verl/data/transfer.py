"""From Python's numbers to tensors, and from host memory to a device, without the host waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def int64(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    """Make a tensor on the CPU of numbers, or of rows of equal length; several times as fast as ``torch.tensor``."""
    return torch.from_numpy(np.array(values, dtype=np.int64))


def float32(values: Sequence[float] | Sequence[Sequence[float]]) -> Tensor:
    """Make a tensor on the CPU of numbers, or of rows of equal length; see :func:`int64`."""
    return torch.from_numpy(np.array(values, dtype=np.float32))


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to a device without waiting for what was launched there before.

    A plain ``tensor.to(device)`` makes the host wait until CUDA has done all that it was given, so that the device has
    nothing to do until the host has launched more.

    Args:
        tensor: On the CPU, or on the device already.
        device: Where it is wanted.

    Returns:
        The tensor there, for what follows on the current stream.
    """
    if tensor.device.type != "cpu" or torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
