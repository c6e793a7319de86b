"""Roles with weights of 4 bits on several ranks, in the rollout and in checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric import Fabric
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_verl import Actor, HybridDataFlow, HybridStrategy, SamplingParams
from lightning_verl.models.quantize import expanded, quantized_parameters
from lightning_verl.rollout.base import Rollouts
from lightning_verl.testing import char_tokenizer, run_ranks, tiny_model, tiny_rollouts

pytestmark = pytest.mark.bitsandbytes

LORA = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "o_proj", "down_proj"], "init_lora_weights": False}
PROMPTS = [[1, 5, 6, 7], [1, 9], [1, 20, 30, 40, 50]]
SAMPLING = SamplingParams(max_new_tokens=6, n=2, seed=3)


def launched(seed: int = 0, precision: Any = "32-true", **options: Any) -> tuple[Fabric, Actor]:
    fabric = Fabric(accelerator="cpu", strategy=HybridStrategy(**options), precision=precision)
    fabric.launch()
    torch.manual_seed(5)
    model = tiny_model("qwen2", seed=seed + fabric.global_rank, vocab_size=130)  # ranks take the first one's codes
    return fabric, Actor(model, tokenizer=char_tokenizer(), lora_config=LORA, quantization="nf4")


def trained(fabric: Fabric, actor: Actor) -> tuple[Any, Any]:
    """One step on all rows."""
    parameters = [parameter for parameter in actor.parameters() if parameter.requires_grad]
    module, optimizer = fabric.setup(actor, torch.optim.SGD(parameters, lr=0.5))
    fabric.backward(module(tiny_rollouts())[0].sum())
    optimizer.step()
    optimizer.zero_grad()
    return module, optimizer


def adapters(actor: Actor) -> dict[str, Tensor]:
    found = {name: p.detach() for name, p in actor.named_parameters() if p.requires_grad}
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).clone() for name, p in found.items()}


def step_and_rollout(options: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor, Rollouts, float]:
    fabric, actor = launched(**options)
    module, _ = trained(fabric, actor)
    with torch.no_grad():
        logprobs = module(tiny_rollouts())[0]
    with fabric.strategy.rollout(actor) as engine:
        rollouts = engine.generate(PROMPTS, SAMPLING)
        if fabric.strategy.enable_3d_hybrid:
            names = dict(engine.model.named_parameters())
            assert not [name for name in names if "lora" in name or "base_layer" in name]
            assert {p.dtype for p in names.values()} == {fabric.strategy.hybrid_precision.compute_dtype}
    held = sum(p.nbytes for p in quantized_parameters(actor).values())
    return adapters(actor), logprobs, rollouts, held


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {"enable_3d_hybrid": False}),
        (2, {"mesh_shape": (2, 1, 1, 1)}),
        (2, {"mesh_shape": (2, 1, 1, 1), "hybrid_engine_config": {"rollout_tp": 2}}),
        (2, {"mesh_shape": (2, 1, 1, 1), "enable_3d_hybrid": False}),
        (2, {"mesh_shape": (2, 1, 1, 1), "parallelism_config": {"actor": {"dp": 1}}}),
    ],
    ids=["unmerged", "data2", "data2-rollout2", "data2-unmerged", "copies"],
)
def test_steps_and_rollouts_are_those_of_one_process(ranks: int, options: dict[str, Any]) -> None:
    steps, logprobs, rollouts, held = step_and_rollout({})
    for other_steps, other_logprobs, other_rollouts, other_held in run_ranks(step_and_rollout, ranks, options):
        assert other_held == held, "codes are whole on every rank"
        torch.testing.assert_close(other_logprobs, logprobs, atol=1e-5, rtol=1e-5)
        for name, step in steps.items():
            torch.testing.assert_close(other_steps[name], step, atol=1e-5, rtol=1e-5)
        assert other_rollouts.response_ids.tolist() == rollouts.response_ids.tolist()
        torch.testing.assert_close(other_rollouts.logprobs, rollouts.logprobs, atol=1e-5, rtol=0)


def mixed() -> tuple[Tensor, Tensor]:
    fabric, actor = launched(precision="bf16-mixed", mesh_shape=(2, 1, 1, 1))
    module, _ = trained(fabric, actor)
    assert {p.dtype for p in actor.parameters() if p.requires_grad} == {torch.float32}
    assert {p.quant_state.dtype for p in quantized_parameters(actor).values()} == {torch.bfloat16}
    with fabric.strategy.rollout(actor) as engine:
        return module(tiny_rollouts())[0].detach(), engine.generate(PROMPTS, SAMPLING).logprobs


def test_mixed_precision_stays_close_to_fp32() -> None:
    _, logprobs, _, _ = step_and_rollout({})
    for found, sampled in run_ranks(mixed, 2):
        assert (found - logprobs).abs().max() < 0.3
        assert sampled.isfinite().all()


def test_an_axis_that_would_cut_codes_is_refused() -> None:
    for message in run_ranks(refused, 2):
        assert "Actor has weights of 4 bits, which no axis cuts, but its layout has tp x pp x ep = 2 x 1 x 1" in message


def refused() -> str:
    fabric, actor = launched(mesh_shape=(1, 2, 1, 1))
    with pytest.raises(ValueError, match="4 bits") as caught:
        fabric.setup_module(actor)
    return str(caught.value)


def save(folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    fabric, actor = launched(mesh_shape=(2, 1, 1, 1))
    module, optimizer = trained(fabric, actor)
    fabric.save(folder, {"actor": module, "actor_optimizer": optimizer})
    weights = {name: expanded(p, torch.float32) for name, p in quantized_parameters(actor).items()}
    flow = HybridDataFlow(actor)
    flow._fabric = fabric
    flow.save_pretrained(f"{folder}-trained")
    return adapters(actor), weights


def test_a_checkpoint_holds_no_codes_and_loads_on_other_ranks(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    saved, weights = run_ranks(save, 2, folder)[0]
    names = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    assert not [name for name in names if "base_layer.weight" in name or "absmax" in name]
    assert any("base_layer.bias" in name for name in names), "biases are as they were"
    fabric, actor = launched()  # the same model, whose codes come from itself
    parameters = [parameter for parameter in actor.parameters() if parameter.requires_grad]
    module, optimizer = fabric.setup(actor, torch.optim.SGD(parameters, lr=0.5))
    assert any((adapters(actor)[name] - value).abs().max() > 1e-3 for name, value in saved.items())
    fabric.load(folder, {"actor": module, "actor_optimizer": optimizer})
    for name, value in adapters(actor).items():
        torch.testing.assert_close(value, saved[name], rtol=0, atol=0)
    for name, parameter in quantized_parameters(actor).items():
        torch.testing.assert_close(expanded(parameter, torch.float32), weights[name], rtol=0, atol=0)
    assert (tmp_path / "checkpoint-trained" / "adapter_model.safetensors").is_file()
    assert not (tmp_path / "checkpoint-trained" / "model.safetensors").exists()


def elsewhere() -> bool:
    fabric, actor = launched(mesh_shape=(1, 1, 1, 1), parallelism_config={"reward": {"dp": 1, "ranks": [1]}})
    fabric.setup_module(actor)
    return all(parameter.is_meta for parameter in actor.parameters())


def test_ranks_without_the_role_hold_no_codes() -> None:
    assert run_ranks(elsewhere, 2) == [False, True]
