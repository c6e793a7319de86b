"""A trial of benchmarks/largest.py: two steps of PPO with four models, in a process that ends with them."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from largest_results import GIB, WAYS, Case, Forecast, Trial
from lightning.fabric import Fabric
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen2Config

from lightning_verl import (
    PPO,
    AsyncRolloutDataset,
    Critic,
    HybridDataFlow,
    HybridStrategy,
    Reference,
    Reward,
    RLTrainer,
    SamplingParams,
)
from lightning_verl.callbacks import Throughput
from lightning_verl.testing import char_tokenizer
from lightning_verl.tuning.arm_process import KL, EndlessActor
from lightning_verl.tuning.candidates import LORA
from lightning_verl.tuning.probe import Probe
from lightning_verl.tuning.shapes import model_config
from lightning_verl.tuning.trial import limit_memory, record_path, reporting, run_process

PRECISION = "bf16-true"
CHECKPOINTING = "full"
"""What takes least memory."""
STEPS = 2


def roles_config(case: Case) -> Qwen2Config:
    """The config of all roles, long enough for a case's rows."""
    config = model_config(case.shape)
    config.max_position_embeddings = max(config.max_position_embeddings, case.row_tokens)
    return config


def compiles(case: Case) -> bool | None:
    """Whether layers run compiled: not where activations are small beside the weights, which spares the compiler."""
    return False if case.quantity == "model" else None


# ---- from outside ----------------------------------------------------------------------------------------------------


def run_case(case: Case, forecast: Forecast, accelerator: str, memory_gib: float | None, time_limit: float) -> Trial:
    """Run a case in a process of its own.

    Args:
        case: The case.
        forecast: What is expected of it.
        accelerator: Fabric's.
        memory_gib: Most memory of the GPU, in GiB; None: all of it.
        time_limit: Seconds after which it is ended.
    """
    foreseen = forecast.gpu_bytes / GIB
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = {"case": asdict(case), "accelerator": accelerator, "memory_gib": memory_gib}
        (folder / "given.json").write_text(json.dumps(given))
        record = run_process([sys.executable, str(Path(__file__).resolve()), str(folder)], folder, time_limit)
    if record.problem:
        problem = record.problem.splitlines()[0][:200]
        return Trial(case, foreseen, problem=problem, out_of_memory=record.out_of_memory)
    on_cuda = "process" not in record.peaks
    return Trial(
        case,
        foreseen,
        measured_gib=record.peak / GIB if on_cuda else None,
        seconds=record.seconds[0],
        tokens_per_second=record.rate,
    )


# ---- from inside -----------------------------------------------------------------------------------------------------


def main(words: Sequence[str] | None = None) -> None:
    """Take the steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="holds given.json; record and problems are written there")
    folder = parser.parse_args(words).folder
    with reporting(folder):
        given = json.loads((folder / "given.json").read_text())
        probe = Probe(record_path(folder), warmup=STEPS - 1, steps=1)
        trainer = make_trainer(Case(**given["case"]), given["accelerator"], probe, given["memory_gib"])
        if trainer.fabric.device.type == "cuda":
            torch.cuda.empty_cache()  # the models as they were before the roles were set up
        trainer.fit(probe.total)


def make_trainer(case: Case, accelerator: str, probe: Probe, memory_gib: float | None = None) -> RLTrainer:
    """The trainer of a case, on one rank."""
    way = WAYS[case.way]
    on_cuda = accelerator != "cpu" and torch.cuda.is_available()
    strategy = HybridStrategy(
        activation_checkpointing=CHECKPOINTING,
        activation_offload=way.offload,
        compile_layers=compiles(case),
        offload_parameters=way.offload and on_cuda,  # a CPU's memory is the host's
    )
    callbacks = [Throughput(), probe]
    fabric = Fabric(accelerator=accelerator, devices=1, precision=PRECISION, strategy=strategy, callbacks=callbacks)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    limit_memory(fabric.device, memory_gib)
    tokenizer = char_tokenizer(bos=False)
    data = AsyncRolloutDataset(prompts_of(case), tokenizer=tokenizer, shuffle=False, prefetch_factor=0)
    return RLTrainer(
        fabric,
        make_roles(case, fabric.device, tokenizer),
        PPO(kl=KL),
        data,
        rollout_batch_size=case.prompts,
        update_batch_size=case.prompts,
        samples_per_prompt=1,
        sampling=SamplingParams(max_new_tokens=case.new_tokens),
    )


def make_roles(case: Case, device: torch.device, tokenizer: Any) -> HybridDataFlow:
    """The roles, with random weights that are drawn on the device in the precision that they are held in."""
    trained: dict[str, Any] = {"lora_config": LORA if WAYS[case.way].lora else None}
    with device:
        return HybridDataFlow(
            actor=EndlessActor(
                _draw(AutoModelForCausalLM, case),
                tokenizer=tokenizer,
                engine="native",
                engine_options={"cuda_graphs": False},  # they take memory, and time to capture
                **trained,
            ),
            critic=Critic(_draw(AutoModel, case), **trained),
            reward=Reward(_draw(AutoModelForSequenceClassification, case)),
            reference=None if WAYS[case.way].lora else Reference(_draw(AutoModelForCausalLM, case)),
            max_tokens_per_micro_batch=case.tokens,
        )


def _draw(kind: Any, case: Case) -> Any:
    config = roles_config(case)
    config.num_labels = 1  # of a reward model
    return kind.from_config(config, dtype=torch.bfloat16)


def prompts_of(case: Case) -> list[dict[str, str]]:
    """Random digits, a token each: the prompts of the first step, of the second, and of one to spare."""
    draw = random.Random(1)  # noqa: S311, no secret
    lengths = [case.first_prompt_tokens, *[case.prompt_tokens] * STEPS]
    return [
        {"prompt": "".join(draw.choices("0123456789", k=length))} for length in lengths for _ in range(case.prompts)
    ]


if __name__ == "__main__":
    main()
