"""Reads how a parameter lies on the ranks from its DTensor."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard  # torch exports it nowhere else

from lightning_verl.resharding.planner import Cut, Grid, TensorLayout


def layout_of(parameter: Tensor, prefix: str, grids: Mapping[str, Grid]) -> TensorLayout:
    """The layout of a parameter over a whole grid of ranks.

    A DTensor on one axis of a mesh lists the ranks of this rank's line only, so a plan made from it would differ from
    rank to rank. Only the names of its axes and its placements are read; the ranks come from the grid.

    Args:
        parameter: A DTensor whose mesh axes are named ``<prefix>_<axis>``, or a tensor that is whole on every rank.
        prefix: The role.
        grids: The grid for each axis that may come up, and under ``""`` the one of whole tensors.
    """
    if not isinstance(parameter, DTensor):
        return TensorLayout(grids[""])
    names = parameter.device_mesh.mesh_dim_names or ()
    axes = [name.removeprefix(f"{prefix}_") for name in names]
    placed = list(zip(axes, parameter.placements, strict=True))
    # A strided shard is cut after the plain ones of the same dim: FSDP2 cuts what tensor parallelism has left.
    inner = [(axis, place) for axis, place in placed if isinstance(place, _StridedShard)]
    outer = [(axis, place) for axis, place in placed if place.is_shard() and not isinstance(place, _StridedShard)]
    cuts = tuple(Cut(axis, place.dim) for axis, place in outer + inner)  # type: ignore[attr-defined]
    return TensorLayout(grids[axes[0]], cuts)


def mesh_of(parameter: Tensor) -> DeviceMesh | None:
    """The mesh of a DTensor; None for a plain tensor."""
    return parameter.device_mesh if isinstance(parameter, DTensor) else None


def local_part(parameter: Tensor) -> Tensor:
    """What this rank holds of a parameter, without gradients: a DTensor's own tensor, or a view of a plain one."""
    # Some versions of to_local make a parameter of it first, at a cost that hundreds of them feel.
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter.detach()
