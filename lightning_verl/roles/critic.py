"""The critic: a value for every token of a response."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_verl.data.experience import RolloutBatch
from lightning_verl.models.load import ModelSource, load_model, prepare
from lightning_verl.models.quantize import Quantization, check_quantization
from lightning_verl.roles.base import LoraSource, Role, spread


class Critic(Role):
    """A model with a value head. The head starts at zero, so that the first values are 0 whatever the model.

    Args:
        source: A hub name, a folder, a config (random weights), or a transformers model (its language-model head is not
            used).
        lora_config: Train an adapter (and the value head) only.
        quantization: ``"nf4"`` holds the linear layers below the adapter in 4 bits (QLoRA); needs bitsandbytes.
        options: Those of ``Role``.
    """

    role = "critic"

    def __init__(
        self,
        source: ModelSource,
        *,
        lora_config: LoraSource = None,
        quantization: Quantization | None = None,
        **options: Any,
    ) -> None:
        name = type(self).__name__
        check_quantization(name, quantization, lora_config is not None)
        model: Any = load_model(source, "base", self.role)
        model = model.base_model  # a causal model that was passed in would carry a head that never gets a gradient
        prepare(name, model, lora_config, quantization)
        super().__init__(model, **options)
        self.value_head = nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False)
        nn.init.zeros_(self.value_head.weight)

    def forward(self, batch: RolloutBatch) -> Tensor:
        """The value before each response token is produced.

        Args:
            batch: The sequences.

        Returns:
            float32 ``[N, R]``, 0 outside the response.
        """
        hidden, _ = self.response_states(batch)
        return spread(self.value_head(hidden).squeeze(-1), batch)
