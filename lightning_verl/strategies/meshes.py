"""The torch meshes of a role: one over the ranks of a stage, and a second one where experts are cut otherwise."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

from lightning_verl.parallel.expert import ExpertAxes
from lightning_verl.strategies.experts import expert_axes
from lightning_verl.strategies.groups import GroupRegistry
from lightning_verl.strategies.layout import RoleLayout


def make_role_mesh(
    layout: RoleLayout, stage: int, groups: GroupRegistry, device_type: str
) -> tuple[TorchDeviceMesh, ExpertAxes | None]:
    """The mesh of (replicate, shard, tensor) ranks of a stage, and the axes of its experts (a collective call).

    Args:
        layout: The role's layout.
        stage: This rank's stage: parameters of others are not here.
        groups: Where groups come from.
        device_type: "cpu" or "cuda".
    """
    found = [groups.get(layout, operation) for operation in ("replicate", "gather", "tensor")]
    mesh = TorchDeviceMesh.from_group(
        [group for group in found if group is not None],
        device_type,
        mesh=torch.tensor(layout.stage_ranks(stage)).view(
            layout.replicas, layout.shards * layout.expert, layout.tensor
        ),
        mesh_dim_names=tuple(f"{layout.role}_{axis}" for axis in ("replicate", "shard", "tensor")),
    )
    return mesh, expert_axes(layout, stage, mesh, groups)
