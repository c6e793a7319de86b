"""The actor in its rollout layout: the same weights to the last bit, the same tokens, and nothing left behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from lightning_verl import Actor, HybridStrategy
from lightning_verl.data.experience import RolloutBatch
from lightning_verl.rollout.base import Rollouts
from lightning_verl.rollout.sampling import SamplingParams
from lightning_verl.testing import char_tokenizer, run_ranks, tiny_model

PROMPTS = [[1, 5, 6, 7], [1, 9], [1, 20, 30, 40, 50]]
SAMPLING = SamplingParams(max_new_tokens=6, n=2, temperature=1.0, seed=3)
UPDATES: dict[str, tuple[tuple[int, int, int, int], Mapping[str, Any]]] = {
    "ddp4": ((4, 1, 1, 1), {"dp": 1, "replicate": True}),
    "fsdp4": ((4, 1, 1, 1), {"dp": 4}),
    "hsdp2x2": ((4, 1, 1, 1), {"dp": 2, "replicate": True}),
    "fsdp2xtp2": ((2, 2, 1, 1), {"dp": 2, "tp": 2}),
    "tp4": ((1, 4, 1, 1), {"dp": 1, "tp": 4}),
}
FAMILIES = ("llama", "qwen2", "qwen3")
"""A head of its own, one that is tied to the embedding, normalised queries and keys."""


def make_actor(family: str = "llama", **options: Any) -> Actor:
    # 4 key-value heads, so that 4 tensor ranks fit; 130 tokens do not divide evenly over them.
    torch.manual_seed(5)  # adapters are drawn from the global state
    model = tiny_model(family, num_key_value_heads=4, vocab_size=130, attention_bias=True)  # type: ignore[arg-type]
    return Actor(model, tokenizer=char_tokenizer(), learning_rate=0.01, **options)


def launched(precision: Any = "32-true", **options: Any) -> tuple[Fabric, HybridStrategy]:
    strategy = HybridStrategy(**options)
    fabric = Fabric(accelerator="cpu", strategy=strategy, precision=precision)
    fabric.launch()
    return fabric, strategy


def whole(actor: Actor) -> dict[str, Tensor]:
    """Every trained parameter, whole, gathered by torch's own functions."""
    state = get_model_state_dict(actor.model, options=StateDictOptions(full_state_dict=True))
    return {name: value.clone() for name, value in state.items()}


def rows() -> RolloutBatch:
    return RolloutBatch(
        input_ids=torch.randint(3, 128, (4, 8), generator=torch.Generator().manual_seed(1)),
        prompt_lengths=torch.full((4,), 3),
        response_lengths=torch.full((4,), 5),
        rollout_logprobs=torch.zeros(4, 5),
        group_ids=torch.arange(4),
        truncated=torch.zeros(4, dtype=torch.bool),
        prompt_texts=[""] * 4,
        response_texts=[""] * 4,
        fields=[{}] * 4,
    )


def check_view(strategy: HybridStrategy, actor: Actor, dtype: torch.dtype = torch.float32) -> None:
    """Every parameter in the rollout module is the slice of the trained one that its layout says, bit for bit."""
    reference = whole(actor)
    view = strategy._hybrid_engine.module  # type: ignore[union-attr]
    rollout = strategy.layout("rollout")
    index, parts = rollout.tensor_rank(dist.get_rank()), rollout.tensor
    vocabulary = strategy._hybrid_engine._vocabulary.tensor_rank(dist.get_rank())  # type: ignore[union-attr]
    for name, parameter in view.named_parameters():
        value = reference[name].to(dtype)
        if parts > 1 and ("embed_tokens" in name or "lm_head" in name):
            value = value.split(-(-len(value) // parts))[vocabulary]
        elif parts > 1 and any(key in name for key in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
            value = value.chunk(parts)[index]
        elif parts > 1 and name.endswith(("o_proj.weight", "down_proj.weight")):
            value = value.chunk(parts, dim=1)[index]
        torch.testing.assert_close(parameter.detach(), value, rtol=0, atol=0, msg=f"{name} of {rollout}")
    head, embedding = view.get_output_embeddings(), view.get_input_embeddings()
    assert (head.weight is embedding.weight) == view.config.tie_word_embeddings


def train(fabric: Fabric, actor: Actor, module: Any, optimizer: Any) -> None:
    fabric.backward(module(rows())[0].sum())
    optimizer.step()
    optimizer.zero_grad()


def one_process() -> dict[str, list[Rollouts]]:
    """Tokens at the first and the second version of the weights, with no process group."""
    found: dict[str, list[Rollouts]] = {}
    for family in FAMILIES:
        fabric, strategy = launched()
        actor = make_actor(family)
        module, optimizer = fabric.setup(actor, torch.optim.SGD(actor.parameters(), lr=0.01))
        found[family] = []
        for _ in range(2):
            with strategy.rollout(actor) as engine:
                found[family].append(engine.generate(PROMPTS, SAMPLING))
            train(fabric, actor, module, optimizer)
    return found


def there_and_back(update: str, rollout_tps: Sequence[int]) -> dict[tuple[str, int], list[Rollouts]]:
    """Roll out, train, roll out, in one update layout and several rollout layouts."""
    mesh, entry = UPDATES[update]
    found = {}
    for family in FAMILIES:
        for rollout_tp in rollout_tps:
            config = {"parallelism_config": {"actor": entry}, "hybrid_engine_config": {"rollout_tp": rollout_tp}}
            fabric, strategy = launched(mesh_shape=mesh, **config)
            actor = make_actor(family)
            module, optimizer = fabric.setup(actor, torch.optim.SGD(actor.parameters(), lr=0.01))
            made = []
            for _ in range(2):
                before = whole(actor)
                with strategy.rollout(actor) as engine:
                    check_view(strategy, actor)
                    made.append(engine.generate(PROMPTS, SAMPLING))
                assert {p.device.type for p in strategy._hybrid_engine.module.parameters()} == {"meta"}
                torch.testing.assert_close(whole(actor), before, rtol=0, atol=0)
                train(fabric, actor, module, optimizer)
            found[family, rollout_tp] = made
    return found


@pytest.mark.parametrize("update", UPDATES)
def test_every_layout_there_and_back(update: str) -> None:
    reference = one_process()
    for found in run_ranks(there_and_back, 4, update, [1, 2, 4], timeout=55):
        for (family, _), made in found.items():
            for one, other in zip(reference[family], made, strict=True):
                assert one.response_ids.tolist() == other.response_ids.tolist()
                torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0, atol=1e-5)
                assert one.weight_version == other.weight_version
