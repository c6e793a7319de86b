"""Recomputed activations: the same gradients, less kept, only where asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_verl.data.packed_rows import PackedRows
from lightning_verl.data.packing import RowSize
from lightning_verl.models import attention
from lightning_verl.models.heads import packed_states
from lightning_verl.parallel import checkpointing
from lightning_verl.parallel.checkpointing import apply_activation_checkpointing, attention_operators
from lightning_verl.testing import tiny_model

IDS = torch.arange(3, 35).view(2, 16)
MODES: list[Any] = ["full", "selective", ["self_attn.o_proj", "mlp.down_proj"], ["mlp"]]


def gradients_and_kept(mode: Any) -> tuple[dict[str, Tensor], int, int]:
    """Gradients, numbers kept for the backward, and how often the first attention's query projection ran."""
    model = tiny_model("qwen3").train()
    apply_activation_checkpointing(model, mode)
    runs = [0]

    def count(module: nn.Module, args: Any, output: Any) -> None:
        runs[0] += 1

    model.model.layers[0].self_attn.q_proj.register_forward_hook(count)
    kept = [0]

    def keep(tensor: Tensor) -> Tensor:
        kept[0] += tensor.numel() if not isinstance(tensor, nn.Parameter) else 0
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=IDS, use_cache=False).logits.log_softmax(-1)[..., 0].mean()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, kept[0], runs[0]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_gradients_are_the_same_and_less_is_kept(mode: Any) -> None:
    expected, all_kept, runs = gradients_and_kept(None)
    actual, kept, again = gradients_and_kept(mode)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, atol=1e-6, rtol=1e-5)
    assert kept < all_kept
    assert (runs, again) == (1, 2 if mode in ("full", "selective") else 1)


def test_outside_of_autograd_the_module_runs_as_before() -> None:
    model = tiny_model("qwen3")
    apply_activation_checkpointing(model, "full")
    with torch.no_grad():
        expected = tiny_model("qwen3").generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
        actual = model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(actual, expected)


def test_attention_by_every_kernel_is_kept() -> None:
    """That over sequences of unequal length too, under the name that torch 2.11 to 2.13 give it, and our own."""
    import torch.nn.attention.varlen  # registers it

    assert {str(operator) for operator in attention_operators()} == {
        "aten._scaled_dot_product_flash_attention.default",
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        "aten._scaled_dot_product_efficient_attention.default",
        "aten._scaled_dot_product_cudnn_attention.default",
        "torch_attn._varlen_attn.default",
        "lightning_verl.block_attention.default",
    }
    assert torch.ops.torch_attn._varlen_attn.default in attention_operators()


def test_the_output_of_attention_is_kept_and_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention_runs() == 2  # one a layer
    monkeypatch.setattr(checkpointing, "attention_operators", frozenset)
    assert attention_runs() == 4


def test_the_output_of_the_kernel_for_unequal_lengths_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """On torch's meta device, which has no numbers but the same operators."""
    monkeypatch.setattr(attention, "_has_kernel", lambda query: True)
    assert attention_runs("meta") == 2
    monkeypatch.setattr(checkpointing, "attention_operators", frozenset)
    assert attention_runs("meta") == 4


def attention_runs(device: str = "cpu") -> int:
    """How often attention runs in a forward and a backward pass with ``"selective"``."""
    model: Any = tiny_model("qwen3").to(device).train()
    apply_activation_checkpointing(model, "selective")
    if device == "cpu":
        with Counter() as counter:
            model(input_ids=IDS, use_cache=False).logits.sum().backward()
        return counter.runs
    rows = PackedRows.of([RowSize(3, 5, row) for row in range(2)], 8)
    sequence = attention.PackedSequence(torch.ones(2, 8, dtype=torch.int64, device=device), rows.to(model.device))
    with attention.attention_named(model, attention.NAME), Counter() as counter:
        packed_states(model, sequence).sum().backward()
    return counter.runs


class Counter(TorchDispatchMode):
    """Counts runs of attention."""

    runs = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        self.runs += name in (
            "aten._scaled_dot_product_flash_attention_for_cpu.default",
            "torch_attn._varlen_attn.default",
        )
        return function(*args, **(kwargs or {}))


def test_wrong_modes_are_refused() -> None:
    with pytest.raises(ValueError, match="activation_checkpointing='some' is unknown; use 'selective', 'full'"):
        apply_activation_checkpointing(tiny_model(), "some")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"no module of Qwen3ForCausalLM ends in 'o_projection'"):
        apply_activation_checkpointing(tiny_model(), ["o_projection"])
    with pytest.raises(ValueError, match="Linear has no decoder layers that could be found"):
        apply_activation_checkpointing(nn.Linear(1, 1), "full")
