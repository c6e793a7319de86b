"""Where the experts of a role lie: the second mesh that a role with an expert axis has."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

from lightning_verl.parallel.expert import ExpertAxes
from lightning_verl.strategies.groups import GroupRegistry
from lightning_verl.strategies.layout import RoleLayout


def expert_axes(layout: RoleLayout, stage: int, mesh: TorchDeviceMesh, groups: GroupRegistry) -> ExpertAxes | None:
    """The axes that experts of a role are cut over, None where they stay whole (a collective call on first use).

    With an expert axis they lie on a mesh of their own over the same ranks, with the axes ``<role>_expert_replicate``,
    ``<role>_expert_shard``, ``<role>_expert`` and ``<role>_expert_tensor``; without one, on the role's.

    Args:
        layout: The role's layout.
        stage: This rank's stage of it.
        mesh: The role's mesh, see ``HybridStrategy.role_mesh``.
        groups: Where groups come from; this rank has a part of the role.
    """
    role = layout.role
    tensor = groups.get(layout, "tensor") if layout.tensor > 1 else None
    if layout.expert == 1:
        if tensor is None:
            return None
        shard = mesh[_fsdp_axes(layout, f"{role}_replicate", f"{role}_shard")]
        return ExpertAxes(mesh[f"{role}_tensor"], shard, groups.get(layout, "reduce"), None, tensor)
    names = tuple(f"{role}_{axis}" for axis in ("expert_replicate", "expert_shard", "expert", "expert_tensor"))
    operations = ("replicate", "expert_gather", "expert", "tensor")
    axes = TorchDeviceMesh.from_group(
        [group for name in operations if (group := groups.get(layout, name)) is not None],
        mesh.device_type,
        mesh=torch.tensor(layout.stage_ranks(stage)).view(layout.replicas, layout.shards, layout.expert, layout.tensor),
        mesh_dim_names=names,
    )
    return ExpertAxes(
        cut=axes[names[2:] if layout.tensor > 1 else names[2:3]],
        shard=axes[_fsdp_axes(layout, *names[:2])],
        reduce=groups.get(layout, "expert_reduce"),
        expert=groups.get(layout, "expert"),
        tensor=tensor,
    )


def _fsdp_axes(layout: RoleLayout, replicate: str, shard: str) -> tuple[str, ...]:
    """The axes of FSDP2's mesh: replicas only where there are some."""
    return (replicate, shard) if layout.replicas > 1 else (shard,)
