"""The formulas for memory against the bytes that models, gradients and optimizers really take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_verl import Actor, Critic, HybridStrategy, Reference
from lightning_verl.data.experience import RolloutBatch
from lightning_verl.planning.batch import BatchSizes, RoleBatch
from lightning_verl.planning.memory import (
    RoleMemory,
)
from lightning_verl.planning.model import build_on_meta, describe
from lightning_verl.planning.shards import Placement, numel_on, received_bytes, rollout_bytes
from lightning_verl.strategies.codes import all_scales
from lightning_verl.strategies.layout import RoleLayout, resolve_layouts
from lightning_verl.strategies.mesh import DeviceMesh
from lightning_verl.strategies.precision import HybridPrecision
from lightning_verl.testing import char_tokenizer, run_ranks, tiny_config, tiny_model

LORA = {"r": 4, "target_modules": ["q_proj", "down_proj"]}
SIZES = BatchSizes(
    rollout_batch_size=8,
    update_batch_size=4,
    samples_per_prompt=2,
    epochs=1,
    max_tokens_per_micro_batch=64,
    prompt_tokens=8,
    response_tokens=8,
)


# ---- parameters, gradients, optimizer state --------------------------------------------------------------------------


def rows() -> RolloutBatch:
    return RolloutBatch(
        input_ids=torch.randint(3, 100, (2, 6), generator=torch.Generator().manual_seed(1)),
        prompt_lengths=torch.full((2,), 3),
        response_lengths=torch.full((2,), 3),
        rollout_logprobs=torch.zeros(2, 3),
        group_ids=torch.arange(2),
        truncated=torch.zeros(2, dtype=torch.bool),
        prompt_texts=[""] * 2,
        response_texts=[""] * 2,
        fields=[{}] * 2,
    )


def local_bytes(tensor: Tensor | None) -> int:
    """Bytes that lie on this rank; of a moment in 8 bits those of its codes, scales and table."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if hasattr(part, "codes"):
        return sum(inner.nbytes for inner in (part.codes, part.scale, part.qmap))
    return 0 if part is None else part.nbytes


def planned_and_real(
    role: str,
    precision: Any,
    vocabulary: int,
    lora: bool,
    options: Mapping[str, Any],
    family: Any = "qwen3",
    optimizer_name: Any = "adamw",
    quantization: Any = None,
) -> tuple[dict[str, int], dict[str, int]]:
    """What is planned for this rank and what is there after one step: parameters, gradients, optimizer state."""
    fabric = Fabric(accelerator="cpu", strategy=HybridStrategy(**options), precision=precision)
    fabric.launch()
    kind = {"actor": Actor, "critic": Critic, "reference": Reference}[role]
    adapter: dict[str, Any] = {"lora_config": LORA, "quantization": quantization} if lora else {}
    if optimizer_name != "adamw":
        adapter["optimizer"] = optimizer_name
        torch.compiler.set_stance("force_eager")  # compiling the step takes 10 s
    module = kind(tiny_model(family, vocab_size=vocabulary, num_key_value_heads=4), **adapter)
    plugin = fabric.strategy.hybrid_precision
    model = describe(plugin.convert_module(module), plugin, optimizer=optimizer_name)
    place = Placement(fabric.strategy.layout(role))
    held = [(p, p.held_bytes(numel_on(p, place.held(p), fabric.global_rank))) for p in model.parameters]
    trained = sum(size for parameter, size in held if parameter.trained)
    planned = {"parameters": sum(size for _, size in held), "gradients": trained, "optimizer": 2 * trained}
    if optimizer_name != "adamw":
        planned["optimizer"] = RoleMemory(model, place, RoleBatch.of(SIZES, 1)).optimizer

    optimizer = module.configure_optimizers() if role != "reference" else torch.optim.SGD(module.parameters())
    wrapped, optimizer = fabric.setup(module, optimizer)
    real = dict.fromkeys(planned, 0)
    if role != "reference":
        result = wrapped(rows())
        fabric.backward((result[0] if role == "actor" else result).sum())
        real["gradients"] = sum(local_bytes(parameter.grad) for parameter in module.parameters())
        optimizer.step()
        states = optimizer.state.values()
        real["optimizer"] = sum(local_bytes(state[key]) for state in states for key in ("exp_avg", "exp_avg_sq"))
    real["parameters"] = sum(local_bytes(parameter) for parameter in module.parameters())
    real["parameters"] += sum(scale.nbytes for scale in all_scales(module))
    return planned, real


FOUR: dict[str, Any] = {"mesh_shape": (2, 2, 1, 1)}


@pytest.mark.parametrize(
    ("ranks", "role", "precision", "vocabulary", "lora", "options"),
    [
        (1, "actor", "32-true", 128, False, {}),
        (1, "actor", "bf16-mixed", 128, True, {}),
        (2, "actor", "bf16-mixed", 129, False, {}),
        (2, "reference", "bf16-mixed", 128, False, {"parallelism_config": {"reference": {"dp": 1}}}),
        (4, "actor", "bf16-mixed", 131, False, FOUR),
        (4, "actor", "32-true", 128, True, FOUR),
        (4, "actor", "bf16-true", 128, False, {"parallelism_config": {"actor": {"dp": 2, "replicate": True}}}),
        (4, "critic", "bf16-mixed", 129, False, {**FOUR, "parallelism_config": {"critic": {"dp": 4}}}),
    ],
)
@pytest.mark.filterwarnings("ignore:precision='bf16-true'")
def test_every_rank_holds_what_is_planned(
    ranks: int, role: str, precision: Any, vocabulary: int, lora: bool, options: Mapping[str, Any]
) -> None:
    results = run_ranks(planned_and_real, ranks, role, precision, vocabulary, lora, options)
    for planned, real in results:
        assert planned == real
    assert results[0][0]["parameters"] > 0


@pytest.mark.torchao
def test_every_rank_holds_8_bit_moments_as_planned() -> None:
    results = run_ranks(planned_and_real, 2, "actor", "bf16-mixed", 128, False, {}, optimizer_name="adamw8bit")
    for planned, real in results:
        assert planned == real
        assert planned["optimizer"] < 0.6 * 2 * planned["gradients"], "half of the matrices are in blocks"


@pytest.mark.bitsandbytes
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_rank_holds_codes_as_planned(ranks: int) -> None:
    whole = run_ranks(planned_and_real, ranks, "actor", "bf16-mixed", 128, True, {})
    results = run_ranks(planned_and_real, ranks, "actor", "bf16-mixed", 128, True, {}, quantization="nf4")
    for (planned, real), (unquantized, _) in zip(results, whole, strict=True):
        assert planned == real
        assert planned["optimizer"] == unquantized["optimizer"]


@pytest.mark.bitsandbytes
def test_codes_by_hand() -> None:
    # A layer has 40,960 elements in 7 matrices: q, k, v and o of 64 x 64 (4 key-value heads), 3 of 128 x 64. One of
    # 4,096 has 2,048 bytes of codes, 64 scales, and 8 for the scales of these; one of 8,192 twice the first two.
    plugin = HybridPrecision("bf16-mixed")
    module = build_on_meta(
        lambda: Actor(tiny_config("qwen3", num_key_value_heads=4), lora_config=LORA, quantization="nf4"), plugin
    )
    memory = RoleMemory(describe(module, plugin), placed(2, (2, 1, 1, 1), 1), RoleBatch.of(SIZES, 2))
    codes = 2 * (4 * (2_048 + 64 + 8) + 3 * (4_096 + 128 + 8))
    plain = 2 * (2 * 8_192 + 2 * (2 * 64 + 2 * 16) + 64) // 2
    assert memory.parameters == codes + plain + memory.trained
    # Nothing of the codes travels to the rollout, which takes them in bf16; they are expanded one by one in the update.
    expanded = {item.what: item.bytes for item in memory.update()["backward of the layers"]}["expanded weight"]
    assert expanded == 2 * 8_192
    assert memory.model.numel - memory.model.trained_numel == 2 * 8_192 + 2 * (40_960 + 160) + 64
    assert memory.rollout_weights == 2 * (2 * 8_192 + 2 * (40_960 + 160) + 64)


@pytest.mark.parametrize(
    "mesh_shape", [(2, 1, 1, 2), (1, 2, 1, 2), (2, 2, 1, 1)], ids=["dp2xep2", "tp2xep2", "dp2xtp2"]
)
def test_every_rank_holds_its_experts_as_planned(mesh_shape: tuple[int, ...]) -> None:
    options = {"mesh_shape": mesh_shape}
    for planned, real in run_ranks(planned_and_real, 4, "actor", "bf16-mixed", 128, False, options, "qwen3_moe"):
        assert planned == real


def resharding(
    precision: Any, options: Mapping[str, Any], family: Any = "qwen3"
) -> tuple[list[int], list[int], int, int]:
    """What is planned for the way to the rollout, on all ranks, and what it was on this one: received and made."""
    fabric = Fabric(accelerator="cpu", strategy=HybridStrategy(**options), precision=precision)
    fabric.launch()
    strategy, tokenizer = fabric.strategy, char_tokenizer()
    actor = Actor(tiny_model(family, vocab_size=len(tokenizer), num_key_value_heads=4), tokenizer=tokenizer)
    model = describe(strategy.hybrid_precision.convert_module(actor), strategy.hybrid_precision)
    place = Placement(strategy.layout("actor"), strategy.layout("rollout"))
    wrapped = fabric.setup_module(actor)
    with strategy.rollout(wrapped):
        report = strategy.reshard_report
    return (
        received_bytes(model, place),
        rollout_bytes(model, place),
        report.received_bytes,
        report.received_bytes + report.copied_bytes,
    )


@pytest.mark.parametrize(
    ("ranks", "precision", "options", "family"),
    [
        (2, "32-true", {"hybrid_engine_config": {"rollout_tp": 2}}, "qwen3"),
        (4, "bf16-mixed", FOUR, "qwen3"),
        (4, "32-true", {**FOUR, "hybrid_engine_config": {"rollout_tp": 4}}, "qwen3"),
        (4, "bf16-mixed", {"mesh_shape": (2, 1, 1, 2), "hybrid_engine_config": {"rollout_tp": 2}}, "qwen3_moe"),
    ],
)
def test_every_rank_receives_and_makes_what_is_planned(
    ranks: int, precision: Any, options: Mapping[str, Any], family: Any
) -> None:
    for rank, (received, made, really_received, really_made) in enumerate(
        run_ranks(resharding, ranks, precision, options, family)
    ):
        assert (received[rank], made[rank]) == (really_received, really_made)
        assert made[rank] > 0


def test_an_uneven_vocabulary_by_hand() -> None:
    # 129 rows over 2 shards: 65 and 64; FSDP2 allocates 65 on both, so the first rank's number is planned for all.
    embedding = next(p for p in model_of().parameters if "embed" in p.name)
    place = Placement(RoleLayout("actor", 1, 2, 1, (0, 1)))
    assert [numel_on(embedding, place.held(embedding), rank) for rank in (0, 1)] == [65 * 64, 64 * 64]


def model_of(precision: str = "32-true", lora: bool = False, **overrides: Any) -> Any:
    """The shapes of a tiny actor: embedding and head of 129 x 64."""
    plugin = HybridPrecision(precision)
    adapter = {"lora_config": LORA} if lora else {}
    module = Actor(tiny_config("qwen3", **{"vocab_size": 129, **overrides}), **adapter)
    return describe(plugin.convert_module(module), plugin)


# ---- the rollout -----------------------------------------------------------------------------------------------------


def placed(world: int, mesh: tuple[int, int, int, int], tensor: int) -> Placement:
    layouts = resolve_layouts(world, DeviceMesh(mesh), {}, {"rollout_tp": tensor})
    return Placement(layouts["actor"], layouts["rollout"])


def test_rollout_weights_and_what_has_to_move_by_hand() -> None:
    # A layer: q 64x64, k and v 32x64, o 64x64, gate, up and down 128x64 = 36,864, and norms of 64+64+16+16 = 160. Two
    # of them, embedding and head of 128x64 = 8,192 each, and a norm of 64: 73,728 + 384 + 16,384.
    model = model_of(vocab_size=128)
    memory = RoleMemory(model, placed(4, (2, 2, 1, 1), 2), RoleBatch.of(SIZES, 2))
    # Held in fp32 on rank 0: matrices and vocabulary over 2 shards x 2 tensor ranks, norms over the shards.
    assert memory.parameters == 4 * ((73_728 + 16_384) // 4 + 384 // 2)
    assert memory.optimizer == 2 * memory.parameters
    # The rollout's tensor axis cuts embedding and head too; norms are whole.
    assert memory.rollout_weights == 4 * (73_728 // 2 + 384 + 16_384 // 2)
    # Each rank has half of what it wants: of its matrices, its part of the vocabulary, and the norms.
    assert received_bytes(model, memory.place) == [4 * ((73_728 + 16_384) // 4 + 384 // 2)] * 4


def test_a_rollout_in_the_layout_and_dtype_of_training_takes_nothing() -> None:
    one = placed(1, (1, 1, 1, 1), 1)
    assert RoleMemory(model_of(), one, RoleBatch.of(SIZES, 1)).rollout_weights == 0
    # bf16 beside fp32 masters is a copy of all 90,496 + 128 elements; an adapter is merged into a copy of its targets,
    # q_proj and down_proj of two layers: 2 x (64 x 64 + 64 x 128).
    assert RoleMemory(model_of("bf16-mixed"), one, RoleBatch.of(SIZES, 1)).rollout_weights == 2 * 90_624
    assert RoleMemory(model_of(lora=True), one, RoleBatch.of(SIZES, 1)).rollout_weights == 4 * 2 * 12_288


def test_a_finer_rollout_finds_its_shards_in_place() -> None:
    # fsdp4 -> tp4: the shards lie along the dims that the rollout cuts, only norms (384 elements, a quarter is there)
    # move, and Placement cuts o_proj and down_proj along dim 1 for it.
    model = model_of(vocab_size=128, num_key_value_heads=4)
    place = placed(4, (4, 1, 1, 1), 4)
    down = next(p for p in model.parameters if p.name.endswith("down_proj.weight"))
    assert place.held(down).region(down.shape, 1) == (((0, 64),), ((32, 64),))
    assert received_bytes(model, place) == [4 * 384 * 3 // 4] * 4


def test_the_cache_by_hand() -> None:
    # 8 prompts x 2 samples over 2 copies of the model: 8 rows of up to 16 tokens; 2 x 2 layers x 1 of 2 kv heads x 16
    memory = RoleMemory(model_of(), placed(4, (2, 2, 1, 1), 2), RoleBatch.of(SIZES, 2))
    items = {item.what: item.bytes for item in memory.rollout(SIZES, "greedy")["last token"]}
    assert items["key-value cache"] == 2 * 2 * 1 * 16 * (8 * 16) * 4
    assert items["logits"] == 8 * 129 * (12 + 4)
    buckets = {item.what: item.bytes for item in memory.rollout(SIZES, "greedy")["resharding"]}["buckets"]
    assert buckets == 2 * max(received_bytes(memory.model, memory.place))
    prefill = {item.what: item.bytes for item in memory.rollout(SIZES, "greedy")["prefill"]}
    assert prefill["key-value cache"] == items["key-value cache"]
    assert prefill["activations"] == 8 * 8 * 4 * (4 * 64 + 3 * 64)


# ---- the update ------------------------------------------------------------------------------------------------------


def test_the_moments_of_an_update_by_hand() -> None:
    # One rank, fp32, 129 x 64 = 8,256 elements in embedding and in head, 37,024 in a layer, 16,576 in the root.
    memory = RoleMemory(model_of(), placed(1, (1, 1, 1, 1), 1), RoleBatch.of(SIZES, 1))
    assert (memory.batch.micro_batches, memory.batch.micro_batch_tokens) == (2, 64)
    moments = {name: {item.what: item.bytes for item in items} for name, items in memory.update().items()}
    everything = 4 * (2 * 37_024 + 16_576)
    assert {moment["gradients"] for moment in moments.values()} == {everything}
    assert "optimizer step" not in moments, "the fused update makes nothing on the way"
    layers = moments["backward of the layers"]
    assert layers["gathered units"] == 4 * (16_576 + 37_024)
    # The 8,256 of the head, a layer, and nothing for its reduction: a layer's 330,752 bytes of activations are gone.
    assert layers["gradients on their way"] == 4 * 8_256 + 4 * 37_024
    assert 64 * 5_168 == 330_752 > 4 * 37_024
    # 64 tokens: two layers of 5,168, then 20 x 64 around them, and 4 x (2 x 64 + 128) in flight.
    assert layers["activations"] == 64 * (2 * 5_168 + 20 * 64 + 4 * 256)
    assert moments["backward of the head"]["logits"] == 20 * 32 * 129
    assert moments["reduction of the root"]["gradients on their way"] == (4 + 4 + 4) * 16_576


def test_8_bit_moments_by_hand() -> None:
    # A layer: q and o of 4,096 and three of 8,192 in blocks = 32,768 elements in 5 parameters, a scale of 4 bytes for
    # 256 and a table of 1,024 bytes each; k and v of 2,048 are too small, norms have 160. Embedding and head of 8,256
    # are no multiple of 256; a norm of 64.
    model = replace(model_of(), optimizer="adamw8bit")
    memory = RoleMemory(model, placed(1, (1, 1, 1, 1), 1), RoleBatch.of(SIZES, 1))
    layer = 32_768 + 4 * 128 + 5 * 1_024 + 4 * (2 * 2_048 + 160)
    assert memory.optimizer == 2 * (2 * layer + 4 * (2 * 8_256 + 64))
    items = {item.what: item.bytes for item in memory.update()["optimizer step"]}
    assert items["AdamW's temporaries"] == 2 * 4 * 8_256, "both moments of the embedding in fp32"


def test_one_micro_batch_has_no_gradients_until_its_end() -> None:
    sizes = BatchSizes(8, 4, 2, 1, 10_000, 8, 8)
    memory = RoleMemory(model_of(), placed(1, (1, 1, 1, 1), 1), RoleBatch.of(sizes, 1))
    moments = {name: {item.what for item in items} for name, items in memory.update().items()}
    assert {name for name, items in moments.items() if "gradients" in items} == {
        "backward of the embedding",
        "reduction of the root",
    }
