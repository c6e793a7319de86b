"""What stays on the device of what layers keep, where activations are offloaded, against the formula."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_verl import Actor
from lightning_verl.parallel import offloading
from lightning_verl.parallel.checkpointing import apply_activation_checkpointing
from lightning_verl.parallel.offloading import offload_activations
from lightning_verl.parallel.tensor import apply_tensor_parallel
from lightning_verl.planning.batch import BatchSizes, RoleBatch
from lightning_verl.planning.memory import RoleMemory, activation_bytes, kept_per_token, staying_per_token
from lightning_verl.planning.model import RoleModel, describe
from lightning_verl.planning.shards import Placement
from lightning_verl.strategies.layout import RoleLayout
from lightning_verl.strategies.precision import HybridPrecision
from lightning_verl.testing import run_ranks, tiny_model

TOKENS = 64


def shapes(mode: Any = None, family: Any = "qwen2", **flags: bool) -> RoleModel:
    """h = 64, q = k = 64, m = 128, 4 heads and as many for keys and values, 2 layers, c = 4."""
    actor = Actor(tiny_model(family, num_key_value_heads=4), activation_checkpointing=mode)
    return replace(describe(actor, HybridPrecision(), mode), **flags)


def left_on_device(layers: int, mode: Any, tensor: int, family: Any) -> int:
    """Bytes of what autograd keeps of so many layers that do not go to the host. Sums are below 2,048 bytes."""
    model = tiny_model(family, num_hidden_layers=layers, num_key_value_heads=4).train()
    if tensor > 1:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        apply_tensor_parallel(model, init_device_mesh("cpu", (tensor,)))
    apply_activation_checkpointing(model, mode)
    offload_activations(model, least_bytes=2048)
    left: dict[int, Tensor] = {}
    pack = offloading._Host.pack

    def note(host: Any, page: Any, stays: set[int], kept: Tensor) -> Any:
        result = pack(host, page, stays, kept)
        local = kept.to_local() if isinstance(kept, DTensor) else kept
        if isinstance(result, Tensor) and local.untyped_storage().data_ptr() not in stays:
            left[local.untyped_storage().data_ptr()] = local  # held, so that no other gets its address
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offloading._Host, "pack", note)
        output = model.base_model(torch.arange(3, 3 + TOKENS).view(4, 16), use_cache=False).last_hidden_state
    assert output.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in left.values())


def left_of_a_layer(mode: Any, tensor: int, family: Any) -> int:
    return left_on_device(2, mode, tensor, family) - left_on_device(1, mode, tensor, family)


@pytest.mark.parametrize(
    ("mode", "tensor", "family", "by_hand"),
    [
        (None, 1, "qwen2", 4 * 4 + 8),  # the sums of the softmax, and those of two norms
        (None, 1, "qwen3", 4 * 4 + 8 + 4 * (4 + 4)),  # and those of the norms of queries and keys
        ("full", 1, "qwen2", 0),
        (None, 2, "qwen2", 4 * 2 + 8),  # the sums of half of the heads
        ("full", 2, "qwen2", 0),
    ],
)
def test_what_stays_of_a_layer_that_runs_as_it_is_written(mode: Any, tensor: int, family: Any, by_hand: int) -> None:
    assert staying_per_token(shapes(mode, family, offloads=True), tensor) == by_hand
    if tensor == 1:
        assert left_of_a_layer(mode, tensor, family) == by_hand * TOKENS
    else:
        assert run_ranks(left_of_a_layer, tensor, mode, tensor, family) == [by_hand * TOKENS] * tensor


def test_what_stays_where_some_is_recomputed() -> None:
    # "selective" keeps the input, queries, keys, values, attention and o_proj, 64 each, and 4 sums: 4 x 6 x 64 + 16.
    # Compiled all but the sums go; as they are written the input alone does, 4 x 64.
    assert kept_per_token(shapes("selective"), 1) == 1_552
    assert staying_per_token(shapes("selective", offloads=True), 1) == 1_552 - 256
    assert staying_per_token(shapes("selective", offloads=True, compiled=True), 1) == 16
    assert staying_per_token(shapes("selective"), 1) == 1_552, "nothing is offloaded"


def test_activations_on_the_device_and_on_the_host_by_hand() -> None:
    five = replace(shapes(offloads=True).decoder, layers=5)
    model = replace(shapes(offloads=True, compiled=True), decoder=five)
    # Compiled a layer keeps 8 (64 + 64 + 64 + 128) + 16 + 8 = 2,584, all but 24 on the host, those of two not.
    # Outside of the layers 20 x 64; one in its backward pass 4 (2 x 64 + 128).
    assert activation_bytes(model, 1) == (5 * 24 + 2 * 2_560 + 1_280, 1_024)
    # Of three micro-batches that wait, all three keep what stays; the two layers are those of one.
    assert activation_bytes(model, 1, waiting=3.0) == (3 * (5 * 24 + 1_280) + 2 * 2_560, 1_024)
    batch = RoleBatch.of(BatchSizes(8, 4, 2, 1, 64, 8, 8), 1)
    memory = RoleMemory(model, Placement(RoleLayout("actor", 1, 1, 1, (0,))), batch, waiting=3.0)
    assert batch.micro_batch_tokens == 64
    assert memory.on_host == 3 * 64 * 5 * 2_560
    assert memory.activations()[0] == 64 * (3 * (5 * 24 + 1_280) + 2 * 2_560)
    kept = replace(memory, model=replace(model, offloads=False))
    assert (kept.on_host, kept.activations()[0]) == (0, 3 * 64 * (5 * 2_584 + 1_280))
