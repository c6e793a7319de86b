"""The metrics of one step: torchmetrics on every rank, combined over ranks at its end."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import MaxMetric, Metric, SumMetric

from lightning_verl.models.compat import all_gather_flat


class WeightedMean(Metric):
    """A mean over values that are added up elsewhere; torchmetrics' own drops the weights unless it checks for NaN."""

    total: Tensor
    count: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("total", default=torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", default=torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, total: Tensor, count: int) -> None:
        """Add the sum of ``count`` values."""
        self.total += total
        self.count += count

    def compute(self) -> Tensor:
        """The mean, NaN without a value."""
        return self.total / self.count


_REDUCTIONS: dict[type[Metric], Callable[[Tensor], Tensor]] = {
    WeightedMean: lambda states: states.sum(0),
    SumMetric: lambda states: states.sum(0),
    MaxMetric: lambda states: states.amax(0),
}

_NOTHING: dict[type[Metric], tuple[Any, ...]] = {WeightedMean: (0.0, 0), SumMetric: (0.0,), MaxMetric: (-math.inf,)}
"""An update that changes nothing; a metric without any would warn."""


class StepMetrics:
    """Collects the figures of a step by name; only ranks that count add to them.

    A figure of a role is named by the ranks of that role alone; ranks agree on the names before they combine.

    Args:
        device: Where the figures are kept; nothing is copied to the host before ``compute``.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._metrics: dict[str, Metric] = {}
        self._shares: dict[str, int] = {}

    def mean(self, name: str, values: Tensor, counts: bool = True) -> None:
        """Add values whose mean over everything that all ranks add is wanted; also none at all.

        Args:
            name: The metric.
            values: Any shape.
            counts: False on ranks that only repeat what another one adds (tensor ranks above 0).
        """
        values = values.detach().to(self._device, torch.float64).flatten()
        kept = values if counts else values[:0]
        self._get(name, WeightedMean).update(kept.sum(), kept.numel())

    def share(self, name: str, value: Tensor, counts: bool = True) -> None:
        """Add this micro-batch's share of a mini-batch's figure (see ``algorithms.losses``); shares are summed.

        A name that ends in ``_max`` combines by maximum instead. ``finish_minibatch`` ends a mini-batch; the mean over
        the step's mini-batches is reported.
        """
        if name.endswith("_max"):
            self.largest(name, value, counts)
        else:
            self._get(name, SumMetric).update(value.detach().double() if counts else torch.zeros(()))
            self._shares.setdefault(name, 0)

    def finish_minibatch(self, prefix: str) -> None:
        """Count one mini-batch for every shared figure whose name starts with ``prefix``."""
        for name in self._shares:
            if name.startswith(prefix):
                self._shares[name] += 1

    def total(self, name: str, value: float | Tensor, counts: bool = True) -> None:
        """Add to a sum over ranks."""
        self._get(name, SumMetric).update(torch.as_tensor(value).detach().double() if counts else torch.zeros(()))

    def largest(self, name: str, value: float | Tensor, counts: bool = True) -> None:
        """Take part in a maximum over ranks."""
        metric = self._get(name, MaxMetric)
        metric.update(torch.as_tensor(value).detach().double() if counts else torch.tensor(-math.inf))

    def compute(self) -> dict[str, float]:
        """Combine over ranks and start anew (a collective call of the world).

        Returns:
            The figures by name; those that nobody added to are left out.
        """
        self._agree_on_names()
        names = sorted(self._metrics)
        states = {name: _states(self._metrics[name]) for name in names}
        sizes = [states[name].numel() for name in names]
        if names:
            flat = torch.cat([states[name] for name in names])
            for name, part in zip(names, _gather(flat).split(sizes, dim=1), strict=True):
                _put(self._metrics[name], _REDUCTIONS[type(self._metrics[name])](part))
        result = {}
        for name in names:
            value = float(self._metrics[name].compute())
            if name in self._shares:
                value /= max(self._shares[name], 1)
            if not math.isinf(value) and not math.isnan(value):
                result[name] = value
        self._metrics.clear()
        self._shares.clear()
        return result

    def _agree_on_names(self) -> None:
        """Add, empty, what other ranks named; take over how many mini-batches they counted."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        own = {name: (type(metric), self._shares.get(name)) for name, metric in self._metrics.items()}
        everyone: list[dict[str, tuple[type[Metric], int | None]]] = [own] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        for named in everyone:
            for name, (kind, minibatches) in named.items():
                if name not in self._metrics:
                    self._get(name, kind).update(*_NOTHING[kind])
                if minibatches is not None:
                    self._shares[name] = max(minibatches, self._shares.get(name, 0))

    def _get(self, name: str, kind: type[Metric]) -> Metric:
        if name not in self._metrics:
            options = {} if kind is WeightedMean else {"nan_strategy": "disable"}  # checking would wait for the device
            metric = kind(**options, sync_on_compute=False).to(self._device)
            self._metrics[name] = metric.set_dtype(torch.float64)
        return self._metrics[name]


def _states(metric: Metric) -> Tensor:
    return torch.stack([getattr(metric, name).double() for name in sorted(metric._defaults)])


def _put(metric: Metric, states: Tensor) -> None:
    for name, state in zip(sorted(metric._defaults), states, strict=True):
        setattr(metric, name, state)


def _gather(flat: Tensor) -> Tensor:
    """``[ranks, states]``."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return flat[None]
    gathered = flat.new_empty(dist.get_world_size() * flat.numel())
    all_gather_flat(gathered, flat)
    return gathered.view(dist.get_world_size(), -1)
