"""How a role's parameters lie on the ranks, for training and for the rollout, and the way from one to the other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lightning_verl.planning.model import ParameterShape, RoleModel
from lightning_verl.resharding.planner import Cut, Grid, TensorLayout, intersect, volume
from lightning_verl.strategies.layout import RoleLayout, rollout_layout, vocabulary_layout


@dataclass(frozen=True)
class Placement:
    """The layout of one role, and if it is the actor, how it is rolled out."""

    layout: RoleLayout
    """The layout in training."""
    rollout_tensor: int | None = None
    """Tensor ranks of the rollout; None: it is not rolled out."""

    @cached_property
    def rollout(self) -> RoleLayout:
        """The layout of the rollout."""
        return rollout_layout(self.layout, self.rollout_tensor or self.layout.tensor)

    @cached_property
    def _dense(self) -> Grid:
        return self.layout.grid()

    @cached_property
    def _experts(self) -> Grid:
        return self.layout.grid(experts=True)

    @cached_property
    def _rollout_grid(self) -> Grid:
        return self.rollout.grid()

    @cached_property
    def _vocabulary_grid(self) -> Grid:
        return vocabulary_layout(self.layout, self.rollout).grid()

    def gathered(self, parameter: ParameterShape) -> TensorLayout:
        """A parameter while its FSDP2 unit is gathered: cut by the tensor and the expert axis only."""
        expert = (Cut("expert", 0),) if parameter.expert else ()
        tensor = () if parameter.tensor_dim is None else (Cut("tensor", parameter.tensor_dim),)
        return TensorLayout(self._experts if parameter.expert else self._dense, (*expert, *tensor))

    def held(self, parameter: ParameterShape) -> TensorLayout:
        """A parameter as it is held: FSDP2 cuts what the other axes left over the shards.

        It cuts dim 0; in an actor whose rollout is cut finer than its training the dim that the rollout cuts, where
        that divides evenly.
        """
        gathered = self.gathered(parameter)
        axis = "expert_shard" if parameter.expert else "shard"
        dim = 0
        if self.rollout_tensor is not None and self.rollout_tensor > self.layout.tensor:
            dim = parameter.rollout_dim or 0
            tensor = self.layout.tensor if parameter.tensor_dim == dim else 1
            if parameter.shape[dim] % (tensor * gathered.grid.size(axis)):
                dim = 0
        return TensorLayout(gathered.grid, (*gathered.cuts, Cut(axis, dim)))

    def rolled_out(self, parameter: ParameterShape) -> TensorLayout:
        """A parameter in the rollout: one copy on each tensor axis of the rollout."""
        if parameter.rollout_dim is None or self.rollout.tensor == 1:
            return TensorLayout(self._rollout_grid)
        grid = self._vocabulary_grid if parameter.vocabulary else self._rollout_grid
        return TensorLayout(grid, (Cut("tensor", parameter.rollout_dim),))


def numel_on(parameter: ParameterShape, layout: TensorLayout, rank: int) -> int:
    """Elements of a parameter on a rank.

    FSDP2 pads each part to the size of the first: the first rank's number is what every rank allocates.
    """
    return volume(layout.region(parameter.shape, rank))


def received_bytes(model: RoleModel, place: Placement) -> list[int]:
    """Bytes that each of an actor's ranks receives when its weights go to the rollout, in the order of its layout.

    It is what the rollout wants on a rank, less what the rank holds of it: nothing can get by with less. What travels
    has the compute dtype already; adapters have their own.

    Args:
        model: The actor.
        place: Where it lies.
    """
    kinds: dict[tuple[tuple[int, ...], TensorLayout, TensorLayout], int] = {}
    for parameter in model.parameters:
        key = (parameter.shape, place.held(parameter), place.rolled_out(parameter))
        itemsize = parameter.itemsize if parameter.adapter else model.compute_bytes
        kinds[key] = kinds.get(key, 0) + itemsize
    return [sum(size * _received(*kind, rank) for kind, size in kinds.items()) for rank in place.layout.ranks]


def _received(shape: tuple[int, ...], held: TensorLayout, wanted: TensorLayout, rank: int) -> int:
    region = wanted.region(shape, rank)
    return volume(region) - volume(intersect(region, held.region(shape, rank)))
