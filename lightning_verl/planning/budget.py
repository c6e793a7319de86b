"""How many tokens a micro-batch may have, from the memory that is free when the first one is cut."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from lightning_verl.parallel.compiling import runs_compiled
from lightning_verl.parallel.vocabulary import vocabulary_ends
from lightning_verl.planning.memory import LOGIT_CHUNK, activation_bytes, update_logit_bytes
from lightning_verl.planning.model import Decoder, RoleModel
from lightning_verl.resharding.layouts import local_part
from lightning_verl.rollout.native.cache import free_bytes
from lightning_verl.strategies.dispatch import gather_counts
from lightning_verl.strategies.hybrid import HybridStrategy

MOST_TOKENS = 16_384
"""A micro-batch of more tokens is hardly faster: matrices are large by then."""
LEAST_TOKENS = 512
"""A micro-batch gets as many even where memory seems short: what is free is only an estimate."""
USED_SHARE = 0.8
"""Of the free memory, for activations and logits; the rest is for gathered units and gaps between tensors."""


class MicroBatchBudget:
    """The tokens of a role's micro-batches where nobody said how many; ``MOST_TOKENS`` where it has no ``model``.

    Free is what the device has free, and what torch holds and does not use, less gradients and optimizer states that
    the first update will make. All ranks of a role take the number of the one with least.

    Args:
        strategy: Knows layouts and device.
        modules: The roles.
        optimizers: Those that there are by the time of the first micro-batch.
    """

    def __init__(
        self, strategy: HybridStrategy, modules: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]
    ) -> None:
        self._strategy, self._modules, self._optimizers = strategy, modules, optimizers
        self._tokens: dict[str, int] = {}

    def of(self, role: str) -> int:
        """The tokens, found once for each role (then a collective call of its ranks)."""
        if role not in self._tokens:
            own, model = MOST_TOKENS, getattr(self._modules[role], "model", None)
            if self._strategy.root_device.type == "cuda" and isinstance(model, PreTrainedModel):
                own = tokens_that_fit(self._describe(role, model), self._strategy.layout(role).tensor, self._free())
            for operation in ("scores", "pipeline"):
                own = int(gather_counts([own], self._strategy.group(role, operation)).min())
            self._tokens[role] = own
        return self._tokens[role]

    def _free(self) -> int:
        return free_bytes(self._strategy.root_device) - sum(map(_owed, self._optimizers.values()))

    def _describe(self, role: str, model: PreTrainedModel) -> RoleModel:
        mode = getattr(self._modules[role], "activation_checkpointing", None) or self._strategy.activation_checkpointing
        return RoleModel(
            role=role,
            architecture="",
            parameters=(),
            decoder=Decoder.of(model),
            compute_bytes=self._strategy.hybrid_precision.compute_dtype.itemsize,
            checkpointing=mode,
            has_head=model.get_output_embeddings() is not None,
            cuts_vocabulary=bool(vocabulary_ends(model)),
            compiled=runs_compiled(self._modules[role]),
            fused=True,
            offloads=self._strategy.activation_offload and any(p.requires_grad for p in model.parameters()),
        )


def tokens_that_fit(model: RoleModel, tensor: int, free: int) -> int:
    """The tokens of a micro-batch of an update, between ``LEAST_TOKENS`` and ``MOST_TOKENS``, a multiple of 256.

    Args:
        model: The role.
        tensor: Ranks of its tensor axis.
        free: Bytes.
    """
    logits = LOGIT_CHUNK * model.tokens_on(tensor) * update_logit_bytes(model, tensor) * model.has_head
    tokens = (int(USED_SHARE * free) - logits) // sum(activation_bytes(model, tensor))
    return max(LEAST_TOKENS, min(MOST_TOKENS, tokens // 256 * 256))


def _owed(optimizer: Optimizer) -> int:
    """Bytes of gradients, and of AdamW's moments, that are not there yet."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    held = sum(local_part(parameter).nbytes for parameter in parameters)
    return held if optimizer.state else 3 * held
