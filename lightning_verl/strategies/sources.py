"""How the parameters of an actor lie on the ranks before a resharding, those of other pipeline stages included."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_verl.models.quantize import is_quantized, whole_shape
from lightning_verl.resharding.layouts import layout_of
from lightning_verl.resharding.planner import TensorLayout
from lightning_verl.strategies.layout import RoleLayout


@dataclass(frozen=True)
class Source:
    """One parameter."""

    shape: tuple[int, ...]
    """Whole."""
    dtype: torch.dtype
    """As it is held."""
    layout: TensorLayout
    """Who holds which part of it."""
    is_expert: bool
    """Whether it lies on the mesh of experts."""
    in_codes: bool
    """Whether it is held in codes of 4 bits."""


def source_of(parameter: Tensor, layout: RoleLayout, stages: tuple[int, ...]) -> Source:
    """Describe a parameter that this rank holds.

    Args:
        parameter: A DTensor on a mesh of the role, or a whole tensor.
        layout: The role's layout.
        stages: The stages that hold it.
    """
    whole, experts = layout.grid(stages=stages), layout.grid(experts=True, stages=stages)
    grids = {"": whole, **dict.fromkeys(whole.axes, whole), **dict.fromkeys(experts.axes, experts)}
    found = layout_of(parameter, layout.role, grids)
    return Source(whole_shape(parameter), parameter.dtype, found, found.grid is experts, is_quantized(parameter))


def join_stages(own: Mapping[str, Source], layout: RoleLayout, stages: dist.ProcessGroup | None) -> dict[str, Source]:
    """Describe the parameters of all stages (a collective call of the stages).

    A parameter that several of them hold, such as an embedding with a tied head, is held alike by all of these.

    Args:
        own: This stage's parameters.
        layout: The role's layout.
        stages: The ranks of the pipeline.

    Returns:
        The parameters by name, in the order of the stages: the same on every rank.
    """
    parts: list[Mapping[str, Source]] = [{}] * layout.pipeline
    dist.all_gather_object(parts, own, group=stages)
    holders: dict[str, tuple[int, ...]] = {}
    for stage, part in enumerate(parts):
        for name in part:
            holders[name] = (*holders.get(name, ()), stage)
    joined = {}
    for name, where in holders.items():
        source = parts[where[0]][name]
        grid = layout.grid(experts=source.is_expert, stages=where)
        joined[name] = replace(source, layout=replace(source.layout, grid=grid))
    return joined
