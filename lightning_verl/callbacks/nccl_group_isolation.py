"""``NCCLGroupIsolation``: a communicator of its own for every role and operation."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from lightning_verl.strategies.groups import DEFAULT_TIMEOUT, NCCLGroupManager, operations_of
from lightning_verl.strategies.layout import ROLES, check_names

if TYPE_CHECKING:
    from lightning_verl.strategies.hybrid import HybridStrategy
    from lightning_verl.trainer import RLTrainer

_logger = logging.getLogger("lightning_verl")


@dataclass(frozen=True)
class IsolatedGroup:
    """One process group that this rank is in."""

    role: str
    """The role it belongs to."""
    operation: str
    """What it is for, see ``strategies.groups.OPERATIONS``."""
    ranks: tuple[int, ...]
    """World ranks, in the order of the group."""
    name: str
    """torch's name of the group, unique in this process."""


class NCCLGroupIsolation:
    """Gives every role and operation a process group of its own: no collective queues behind one of another.

    Without it, roles share one group an axis: the critic's gradient reduction waits until the parameter gathers that
    the actor has queued on the same communicator are through. Groups are made for parameter gathers, gradient
    reduction, replicas, cut matrices, experts, statistics, and the rows that a role works on with their results, of
    each role, and for resharding the actor, wherever they have more than one rank; those of roles that are never set up
    stay unused. Works with gloo too. One CPU process has no groups and needs none.

    What it does not lift: ranks must still issue their collectives in one common order, over all groups.

    Args:
        timeout: How long a collective of these groups may take; or one for each ``"role/operation"``, such as
            ``{"critic/reduce": timedelta(minutes=5)}``, where the others keep 1800 s.
        high_priority: Run their kernels on high-priority CUDA streams (NCCL only).

    Raises:
        ValueError: A timeout is not positive, or for a role or an operation that there is not.
    """

    def __init__(
        self, timeout: timedelta | Mapping[str, timedelta] = DEFAULT_TIMEOUT, high_priority: bool = False
    ) -> None:
        names = [f"{role}/{operation}" for role in ROLES for operation in operations_of(role)]
        given = timeout if isinstance(timeout, Mapping) else dict.fromkeys(names, timeout)
        check_names("NCCLGroupIsolation(timeout)", given, names, "group")
        for name, limit in given.items():
            if limit <= timedelta(0):
                raise ValueError(f"NCCLGroupIsolation got timeout={limit} for {name!r}; it must be above 0.")
        self._timeouts = {name: given.get(name, DEFAULT_TIMEOUT) for name in names}
        self.high_priority = high_priority
        self.report: list[IsolatedGroup] = []
        """The groups that this rank is in, by role and operation."""
        self._strategy: HybridStrategy | None = None
        self._printed = False

    def on_groups_setup(self, strategy: HybridStrategy) -> None:
        """Create the groups and hand them to the strategy (a collective call), once for each strategy.

        Raises:
            RuntimeError: Two operations ended up on one communicator.
        """
        if not dist.is_initialized() or self._strategy is strategy:
            return
        self._strategy, self._printed = strategy, False
        created = self._create(strategy)
        groups = {place: own for place, own in created.items() if own is not None}
        _check_distinct(groups)
        for (role, operation), own in created.items():
            strategy.set_group(role, operation, own)
        self.report = [
            IsolatedGroup(role, operation, tuple(dist.get_process_group_ranks(group)), group.group_name)
            for (role, operation), group in groups.items()
        ]

    def on_run_start(self, trainer: RLTrainer) -> None:
        """Let rank 0 write its groups to the log, once."""
        if self.report and not self._printed and trainer.fabric.is_global_zero:
            self._printed = True
            _logger.info("NCCLGroupIsolation: groups of rank 0\n%s", _table(self.report))

    def _create(self, strategy: HybridStrategy) -> dict[tuple[str, str], dist.ProcessGroup | None]:
        """Every line of every role's grid, in the same order on every rank.

        Returns:
            The groups that this rank is in; None for the operations of roles that it has no part of.
        """
        groups: dict[tuple[str, str], dist.ProcessGroup | None] = {}
        for role in ROLES:
            layout = strategy.layout(role)
            for operation, axis in operations_of(role, layout).items():
                if strategy.has_group(role, operation):
                    continue  # the user's own, such as RLTrainer(grad_sync_groups=...)
                for line in layout.lines(axis):
                    if len(line) == 1:
                        continue  # nothing is communicated; the strategy's shared group stands in
                    group = NCCLGroupManager.create_group(
                        line,
                        timeout=self._timeouts[f"{role}/{operation}"],
                        high_priority=self.high_priority,
                        description=f"{role}/{operation}:{line}",
                    )
                    groups[role, operation] = groups.get((role, operation)) or group
        return groups


def _check_distinct(groups: Mapping[tuple[str, str], dist.ProcessGroup]) -> None:
    """Refuse groups that are one communicator under two names, or the world's."""
    owners: dict[str, str] = {dist.group.WORLD.group_name: "the world"} if dist.group.WORLD is not None else {}
    for (role, operation), group in groups.items():
        name = f"{role}/{operation}"
        other = owners.setdefault(group.group_name, name)
        if other != name:
            raise RuntimeError(
                f"NCCLGroupIsolation: {name} and {other} ended up on one communicator ({group.group_name!r}), so they "
                "are not isolated. torch.distributed.new_group must make a new group at each call; look for code that "
                "replaces it."
            )


def _table(report: Sequence[IsolatedGroup]) -> str:
    return "\n".join(f"  {g.role:<10}{g.operation:<10}ranks {list(g.ranks)}  {g.name}" for g in report)
