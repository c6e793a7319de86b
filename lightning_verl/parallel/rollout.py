"""How a model is cut for generating: plain local tensors, one reduction behind each row-wise layer, no DTensor.

The update layout wants DTensor for gradients, optimizers and checkpoints. A decode step has none of these and runs
thousands of times, so that here a rank simply holds its part of a weight and the modules know how to put parts
together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from lightning_verl.models.compat import all_gather_flat
from lightning_verl.parallel.linears import compute_by
from lightning_verl.parallel.tensor import planned_styles
from lightning_verl.parallel.vocabulary import vocabulary_ends


@dataclass(frozen=True)
class RolloutCut:
    """Which dim of a parameter the rollout's tensor axis cuts."""

    dim: int
    """The dim, of the weight as the model defines it."""


def rollout_cuts(model: PreTrainedModel) -> dict[str, RolloutCut]:
    """What a rollout over several tensor ranks cuts, by the names of parameters; what is not named stays whole.

    Matrices follow the tensor-parallel plan in the model's config, embedding and output head are cut along the
    vocabulary (``vocabulary_ends``).

    Args:
        model: A causal model without adapters.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    cuts: dict[str, RolloutCut] = {}
    dims = {"colwise": {"weight": 0, "bias": 0}, "rowwise": {"weight": 1}}
    for module, style in planned_styles(model):
        for key, dim in dims.get(style, {}).items():
            if getattr(module, key, None) is not None:
                cuts[names[id(getattr(module, key))]] = RolloutCut(dim)
    for end in vocabulary_ends(model):
        cuts.update({names[id(parameter)]: RolloutCut(0) for parameter in end.parameters(recurse=False)})
    return cuts


def cut_forwards(model: PreTrainedModel, group: dist.ProcessGroup, order: tuple[int, ...]) -> None:
    """Make a model run on parts of its weights, in place; the weights themselves are put in later.

    Args:
        model: The model, whole or on the meta device.
        group: The tensor ranks that share it.
        order: For each rank of the group, which part of what is cut it holds.
    """
    for module, style in planned_styles(model):
        if style == "rowwise":
            compute_by(_by_rows, module, group)
    for end in vocabulary_ends(model):
        of_tokens = isinstance(end, nn.Embedding)
        end.forward = _Embedding(end, group, order) if of_tokens else _Head(end, group, order, end.out_features)


def _by_rows(linear: Any, inputs: Tensor) -> Tensor:
    """A linear layer whose inputs are cut: partial outputs are summed, the bias is added once."""
    output: Tensor = functional.linear(inputs, linear.weight)
    dist.all_reduce(output, group=linear.tensor_group)
    return output if linear.bias is None else output + linear.bias


class _Embedding:
    """A look-up in one part of the vocabulary; every id is in exactly one rank's part, the others add zeros."""

    def __init__(self, embedding: Any, group: dist.ProcessGroup, order: tuple[int, ...]) -> None:
        self.embedding, self.group = embedding, group
        self.part, self.parts = order[group.rank()], group.size()

    def __call__(self, ids: Tensor) -> Tensor:
        weight: Tensor = self.embedding.weight
        local = ids - self.part * -(-self.embedding.num_embeddings // self.parts)
        elsewhere = (local < 0) | (local >= weight.shape[0])
        if len(weight):
            output = functional.embedding(local.masked_fill(elsewhere, 0), weight).masked_fill_(elsewhere[..., None], 0)
        else:  # the last ranks of a vocabulary that does not divide may hold nothing
            output = weight.new_zeros(*ids.shape, weight.shape[1])
        dist.all_reduce(output, group=self.group)
        return output


class _Head:
    """An output head over one part of the vocabulary; the logits of all parts are gathered."""

    def __init__(self, head: Any, group: dist.ProcessGroup, order: tuple[int, ...], size: int) -> None:
        self.head, self.group, self.size = head, group, size
        self.rank_of_part = sorted(range(len(order)), key=order.__getitem__)

    def __call__(self, hidden: Tensor) -> Tensor:
        local = functional.linear(hidden, self.head.weight, self.head.bias)
        parts = self.group.size()
        chunk = -(-self.size // parts)
        local = functional.pad(local, (0, chunk - local.shape[-1])).contiguous()
        gathered = local.new_empty(parts, *local.shape)
        all_gather_flat(gathered.view(-1), local.view(-1), self.group)
        return torch.cat([gathered[rank] for rank in self.rank_of_part], dim=-1)[..., : self.size]
