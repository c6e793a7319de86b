"""Process groups: who makes them, and which role and operation each belongs to."""

from __future__ import annotations

import atexit
import functools
import sys
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from lightning_verl.models import compat
from lightning_verl.strategies.layout import RoleLayout, check_names

DEFAULT_TIMEOUT = timedelta(seconds=1800)

OPERATIONS = {
    "gather": "shard",
    "reduce": "shard",
    "replicate": "replicate",
    "tensor": "tensor",
    "scores": "data",
    "rows": "exchange",
    "expert": "expert",
    "expert_gather": "expert_shard",
    "expert_reduce": "expert_shard",
    "pipeline": "pipeline",
    "ends": "ends",
    "reshard": "all",
}
"""What a role communicates, and along which axis of its grid.

``gather``: FSDP2's parameter all-gather. ``reduce``: its gradient reduce-scatter. ``replicate``: the gradient
all-reduce over whole copies. ``tensor``: the reductions inside cut matrices. ``scores``: loss normalisers and
statistics. ``rows``: the actor's rows on their way to the role, and its scores, values and log-probs on their way back.
``reshard``: the actor's weights on their way from its update layout to its rollout layout. ``expert``: tokens to and
from experts. ``expert_gather`` and ``expert_reduce``: what ``gather`` and ``reduce`` are, for experts. ``pipeline``:
hidden states and their gradients between stages, results from the last stage to the others. ``ends``: the gradient of
an embedding that the head of the last stage is tied to.
"""


def operations_of(role: str, layout: RoleLayout | None = None) -> dict[str, str]:
    """The operations that a role has, and their axes: only the actor is ever resharded.

    Args:
        role: The role.
        layout: Leaves out those of axes that this layout does not have; None: all of them.
    """
    unused = {"" if role == "actor" else "reshard"}
    if layout is not None and layout.expert == 1:
        unused |= {"expert", "expert_gather", "expert_reduce"}
    if layout is not None and layout.pipeline == 1:
        unused |= {"pipeline", "ends"}
    return {operation: axis for operation, axis in OPERATIONS.items() if operation not in unused}


@functools.cache
def leave_groups_at_exit() -> None:
    """Let a process that ends well leave its process groups first, once for all strategies of the process.

    Left to the interpreter's own end, threads of gloo may outlive what they work on, and the process aborts after its
    work is done. One that ends with an error leaves nothing: it could wait for ranks that wait for it.
    """
    atexit.register(_leave_groups)


def _leave_groups() -> None:
    if dist.is_initialized() and getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()


class NCCLGroupManager:
    """Creates process groups, every rank of the world in the same order."""

    @staticmethod
    def create_group(
        ranks: Sequence[int],
        backend: str | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        *,
        high_priority: bool = False,
        description: str = "",
    ) -> dist.ProcessGroup | None:
        """Create one group. Every rank of the world must call it, also those outside ``ranks``.

        Args:
            ranks: World ranks of the group, in the order of the group.
            backend: "nccl" or "gloo"; None takes the backend of the world.
            timeout: How long a collective of the group may take.
            high_priority: Run the group's kernels on a high-priority stream (NCCL only; ignored by other backends).
            description: A name for error messages.

        Returns:
            The group, or None on a rank that is not in it.

        Raises:
            RuntimeError: No process group exists yet.
        """
        if not dist.is_initialized():
            raise RuntimeError(
                "NCCLGroupManager.create_group needs a world of processes; call fabric.launch() first (one CPU "
                "process has no groups and needs none)."
            )
        options = None
        if high_priority and (backend or dist.get_backend()) == "nccl":
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            options._timeout = timeout  # options carry a time-out of their own, which would win
        group = compat.new_group(ranks, backend=backend, timeout=timeout, description=description, options=options)
        return group if dist.get_rank() in ranks else None


class GroupRegistry:
    """The groups of every role and operation. Roles share one group an axis unless one is put in its place."""

    def __init__(self, timeout: timedelta, backend: str | None) -> None:
        self._timeout = timeout
        self._backend = backend
        self._shared: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self._own: dict[tuple[str, str], dist.ProcessGroup | None] = {}

    def put(self, layout: RoleLayout, operation: str, group: dist.ProcessGroup | None) -> None:
        """Use ``group`` for one operation of a role, from the role's set-up on.

        Ranks without the role must call it too, so that all know that there is a group; theirs is not looked at.

        Raises:
            ValueError: The operation is unknown, or the group's ranks are not this rank's line of the role's grid.
        """
        check_names("HybridStrategy.set_group", [operation], OPERATIONS, "operation")
        wanted = _own_line(layout, OPERATIONS[operation])
        if wanted is None:
            self._own[layout.role, operation] = None
            return
        ranks = None if group is None else dist.get_process_group_ranks(group)
        if ranks != wanted:
            raise ValueError(
                f"HybridStrategy.set_group: the group for {layout.role!r} / {operation!r} has ranks {ranks}, but this "
                f"rank communicates along the {OPERATIONS[operation]} axis with {wanted}. Create the group with those "
                "ranks."
            )
        self._own[layout.role, operation] = group

    def has(self, role: str, operation: str) -> bool:
        """Whether a group was put in place for an operation of a role."""
        return (role, operation) in self._own

    def get(self, layout: RoleLayout, operation: str) -> dist.ProcessGroup | None:
        """The group of one operation of a role; None on a rank outside of it, and where nothing of the kind is sent.

        Created with all its sister lines on first use (a collective call, of the ranks without the role too).
        """
        if (layout.role, operation) in self._own:
            return self._own[layout.role, operation]
        axis = OPERATIONS[operation]
        if axis in ("pipeline", "ends") and layout.pipeline == 1:
            return None
        for line in _lines(layout, axis):
            if tuple(line) not in self._shared:
                self._shared[tuple(line)] = NCCLGroupManager.create_group(
                    line, self._backend, self._timeout, description=f"shared:{line}"
                )
        own = _own_line(layout, axis)
        return None if own is None else self._shared[tuple(own)]


def _own_line(layout: RoleLayout, axis: str) -> list[int] | None:
    rank = dist.get_rank()
    return next((line for line in _lines(layout, axis) if rank in line), None)


def _lines(layout: RoleLayout, axis: str) -> list[list[int]]:
    """The lines of a grid as groups. Those of the rollout ascend, as torch 2.11 wants it; no order matters there."""
    lines = layout.lines(axis)
    return [sorted(line) for line in lines] if layout.role == "rollout" else lines
