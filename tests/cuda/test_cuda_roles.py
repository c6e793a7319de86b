"""Roles on a GPU: host memory, 8-bit moments, rollouts, and FSDP2 where nothing is cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor

from lightning_verl import Actor, HybridStrategy, SamplingParams
from lightning_verl.parallel.fsdp import fsdp_units
from lightning_verl.rollout.base import Rollouts
from lightning_verl.testing import char_tokenizer, tiny_model, tiny_rollouts

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(300)]

LORA = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "down_proj"]}


def trained(precision: Any, options: dict[str, Any], **strategy: Any) -> tuple[list[float], torch.Tensor, Actor]:
    """Three steps: their gradient norms, the weights of the last rollout, and the actor."""
    fabric = Fabric(accelerator="cuda", devices=1, precision=precision, strategy=HybridStrategy(**strategy))
    fabric.launch()
    torch.manual_seed(0)
    actor: Any = Actor(tiny_model("qwen2"), tokenizer=char_tokenizer(), learning_rate=1e-2, **options)
    wrapped = fabric.setup_module(actor)
    optimizer = fabric.setup_optimizers(actor.configure_optimizers())
    norms = []
    for _ in range(3):
        fabric.backward(wrapped(tiny_rollouts().to(fabric.device))[0].square().sum())
        norms.append(float(fabric.clip_gradients(wrapped, optimizer, max_norm=0.5)))
        optimizer.step()
        optimizer.zero_grad()
    with fabric.strategy.rollout(wrapped):
        weights = torch.cat([p.detach().float().cpu().flatten() for p in actor.engine.model.parameters()])
    torch.distributed.destroy_process_group()
    return norms, weights, actor


@pytest.mark.parametrize("lora", [None, LORA], ids=["whole", "lora"])
@pytest.mark.parametrize(("precision", "bound"), [("32-true", 1e-5), ("bf16-mixed", 5e-3)])
def test_host_memory_changes_nothing(precision: Any, bound: float, lora: Any) -> None:
    options = {"lora_config": lora}
    norms, weights, actor = trained(precision, options)
    hosted_norms, hosted_weights, hosted = trained(precision, options, offload_parameters=True)
    assert next(actor.parameters()).is_cuda
    assert not next(hosted.parameters()).is_cuda
    assert hosted_norms == pytest.approx(norms, rel=bound)
    assert float((hosted_weights - weights).norm() / weights.norm()) < bound


def test_one_gpu_without_casts_runs_without_fsdp() -> None:
    _, _, plain = trained("bf16-true", {})
    _, _, cast = trained("bf16-mixed", {})
    assert not fsdp_units(plain)
    assert fsdp_units(cast)


@pytest.mark.torchao
def test_moments_of_8_bits_train_alike() -> None:
    _, weights, _ = trained("bf16-mixed", {})
    _, others, _ = trained("bf16-mixed", {"optimizer": "adamw8bit"})
    assert float((others - weights).norm() / weights.norm()) < 0.02


def logprobs_of_both(actor: Actor, prompts: list[list[int]], made: Rollouts) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each response the log-probs of the rollout, and those of a plain pass over it with the trained weights."""
    device = next(actor.parameters()).device
    for row, prompt in enumerate(prompts[index] for index in made.prompt_rows.tolist()):
        length = int(made.lengths[row])
        response = made.response_ids[row, :length].to(device)
        ids = torch.cat([torch.tensor(prompt, device=device), response])[None]
        with torch.no_grad():
            logits = actor.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        trained = logits.float().log_softmax(-1).gather(1, response[:, None])[:, 0]
        yield made.logprobs[row, :length].to(device), trained


def test_rollout_log_probs_are_those_of_training() -> None:
    fabric = Fabric(accelerator="cuda", devices=1, strategy=HybridStrategy())
    fabric.launch()
    actor: Any = Actor(tiny_model("qwen3"), tokenizer=char_tokenizer(), engine="native")
    wrapped = fabric.setup_module(actor)
    prompts = [[1, 5, 9], [7], list(range(3, 43))]
    with fabric.strategy.rollout(wrapped) as engine:
        made = engine.generate(prompts, SamplingParams(n=4, max_new_tokens=20, seed=1))
    pairs = list(logprobs_of_both(actor, prompts, made))
    assert len(pairs) == 3 * 4
    for rolled_out, trained_ones in pairs:
        torch.testing.assert_close(rolled_out, trained_ones, atol=2e-5, rtol=1e-4)
    torch.distributed.destroy_process_group()
