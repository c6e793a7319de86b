"""How a role's parameters lie on the ranks, for training and for the rollout, and the way from one to the other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from lightning_verl.planning.model import ParameterShape, RoleModel
from lightning_verl.resharding.planner import Cut, Grid, TensorLayout, intersect, volume
from lightning_verl.strategies.layout import RoleLayout


@lru_cache
def _dense_grid(layout: RoleLayout) -> Grid:
    shape = (layout.replicas, layout.shards * layout.expert, layout.tensor)
    return Grid(("replicate", "shard", "tensor"), shape, layout.ranks)


@lru_cache
def _expert_grid(layout: RoleLayout) -> Grid:
    shape = (layout.replicas, layout.shards, layout.expert, layout.tensor)
    return Grid(("replicate", "shard", "expert", "tensor"), shape, layout.ranks)


@lru_cache
def _rollout_grid(layout: RoleLayout, tensor: int) -> Grid:
    return Grid(("replicate", "tensor"), (len(layout.ranks) // tensor, tensor), layout.ranks)


def gathered_layout(parameter: ParameterShape, layout: RoleLayout) -> TensorLayout:
    """A parameter while its FSDP2 unit is gathered: cut by the tensor and the expert axis only."""
    grid = _expert_grid(layout) if parameter.expert else _dense_grid(layout)
    expert = (Cut("expert", 0),) if parameter.expert else ()
    tensor = () if parameter.tensor_dim is None else (Cut("tensor", parameter.tensor_dim),)
    return TensorLayout(grid, (*expert, *tensor))


def update_layout(parameter: ParameterShape, layout: RoleLayout) -> TensorLayout:
    """A parameter as it is held: FSDP2 cuts dim 0 of what the other axes left over the shards."""
    gathered = gathered_layout(parameter, layout)
    return TensorLayout(gathered.grid, (*gathered.cuts, Cut("shard", 0)))


def rollout_layout(parameter: ParameterShape, layout: RoleLayout, tensor: int) -> TensorLayout:
    """A parameter in the rollout: one copy on each group of ``tensor`` ranks that follow each other."""
    cuts = () if parameter.rollout_dim is None else (Cut("tensor", parameter.rollout_dim),)
    return TensorLayout(_rollout_grid(layout, tensor), cuts)


def numel_on(parameter: ParameterShape, layout: TensorLayout, rank: int) -> int:
    """Elements of a parameter on a rank.

    FSDP2 pads each part to the size of the first: the first rank's number is what every rank allocates.
    """
    return volume(layout.region(parameter.shape, rank))


def received_bytes(model: RoleModel, layout: RoleLayout, tensor: int, ranks: Sequence[int]) -> list[int]:
    """Bytes that ranks receive when the weights go from training to the rollout, in the compute dtype.

    It is what the rollout wants on a rank, less what the rank holds of it: nothing can get by with less.

    Args:
        model: The actor.
        layout: Its layout in training.
        tensor: Tensor ranks of the rollout.
        ranks: World ranks of the layout.
    """
    kinds: dict[tuple[tuple[int, ...], TensorLayout, TensorLayout], int] = {}
    for parameter in model.parameters:
        key = (parameter.shape, update_layout(parameter, layout), rollout_layout(parameter, layout, tensor))
        kinds[key] = kinds.get(key, 0) + 1
    return [
        model.compute_bytes * sum(count * _received(*kind, rank) for kind, count in kinds.items()) for rank in ranks
    ]


def _received(shape: tuple[int, ...], held: TensorLayout, wanted: TensorLayout, rank: int) -> int:
    region = wanted.region(shape, rank)
    return volume(region) - volume(intersect(region, held.region(shape, rank)))
