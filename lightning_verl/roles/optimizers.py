"""Optimizers of roles by name: AdamW, and AdamW with moments of 8 bits."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW, Optimizer

from lightning_verl.resharding.layouts import mesh_of
from lightning_verl.strategies.layout import check_names

OptimizerName = Literal["adamw", "adamw8bit"]
"""``"adamw8bit"`` holds both moments in 8 bits, in blocks of 256 elements with a scale each; it needs torchao."""

_FUSED_DEVICES = ("cpu", "cuda")


def check_optimizer(owner: str, name: str) -> None:
    """Refuse an optimizer that cannot be made, before anything is.

    Args:
        owner: The class that was given it, for messages.
        name: One of ``OptimizerName``.

    Raises:
        ValueError: There is no such optimizer.
        ImportError: "adamw8bit", but torchao is missing.
    """
    check_names(owner, [name], get_args(OptimizerName), "optimizer")
    if name == "adamw8bit" and importlib.util.find_spec("torchao") is None:
        raise ImportError(
            f"{owner}: optimizer='adamw8bit' needs torchao, which is not installed. Install it with "
            "pip install 'lightning-verl[8bit]', or take optimizer='adamw'."
        )


def make_optimizer(
    name: OptimizerName,
    parameters: Sequence[nn.Parameter],
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
) -> Optimizer:
    """Make AdamW over parameters that were set up on their device.

    The update is fused where torch can. Parameters of one mesh share a param group: the fused update takes no others
    together.

    Args:
        name: Which one.
        parameters: The trained parameters, plain or of any meshes.
        learning_rate: The step size.
        weight_decay: The weight decay.
        betas: The decays of the moments.
    """
    options: dict[str, Any] = {"lr": learning_rate, "weight_decay": weight_decay, "betas": betas}
    if name == "adamw8bit":
        made: Optimizer = _adamw_8bit()(parameters, **options)
        return made
    by_mesh: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_mesh.setdefault(mesh_of(parameter), []).append(parameter)
    groups = [{"params": group} for group in by_mesh.values()]
    return AdamW(groups or parameters, fused=_can_fuse(parameters) or None, **options)


def _can_fuse(parameters: Sequence[Tensor]) -> bool:
    return all(p.device.type in _FUSED_DEVICES and p.is_floating_point() for p in parameters)


@cache
def _adamw_8bit() -> Callable[..., Optimizer]:
    """torchao's class, with learning rates that are plain numbers, as schedules and checkpoints take them."""
    from torchao.optim import AdamW8bit

    class PlainRateAdamW8bit(AdamW8bit):  # type: ignore[misc]
        def add_param_group(self, param_group: dict[str, Any]) -> None:
            super().add_param_group(param_group)
            self.param_groups[-1]["lr"] = float(self.param_groups[-1]["lr"])

        def step(self, closure: Callable[[], float] | None = None) -> float | None:
            rates = [group["lr"] for group in self.param_groups]
            for group in self.param_groups:
                group["lr"] = torch.tensor(float(group["lr"]))
            try:
                return super().step(closure)  # type: ignore[no-any-return]
            finally:
                for group, rate in zip(self.param_groups, rates, strict=True):
                    group["lr"] = rate

    return PlainRateAdamW8bit
