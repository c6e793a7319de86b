"""FSDP2 over a role: each decoder layer a unit, the role itself the root."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter  # torch exports it nowhere else
from torch.distributed.tensor import DTensor, Shard

from lightning_verl.models.compat import reduce_scatter_flat
from lightning_verl.models.quantize import quantized_parameters
from lightning_verl.parallel.structure import decoder_layers


class GroupReduceScatter(ReduceScatter):
    """Reduce-scatters gradients on a group of their own, so that they do not queue behind parameter gathers.

    Args:
        group: The group, of the same ranks in the same order as the mesh's shard axis.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer for FSDP2 to fill."""
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType | dist.ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce on the own group in place of the mesh's."""
        return reduce_scatter_flat(output_tensor, input_tensor, op, self.group, async_op)


def apply_fsdp(
    module: nn.Module,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    reduce: dist.ProcessGroup,
    dims: Mapping[str, int] | None = None,
    offload: OffloadPolicy | None = None,
) -> None:
    """Cut a role's parameters over the data axis, in place.

    The role is the root unit, so that heads of its own (a value head) are synchronised too. The root reshards after its
    forward like every other unit: left gathered, it would not see a later change of its shards.

    Args:
        module: The role.
        mesh: ``(shard,)`` or ``(replicate, shard)``.
        policy: Mixed-precision policy, the same for every unit.
        reduce: The group for gradient reduce-scatter.
        dims: The dim to cut, by a parameter's name in the role; 0 for those left out, and where the dim does not
            divide evenly (FSDP2 wants that of any other dim than 0).
        offload: Where shards, their gradients and so the optimizer's states live; None: on the device.
    """
    offload = offload or OffloadPolicy()
    codes = set(quantized_parameters(module).values())  # whole on every rank: they are small, and no numbers to cast
    units: list[Any] = [*decoder_layers(module), module]
    for unit in units:
        # Anew for each unit: the parameters of those before are gone, and others may have taken their ids.
        wanted = {id(p): dims[name] for name, p in module.named_parameters() if name in dims} if dims else {}

        def placement(parameter: nn.Parameter, wanted: Mapping[int, int] = wanted) -> Shard:
            dim = wanted.get(id(parameter), 0)
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            return Shard(dim if dim and local.shape[dim] % mesh.size(-1) == 0 else 0)

        fully_shard(
            unit,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=True,
            shard_placement_fn=placement,
            ignored_params=codes,
        )
    _let_compile(units[:-1])
    module._hybrid_touch = _touch  # type: ignore[assignment]
    module.__dict__["_hybrid_units"] = fsdp_units(module)
    for method in ("_hybrid_touch", "score", "stage_states"):
        if hasattr(module, method):
            register_fsdp_forward_method(module, method)
    use_reduce_group(units, mesh, reduce)


def _let_compile(layers: Iterable[nn.Module]) -> None:
    """Have torch compile layers as it would without FSDP2, whose hooks run around what is compiled.

    FSDP2 marks modules for the compiler, which then takes their numbers (sizes of heads, epsilons) for ones that may
    change, and makes kernels for any size of head.
    """
    for layer in layers:
        for child in layer.modules():
            vars(child).pop("_is_fsdp_managed_module", None)


def use_reduce_group(units: Iterable[FSDPModule], mesh: DeviceMesh, reduce: dist.ProcessGroup) -> None:
    """Let units reduce their gradients on a group of their own, where it is not the mesh's."""
    if reduce is mesh.get_group(mesh.ndim - 1):
        return
    for unit in units:
        unit.set_custom_reduce_scatter(GroupReduceScatter(reduce))


def _touch(nothing: None) -> None:
    """A forward that does nothing: running it makes FSDP2 take the role as its root.

    It has an argument because torch 2.11 fails on a forward without any.
    """


def fsdp_units(module: nn.Module) -> list[FSDPModule]:
    """The FSDP2 units in a module, the root first."""
    known: list[FSDPModule] | None = module.__dict__.get("_hybrid_units")  # of a role: looking for them takes a while
    return known or [child for child in module.modules() if isinstance(child, FSDPModule)]


def reshard(module: nn.Module) -> None:
    """Free gathered parameters, so that ``module.parameters()`` are the shards."""
    for unit in fsdp_units(module):
        unit.reshard()


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Hold the whole parameters of a role, cast to the compute dtype, while the context is open (a collective call).

    Inner modules may then run on their own: the role was made FSDP2's root by touching it first.
    """
    units = fsdp_units(module)
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
    try:
        if units:
            module._hybrid_touch(None)  # type: ignore[operator]
        for unit in units:
            unit.unshard()
        yield
    finally:
        for unit in units:
            unit.set_reshard_after_forward(True, recurse=False)
            unit.reshard()


@contextmanager
def no_gradient_sync(module: nn.Module, enabled: bool) -> Iterator[None]:
    """Keep gradients local and whole while the context is open, if enabled; they are reduced by the next backward."""
    units = fsdp_units(module) if enabled else []
    for unit in units:
        unit.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for unit in units:
            unit.set_requires_gradient_sync(True, recurse=False)
