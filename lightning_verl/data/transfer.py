"""Copies from host memory to a device that the host does not wait for."""

from __future__ import annotations

import torch
from torch import Tensor


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
