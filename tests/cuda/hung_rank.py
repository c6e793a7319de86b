"""One of two ranks, the second of which sleeps in the actor's second update; test_cuda_hang.py starts it.

Prints when the first one begins to wait.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric import Fabric
from torch.distributed import TCPStore

from lightning_verl import (
    GRPO,
    Actor,
    AsyncRolloutDataset,
    HybridDataFlow,
    HybridStrategy,
    RewardFunction,
    RLTrainer,
    SamplingParams,
)
from lightning_verl.testing import char_tokenizer, tiny_model

TIMEOUT = timedelta(seconds=10)
RANK = int(os.environ["RANK"])


class SleepingLoss(GRPO):
    """The first update is well, so that all that is compiled or connected is there in the second."""

    updates = 0

    def actor_loss(self, *args: Any) -> Any:
        self.updates += 1
        if self.updates == 2:
            if RANK == 1:
                time.sleep(1000)
            print(f"WAITS {time.time()}", flush=True)
        return super().actor_loss(*args)


def meet(device: str) -> None:
    """Until both ranks have imported all and found their device: how long that takes is no concern of the timeout."""
    torch.zeros(1, device=device)
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.set(f"ready/{RANK}", "")
    store.wait(["ready/0", "ready/1"], timedelta(seconds=100))


def main(accelerator: str) -> None:
    meet("cpu" if accelerator == "cpu" else f"cuda:{RANK}")
    fabric = Fabric(accelerator=accelerator, devices=2, strategy=HybridStrategy(timeout=TIMEOUT, compile_layers=False))
    fabric.launch()
    tokenizer = char_tokenizer()
    actor = Actor(tiny_model(vocab_size=len(tokenizer)), tokenizer=tokenizer, engine="transformers")
    trainer = RLTrainer(
        fabric,
        HybridDataFlow(actor, reward=RewardFunction(lambda response: float(len(response)))),
        SleepingLoss(kl=0.0),
        AsyncRolloutDataset([{"prompt": str(number)} for number in range(8)], tokenizer=tokenizer),
        rollout_batch_size=4,
        samples_per_prompt=2,
        sampling=SamplingParams(max_new_tokens=4),
    )
    trainer.fit(2)


if __name__ == "__main__":
    main(sys.argv[1])
