"""Weights handed over to an engine that has its own: which, when, whole, and what an error leaves behind."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import BloomConfig

from lightning_verl import Actor, HybridStrategy, SamplingParams
from lightning_verl.roles import actor as actor_module
from lightning_verl.strategies.engine import RolloutWeights
from lightning_verl.testing import char_tokenizer, run_ranks, tiny_model, tiny_rollouts

LORA = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "down_proj"]}


class KeepingEngine:
    """Keeps a copy of the weights that it is handed, by version; fails where it is told to."""

    needs_weights = True

    def __init__(self) -> None:
        self.weight_version = -1
        self.step_group: Any = None
        self.tensor_lines: Any = None
        self.handed: list[tuple[int, dict[str, Tensor]]] = []
        self.released = 0
        self.fails = False

    def holds(self, version: int) -> bool:
        return self.weight_version == version

    def forget_weights(self) -> None:
        self.weight_version = -1

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        if self.holds(version):
            return
        named = {name: tensor.detach().clone() for name, tensor in weights}
        if self.fails:
            raise RuntimeError("out of memory")
        self.handed.append((version, named))
        self.weight_version = version

    def generate(self, *arguments: Any, **options: Any) -> int:
        return self.weight_version

    def release(self) -> None:
        self.released += 1


def make(
    weights: RolloutWeights = "merged", family: Any = "qwen2", **options: Any
) -> tuple[Fabric, Any, Actor, Any, Any]:
    """A set-up actor whose engine is a ``KeepingEngine``: fabric, strategy, actor, what fabric returned, optimizer."""
    lora = options.pop("lora_config", None)
    strategy = HybridStrategy(**options)
    fabric = Fabric(accelerator="cpu", strategy=strategy)
    fabric.launch()
    torch.manual_seed(5)
    actor = Actor(tiny_model(family), tokenizer=char_tokenizer(), lora_config=lora)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(actor_module, "rollout_weights", lambda name, given: weights)
        module = fabric.setup_module(actor)
    trained = [parameter for parameter in actor.parameters() if parameter.requires_grad]
    optimizer = fabric.setup_optimizers(torch.optim.SGD(trained, lr=0.1))
    actor._engine = KeepingEngine()
    return fabric, strategy, actor, module, optimizer


def train(fabric: Fabric, module: Any, optimizer: Any) -> None:
    fabric.backward(module(tiny_rollouts())[0].sum())
    optimizer.step()
    optimizer.zero_grad()


def whole(actor: Actor) -> dict[str, Tensor]:
    state = get_model_state_dict(actor.model, options=StateDictOptions(full_state_dict=True))
    return {name: value.clone() for name, value in state.items()}


def test_weights_are_handed_over_once_for_each_version() -> None:
    fabric, strategy, actor, module, optimizer = make()
    engine = actor.engine
    for _ in range(2):
        with strategy.rollout(actor) as lent:
            assert lent.generate() == 0
            assert {parameter.device.type for parameter in actor._generator[0].parameters()} == {"meta"}  # ours left
    train(fabric, module, optimizer)
    with strategy.rollout(actor) as lent:
        assert lent.generate() == 1
        train(fabric, module, optimizer)
        with pytest.raises(RuntimeError, match="holds version 1 of the weights, but the actor is at version 2"):
            lent.generate()
    assert [version for version, _ in engine.handed] == [0, 1]  # type: ignore[attr-defined]
    assert engine.released == 3  # type: ignore[attr-defined]
    names = engine.handed[1][1].keys()  # type: ignore[attr-defined]
    assert "lm_head.weight" not in names  # tied: sent once
    assert "model.embed_tokens.weight" in names
    assert not [name for name in names if "critic" in name or "score" in name]


# ---- options of the engine -------------------------------------------------------------------------------------------


def set_up_actor(engine: str = "native", given: Any = None, **options: Any) -> tuple[HybridStrategy, Actor]:
    strategy = HybridStrategy(**options)
    fabric = Fabric(accelerator="cpu", strategy=strategy)
    fabric.launch()
    actor = Actor(tiny_model("qwen3"), tokenizer=char_tokenizer(), engine=engine, engine_options=given)
    fabric.setup_module(actor)
    return strategy, actor


@pytest.mark.parametrize(
    ("given", "options", "held"),
    [
        (None, {}, ("auto", False)),
        (None, {"kv_cache_dtype": "fp8", "offload_kvcache": True}, ("fp8", True)),
        ({"kv_cache_dtype": "bfloat16"}, {"kv_cache_dtype": "fp8", "offload_kvcache": True}, ("bfloat16", True)),
        ({"kv_cache_dtype": "auto", "offload_kvcache": False}, {"kv_cache_dtype": "fp8", "offload_kvcache": True},
         ("auto", False)),
        ({"kv_cache_dtype": "fp8", "offload_kvcache": True}, {}, ("fp8", True)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("engine", ["native", "auto"])
def test_the_strategys_cache_is_the_engines_and_the_actors_own_wins(
    engine: str, given: Any, options: Any, held: tuple[str, bool]
) -> None:
    _, actor = set_up_actor(engine, given, **options)
    found: Any = actor.engine
    assert (found.options.kv_cache_dtype, found.options.offload_kvcache) == held


def test_a_cache_of_the_strategy_generates_what_one_of_the_actor_does() -> None:
    found = []
    for given, kind in ((None, "fp8"), ({"kv_cache_dtype": "fp8"}, "auto"), (None, "auto")):
        strategy, actor = set_up_actor(given=given, kv_cache_dtype=kind)
        with strategy.rollout(actor) as engine:
            rollouts = engine.generate([[5, 6, 7], [8, 9]], SamplingParams(max_new_tokens=6, temperature=0.0))
        found.append(rollouts.logprobs)
    assert torch.equal(found[0], found[1])
    assert (found[0] - found[2]).abs().max() > 1e-4


def test_a_cache_that_there_is_not_is_refused_at_construction() -> None:
    with pytest.raises(ValueError, match=r"HybridStrategy: kv_cache_dtype is 'bf16'; it must be 'auto', 'bfloat16' or"):
        HybridStrategy(kv_cache_dtype="bf16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="HybridStrategy: offload_kvcache is 'yes'; it must be True or False"):
        HybridStrategy(offload_kvcache="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="NativeOptions: offload_kvcache is 1; it must be True or False"):
        Actor(tiny_model(), engine_options={"offload_kvcache": 1})


def test_engines_without_such_a_cache_refuse_the_strategys() -> None:
    with pytest.raises(
        ValueError,
        match=r"HybridStrategy\(kv_cache_dtype='fp8'\) speaks to the native engine, but Actor has engine='t",
    ):
        set_up_actor("transformers", kv_cache_dtype="fp8")
    set_up_actor("transformers")
    actor = Actor(tiny_model(), tokenizer=char_tokenizer())
    actor._engine_name = "vllm"
    fabric = Fabric(accelerator="cpu", strategy=HybridStrategy(offload_kvcache=True))
    fabric.launch()
    with pytest.raises(ValueError, match=r"offload_kvcache=True.*engine='vllm'.*\{'engine_args': \{...\}\}"):
        fabric.setup_module(actor)
    with pytest.raises(ValueError, match=r"got \{'offload_kvcache': True\}.*but OwnActor has no take_engine_options"):
        fabric.setup_module(OwnActor())


@pytest.mark.parametrize(("kind", "given"), [("auto", ""), ("fp8", "{'kv_cache_dtype': 'fp8'}")])
def test_auto_says_that_nothing_comes_of_a_cache_where_it_takes_transformers(
    kind: Any, given: str, recwarn: pytest.WarningsRecorder
) -> None:
    config = BloomConfig(vocab_size=len(char_tokenizer()), hidden_size=16, n_layer=1, n_head=2)
    fabric = Fabric(accelerator="cpu", strategy=HybridStrategy(kv_cache_dtype=kind))
    fabric.launch()
    actor = Actor(config, tokenizer=char_tokenizer())
    fabric.setup_module(actor)
    assert type(actor.engine).__name__ == "TransformersEngine"
    said = [str(warning.message) for warning in recwarn if "nothing comes of" in str(warning.message)]
    assert said == ([f"engine='transformers' has no options, so nothing comes of {given}."] if given else [])


class OwnActor(nn.Module):
    """A user's own, which knows nothing of engines."""

    role = "actor"


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_the_same_version_is_handed_over(tmp_path: Path) -> None:
    fabric, strategy, actor, _, optimizer = make()
    fabric.save(tmp_path / "saved", {"actor": actor, "optimizer": optimizer})
    saved = whole(actor)
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.add_(1.0)
    with strategy.rollout(actor):
        pass
    fabric.load(tmp_path / "saved", {"actor": actor, "optimizer": optimizer})
    with strategy.rollout(actor):
        pass
    handed = actor.engine.handed  # type: ignore[attr-defined]
    assert [version for version, _ in handed] == [0, 0]
    torch.testing.assert_close(handed[1][1], {name: saved[name] for name in handed[1][1]}, rtol=0, atol=0)


@pytest.mark.parametrize("weights", ["merged", "adapter"])
def test_adapters_are_merged_or_handed_over_beside(weights: RolloutWeights) -> None:
    _, strategy, actor, _, _ = make(weights, lora_config=LORA)
    for name, parameter in actor.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(len(name)))
    before = whole(actor)
    with strategy.rollout(actor):
        pass
    strategy._versions["actor"] = 1  # the same weights once more
    with strategy.rollout(actor):
        pass
    torch.testing.assert_close(whole(actor), before, rtol=0, atol=0)
    (_, named), (_, again) = actor.engine.handed  # type: ignore[attr-defined]
    torch.testing.assert_close(again, named, rtol=0, atol=0)  # not merged twice
    layer = "model.layers.1.mlp.down_proj"
    a, b = (before[f"{layer}.lora_{half}.default.weight"] for half in "AB")
    base = before[f"{layer}.base_layer.weight"]
    strange = [name for name in named if "base_" in name or "_fsdp" in name or "_orig_mod" in name]
    assert strange == []
    if weights == "merged":  # alpha / r is 2
        torch.testing.assert_close(named[f"{layer}.weight"], base + 2.0 * b @ a, rtol=0, atol=1e-6)
        assert not [name for name in named if "lora_" in name]
    else:
        torch.testing.assert_close(named[f"{layer}.weight"], base, rtol=0, atol=0)
        torch.testing.assert_close(named[f"{layer}.lora_A.default.weight"], a, rtol=0, atol=0)
        torch.testing.assert_close(named[f"{layer}.lora_B.default.weight"], 2.0 * b, rtol=0, atol=0)
        assert len([name for name in named if "lora_" in name]) == 2 * 2 * 2


def test_an_error_while_handing_over_leaves_the_trained_weights() -> None:
    fabric, strategy, actor, module, optimizer = make(lora_config=LORA)
    before = whole(actor)
    actor.engine.fails = True  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="out of memory"), strategy.rollout(actor):
        pass
    torch.testing.assert_close(whole(actor), before, rtol=0, atol=0)
    assert {parameter.device.type for parameter in actor._generator[0].parameters()} == {"meta"}
    train(fabric, module, optimizer)
    actor.engine.fails = False  # type: ignore[attr-defined]
    with strategy.rollout(actor) as lent:
        assert lent.generate() == 1


def handed_over_on_each_rank(family: str, mesh: tuple[int, ...], rollout_tp: int) -> tuple[dict[str, Tensor], Any]:
    """What a rank hands over, beside the whole weights, and the ranks of its tensor group."""
    _, strategy, actor, _, _ = make(family=family, mesh_shape=mesh, hybrid_engine_config={"rollout_tp": rollout_tp})
    expected = whole(actor)
    with strategy.rollout(actor):
        pass
    ((_, named),) = actor.engine.handed  # type: ignore[attr-defined]
    torch.testing.assert_close(named, {name: expected[name] for name in named}, rtol=0, atol=0)
    return named, actor.engine.tensor_lines  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("family", "mesh", "rollout_tp", "lines"),
    [
        ("qwen2", (2, 1, 1, 1), 2, [[0, 1]]),
        ("llama", (1, 2, 1, 1), 1, [[0], [1]]),
        ("qwen3_moe", (1, 1, 1, 2), 1, [[0], [1]]),
    ],
)
def test_every_rank_hands_over_whole_tensors(family: str, mesh: Any, rollout_tp: int, lines: list[list[int]]) -> None:
    found = run_ranks(handed_over_on_each_rank, 2, family, mesh, rollout_tp)
    shapes = {name: parameter.shape for name, parameter in tiny_model(family).named_parameters()}  # type: ignore[arg-type]
    for named, given in found:
        assert {name: tensor.shape for name, tensor in named.items()} == shapes
        assert given == lines


def test_layouts_without_a_hand_over_are_refused() -> None:
    with pytest.raises(ValueError, match="takes them from the 3D hybrid engine; leave enable_3d_hybrid=False"):
        make(enable_3d_hybrid=False)


def reward_on_a_rank_of_its_own() -> str:
    with pytest.raises(ValueError, match="vLLM starts on all 2 processes together") as error:
        make(mesh_shape=(1, 1, 1, 1), parallelism_config={"reward": {"dp": 1, "ranks": [1]}})
    return str(error.value)


def test_a_role_with_ranks_of_its_own_is_refused_on_every_rank() -> None:
    for message in run_ranks(reward_on_a_rank_of_its_own, 2):
        assert "the actor lies on ranks [0] only" in message
