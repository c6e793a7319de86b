"""What a strategy knows of its pipelines: which roles are cut into stages, and what stages have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_verl.pipeline.building import Share, stages_only
from lightning_verl.pipeline.order import check_schedule, chunks_of
from lightning_verl.pipeline.stages import StagedRole
from lightning_verl.strategies.codes import all_scales
from lightning_verl.strategies.layout import RoleLayout

if TYPE_CHECKING:
    from lightning_verl.strategies.hybrid import HybridStrategy


class Staging:
    """The stages of all roles of a strategy.

    Args:
        strategy: Knows layouts and groups.

    Raises:
        ValueError: There is no such schedule.
    """

    def __init__(self, strategy: HybridStrategy) -> None:
        check_schedule("HybridStrategy", strategy.pipeline_schedule)
        self._strategy = strategy
        self._staged: dict[str, StagedRole] = {}

    def check(self, layouts: Mapping[str, RoleLayout]) -> None:
        """Refuse what a pipeline cannot do, before any process is launched.

        Raises:
            ValueError: A role is to be cut into stages, and the strategy rolls out in the update layout or keeps
                parameters in host memory.
        """
        if (actor := layouts["actor"]).pipeline > 1 and not self._strategy.enable_3d_hybrid:
            raise ValueError(
                f"HybridStrategy got enable_3d_hybrid=False with {actor.pipeline} pipeline stages: it rolls "
                "out in the update layout, but no rank has all layers there. Leave it out, or give the actor pp=1."
            )
        for role, layout in layouts.items():
            if layout.pipeline > 1 and self._strategy.offload_parameters:
                raise ValueError(
                    f"HybridStrategy got offload_parameters=True, but the {role} has {layout.pipeline} pipeline "
                    "stages, whose shards stay on the device. Leave it out, or set pp to 1."
                )

    @contextmanager
    def building(self, around: AbstractContextManager[Any]) -> Iterator[None]:
        """Inside of another context, let roles be built with memory for this rank's stages only."""
        with around, stages_only(self._share):
            yield

    def _share(self, role: str) -> Share | None:
        layout = self._strategy.layout(role)
        if layout.pipeline == 1 or not layout.holds(self._strategy.global_rank):
            return None
        chunks = chunks_of(self._strategy.pipeline_schedule)
        return Share(layout.stage(self._strategy.global_rank), layout.pipeline, chunks)

    def of(self, role: str) -> StagedRole | None:
        """This rank's stages of a role; None where its layers are not divided."""
        return self._staged.get(role)

    def cut(self, module: nn.Module, role: str) -> None:
        """Keep this rank's stages of a role only, in place, on the device; nothing where its layout has one stage.

        Raises:
            ValueError: The role cannot be cut.
        """
        if (share := self._share(role)) is not None:
            self._staged[role] = StagedRole(module, share.rank, share.ranks, share.chunks)
            module.to(self._strategy.root_device)

    def copy_weights(self, module: nn.Module, role: str) -> None:
        """Make all ranks of a stage start from the same weights, also where they were drawn at random on each.

        So do the ends of a pipeline with what they share.
        """
        for operation in ("scores", "tensor"):  # along the data axis, then along the tensor axis
            self._copy(
                [*module.parameters(), *module.buffers(), *all_scales(module)], self._strategy.group(role, operation)
            )
        self._copy(self._tied(role), self._strategy.group(role, "ends") if role in self._staged else None)

    def counted_once(self, role: str) -> tuple[dist.ProcessGroup | None, list[Tensor]]:
        """What the gradient norm of a role needs to know: the group of its stages, and what others count."""
        if (staged := self.of(role)) is None:
            return None, []
        return self._strategy.group(role, "pipeline"), [] if staged.stages[0].is_first else self._tied(role)

    def _tied(self, role: str) -> list[Tensor]:
        staged = self.of(role)
        return [] if staged is None or staged.tied is None else list(staged.tied.parameters())

    @staticmethod
    def _copy(tensors: list[Tensor], group: dist.ProcessGroup | None) -> None:
        if group is not None and group.size() > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), group=group, group_src=0)


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move a module's buffers; its parameters follow once it is known which of them stay."""
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = buffer.to(device)
