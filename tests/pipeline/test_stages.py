"""A role cut by layers, stage after stage in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_verl import Actor, Critic
from lightning_verl.pipeline.stages import StagedRole, stage_costs, staging_problems
from lightning_verl.roles.reward import Reward
from lightning_verl.testing import tiny_config, tiny_model, tiny_rollouts

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gemma", "gemma2", "gemma3", "gpt2")


def in_stages(make: Any, ranks: int, chunks: int = 1) -> torch.Tensor:
    """What a role gives for rows whose states go through the stages of all ranks, each of which keeps its own only."""
    rows = tiny_rollouts()
    roles = [make() for _ in range(ranks)]
    staged = [StagedRole(role, rank, ranks, chunks) for rank, role in enumerate(roles)]
    states = None
    for number in range(ranks * chunks):
        role, own = roles[number % ranks], staged[number % ranks]
        stage = own.stages[number // ranks]
        assert (stage.index, stage.is_first, stage.is_last) == (number, number == 0, number == ranks * chunks - 1)
        with torch.no_grad(), own.running(stage, states):
            result = role(rows) if stage.is_last else role.stage_states(rows)
        states = result
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_compute_what_the_whole_model_does(family: Any) -> None:
    with torch.no_grad():
        whole = Actor(tiny_model(family))(tiny_rollouts())[0]
    torch.testing.assert_close(in_stages(lambda: Actor(tiny_model(family)), 2), whole)


@pytest.mark.parametrize(("ranks", "chunks"), [(4, 1), (2, 2)])
def test_any_number_of_stages_does(ranks: int, chunks: int) -> None:
    def make() -> Actor:
        return Actor(tiny_model("qwen2", num_hidden_layers=4))

    with torch.no_grad():
        torch.testing.assert_close(in_stages(make, ranks, chunks), make()(tiny_rollouts())[0])


def test_a_critic_and_a_reward_keep_their_heads_on_the_last_stage() -> None:
    def critic() -> Critic:
        made = Critic(tiny_model())
        nn.init.constant_(made.value_head.weight, 0.1)
        return made

    def reward() -> Reward:
        torch.manual_seed(0)
        return Reward(tiny_config())

    for make in (critic, reward):
        with torch.no_grad():
            torch.testing.assert_close(in_stages(make, 2), make()(tiny_rollouts()))
    cut = critic()
    StagedRole(cut, 0, 2)
    assert not any("value_head" in name for name, _ in cut.named_parameters())


def test_a_rank_keeps_the_parameters_of_its_stages_under_their_names() -> None:
    names = {name for name, _ in Actor(tiny_model()).named_parameters()}
    kept = []
    for rank in range(2):
        actor = Actor(tiny_model())
        StagedRole(actor, rank, 2)
        kept.append({name for name, _ in actor.named_parameters()})
    assert kept[0] | kept[1] == names
    assert not kept[0] & kept[1]
    assert {name.split(".")[2] for name in kept[0]} == {"embed_tokens", "layers"}
    assert all(".layers.0." in name or ".embed_tokens." in name for name in kept[0])


def test_both_ends_keep_a_tied_weight() -> None:
    kept = []
    for rank in range(3):
        actor = Actor(tiny_model("qwen2", num_hidden_layers=3))
        staged = StagedRole(actor, rank, 3)
        kept.append("model.model.embed_tokens.weight" in dict(actor.named_parameters()))
        assert (staged.tied is not None) == (rank != 1)
    assert kept == [True, False, True]


def test_the_head_costs_as_much_as_it_multiplies() -> None:
    costs = stage_costs(tiny_model())
    # An untied head of 128 x 64; a layer: q, o 64 x 64, k, v 64 x 32, three of 64 x 128, norms 64 + 64 + 16 + 16.
    assert costs.last == 128 * 64
    assert costs.layers == (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64 + 2 * 16,) * 2
    assert stage_costs(tiny_model().base_model).last == 0


def test_of_packed_experts_those_cost_that_a_token_goes_to() -> None:
    # Two of four experts: half of the experts' parameters.
    model: Any = tiny_model("qwen3_moe")
    packed = sum(p.numel() for p in model.model.layers[0].mlp.experts.parameters())
    everything = sum(p.numel() for p in model.model.layers[0].parameters())
    assert stage_costs(model).layers[0] == everything - packed // 2


def test_more_stages_than_layers_say_so() -> None:
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM has 2 layers, fewer than the 4 stages.*pp to at most 2"):
        StagedRole(Actor(tiny_model()), 0, 4)
    with pytest.raises(ValueError, match="2 layers, fewer than the 4 stages"):
        StagedRole(Actor(tiny_model()), 0, 2, chunks=2)


def test_a_model_that_is_more_than_embeddings_layers_and_a_norm_says_so() -> None:
    model: Any = tiny_model()
    model.model.adapter = nn.Linear(2, 2)
    model.model.scale = nn.Parameter(torch.ones(1))
    (problem,) = staging_problems(Actor(model), 2)
    assert (
        "besides embeddings, layers and a final norm it has adapter, scale, and where that runs is not known" in problem
    )


def test_a_role_that_is_none_of_ours_says_so() -> None:
    class Own(nn.Module):
        model = nn.Linear(2, 2)

    (problem,) = staging_problems(Own(), 2)
    assert problem.startswith("Own cannot be cut into 2 stages: it is not a role of lightning_verl.roles")
    model: Any = tiny_model()
    model.model.layers = nn.Sequential(*model.model.layers)
    (problem,) = staging_problems(Actor(model), 2)
    assert "its decoder layers are not one list of Qwen3Model's own" in problem


def test_a_cut_role_that_is_called_as_a_whole_says_so() -> None:
    for rank in range(2):
        actor = Actor(tiny_model())
        StagedRole(actor, rank, 2)
        with pytest.raises(RuntimeError, match="This rank has some layers of the model only"):
            actor(tiny_rollouts())
