"""What the roles share: a model from any source, its optimizer, and a way to run on a batch without rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from peft import LoraConfig
from torch import Tensor, nn

from lightning_verl.data.experience import RolloutBatch
from lightning_verl.models.attention import NAME, PackedSequence, attention_named, attention_problem
from lightning_verl.models.heads import hidden_states, packed_states
from lightning_verl.parallel.checkpointing import ActivationCheckpointing
from lightning_verl.roles.optimizers import OptimizerName, check_optimizer, make_optimizer


class Role(LightningModule):
    """One model of the RL data flow, as a LightningModule with a ``role``.

    Attributes:
        role: ``"actor"``, ``"critic"``, ``"reference"`` or ``"reward"``.
        trainable: Whether it has an optimizer; the parameters of the others never get gradients.

    Args:
        model: The module to run.
        learning_rate: AdamW's step size.
        weight_decay: AdamW's weight decay.
        betas: AdamW's moment decays.
        activation_checkpointing: Overrides the strategy's for this role.
        optimizer: "adamw", or "adamw8bit" for moments of 8 bits, which needs torchao.

    Raises:
        ValueError: There is no such optimizer.
        ImportError: "adamw8bit", but torchao is missing.
    """

    role: str
    trainable: bool = True
    model: Any

    def __init__(
        self,
        model: nn.Module,
        *,
        learning_rate: float = 1e-6,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        activation_checkpointing: ActivationCheckpointing = None,
        optimizer: OptimizerName = "adamw",
    ) -> None:
        check_optimizer(type(self).__name__, optimizer)
        super().__init__()
        self.model = model
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.betas = betas
        self.activation_checkpointing = activation_checkpointing
        self._is_padded = True
        self.optimizer_name = optimizer

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over the trained parameters; override it for another optimizer."""
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return make_optimizer(self.optimizer_name, parameters, self.learning_rate, self.weight_decay, self.betas)

    @property
    def packing_problem(self) -> str | None:
        """Why the model cannot run rows side by side, without padding; None if it can."""
        return attention_problem(self.model)

    @contextmanager
    def without_padding(self) -> Iterator[None]:
        """Let batches with ``packed`` run without padding; the context is open for their backward passes too.

        Raises:
            ValueError: The model cannot.
        """
        if problem := self.packing_problem:
            raise ValueError(
                f"{type(self).__name__} cannot run {type(self.model).__name__} without padding: {problem}. "
                "Use HybridDataFlow(packing='padded')."
            )
        with attention_named(self.model, NAME):
            self._is_padded = False
            try:
                yield
            finally:
                self._is_padded = True

    def positions(self, batch: RolloutBatch) -> int:
        """How many positions the model runs on for a batch, padding included."""
        if batch.packed is not None and not self._is_padded:
            return batch.packed.source.numel()
        return _padded_ids(batch).numel()

    def all_states(self, batch: RolloutBatch) -> Tensor:
        """Run the model.

        Args:
            batch: The sequences. Without rows the model runs on a made-up token, because the other ranks of a sharded
                model wait for this one.

        Returns:
            The hidden states of all positions, row after row or as the rows are packed, ``[positions, H]``.
        """
        if batch.packed is not None and not self._is_padded:
            return packed_states(self.model, PackedSequence(batch.input_ids, batch.packed))
        return hidden_states(self.model, _padded_ids(batch)).flatten(0, 1)

    def stage_states(self, batch: RolloutBatch) -> Tensor:
        """What a pipeline stage before the last one makes of a batch, called from outside: see ``all_states``."""
        return self.all_states(batch).clone()  # of a view FSDP2 says that it may lose its hooks

    def response_states(self, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        """Run the model, see ``all_states``.

        Returns:
            The hidden states that predict each response token, ``[M, H]``, and the ids of those tokens, int64 ``[M]``,
            row after row.
        """
        states = self.all_states(batch)
        if batch.packed is not None and not self._is_padded:
            return states[batch.packed.predicting], batch.input_ids.flatten()[batch.packed.responses]
        rows, offsets = batch.response_mask.nonzero(as_tuple=True)
        columns = batch.prompt_lengths[rows] + offsets
        return states[rows * batch.input_ids.shape[1] + columns - 1], batch.input_ids[rows, columns]

    def last_states(self, batch: RolloutBatch) -> Tensor:
        """Run the model, see ``all_states``; returns the hidden state of each row's last token, ``[N, H]``."""
        states = self.all_states(batch)
        if batch.packed is not None and not self._is_padded:
            return states[batch.packed.last]
        rows = torch.arange(len(batch), device=states.device)
        return states[rows * batch.input_ids.shape[1] + (batch.lengths - 1).clamp(min=0)]


LoraSource = dict[str, Any] | LoraConfig | None


def spread(values: Tensor, batch: RolloutBatch) -> Tensor:
    """Put values of response tokens ``[tokens]`` back in their rows, float32 ``[N, R]`` with 0 elsewhere."""
    mask = batch.response_mask
    # Places are counted on the device: a masked copy, or its gradient, would let the host wait to learn how many.
    places = (mask.flatten().cumsum(0) - 1).clamp(min=0)
    known = torch.cat([values.float(), values.new_zeros(1, dtype=torch.float32)])  # a batch may have no token
    return known.gather(0, places).view(mask.shape).masked_fill(~mask, 0.0)


def _padded_ids(batch: RolloutBatch) -> Tensor:
    """The token ids to run a model on, ``[N, T]``; a single made-up token where there are no rows."""
    return batch.input_ids if len(batch) else batch.input_ids.new_zeros((1, 1))
