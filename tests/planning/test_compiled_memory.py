"""What compiled layers keep, against the formula."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend

from lightning_verl import Actor
from lightning_verl.data.microbatches import MicroBatches
from lightning_verl.models.attention import PackedSequence
from lightning_verl.models.heads import packed_states
from lightning_verl.parallel import compiling
from lightning_verl.planning.memory import kept_per_token
from lightning_verl.planning.model import RoleModel, describe
from lightning_verl.strategies.precision import HybridPrecision
from lightning_verl.testing import tiny_model, tiny_rollouts


def kept_by_compiled_layers(layers: int, monkeypatch: pytest.MonkeyPatch) -> tuple[RoleModel, int, int]:
    """A role, the tokens of a micro-batch, and the bytes that layers compiled as on a GPU keep of it."""
    torch._dynamo.reset()
    divided = lookup_backend("aot_eager_decomp_partition")  # as inductor divides forward and backward pass
    monkeypatch.setattr(compiling, "lookup_backend", lambda name: divided)
    actor = Actor(tiny_model("qwen3", num_hidden_layers=layers))
    compiling.compile_layers(actor, compiling.inductor)
    batch = tiny_rollouts(8)
    rows = MicroBatches.cut(batch.sizes(), 10**6, "shared").take(batch, 0)
    sequence = PackedSequence(rows.input_ids, rows.packed)
    weights = {parameter.untyped_storage().data_ptr() for parameter in actor.parameters()}
    found: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with actor.without_padding(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        states = packed_states(actor.model, sequence)
    states.sum().backward()
    kept = sum(size for place, size in found.items() if place not in weights)
    return replace(describe(actor, HybridPrecision()), compiled=True), sequence.ids.numel(), kept


def test_what_a_compiled_layer_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of a GPU keeps the sums of its softmax too, 4 bytes a head; plain attention computes them again."""
    _, tokens, two = kept_by_compiled_layers(2, monkeypatch)
    model, _, three = kept_by_compiled_layers(3, monkeypatch)
    decoder = model.decoder
    # 8 (64 + 64 + 32 + 128) + 4 x 4 + 8, and of QK-norm 4 (64 + 32) + 4 (4 + 2): 2,736
    assert kept_per_token(model, 1) == 2736
    assert (three - two) / tokens == 2736 - 4 * decoder.heads
