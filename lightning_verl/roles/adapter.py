"""The reference policy of a LoRA actor: the same model with its adapter as it was at step 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_verl.parallel.fsdp import reshard


class AdapterReference:
    """Keeps a copy of a role's trained parameters and puts it in place for a pass.

    A new adapter adds nothing, so at step 0 of a fresh run this is the base model; after SFT with an adapter it is what
    SFT made.
    """

    def __init__(self, actor: nn.Module) -> None:
        self._actor = actor
        self._start: dict[str, Tensor] = {}
        self.freeze()

    @torch.no_grad()
    def freeze(self) -> None:
        """Make the actor as it is now the reference."""
        reshard(self._actor)
        self._start = {name: parameter.detach().clone() for name, parameter in self._trained().items()}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the actor be the reference while the context is open."""
        current = {name: parameter.detach().clone() for name, parameter in self._trained().items()}
        self._write(self._start)
        try:
            yield
        finally:
            self._write(current)

    def tensors(self) -> dict[str, Tensor]:
        """The reference's adapter, by parameter name; a checkpoint holds it."""
        return self._start

    def _trained(self) -> Mapping[str, Tensor]:
        return {name: parameter for name, parameter in self._actor.named_parameters() if parameter.requires_grad}

    @torch.no_grad()
    def _write(self, tensors: Mapping[str, Tensor]) -> None:
        reshard(self._actor)
        for name, parameter in self._trained().items():
            parameter.copy_(tensors[name])
