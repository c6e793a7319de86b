"""One true gradient norm over parameters that live on different meshes."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def clip_by_true_norm(
    parameters: Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = True,
    *,
    stages: dist.ProcessGroup | None = None,
    uncounted: Iterable[Tensor] = (),
) -> Tensor:
    """Scale gradients in place so that their total norm is at most ``max_norm``, and return the norm before.

    torch's own function refuses parameters of several meshes (norm weights lie on the data axis, matrices on data and
    tensor). Here the norm is taken for each mesh, then of these norms. Parameters that are whole on every rank count
    once.

    Args:
        parameters: Parameters; those without a gradient are passed over.
        max_norm: Largest norm.
        norm_type: Order of the norm.
        error_if_nonfinite: Whether a norm that is not finite is an error.
        stages: The ranks that hold the other stages of the same model.
        uncounted: Parameters whose gradient another stage has too, and counts; they are scaled like the others.

    Raises:
        RuntimeError: The norm is not finite and ``error_if_nonfinite`` is set.
    """
    by_layout: dict[_Layout, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_layout.setdefault(_layout(parameter.grad), []).append(parameter)
    elsewhere = {id(parameter) for parameter in uncounted}
    norms = []
    for key, group in by_layout.items():
        counted = [p.grad for p in group if p.grad is not None and id(p) not in elsewhere]
        if counted:
            norms.append(_norm(counted, *key, norm_type))
    if not norms and stages is None:
        return torch.tensor(0.0)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())
    if stages is not None:
        total = _over_stages(total, stages, norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The gradient norm is {total.item()}, so the step would write NaN into the weights; nothing was changed. "
            "Look at the loss, or pass error_if_nonfinite=False."
        )
    for group in by_layout.values():
        clip_grads_with_norm_(group, max_norm, total)
    return total


def _over_stages(norm: Tensor, stages: dist.ProcessGroup, norm_type: float) -> Tensor:
    """The norm of all stages' gradients from that of each, on the device of the group."""
    on_cuda = dist.get_backend(stages) == "nccl"
    norm = norm.to(torch.device("cuda", torch.cuda.current_device()) if on_cuda else norm.device)
    norms = [torch.empty_like(norm) for _ in range(stages.size())]
    dist.all_gather(norms, norm, group=stages)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total


_Layout = tuple[DeviceMesh | None, tuple[int, ...]]
"""A mesh, and the axes of it that a gradient is cut over."""


def _layout(gradient: Tensor) -> _Layout:
    if not isinstance(gradient, DTensor):
        return None, ()
    return gradient.device_mesh, tuple(i for i, place in enumerate(gradient.placements) if not place.is_replicate())


def _norm(gradients: list[Tensor], mesh: DeviceMesh | None, cut: tuple[int, ...], norm_type: float) -> Tensor:
    """The norm of gradients of one layout: of the parts here, then summed over the axes that cut them."""
    parts = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    norm = get_total_norm(parts, norm_type).float()
    infinite = math.isinf(norm_type)
    power = norm if infinite else norm**norm_type
    if mesh is not None:
        power = power.to(mesh.device_type)  # of gradients in host memory it is there, where NCCL cannot reduce it
    groups = [] if mesh is None else [mesh.get_group(axis) for axis in cut]
    for group in groups:
        dist.all_reduce(power, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)
    total: Tensor = power if infinite else power ** (1 / norm_type)
    return total
