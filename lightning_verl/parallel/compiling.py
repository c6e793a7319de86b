"""Decoder layers compiled in place: one compilation serves all layers of a role, and micro-batches of all lengths."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch._functorch import config
from torch.distributed.tensor import DTensor
from transformers import Cache

from lightning_verl.parallel.expert import expert_modules
from lightning_verl.parallel.structure import decoder_layers


def inductor(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """torch's compiler, told not to keep what follows from other kept tensors element by element.

    So the backward pass of a gated MLP makes the product of its halves again, on the way in a kernel that reads both
    anyway, and that of a norm its output. It is a third of what a layer of Qwen2.5-1.5B would keep.
    """
    with config.patch(ban_recompute_materialized_backward=False):
        return lookup_backend("inductor")(graph, list(inputs))


BACKEND: Any = inductor
"""What compiles."""

_log = logging.getLogger(__name__)


def compile_layers(module: nn.Module, backend: Any = None) -> bool:
    """Have the decoder layers of a role run compiled, in place: names of parameters and modules stay.

    To be called before FSDP2 cuts the layers, whose hooks then run around what is compiled, and after activation
    checkpointing is in place, which is compiled along: what a layer recomputes is part of its backward graph. A layer
    that torch cannot compile as a whole is compiled in parts; one that is given a cache, as in a rollout, runs as it is
    written.

    Args:
        module: The role.
        backend: torch's name of what compiles, or a function; None: ``BACKEND``.

    Returns:
        Whether the layers run compiled. Where not, a logged line says why.
    """
    layers = decoder_layers(module)
    is_cut = any(isinstance(parameter, DTensor) for layer in layers for parameter in layer.parameters())
    if problem := compiling_problem(module, is_cut):
        _log.warning("%s: its decoder layers are not compiled: %s.", type(module).__name__, problem)
        return False
    learning, scoring = (_compiled(backend or BACKEND) for _ in range(2))
    for layer in layers:
        layer.forward = _runner(layer.forward, learning, scoring)
    module.__dict__["_runs_compiled"] = True
    return True


def runs_compiled(module: nn.Module) -> bool:
    """Whether the decoder layers of a role run compiled."""
    return "_runs_compiled" in vars(module)


def compiling_problem(module: nn.Module, is_cut: bool) -> str | None:
    """Why the decoder layers of a role are not compiled; None: they are.

    Args:
        module: The role.
        is_cut: Whether a tensor axis cuts them.
    """
    if not decoder_layers(module):
        return "none were found"
    if expert_modules(module):
        return "experts take as many tokens as the router sends them, which a compiled layer would have to wait for"
    if is_cut:
        return "their matrices are cut over a tensor axis, for which layers are not compiled yet"
    return None


def _compiled(backend: Any) -> Callable[..., Any]:
    """A compiled function that runs a layer.

    torch counts compilations by code object, and gives up on one that had 8 of them. Each role has code of its own, so
    that roles do not use up each other's.
    """
    function = FunctionType(_run.__code__.replace(), _run.__globals__)
    return torch.compile(function, backend=backend, dynamic=True)


def _run(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return forward(*args, **kwargs)


def _runner(
    forward: Callable[..., Any], learning: Callable[..., Any], scoring: Callable[..., Any]
) -> Callable[..., Any]:
    # A module's numbers, such as a norm's epsilon, else are tensors on the CPU, and where something is recomputed they
    # get a kernel there: it takes a C++ compiler, and longer to build than all others.
    constants = torch._dynamo.config.patch(specialize_float=True)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, Cache) for value in (*args, *kwargs.values())):
            return forward(*args, **kwargs)  # each layer writes to a place of its own: it would be compiled anew
        with constants:
            return (learning if torch.is_grad_enabled() else scoring)(forward, args, kwargs)

    return run
