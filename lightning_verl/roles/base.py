"""What the roles share: a model from any source, its optimizer, and a way to run on a batch without rows."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from peft import LoraConfig
from torch import Tensor, nn

from lightning_verl.data.experience import RolloutBatch
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
        self.optimizer_name = optimizer

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over the trained parameters; override it for another optimizer."""
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return make_optimizer(self.optimizer_name, parameters, self.learning_rate, self.weight_decay, self.betas)


LoraSource = dict[str, Any] | LoraConfig | None


def response_places(batch: RolloutBatch) -> tuple[Tensor, Tensor]:
    """Where the hidden states that predict response tokens are.

    Returns:
        ``(rows, columns)`` of the positions that predict each response token, int64 ``[tokens]``, row after row.
    """
    rows, offsets = batch.response_mask.nonzero(as_tuple=True)
    return rows, batch.prompt_lengths[rows] + offsets - 1


def spread(values: Tensor, batch: RolloutBatch) -> Tensor:
    """Put values of response tokens ``[tokens]`` back in their rows, float32 ``[N, R]`` with 0 elsewhere."""
    mask = batch.response_mask
    return torch.zeros(mask.shape, dtype=torch.float32, device=mask.device).masked_scatter(mask, values.float())


def model_inputs(batch: RolloutBatch) -> Tensor:
    """The token ids to run a model on, ``[N, T]``; a single made-up token where there are no rows.

    A rank without rows must still run the model, because the other ranks of a sharded model wait for it.
    """
    if len(batch):
        return batch.input_ids
    return batch.input_ids.new_zeros((1, 1))
