"""Weights of 4 bits under adapters: what is refused, how large they are, and that they train as what they stand for."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

from lightning_verl import Actor, Critic, Reference
from lightning_verl.models.quantize import code_bytes, expanded, quantized_parameters, whole_shape
from lightning_verl.testing import char_tokenizer, tiny_config, tiny_model, tiny_rollouts

LORA = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False}


def test_bytes_by_hand() -> None:
    # 1,000 elements: 500 bytes of codes, 16 blocks of 64 with a byte each, one block of these and the offset.
    assert code_bytes(1_000) == 500 + 16 + 4 + 4
    # 2^20 elements: 2^19, 16,384 scales, 64 scales of those
    assert code_bytes(2**20) == 2**19 + 16_384 + 4 * 64 + 4


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for role in (Actor, Critic, Reference):
        with pytest.raises(ValueError, match=rf"{role.__name__} got quantization='nf4' without lora_config"):
            role(tiny_config(), quantization="nf4")
    with pytest.raises(ValueError, match="Actor got quantization='int3'; it takes nf4, or None"):
        Actor(tiny_config(), quantization="int3", lora_config=LORA)  # type: ignore[arg-type]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs bitsandbytes, .* pip install 'lightning-verl\[4bit\]'"):
        Actor(tiny_config(), quantization="nf4", lora_config=LORA)


def make_actor(quantization: Any) -> Actor:
    torch.manual_seed(0)  # adapters are drawn from the global state
    return Actor(tiny_model("qwen2"), tokenizer=char_tokenizer(), lora_config=LORA, quantization=quantization)


@pytest.mark.bitsandbytes
def test_linear_layers_of_the_body_are_in_codes_and_the_rest_is_not() -> None:
    actor = make_actor("nf4")
    codes = quantized_parameters(actor.model)
    assert len(codes) == 2 * 7
    assert {name.rpartition("layers.")[0] for name in codes} == {"model."}
    down = actor.model.model.layers[0].mlp.down_proj.base_layer.weight
    assert (whole_shape(down), down.dtype, down.numel()) == ((64, 128), torch.uint8, 64 * 128 // 2)
    assert {name for name, p in actor.named_parameters() if p.requires_grad} == {
        name for name, _ in actor.named_parameters() if ".lora_" in name
    }
    state = down.quant_state
    held = down.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes + state.offset.nbytes
    assert held == code_bytes(64 * 128)


@pytest.mark.bitsandbytes
def test_it_trains_like_the_weights_that_the_codes_stand_for() -> None:
    actor, plain = make_actor("nf4"), make_actor(None)
    with torch.no_grad():
        for name, parameter in quantized_parameters(actor.model).items():
            dict(plain.model.named_parameters())[name].copy_(expanded(parameter, torch.float32))
    moved = []
    for model in (actor, plain):
        logprobs, entropy = model(tiny_rollouts(), 0.7, True)
        (logprobs.sum() + entropy.square().sum()).backward()
        moved.append([logprobs.detach(), *(p.grad for p in model.parameters() if p.requires_grad)])
    for one, other in zip(*moved, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
        assert other.abs().max() > 1e-4
    whole = make_actor(None)(tiny_rollouts())[0]
    assert (whole - moved[0][0]).abs().max() > 1e-2, "4 bits must differ from the weights that they were made of"


@pytest.mark.bitsandbytes
def test_a_critic_keeps_a_plain_value_head() -> None:
    critic = Critic(tiny_model("llama"), lora_config=LORA, quantization="nf4")
    assert type(critic.value_head) is nn.Linear
    assert critic.value_head.weight.requires_grad
    assert len(quantized_parameters(critic)) == 14
    critic(tiny_rollouts()).sum().backward()
    assert critic.value_head.weight.grad.abs().max() > 0
