"""PPO with four roles, as one writes it for real models; here they are tiny and made on the spot.

python examples/train_script/train.py
torchrun --nproc-per-node 2 examples/train_script/train.py
torchrun --nproc-per-node 4 examples/train_script/train.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger

from lightning_verl import (
    PPO,
    Actor,
    AsyncRolloutDataset,
    Critic,
    HybridDataFlow,
    HybridStrategy,
    Reference,
    RewardFunction,
    RLTrainer,
    SamplingParams,
)
from lightning_verl.callbacks import NCCLGroupIsolation, PrefetchLoader, RewardEMA
from lightning_verl.testing import char_tokenizer, tiny_model


def score(response: str, answer: str) -> float:
    """The reward: how many of the answer's characters are in their place. `answer` is a field of the data row."""
    return sum(given == right for given, right in zip(response, answer, strict=False)) / len(answer)


def make_files(folder: Path) -> None:
    """Write a model with random weights, its tokenizer, and prompts: what a hub name and a JSONL file are for real."""
    tokenizer = char_tokenizer()
    tiny_model("qwen3", vocab_size=len(tokenizer)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(str(folder / "model"))
    rows = [
        {"prompt": f"{first}+{second}=", "answer": str(first + second)} for first in range(30) for second in range(30)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/train_script"), help="where everything is written")
    parser.add_argument("--max-steps", type=int, default=20)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder in place of the tiny model")
    parser.add_argument("--precision", default="32-true", help="32-true, bf16-mixed or bf16-true")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="about 1e-6 for a real model")
    options = parser.parse_args()

    fabric = Fabric(
        strategy=HybridStrategy(),
        precision=options.precision,
        loggers=[CSVLogger(options.folder, name="logs")],
        callbacks=[RewardEMA(decay=0.995), NCCLGroupIsolation(), PrefetchLoader(depth=4)],
    )
    fabric.launch()
    if fabric.is_global_zero:
        make_files(options.folder)
    fabric.barrier()

    model = options.model or options.folder / "model"
    dataflow = HybridDataFlow(
        actor=Actor(model, learning_rate=options.learning_rate),
        critic=Critic(model, learning_rate=options.learning_rate),
        reward=RewardFunction(score),
        reference=Reference(model),
    )
    data = AsyncRolloutDataset(
        options.folder / "prompts.jsonl",
        tokenizer=dataflow.tokenizer,
        max_prompt_length=8,
        prefetch_factor=4,
        num_workers=2,
    )
    trainer = RLTrainer(
        fabric,
        dataflow,
        PPO(kl=0.01),
        data,
        rollout_batch_size=32,
        update_batch_size=8,
        sampling=SamplingParams(max_new_tokens=4),
    )
    metrics = trainer.fit(max_steps=options.max_steps)
    fabric.logger.finalize("success")
    fabric.print(f"reward in step {options.max_steps}: {metrics['reward/mean']:.3f}")


if __name__ == "__main__":
    main()
