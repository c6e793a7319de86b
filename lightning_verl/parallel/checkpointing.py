"""Activation checkpointing, never re-entrant: a layer's forward is run again in the backward instead of being kept.

``"full"`` keeps only the input of each decoder layer. ``"selective"`` also keeps the outputs that cost most to
recompute for their size: attention, ``o_proj`` and ``up_proj``. A list of module-name suffixes checkpoints just those
modules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_verl.models.compat import varlen_attention_operator
from lightning_verl.parallel.structure import decoder_layers

ActivationCheckpointing = Literal["selective", "full"] | Sequence[str] | None

_KEPT_MODULES = ("o_proj", "up_proj")
_MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


@cache
def attention_operators() -> frozenset[Any]:
    """The operators that attention comes down to, on any device: ``"selective"`` keeps their outputs."""
    aten = torch.ops.aten
    operators = {
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
        for layer in targets:
            _recompute(layer, _keep_costly(layer) if mode == "selective" else None)
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


def _keep_costly(layer: nn.Module) -> _Contexts:
    """A policy that keeps attention and the matmuls of ``_KEPT_MODULES``, told apart by which module is running."""
    running: list[nn.Module] = []
    attention = attention_operators()

    def enter(module: nn.Module, args: Any) -> None:
        running.append(module)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        running.pop()

    for name, child in layer.named_modules():
        if name.rpartition(".")[2] in _KEPT_MODULES:
            child.register_forward_pre_hook(enter)
            child.register_forward_hook(leave, always_call=True)  # recomputation may stop inside the module

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = operation in attention or (bool(running) and operation in _MATMULS)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)
