"""The actor in its rollout layout: the same weights to the last bit, the same tokens, and nothing left behind."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from lightning_verl import Actor, HybridStrategy
from lightning_verl.resharding.layouts import local_part
from lightning_verl.resharding.sinks import MergedAdapter, merge, mergeable_adapters
from lightning_verl.rollout.base import Rollouts
from lightning_verl.rollout.sampling import SamplingParams
from lightning_verl.testing import char_tokenizer, run_ranks, tiny_model, tiny_rollouts

PROMPTS = [[1, 5, 6, 7], [1, 9], [1, 20, 30, 40, 50]]
SAMPLING = SamplingParams(max_new_tokens=6, n=2, temperature=1.0, seed=3)
UPDATES: dict[str, tuple[tuple[int, int, int, int], Mapping[str, Any]]] = {
    "ddp4": ((4, 1, 1, 1), {"dp": 1, "replicate": True}),
    "fsdp4": ((4, 1, 1, 1), {"dp": 4}),
    "hsdp2x2": ((4, 1, 1, 1), {"dp": 2, "replicate": True}),
    "fsdp2xtp2": ((2, 2, 1, 1), {"dp": 2, "tp": 2}),
    "tp4": ((1, 4, 1, 1), {"dp": 1, "tp": 4}),
    "fsdp2xep2": ((2, 1, 1, 2), {"dp": 2, "ep": 2}),
    "fsdp2": ((2, 1, 1, 1), {"dp": 2}),
    "ep2": ((1, 1, 1, 2), {"dp": 1, "ep": 2}),
}
FAMILIES = ("qwen2", "qwen3")
"""A head that is tied to the embedding; one of its own, with normalised queries and keys."""


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


def check_view(strategy: HybridStrategy, actor: Actor, dtype: torch.dtype = torch.float32) -> None:
    """Every parameter in the rollout module is the slice of the trained one that its layout says, bit for bit."""
    reference = whole(actor)
    view = strategy._rollouts._engine.module  # type: ignore[union-attr]
    rollout = strategy.layout("rollout")
    index, parts = rollout.tensor_rank(dist.get_rank()), rollout.tensor
    for name, parameter in view.named_parameters():
        value = reference[name].to(dtype)
        if "experts." in name:  # the tensor axis divides them too, below the expert axis
            place = rollout.coordinates(dist.get_rank())[2] * parts + index
            value = value.chunk(rollout.expert * parts)[place]
        elif parts > 1 and ("embed_tokens" in name or "lm_head" in name):
            value = value.split(-(-len(value) // parts))[index]
        elif parts > 1 and any(key in name for key in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
            value = value.chunk(parts)[index]
        elif parts > 1 and name.endswith(("o_proj.weight", "down_proj.weight")):
            value = value.chunk(parts, dim=1)[index]
        torch.testing.assert_close(parameter.detach(), value, rtol=0, atol=0, msg=f"{name} of {rollout}")
    head, embedding = view.get_output_embeddings(), view.get_input_embeddings()
    assert (head.weight is embedding.weight) == view.config.tie_word_embeddings


def train(fabric: Fabric, actor: Actor, module: Any, optimizer: Any) -> None:
    fabric.backward(module(tiny_rollouts())[0].sum())
    optimizer.step()
    optimizer.zero_grad()


def one_process(families: Sequence[str]) -> dict[str, list[Rollouts]]:
    """Tokens at the first and the second version of the weights, with no process group."""
    found: dict[str, list[Rollouts]] = {}
    for family in families:
        fabric, strategy = launched()
        actor = make_actor(family)
        module, optimizer = fabric.setup(actor, torch.optim.SGD(actor.parameters(), lr=0.01))
        found[family] = []
        for _ in range(2):
            with strategy.rollout(actor) as engine:
                found[family].append(engine.generate(PROMPTS, SAMPLING))
            train(fabric, actor, module, optimizer)
    return found


def there_and_back(
    update: str, families: Sequence[str], rollout_tps: Sequence[int]
) -> dict[tuple[str, int], list[Rollouts]]:
    """Roll out, train, roll out, in one update layout and several rollout layouts."""
    mesh, entry = UPDATES[update]
    found = {}
    for family in families:
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
                assert {p.device.type for p in strategy._rollouts._engine.module.parameters()} == {"meta"}
                torch.testing.assert_close(whole(actor), before, rtol=0, atol=0)
                train(fabric, actor, module, optimizer)
            found[family, rollout_tp] = made
    return found


@pytest.mark.parametrize("update", UPDATES)
def test_every_layout_there_and_back(update: str) -> None:
    mesh, entry = UPDATES[update]
    world, experts = math.prod(mesh), entry.get("ep", 1)
    families = ("qwen3_moe",) if experts > 1 else FAMILIES
    rollout_tps = [tensor for tensor in (1, 2, 4) if world // experts % tensor == 0]  # expert ranks stay what they are
    reference = one_process(families)
    for found in run_ranks(there_and_back, world, update, families, rollout_tps, timeout=55):
        assert set(found) == {(family, tensor) for family in families for tensor in rollout_tps}
        for (family, _), made in found.items():
            for one, other in zip(reference[family], made, strict=True):
                assert one.response_ids.tolist() == other.response_ids.tolist()
                torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0, atol=1e-5)
                assert one.weight_version == other.weight_version


# ---- adapters --------------------------------------------------------------------------------------------------------

LORA = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "o_proj", "down_proj"]}


def test_an_adapter_is_merged_by_hand_arithmetic() -> None:
    weight, adapter = torch.eye(2), MergedAdapter("w", "a", "b", scale=2.0, transposed=False)
    merge(weight, torch.tensor([[0.5, -0.5]]), torch.tensor([[1.0], [2.0]]), adapter)
    # I + 2 x [[1], [2]] [[.5, -.5]] = I + [[1, -1], [2, -2]]
    assert weight.tolist() == [[2.0, -1.0], [2.0, -1.0]]
    weight = torch.eye(2)
    merge(weight, torch.tensor([[0.5, -0.5]]), torch.tensor([[1.0], [2.0]]), replace(adapter, transposed=True))
    assert weight.tolist() == [[2.0, 2.0], [-1.0, -1.0]]


@pytest.mark.parametrize(("options", "scale"), [({}, 2.0), ({"use_rslora": True}, 16 / 8**0.5)])
def test_the_scale_is_that_of_the_variant(options: dict[str, Any], scale: float) -> None:
    actor = make_actor(lora_config={"r": 8, "alpha": 16, "target_modules": ["q_proj"], **options})
    assert [adapter.scale for adapter in mergeable_adapters(actor.model)] == pytest.approx([scale, scale])


def merged_rollouts(rollout_tp: int, mesh: tuple[int, int, int, int]) -> tuple[Rollouts, set[str]]:
    """Roll out with a LoRA actor a hundred times; its weights stay what they were, to the last bit."""
    fabric, strategy = launched(mesh_shape=mesh, hybrid_engine_config={"rollout_tp": rollout_tp})
    actor = make_actor(lora_config=LORA)
    for name, parameter in actor.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(len(name)))
    fabric.setup(actor, torch.optim.SGD([p for p in actor.parameters() if p.requires_grad], lr=0.01))
    before = whole(actor)
    view = strategy._rollouts._engine.module  # type: ignore[union-attr]
    names = {name for name, _ in view.named_parameters()}
    kept: dict[str, Tensor] = {}
    for turn in range(100):
        with strategy.rollout(actor) as engine:
            now = {name: parameter.detach().clone() for name, parameter in view.named_parameters()}
            torch.testing.assert_close(now, kept or now, rtol=0, atol=0)
            kept = now
            if turn == 99:
                rollouts = engine.generate(PROMPTS, SAMPLING)
    torch.testing.assert_close(whole(actor), before, rtol=0, atol=0)
    assert {p.requires_grad for n, p in actor.model.named_parameters() if "lora_" in n} == {True}
    return rollouts, names


def unmerged_rollouts() -> Rollouts:
    """The same actor, its adapters applied by peft itself."""
    fabric, strategy = launched(enable_3d_hybrid=False)
    actor = make_actor(lora_config=LORA)
    for name, parameter in actor.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(len(name)))
    fabric.setup_module(actor)
    with strategy.rollout(actor) as engine:
        return engine.generate(PROMPTS, SAMPLING)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("ranks", "mesh", "rollout_tp"), [(1, (1, 1, 1, 1), 1), (2, (2, 1, 1, 1), 2), (2, (1, 2, 1, 1), 1)]
)
def test_a_lora_actor_generates_with_merged_weights(ranks: int, mesh: Any, rollout_tp: int) -> None:
    reference = unmerged_rollouts()
    for rollouts, names in run_ranks(merged_rollouts, ranks, rollout_tp, mesh):
        assert rollouts.response_ids.tolist() == reference.response_ids.tolist()
        torch.testing.assert_close(rollouts.logprobs, reference.logprobs, rtol=0, atol=1e-5)
        assert not [name for name in names if "base_layer" in name or "lora_" in name or "base_model" in name]


def test_an_adapter_that_cannot_be_merged_is_refused_and_the_way_out_works() -> None:
    dora = {**LORA, "use_dora": True}
    fabric, _ = launched()
    with pytest.raises(ValueError, match=r"q_proj.*is more than plain LoRA.*enable_3d_hybrid=False"):
        fabric.setup_module(make_actor(lora_config=dora))
    fabric, strategy = launched(enable_3d_hybrid=False)
    actor = make_actor(lora_config=dora)
    fabric.setup_module(actor)
    with strategy.rollout(actor) as engine:
        assert len(engine.generate(PROMPTS, SAMPLING).lengths) == 6


# ---- the loan --------------------------------------------------------------------------------------------------------


def test_stale_weights_and_a_rollout_that_is_over_are_refused() -> None:
    fabric, strategy = launched()
    actor = make_actor()
    module, optimizer = fabric.setup(actor, torch.optim.SGD(actor.parameters(), lr=0.01))
    with strategy.rollout(actor) as engine:
        assert engine.weight_version == 0
        train(fabric, actor, module, optimizer)
        with pytest.raises(RuntimeError, match="holds version 0 of the weights, but the actor is at version 1"):
            engine.generate(PROMPTS, SAMPLING)
    with pytest.raises(RuntimeError, match="after its rollout: the weights are gone"):
        engine.generate(PROMPTS, SAMPLING)
    with strategy.rollout(actor) as engine:
        assert engine.generate(PROMPTS, SAMPLING).weight_version == 1


def test_an_error_in_a_rollout_frees_the_weights_too() -> None:
    fabric, strategy = launched()
    actor = make_actor(lora_config=LORA)
    fabric.setup_module(actor)
    before = whole(actor)
    with pytest.raises(ZeroDivisionError), strategy.rollout(actor):
        raise ZeroDivisionError
    assert {p.device.type for p in strategy._rollouts._engine.module.parameters()} == {"meta"}  # type: ignore[union-attr]
    torch.testing.assert_close(whole(actor), before, rtol=0, atol=0)


def bytes_in_use(precision: Any) -> list[int]:
    """Bytes of tensors reachable from the rollout module before, in and after a rollout, and its buffers' size."""
    fabric, strategy = launched(precision, hybrid_engine_config={"rollout_tp": 2}, reshard_bucket_bytes=4096)
    actor = make_actor()
    fabric.setup_module(actor)
    view = strategy._rollouts._engine.module  # type: ignore[union-attr]

    def held() -> int:
        return sum(p.nbytes for p in view.parameters() if p.device.type != "meta")

    found = [held()]
    with strategy.rollout(actor):
        found.append(held())
        check_view(strategy, actor, strategy.hybrid_precision.compute_dtype)
    return [*found, held(), strategy.reshard_report.buffer_bytes]  # type: ignore[union-attr]


def kinds(rollout_tp: int) -> dict[str, tuple[int, int]]:
    fabric, strategy = launched(hybrid_engine_config={"rollout_tp": rollout_tp})
    actor = make_actor("qwen3")
    fabric.setup_module(actor)
    with strategy.rollout(actor):
        groups = strategy.reshard_report.groups  # type: ignore[union-attr]
    return {group.name: (group.wanted_bytes, group.received_bytes) for group in groups}


def test_the_report_says_by_kind_of_parameter_what_travels() -> None:
    for found in run_ranks(kinds, 2, 2):
        # 2 layers of 64 x 64 in fp32, of which a rank wants half. Shards are aligned: only what stays whole travels.
        assert found["model.layers.self_attn.o_proj.weight"] == (2 * 64 * 64 * 4 // 2, 0)
        assert found["model.layers.input_layernorm.weight"] == (2 * 64 * 4, 2 * 64 * 4 // 2)
        travelling = {name for name, (_, received) in found.items() if received}
        assert travelling
        assert all("norm" in name or name.endswith("o_proj.bias") for name in travelling)


def test_a_rank_holds_its_shard_during_the_rollout_and_nothing_after() -> None:
    total = sum(parameter.numel() for parameter in make_actor().model.parameters())
    for before, during, after, buffers in run_ranks(bytes_in_use, 2, "bf16-mixed"):
        assert before == after == 0
        assert total / 2 * 2 <= during <= total / 2 * 2 * 1.05  # half of it in bf16, norms and o_proj's bias whole
        assert buffers <= 2 * 4096


# ---- offload ---------------------------------------------------------------------------------------------------------


def offloaded_steps(offload: bool) -> tuple[dict[str, Tensor], list[int]]:
    fabric, strategy = launched(hybrid_engine_config={"offload_to_cpu": offload})
    actor = make_actor()
    module, optimizer = fabric.setup(actor, torch.optim.AdamW(actor.parameters(), lr=0.01))
    moved = []
    for _ in range(3):
        with strategy.rollout(actor):
            states = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
            moved.append(sum(local_part(state).untyped_storage().nbytes() for state in states))
        train(fabric, actor, module, optimizer)
    report = strategy.offload_report
    assert (report is None) == (not offload)
    if report is not None:
        states = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
        assert report.moved_bytes == sum(local_part(state).nbytes for state in states)
        assert report.out_seconds > 0 < report.back_seconds
    return whole(actor), moved


@pytest.mark.parametrize("ranks", [1, 2])
def test_offloaded_states_come_back_as_they_were(ranks: int) -> None:
    kept = run_ranks(offloaded_steps, ranks, False)
    moved = run_ranks(offloaded_steps, ranks, True)
    for (weights, held), (other, away) in zip(kept, moved, strict=True):
        torch.testing.assert_close(weights, other, rtol=0, atol=0)
        assert held[1:] == [held[1]] * 2 != [0, 0]
        assert away == [0, 0, 0]  # the memory is given back while the actor generates


def accumulated_over_a_rollout(offload: bool) -> tuple[dict[str, Tensor], float]:
    """A backward pass before a rollout and one after it, then one step; and bytes of gradients during the rollout."""
    fabric, strategy = launched(hybrid_engine_config={"offload_to_cpu": offload})
    actor = make_actor()
    module, optimizer = fabric.setup(actor, torch.optim.SGD(actor.parameters(), lr=0.01))
    fabric.backward(module(tiny_rollouts())[0].sum())
    with strategy.rollout(actor):
        held = sum(local_part(p.grad).untyped_storage().nbytes() for p in actor.parameters() if p.grad is not None)
    fabric.backward(module(tiny_rollouts())[0].sum())
    optimizer.step()
    return whole(actor), held


def test_gradients_that_wait_over_a_rollout_are_added_to() -> None:
    kept, held = accumulated_over_a_rollout(False)
    moved, away = accumulated_over_a_rollout(True)
    torch.testing.assert_close(kept, moved, rtol=0, atol=0)
    assert held > 0 == away
