"""Tiny models: their sizes, their seeds, and that they can be trained."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from lightning_verl.testing import tiny_config, tiny_model
from lightning_verl.testing.tiny import Family

FAMILIES: tuple[Family, ...] = get_args(Family)


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes(family: Family) -> None:
    config = tiny_config(family)
    sizes = (config.hidden_size, config.num_hidden_layers, config.num_attention_heads, config.vocab_size)
    assert sizes == (64, 2, 4, 128)
    assert config.max_position_embeddings == 128
    assert (config.bos_token_id, config.eos_token_id) == (1, 2)


TIED = ("qwen2", "gemma", "gemma2", "gemma3", "gpt2")


@pytest.mark.parametrize(("family", "tied"), [(name, name in TIED) for name in FAMILIES])
def test_which_families_tie_the_head(family: Family, tied: bool) -> None:
    model = tiny_model(family)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) is tied


def test_key_value_heads_and_head_size_follow_the_overrides() -> None:
    attention = tiny_model("qwen3").model.layers[0].self_attn
    assert attention.k_proj.weight.shape == (2 * 16, 64)  # 2 key-value heads of 64 / 4
    attention = tiny_model("qwen3", hidden_size=32, num_key_value_heads=1).model.layers[0].self_attn
    assert attention.k_proj.weight.shape == (1 * 8, 32)  # 1 key-value head of 32 / 4


@pytest.mark.parametrize("family", ["qwen3", "gemma", "gemma2", "gemma3"])
def test_the_head_size_follows_the_width(family: Family) -> None:
    assert tiny_config(family).head_dim == 16
    assert tiny_config(family, hidden_size=32).head_dim == 8
    assert tiny_config(family, head_dim=24).head_dim == 24


def test_what_each_layer_sees() -> None:
    windows = {
        family: [layer.self_attn.sliding_window for layer in tiny_model(family).model.layers]
        for family in ("gemma2", "gemma3")
    }
    assert windows == {"gemma2": [20, None], "gemma3": [20, None]}
    assert tiny_config("mistral").sliding_window == 8
    assert tiny_config("gemma3", num_hidden_layers=3, layer_types=["full_attention"] * 3).num_hidden_layers == 3


def test_gemma2_feels_its_caps() -> None:
    def logits(**overrides: float) -> torch.Tensor:
        return tiny_model("gemma2", **overrides)(torch.arange(3, 11)[None]).logits.detach()

    capped = logits()
    assert float(capped.abs().max()) < 3
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        assert float((logits(**{cap: 1000.0}) - capped).abs().max()) > 1e-3


def test_gemma3_normalises_queries_and_keys() -> None:
    attention = tiny_model("gemma3").model.layers[0].self_attn
    assert attention.q_norm.weight.shape == attention.k_norm.weight.shape == (16,)


def test_both_layers_have_experts() -> None:
    for layer in tiny_model("qwen3_moe").model.layers:
        assert layer.mlp.experts.gate_up_proj.shape == (4, 2 * 32, 64)  # gate and up, packed
        assert layer.mlp.experts.down_proj.shape == (4, 64, 32)
        assert layer.mlp.gate.top_k == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_follow_the_seed_alone(family: Family) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = tiny_model(family, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(7)
    second, other = tiny_model(family, seed=3), tiny_model(family, seed=4)
    weights = [next(iter(model.parameters())) for model in (first, second, other)]
    assert weights[0].dtype == torch.float32
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_learns_and_generates(family: Family) -> None:
    model = tiny_model(family)
    assert not model.training
    ids = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6, 7]])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(15):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
    generated = model.generate(ids[:, :4], attention_mask=torch.ones(1, 4), max_new_tokens=3, do_sample=False)
    assert generated.tolist() == [[5, 6, 7, 5, 6, 7, 5]]


def test_gpt2_drops_out_only_where_asked_to() -> None:
    ids = torch.arange(8)[None]
    for dropout, same in ((0.0, True), (0.1, False)):
        model = tiny_model("gpt2", resid_pdrop=dropout).train()
        assert torch.equal(model(ids).logits, model(ids).logits) is same


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(ValueError, match="family must be one of llama, .*, gemma3, gpt2, got 'bert'"):
        tiny_model("bert")  # type: ignore[arg-type]
