"""How often the host waits for a GPU in the passes of training: a device that is waited for has nothing to do next."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric

from lightning_verl import (
    GRPO,
    Actor,
    AsyncRolloutDataset,
    HybridDataFlow,
    HybridStrategy,
    Reference,
    RewardFunction,
    RLTrainer,
    SamplingParams,
)
from lightning_verl.testing import char_tokenizer, tiny_model

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(300)]


class Waits:
    """Counts what makes the host wait in the passes of each step, by place in the code."""

    def __init__(self) -> None:
        self.of_passes: list[list[str]] = [[]]

    def look_at(self, flow: HybridDataFlow) -> None:
        for name in ("actor", "reference"):
            passes: Any = flow._passes[name]
            passes.train, passes.forward = self._counted(passes.train), self._counted(passes.forward)

    def on_step_end(self) -> None:
        self.of_passes.append([])

    def _counted(self, run: Any) -> Any:
        def counted(*args: Any) -> Any:
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                try:
                    return run(*args)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                    places = [f"{w.filename}:{w.lineno}" for w in found if "synchronizing" in str(w.message)]
                    self.of_passes[-1] += places

        return counted


def waits_of(micro_batch_tokens: int) -> list[str]:
    """Those of the third step, when everything is compiled."""
    waits = Waits()
    fabric = Fabric(accelerator="cuda", devices=1, precision="bf16-true", strategy=HybridStrategy(), callbacks=[waits])
    fabric.launch()
    tokenizer = char_tokenizer()
    sizes: Any = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    flow = HybridDataFlow(
        Actor(tiny_model("qwen3", vocab_size=len(tokenizer), **sizes), tokenizer=tokenizer),
        reward=RewardFunction(lambda response: float(len(response))),
        reference=Reference(tiny_model("qwen3", vocab_size=len(tokenizer), **sizes)),
        max_tokens_per_micro_batch=micro_batch_tokens,
    )
    trainer = RLTrainer(
        fabric,
        flow,
        GRPO(kl=0.04),
        AsyncRolloutDataset([{"prompt": "1" * (4 + row)} for row in range(24)], tokenizer=tokenizer, seed=0),
        rollout_batch_size=8,
        samples_per_prompt=4,
        sampling=SamplingParams(max_new_tokens=16, min_new_tokens=16),
    )
    waits.look_at(flow)
    trainer.fit(3)
    torch.distributed.destroy_process_group()
    return waits.of_passes[2]


def test_micro_batches_do_not_wait_for_the_device() -> None:
    few, many = waits_of(600), waits_of(150)
    assert many == few == []
