"""The vocabulary over a tensor axis: embedding and output head cut along it.

A rank holds consecutive tokens, ``ceil(V / ranks)`` of them, the last rank what is left. In training it makes only its
own logits; what a softmax needs of the others is a maximum and three sums for each position, see
``models/fused_logprobs.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional
from transformers import PreTrainedModel

from lightning_verl.parallel.collectives import SumGradient, SumOutput


def vocabulary_ends(model: PreTrainedModel) -> list[Any]:
    """The modules of a model that a tensor axis cuts along the vocabulary: embedding, and output head if it has one.

    None where one of them is of a class of its own, which may scale or bias, or carries an adapter: both stay whole.
    What only another stage of a pipeline has does not count.
    """
    ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    here = [end for end in ends if end is not None and next(end.parameters(), None) is not None]
    return here if all(type(end) in (nn.Embedding, nn.Linear) for end in here) else []


def cut_vocabulary(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Cut embedding and output head over a one-axis mesh, in place; tied ones stay one parameter.

    As a module the head still returns the logits of all tokens: it gathers them, for whoever generates with the model.

    Args:
        model: A causal model, or one without a head. Every rank holds the same weights.
        mesh: The role's tensor axis.
    """
    cut: dict[Tensor, Any] = {}
    for end in reversed(vocabulary_ends(model)):  # the head first
        whole = end.weight
        if isinstance(end, nn.Linear):
            parallelize_module(end, mesh, ColwiseParallel(output_layouts=Replicate()))
            cut[whole] = end.weight
            continue
        if whole not in cut:
            cut[whole] = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]), requires_grad=whole.requires_grad)
        end.weight = cut[whole]
        end.forward = _CutEmbedding(end)


class _CutEmbedding:
    """A look-up in one part of the vocabulary; every id is in exactly one rank's part, the others add zeros."""

    def __init__(self, embedding: Any) -> None:
        self.embedding = embedding

    def __call__(self, ids: Tensor) -> Tensor:
        shard = VocabularyShard.of_weight(self.embedding.weight)
        weight = self.embedding.weight.to_local()
        place, here = shard.place(ids, len(weight))
        padding = self.embedding.padding_idx  # its row gets no gradient
        own = None if padding is None or not 0 <= padding - shard.start < len(weight) else padding - shard.start
        part = functional.embedding(place, weight, own).masked_fill(~here[..., None], 0)
        total: Tensor = SumOutput.apply(part, shard.group)  # type: ignore[no-untyped-call]
        return total


@dataclass(frozen=True)
class VocabularyShard:
    """The part of the vocabulary that a rank makes logits of."""

    group: dist.ProcessGroup
    """The ranks that have all of it together, with equal hidden states."""
    start: int
    """This rank's first token."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> VocabularyShard | None:
        """The part of a model's head that this rank holds; None where the head is whole."""
        head = model.get_output_embeddings()
        cut = head in vocabulary_ends(model) and isinstance(head.weight, DTensor)
        return cls.of_weight(head.weight) if cut else None

    @classmethod
    def of_weight(cls, weight: DTensor) -> VocabularyShard:
        """The part of a weight that is cut over the vocabulary and, if FSDP2 cuts it too, gathered."""
        mesh = weight.device_mesh
        return cls(mesh.get_group(), mesh.get_local_rank() * -(-weight.shape[0] // mesh.size()))

    def place(self, ids: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Where tokens are in this part of ``size`` tokens (anywhere, if not in it), and whether they are in it."""
        place = ids - self.start
        here = (place >= 0) & (place < size)
        return place.masked_fill(~here, 0), here

    def shared(self, hidden: Tensor) -> Tensor:
        """Hidden states for this rank's part of the head: the gradients that all parts give them are summed."""
        states: Tensor = SumGradient.apply(hidden, self.group)  # type: ignore[no-untyped-call]
        return states
