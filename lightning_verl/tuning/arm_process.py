"""The process that does the work of ``lightning-verl tunings`` in one way; Fabric starts the other ranks from it."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric

from lightning_verl.algorithms.ppo import PPO
from lightning_verl.callbacks import NCCLGroupIsolation, PrefetchLoader, Throughput
from lightning_verl.data.prompts import AsyncRolloutDataset
from lightning_verl.dataflow import HybridDataFlow
from lightning_verl.roles.actor import Actor
from lightning_verl.roles.critic import Critic
from lightning_verl.roles.reference import Reference
from lightning_verl.roles.reward import Reward
from lightning_verl.rollout.sampling import SamplingParams
from lightning_verl.strategies.hybrid import HybridStrategy
from lightning_verl.testing import char_tokenizer
from lightning_verl.trainer import RLTrainer
from lightning_verl.tuning.arms import Arm, Work
from lightning_verl.tuning.probe import Probe
from lightning_verl.tuning.record import Record
from lightning_verl.tuning.shapes import model_config
from lightning_verl.tuning.trial import limit_memory, record_path, reporting, run_process

KL = 0.04
_LEARNING_RATE = 1e-6
_PREFETCHED = 4
"""Batches ready in host memory, and as many on the device."""


class EndlessActor(Actor):
    """No token ends a response: each has its exact length."""

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """None."""
        return ()


def run_arm(arm: Arm, work: Work, accelerator: str, steps: int, warmup: int, time_limit: float, folder: Path) -> Record:
    """Do the work in one way, in processes of its own.

    Args:
        arm: The way.
        work: The work.
        accelerator: Fabric's.
        steps: Steps that count.
        warmup: Steps before them.
        time_limit: Seconds after which it is ended.
        folder: An empty one, for what the processes write.
    """
    given = {"arm": asdict(arm), "work": asdict(work), "accelerator": accelerator, "steps": steps, "warmup": warmup}
    (folder / "given.json").write_text(json.dumps(given))
    return run_process([sys.executable, "-m", "lightning_verl.tuning.arm_process", str(folder)], folder, time_limit)


def main(words: Sequence[str] | None = None) -> None:
    """Take the steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="holds given.json; record and problems are written there")
    folder = parser.parse_args(words).folder
    with reporting(folder):
        given = json.loads((folder / "given.json").read_text())
        arm, work = Arm(**given["arm"]), Work(**given["work"])
        probe = Probe(record_path(folder), given["warmup"], given["steps"], profile=True)
        trainer = make_trainer(arm, work, given["accelerator"], probe)
        if trainer.fabric.device.type == "cuda":
            torch.cuda.empty_cache()  # the whole models that the roles were cut from
        limit_memory(trainer.fabric.device, work.memory_gib)
        trainer.fit(probe.total)


def make_trainer(arm: Arm, work: Work, accelerator: str, probe: Probe) -> RLTrainer:
    """The trainer of an arm, on the ranks that Fabric starts."""
    callbacks = [Throughput(), probe]
    callbacks += [NCCLGroupIsolation()] if arm.isolated else []
    callbacks += [PrefetchLoader(_PREFETCHED)] if arm.prefetch else []
    strategy = HybridStrategy(arm.mesh, arm.parallelism, activation_checkpointing=arm.checkpointing)
    fabric = Fabric(
        accelerator=accelerator,
        devices=arm.ranks,
        precision=work.precision,  # type: ignore[arg-type]
        strategy=strategy,
        callbacks=callbacks,
    )
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    tokenizer = char_tokenizer(bos=False)
    flow = _roles(arm, work, fabric, tokenizer)
    data = AsyncRolloutDataset(
        _prompts(work, arm.ratio * (probe.total + 1)),
        tokenizer=tokenizer,
        shuffle=False,
        prefetch_factor=_PREFETCHED if arm.prefetch else 0,
    )
    return RLTrainer(
        fabric,
        flow,
        PPO(kl=KL),
        data,
        rollout_batch_size=arm.ratio * work.prompts,
        update_batch_size=work.prompts,
        samples_per_prompt=work.samples,
        sampling=SamplingParams(max_new_tokens=work.new_tokens),
    )


def _roles(arm: Arm, work: Work, fabric: Fabric, tokenizer: Any) -> HybridDataFlow:
    config = model_config(work.shape)
    trained: dict[str, Any] = {"learning_rate": _LEARNING_RATE, "lora_config": arm.lora}
    with fabric.device:  # random weights are drawn there, where it is quick
        return HybridDataFlow(
            actor=EndlessActor(config, tokenizer=tokenizer, engine="native", engine_options=arm.engine, **trained),
            critic=Critic(config, **trained),
            reward=Reward(config),
            # With an adapter the reference is the actor without it.
            reference=Reference(config) if arm.lora is None else None,
            max_tokens_per_micro_batch=work.micro_batch_tokens,
        )


def _prompts(work: Work, minibatches: int) -> list[dict[str, str]]:
    """So many mini-batches of random digits, a token each."""
    draw = random.Random(1)  # noqa: S311, no secret
    count = work.prompts * minibatches
    return [{"prompt": "".join(draw.choices("0123456789", k=work.prompt_tokens))} for _ in range(count)]


if __name__ == "__main__":
    main()
