"""Activation checkpointing, never re-entrant: a layer's forward is run again in the backward instead of being kept.

``"full"`` keeps only the input of each decoder layer. ``"selective"`` also keeps attention: its output, and those of
the matrices around it, which are as narrow as the residual stream. What it recomputes are norms and the MLP's wide
part. A list of module-name suffixes checkpoints just those modules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Literal

import torch
from torch import nn
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_verl.models import block_attention  # noqa: F401  registers its operator
from lightning_verl.models.compat import varlen_attention_operator
from lightning_verl.parallel.structure import decoder_layers

ActivationCheckpointing = Literal["selective", "full"] | Sequence[str] | None

_KEPT_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
_MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


@cache
def attention_operators() -> frozenset[Any]:
    """The operators that attention comes down to, on any device: ``"selective"`` keeps their outputs."""
    aten = torch.ops.aten
    operators = {
        torch.ops.lightning_verl.block_attention.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        varlen_attention_operator(),
    }
    return frozenset(operators - {None})


def apply_activation_checkpointing(module: nn.Module, mode: ActivationCheckpointing) -> None:
    """Make a role recompute activations, in place. Outside of autograd the modules run as before.

    Args:
        module: The role.
        mode: ``"selective"``, ``"full"``, a list of module-name suffixes, or None for nothing.

    Raises:
        ValueError: An unknown mode, a suffix that no module has, or a role whose decoder layers cannot be found.
    """
    if mode is None:
        return
    if isinstance(mode, str):
        if mode not in ("selective", "full"):
            raise ValueError(
                f"activation_checkpointing={mode!r} is unknown; use 'selective', 'full', None or a list of module-name "
                "suffixes such as ['self_attn.o_proj']."
            )
        targets = decoder_layers(module)
        if not targets:
            raise ValueError(
                f"activation_checkpointing={mode!r}: {type(module).__name__} has no decoder layers that could be "
                "found; name the modules in a list of suffixes instead."
            )
        contexts = _keep_costly(targets) if mode == "selective" else None
        for layer in targets:
            _recompute(layer, contexts)
        return
    for suffix in mode:
        named = [child for name, child in module.named_modules() if name == suffix or name.endswith("." + suffix)]
        if not named:
            raise ValueError(f"activation_checkpointing: no module of {type(module).__name__} ends in {suffix!r}.")
        for child in named:
            _recompute(child, None)


_Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def _recompute(module: nn.Module, contexts: _Contexts | None) -> None:
    forward = module.forward
    options: dict[str, Any] = {"use_reentrant": False}
    if contexts is not None:
        options["context_fn"] = contexts

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, **options, **kwargs)

    module.forward = recomputed


def _keep_costly(layers: Sequence[nn.Module]) -> _Contexts:
    """A policy that keeps attention and the matmuls of ``_KEPT_MODULES``, told apart by which module is running.

    One for all layers: a compiled layer is compiled anew where another policy comes with it.
    """
    running: list[nn.Module] = []
    attention = attention_operators()

    for layer in layers:
        for name, child in layer.named_modules():
            if name.rpartition(".")[2] in _KEPT_MODULES:
                child.forward = _noted(child, running)  # a hook has a number, and is compiled anew for each

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = operation in attention or (operation in _MATMULS and (bool(running) or _is_compiled_into_kept_module()))
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


def _noted(module: nn.Module, running: list[nn.Module]) -> Callable[..., Any]:
    """A module's forward that is in a list while it runs."""
    forward = module.forward

    @functools.wraps(forward)
    def noted(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        running.append(module)
        try:
            return forward(*args, **kwargs)
        finally:
            running.pop()  # recomputation may stop inside of the module

    return noted


def _is_compiled_into_kept_module() -> bool:
    """Whether the operator that is being compiled belongs to one of ``_KEPT_MODULES``."""
    modules = traceback.get_current_meta().get("nn_module_stack") or {}
    return any(path.rpartition(".")[2] in _KEPT_MODULES for path, _ in modules.values())
