"""Models that are built with memory for some stages only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_verl import Actor, Critic, HybridDataFlow, HybridStrategy
from lightning_verl.pipeline.building import Share, stages_only
from lightning_verl.pipeline.gather import whole_state
from lightning_verl.roles.reward import Reward
from lightning_verl.testing import char_tokenizer, run_ranks, tiny_config, tiny_model, tiny_rollouts

FAMILIES = ("llama", "qwen2", "qwen3_moe", "gemma3", "gpt2")


def held(module: nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters() if not parameter.is_meta}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_is_read_stage_by_stage(tmp_path: Path, family: Any) -> None:
    whole = tiny_model(family)
    whole.save_pretrained(tmp_path)
    expected = dict(whole.named_parameters())
    found: set[str] = set()
    for rank in range(2):
        with stages_only(lambda role, rank=rank: Share(rank, 2, 1)):  # type: ignore[misc]
            model: Any = Actor(tmp_path, tokenizer=char_tokenizer()).model
        assert type(model) is type(whole)
        assert dict(model.named_parameters()).keys() == expected.keys()
        for name, parameter in model.named_parameters():
            if not parameter.is_meta:
                torch.testing.assert_close(parameter, expected[name], rtol=0, atol=0)
        assert not any(buffer.is_meta for buffer in model.buffers())
        layers = {name for name in held(model) if f".{rank}." in name and "experts" not in name}
        assert layers
        found |= held(model)
        assert held(model) != expected.keys() or "wpe" in found
    assert found == expected.keys()


def test_random_weights_are_drawn_for_some_stages_only() -> None:
    with stages_only(lambda role: Share(1, 2, 1)):
        critic, reward = Critic(tiny_config("llama")), Reward(tiny_config("llama"))
    for role in (critic, reward):
        names = held(role)
        assert any("layers.1." in name for name in names)
        assert not any("layers.0." in name or "embed_tokens" in name for name in names)
        (weights,) = (value for name, value in role.named_parameters() if name.endswith("layers.1.mlp.up_proj.weight"))
        assert weights.std().item() == pytest.approx(0.1, rel=0.1)
    assert "value_head.weight" in held(critic)
    assert "model.score.weight" in held(reward)


def test_outside_of_the_context_everything_is_built(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    assert held(Actor(tmp_path)) == {name for name, _ in Actor(tmp_path).named_parameters()}


def test_a_model_that_cannot_be_cut_is_built_whole() -> None:
    with stages_only(lambda role: Share(0, 3, 1)):
        actor = Actor(tiny_config())
    assert held(actor) == {name for name, _ in actor.named_parameters()}


def built_by_a_strategy(folder: str) -> tuple[set[str], dict[str, torch.Tensor], torch.Tensor]:
    strategy = HybridStrategy((2, 1, 2, 1))
    fabric = Fabric(accelerator="cpu", strategy=strategy)
    fabric.launch()
    with fabric.init_module():
        actor = Actor(folder)
    names = held(actor)
    flow = HybridDataFlow(actor)
    flow.setup(fabric)
    logprobs = flow.logprobs(tiny_rollouts())
    return names, whole_state(actor.model, strategy.group("actor", "pipeline")), logprobs


def test_a_strategy_builds_the_stage_of_each_rank(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = Actor(model)(tiny_rollouts())[0]
    made = run_ranks(built_by_a_strategy, 4, str(tmp_path))
    for rank, (names, _, logprobs) in enumerate(made):
        assert {int(name.split(".")[3]) for name in names if ".layers." in name} == {rank // 2}
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(made[0][1], dict(model.state_dict()), rtol=0, atol=0)
