"""vLLM on a GPU, beside training: the weights of every step reach it, and its memory comes and goes by sleep level."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from test_cuda_roles import logprobs_of_both

from lightning_verl import Actor, HybridStrategy, SamplingParams
from lightning_verl.rollout.base import Rollouts
from lightning_verl.testing import char_tokenizer, tiny_model, tiny_rollouts

pytestmark = [pytest.mark.cuda, pytest.mark.vllm, pytest.mark.timeout(300)]

PROMPTS = [[1, 5, 9], [7], list(range(3, 43))]
CACHE_BYTES = 2**30
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 768,
    "max_position_embeddings": 128,
}
LORA = {"r": 8, "alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj"]}
EAGER = {"enforce_eager": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "everything freed": {"sleep_level": 2},
    "weights on the host": {"sleep_level": 1, "engine_args": EAGER},
    "everything kept": {"sleep_level": 0, "engine_args": EAGER},
    "adapter beside": {"sleep_level": 1, "lora": "adapter", "engine_args": EAGER},
    "adapter merged": {"sleep_level": 2, "lora": "merged", "engine_args": EAGER},
}


def gap(actor: Actor, made: Rollouts) -> float:
    """Mean difference between the rollout's log-probs and those of the trained weights."""
    return float(torch.cat([(one - other).abs() for one, other in logprobs_of_both(actor, PROMPTS, made)]).mean())


def roll_out_and_train(name: str) -> tuple[list[tuple[float, float]], int]:
    """Of two rollouts, the gap to their own weights and to those of a step later; bytes that leaving the last frees."""
    options = SETTINGS[name]
    strategy = HybridStrategy()
    fabric = Fabric(accelerator="cuda", devices=1, precision="bf16-true", strategy=strategy)
    fabric.launch()
    actor: Any = Actor(
        tiny_model("qwen2", **SIZES),
        tokenizer=char_tokenizer(),
        learning_rate=2e-2,
        engine="vllm",
        engine_options={"max_num_seqs": 16, "kv_cache_bytes": CACHE_BYTES, **options},
        lora_config=LORA if "lora" in options else None,
    )
    wrapped = fabric.setup_module(actor)
    optimizer = fabric.setup_optimizers(actor.configure_optimizers())
    gaps = []
    for step in range(2):
        with strategy.rollout(wrapped) as engine:
            made = engine.generate(PROMPTS, SamplingParams(n=8, max_new_tokens=20), step=step)
            inside = torch.cuda.mem_get_info()[0]
        freed = torch.cuda.mem_get_info()[0] - inside
        before = gap(actor, made)
        fabric.backward(wrapped(tiny_rollouts().to(fabric.device))[0].square().sum())
        optimizer.step()
        optimizer.zero_grad()
        gaps.append((before, gap(actor, made)))
    engine.close()
    return gaps, freed


@pytest.mark.parametrize("name", SETTINGS)
def test_every_step_reaches_vllm_and_its_memory_comes_back(name: str) -> None:
    # Not forked: a process where CUDA was asked for could not use it again.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        gaps, freed = pool.submit(roll_out_and_train, name).result(timeout=240)
    for own, of_a_step_later in gaps:
        assert own < 0.03  # logits between 4 and 8 are 1/32 apart in bf16: each side is up to 1/64 off
        assert of_a_step_later > 5 * own  # else old weights would pass too
    if SETTINGS[name]["sleep_level"]:
        assert freed > 0.9 * CACHE_BYTES
    else:
        assert abs(freed) < 0.1 * CACHE_BYTES
