"""How many tokens a micro-batch gets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lightning.fabric import Fabric

from lightning_verl import Actor, HybridDataFlow, HybridStrategy, Reward, RewardEnsemble
from lightning_verl.planning import budget
from lightning_verl.planning.budget import MicroBatchBudget, tokens_that_fit
from lightning_verl.planning.model import describe
from lightning_verl.strategies.precision import HybridPrecision
from lightning_verl.testing import char_tokenizer, run_ranks, tiny_config, tiny_model


def test_tokens_by_hand() -> None:
    # h = 64, q = 64, k = 32, m = 128, 4 heads, 2 layers, c = 4. A layer keeps (8 + 16) 64 + 8 + 4 (128 + 64) + 16 +
    # 16 x 128 = 4,376; outside (4 + 16) 64 = 1,280; one layer in its backward 4 (128 + 128) = 1,024. Together
    # 2 x 4,376 + 1,280 + 1,024 = 11,056 bytes a token. Logits: 1,024 x 128 x 20 = 2,621,440.
    model = describe(Actor(tiny_model("qwen2"), tokenizer=char_tokenizer()), HybridPrecision())
    # 0.8 x 30,000,000 - 2,621,440 = 21,378,560: 1,933 tokens, in steps of 256: 1,792.
    assert tokens_that_fit(model, 1, 30_000_000) == 1_792
    assert tokens_that_fit(model, 1, 10**12) == 16_384
    assert tokens_that_fit(model, 1, -(10**9)) == 512
    # Compiled a layer keeps 8 (64 + 64 + 32 + 128) + 16 + 8 = 2,328: together 6,960, so 3,071 tokens.
    compiled = replace(model, compiled=True)
    assert tokens_that_fit(compiled, 1, 30_000_000) == 2_816
    # Logits in compiled kernels, 1,024 x 128 x 8 = 1,048,576: 3,297 tokens.
    assert tokens_that_fit(replace(compiled, fused=True), 1, 30_000_000) == 3_072
    # Two layers are on the device in any case, so that offloading two saves nothing, and of ten all but 24 of eight:
    # 10 x 24 + 2 x 2,304 + 1,280 + 1,024 = 7,152, so 3,209 tokens.
    ten = replace(compiled, fused=True, offloads=True, decoder=replace(model.decoder, layers=10))
    assert tokens_that_fit(replace(ten, decoder=model.decoder), 1, 30_000_000) == 3_072
    assert tokens_that_fit(ten, 1, 30_000_000) == 3_072
    assert tokens_that_fit(replace(ten, offloads=False), 1, 30_000_000) == 768


def ranks_agree() -> tuple[int, int]:
    fabric = Fabric(accelerator="cpu", strategy=HybridStrategy())
    fabric.launch()
    flow = HybridDataFlow(Actor(tiny_model(), tokenizer=char_tokenizer()))
    flow.setup(fabric)
    flow.setup_optimizers()
    on_cpu = MicroBatchBudget(flow.strategy, flow.modules, flow.optimizers).of("actor")
    budget.MOST_TOKENS -= 1_000 * fabric.global_rank
    return on_cpu, MicroBatchBudget(flow.strategy, flow.modules, flow.optimizers).of("actor")


def test_ranks_take_the_smallest_number() -> None:
    assert run_ranks(ranks_agree, 2) == [(16_384, 15_384), (16_384, 15_384)]


def test_what_the_first_update_makes_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = Actor(tiny_config("qwen2"), tokenizer=char_tokenizer())
    optimizer = actor.configure_optimizers()
    held = sum(parameter.nbytes for parameter in actor.parameters())
    strategy = HybridStrategy()
    monkeypatch.setattr(HybridStrategy, "root_device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1_000_000, 2_000_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500_000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 300_000)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
    strategy._resolve(1)
    described = MicroBatchBudget(strategy, {"actor": actor}, {})._describe("actor", actor.model)
    assert (described.fused, described.compiled, described.offloads) == (True, False, False)
    strategy.activation_offload = True
    assert MicroBatchBudget(strategy, {"actor": actor}, {})._describe("actor", actor.model).offloads
    models = RewardEnsemble([Reward(tiny_config("llama")) for _ in range(3)])
    assert MicroBatchBudget(strategy, {"reward": models}, {}).of("reward") == 16_384  # its models are not one
    assert MicroBatchBudget(strategy, {"actor": actor}, {}).of("actor") == 512
    found = MicroBatchBudget(strategy, {"actor": actor}, {"actor": optimizer})
    assert found._free() == 1_000_000 + 200_000 - 3 * held  # gradients and two moments
    for parameter in actor.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert found._free() == 1_000_000 + 200_000 - held
