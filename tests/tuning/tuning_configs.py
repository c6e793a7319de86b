"""A tiny run and made-up records, for the tests of this folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning_verl.config import BatchConfig, DataConfig, ModelConfig, RewardConfig, TrainConfig
from lightning_verl.rollout.sampling import SamplingParams
from lightning_verl.testing import char_tokenizer, tiny_model
from lightning_verl.tuning.record import Record


def make_run(folder: Path, **changes: Any) -> TrainConfig:
    """A model of one layer, prompts, and a reward; rows of at most 8 + 4 tokens, 4 prompts x 2 samples."""
    tokenizer = char_tokenizer()
    tiny_model("qwen3", vocab_size=len(tokenizer), num_hidden_layers=1).save_pretrained(folder / "model")
    tokenizer.save_pretrained(str(folder / "model"))
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+1="}) + "\n" for n in range(8)))
    (folder / "tuning_rewards.py").write_text("def score(response):\n    return len(response) / 4\n")
    values: dict[str, Any] = {
        "rewards": RewardConfig(["tuning_rewards:score"]),
        "sampling": SamplingParams(max_new_tokens=4),
        "batch": BatchConfig(4, 2, samples_per_prompt=2),
        "accelerator": "cpu",
        **changes,
    }
    data = DataConfig(str(folder / "prompts.jsonl"), max_prompt_length=8)
    return TrainConfig(ModelConfig(str(folder / "model")), data, {"name": "grpo"}, 2, str(folder / "out"), **values)


def record(*seconds: float, ranks: int = 1, **changes: Any) -> Record:
    """Steps of 100 tokens each."""
    tokens = [100.0] * len(seconds)
    return Record(ranks=ranks, memory_bytes=2**34, seconds=list(seconds), tokens=tokens, **changes)
