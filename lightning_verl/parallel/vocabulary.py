"""The vocabulary over a tensor axis: embedding and output head cut along it, and log-probs from parts of the logits.

A rank holds consecutive tokens, ``ceil(V / ranks)`` of them, the last rank what is left. In training it makes only its
own logits; what a softmax needs of the others is a maximum and two or three sums for each position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional
from transformers import PreTrainedModel

from lightning_verl.parallel.collectives import SumGradient, SumOutput

_NO_MASS = -1e4
"""A log-prob whose probability is exactly 0, also in float64; -inf would make NaN of 0 x -inf."""


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

    def score(
        self, logits: Tensor, targets: Tensor, divisor: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs (and entropies) under the softmax over all ranks' logits (a collective call of the group).

        With z the logits over ``divisor`` less their maximum over all ranks, s = sum e^z: a log-prob is z - log s, the
        entropy log s - (sum e^z z) / s.

        Args:
            logits: Of this rank's tokens, ``[n, size]``.
            targets: Token ids of the whole vocabulary, int64 ``[n]``, equal on all ranks.
            divisor: The temperature, above 0.
            with_entropy: Also return the entropies.

        Returns:
            ``[n]`` each, float32 (float64 for float64 logits), equal on all ranks; a log-prob is never above 0.
        """
        scored: tuple[Tensor, Tensor | None] = _Score.apply(  # type: ignore[no-untyped-call]
            logits, targets, self, divisor, with_entropy
        )
        return scored


class _Score(torch.autograd.Function):
    """See ``VocabularyShard.score``; gradients of equal results on all ranks, by hand to save copies of the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, shard: VocabularyShard, divisor: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / divisor
        largest = scaled.amax(dim=-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=shard.group)
        scaled -= largest[:, None]
        place, here = shard.place(targets, scaled.shape[-1])
        picked = scaled.gather(-1, place[:, None]).squeeze(-1).masked_fill(~here, 0)
        mass = scaled.clamp_(min=_NO_MASS).exp()
        sums = [mass.sum(dim=-1), picked]
        if with_entropy:
            sums.append(mass.mul_(scaled).sum(dim=-1))
        total = torch.stack(sums)
        dist.all_reduce(total, group=shard.group)
        log_sum = total[0].log()
        entropy = log_sum - total[2] / total[0] if with_entropy else None
        ctx.divisor, ctx.dtype = divisor, logits.dtype
        ctx.save_for_backward(scaled, log_sum, entropy, place, here)
        return total[1] - log_sum, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # d log p_t / dz_i = [i = t] - p_i and dH / dz_i = -p_i (log p_i + H)
        scaled, log_sum, entropy, place, here = ctx.saved_tensors
        log_probs = scaled - log_sum[:, None]
        probs = log_probs.exp()
        if entropy is None:
            gradient = probs.mul_(-gradients[0][:, None])
        else:
            inner = log_probs.add_(entropy[:, None]).mul_(gradients[1][:, None]).add_(gradients[0][:, None])
            gradient = inner.mul_(probs).neg_()
        gradient.scatter_add_(-1, place[:, None], (gradients[0] * here)[:, None])
        return gradient.div_(ctx.divisor).to(ctx.dtype), None, None, None, None
