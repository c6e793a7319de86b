"""What a micro-batch of the actor's update moves between ranks, against the time of its matmuls. An estimate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_verl.planning.batch import BatchSizes, RoleBatch
from lightning_verl.planning.memory import RoleMemory
from lightning_verl.planning.shards import numel_on

MATMUL_FLOPS = {2: 743e12, 4: 50e12}
"""FLOP/s of matmuls by bytes of an element: bf16 as measured on an H200, fp32 outside of the tensor cores."""
HOST_RANKS = 8
"""Ranks of one host, which follow each other."""
HOST_LINK = 280.0
"""GB/s that a rank receives in an all-gather within a host: NVLink, measured on two H200."""
NETWORK_LINK = 50.0
"""GB/s that a rank receives over the network: one adapter of 400 Gb/s a GPU."""


@dataclass(frozen=True)
class Traffic:
    """One micro-batch on one rank."""

    parameter_bytes: int
    """Received for gathers, in forward and backward, and for the reduction of gradients in fp32."""
    parameter_seconds: float
    """Its time at the link's bandwidth; it runs beside the matmuls."""
    tensor_bytes: int
    """Received for the all-reduces of the tensor axis."""
    tensor_seconds: float
    """Its time; the matmuls wait for it."""
    matmul_seconds: float
    """Time of the matmuls at ``MATMUL_FLOPS``."""
    shard_link: float
    """GB/s that gathers were taken to have."""

    @property
    def is_bound(self) -> bool:
        """Whether communication takes longer than the matmuls."""
        return self.parameter_seconds + self.tensor_seconds > self.matmul_seconds

    @classmethod
    def of(cls, actor: RoleMemory, sizes: BatchSizes, link: float | None) -> Traffic | None:
        """The traffic of an actor; None where the FLOPs are not known.

        Args:
            actor: The actor.
            sizes: The batches.
            link: GB/s of the link of a GPU; None: ``HOST_LINK`` or ``NETWORK_LINK``, by where a group's ranks are.
        """
        model, layout, batch = actor.model, actor.layout, actor.batch
        if model.cost is None:
            return None
        shards, tensor = layout.shards * layout.expert, layout.tensor
        rank = layout.ranks[0]  # of a pipeline the first stage
        held = [(p, numel_on(p, actor.place.gathered(p), rank)) for p in model.parameters]
        gathers = 2 * model.compute_bytes * sum(numel for _, numel in held)
        reduction = 4 * sum(numel for parameter, numel in held if parameter.trained)
        parameter_bytes = (gathers + reduction) * (shards - 1) // shards
        # All-reduces a layer: two in its forward, two in its backward, and where it is recomputed that behind attention
        # again (what follows that behind the MLP is needed by no backward, unless it is a norm).
        passes = 5 if model.checkpointing in ("full", "selective") else 4
        hidden = batch.micro_batch_tokens * model.decoder.hidden * model.compute_bytes
        layers = -(-model.decoder.layers // layout.pipeline)
        reductions = passes * layers + 2 * model.cuts_vocabulary  # embedding, and the head's gradient
        tensor_bytes = reductions * hidden * 2 * (tensor - 1) // tensor
        flops = float(model.cost.flops_of(*_attended(batch, sizes))) / (tensor * layout.pipeline)
        shard_link = link or _link(layout.lines("shard")[0])
        return cls(
            parameter_bytes=parameter_bytes,
            parameter_seconds=parameter_bytes / (shard_link * 1e9),
            tensor_bytes=tensor_bytes,
            tensor_seconds=tensor_bytes / ((link or _link(layout.lines("tensor")[0])) * 1e9),
            matmul_seconds=flops / MATMUL_FLOPS[model.compute_bytes],
            shard_link=shard_link,
        )


def _attended(batch: RoleBatch, sizes: BatchSizes) -> tuple[Tensor, Tensor]:
    """Tokens of a micro-batch, and twice the pairs of which one sees the other; those of a shared prompt count once."""
    rows = batch.micro_batch_responses // sizes.response_tokens
    prompts = (batch.micro_batch_tokens - batch.micro_batch_responses) // sizes.prompt_tokens
    squares = rows * (sizes.row_tokens**2 - sizes.prompt_tokens**2) + prompts * sizes.prompt_tokens**2
    return torch.tensor(batch.micro_batch_tokens).double(), torch.tensor(squares).double()


def _link(ranks: list[int]) -> float:
    """The bandwidth among ranks, by whether they are on one host."""
    return HOST_LINK if len(hosts(ranks)) == 1 else NETWORK_LINK


def hosts(ranks: Iterable[int]) -> set[int]:
    """The hosts that ranks are on."""
    return {rank // HOST_RANKS for rank in ranks}
