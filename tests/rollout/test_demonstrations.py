"""Rollouts that no engine has sampled: demonstrations."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from lightning_verl.data.experience import PromptBatch
from lightning_verl.rollout.batch import demonstrations
from lightning_verl.testing import char_tokenizer

TOKENIZER = char_tokenizer()


def test_demonstrations_take_prompts_from_any_device() -> None:
    class OnDevice(PromptBatch):
        """Notes that it was brought to the host, as prompts on CUDA must be."""

        moved: ClassVar[list[str]] = []

        def to(self, device: Any, non_blocking: bool = False) -> PromptBatch:
            self.moved.append(str(device))
            return PromptBatch(self.ids, self.lengths, self.indices, self.texts, self.fields)

    prompts = OnDevice(torch.tensor([[5, 6]]), torch.tensor([2]), torch.tensor([0]), ["x"], [{"answer": "1"}])
    batch = demonstrations(prompts, "answer", TOKENIZER)
    assert OnDevice.moved == ["cpu"]
    assert batch.input_ids.tolist() == [[5, 6, TOKENIZER.convert_tokens_to_ids("1"), TOKENIZER.eos_token_id]]
