"""Parameters, gradients and optimizer states that live in host memory, by FSDP2's own policy."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from lightning_verl.resharding.layouts import local_part
from lightning_verl.strategies.layout import RoleLayout

HOST_LINK = 53.0
"""GB/s each way between a GPU and its host, as measured on hosts with PCIe 5."""


def host_policy(device: torch.device) -> OffloadPolicy:
    """The policy that keeps shards in pinned host memory.

    Raises:
        ValueError: The device has no other memory than the host's.
    """
    if device.type != "cuda":
        raise ValueError(
            f"HybridStrategy got offload_parameters=True on device {device.type!r}, whose memory is the host's "
            "already; leave it out, or use accelerator='cuda'."
        )
    return CPUOffloadPolicy(pin_memory=True)


def check_hosted(layout: RoleLayout) -> None:
    """Refuse a role that cannot live in host memory.

    Raises:
        ValueError: Its experts are divided.
    """
    if layout.expert > 1:
        raise ValueError(
            f"HybridStrategy got offload_parameters=True, but the experts of the {layout.role} are divided over "
            f"{layout.expert} ranks, whose shards stay on the GPU. Leave it out, or set ep to 1."
        )


def link_bytes(module: nn.Module) -> int:
    """Bytes that a micro-batch of an update moves over this rank's host link, both ways.

    Shards go to the device for the forward and once more for the backward pass, as they are held (the cast to the
    compute dtype comes after); gradients come back in the dtype of their parameters.

    Args:
        module: The role, sharded.
    """
    parameters = list(module.parameters())
    gradients = sum(local_part(parameter).nbytes for parameter in parameters if parameter.requires_grad)
    return 2 * sum(local_part(parameter).nbytes for parameter in parameters) + gradients


def warn_of_link(module: nn.Module, role: str) -> None:
    """Say what a role in host memory costs."""
    moved = link_bytes(module) / 1e9
    warnings.warn(
        f"HybridStrategy(offload_parameters=True): each micro-batch of an update of the {role} moves {moved:.3g} GB "
        f"over the host link of a rank, {1000 * moved / HOST_LINK:.3g} ms at {HOST_LINK:g} GB/s, and its optimizer "
        "steps on the CPU. More shards (dp) cost less where there are ranks for them.",
        stacklevel=2,
    )
