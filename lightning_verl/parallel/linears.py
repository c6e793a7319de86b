"""Linear layers cut over a tensor axis: their parameters are DTensors, what they compute is plain local tensors.

A layer cut by columns gives this rank's outputs, one cut by rows sums what the ranks made of their inputs. Layers cut
by columns share an input (queries, keys, values; both halves of a gated MLP): its gradient is summed once, where it
enters the module around them, not once for each. So a decoder layer has two all-reduces in its forward and two in its
backward.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch.distributed as dist
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional

from lightning_verl.parallel.collectives import SumGradient, SumOutput


def linears(module: nn.Module, style: str) -> list[Any]:
    """The linear layers to cut in a planned module: itself, or of an adapter's target what follows it.

    Column-wise: A stays whole (see ``cut_linears``), B is cut with the outputs. Row-wise: A is cut with the inputs and
    its narrow output summed, B stays whole.

    Args:
        module: A linear layer, with an adapter or without.
        style: ``"colwise"`` or ``"rowwise"``.
    """
    if not isinstance(module, LoraLayer):
        return [module]
    halves = module.lora_B if style == "colwise" else module.lora_A
    return [module.base_layer, *halves.values()]


def cut_linears(module: nn.Module, style: str, mesh: DeviceMesh) -> None:
    """Cut a planned module, in place. Every rank must hold the same weights.

    One cut by columns gives its input this rank's part of the gradient: ``sum_input_gradient`` of it, or of a module
    around it, makes that whole.

    Args:
        module: A linear layer, with an adapter or without.
        style: ``"colwise"`` or ``"rowwise"``.
        mesh: The tensor axis.

    Raises:
        TypeError: It is no plain linear layer, or its adapter no plain LoRA.
    """
    group = mesh.get_group()
    for adapter, variant in getattr(module, "lora_variant", {}).items():
        raise TypeError(
            f"{type(module).__name__} has the adapter {adapter!r} of {type(variant).__name__}, but only plain LoRA can "
            "be cut over a tensor axis; set its role's tp to 1, or leave use_dora and kin out of the LoraConfig."
        )
    for linear in linears(module, style):
        if getattr(type(linear), "forward", None) is not nn.Linear.forward:
            raise TypeError(
                f"{type(linear).__name__} is planned as {style}, but only torch.nn.Linear can be cut so; set its "
                "role's tp to 1."
            )
        for name, parameter in list(linear.named_parameters(recurse=False)):
            along = Shard(0) if style == "colwise" else Shard(1) if name == "weight" else Replicate()
            part = nn.Parameter(distribute_tensor(parameter, mesh, [along]), requires_grad=parameter.requires_grad)
            linear.register_parameter(name, part)
        compute_by(_by_columns if style == "colwise" else _by_rows, linear, group)
    if isinstance(module, LoraLayer) and style == "colwise":
        for half in module.lora_A.values():
            compute_by(_before_columns, half, group)


def sum_input_gradient(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Sum the gradient of a module's first input over a tensor axis, in place: the ranks have parts of it.

    Args:
        module: A module all of whose uses of that input are cut by columns.
        group: The tensor axis.
    """
    forward = module.forward
    first = next(iter(inspect.signature(forward).parameters))

    @functools.wraps(forward)
    def summing(*args: Any, **kwargs: Any) -> Any:
        if args:
            return forward(SumGradient.apply(args[0], group), *args[1:], **kwargs)  # type: ignore[no-untyped-call]
        return forward(**{**kwargs, first: SumGradient.apply(kwargs[first], group)})  # type: ignore[no-untyped-call]

    module.forward = summing


def compute_by(function: Callable[[Any, Tensor], Tensor], linear: Any, group: dist.ProcessGroup) -> None:
    """Replace what a linear layer computes, in place; the group is its ``tensor_group``.

    Args:
        function: Takes the layer and its input. All layers share it, so that the compiler takes them for one: it would
            compile each anew whose ``forward`` is an object of its own.
        linear: The layer.
        group: The tensor axis.
    """
    linear.tensor_group = group
    linear.forward = MethodType(function, linear)


def _by_columns(linear: Any, inputs: Tensor) -> Tensor:
    """The outputs that this rank's rows of the weight give."""
    bias = linear.bias
    return functional.linear(inputs, linear.weight.to_local(), None if bias is None else bias.to_local())


def _by_rows(linear: Any, inputs: Tensor) -> Tensor:
    """All outputs, of inputs of which this rank has a part; the bias, whole, is added once."""
    part = functional.linear(inputs, linear.weight.to_local())
    output: Tensor = SumOutput.apply(part, linear.tensor_group)  # type: ignore[no-untyped-call]
    bias = linear.bias
    return output if bias is None else output + bias.to_local()


def _before_columns(linear: Any, inputs: Tensor) -> Tensor:
    """The whole half of an adapter before the one cut by columns, which gives it this rank's part of the gradient.

    The gradient of its weight is summed here: that is smaller than what it computes, and equal on all ranks even if
    each drops out other inputs.
    """
    weight = SumGradient.apply(linear.weight, linear.tensor_group)  # type: ignore[no-untyped-call]
    return functional.linear(inputs, weight)
