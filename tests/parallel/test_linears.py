"""Linear layers over a tensor axis: what they communicate, and the gradients of whole ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_verl.parallel.checkpointing import apply_activation_checkpointing
from lightning_verl.parallel.linears import cut_linears
from lightning_verl.parallel.tensor import apply_tensor_parallel
from lightning_verl.testing import run_ranks, tiny_model

IDS = torch.arange(3, 35).view(2, 16)
HIDDEN = 2 * 16 * 64
"""Elements of the hidden states."""
TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3", "qwen3_moe"]


def own_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return init_device_mesh("cpu", (2,))


class AllReduces(TorchDispatchMode):
    """Notes how many elements each all-reduce has."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again with what a DTensor is made of
        if "c10d" in func.name() and "allreduce" in func.name().replace("_", ""):
            first = args[0][0] if isinstance(args[0], list | tuple) else args[0]
            self.elements.append(first.numel())
        return func(*args, **(kwargs or {}))


def adapted(model: Any, **options: Any) -> Any:
    torch.manual_seed(0)  # adapters are drawn from the global state
    config = LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False, **options)
    inject_adapter_in_model(config, model)
    return model


# ---- what is communicated --------------------------------------------------------------------------------------------


def reductions(family: Any, mode: Any, lora: bool, layers: int) -> tuple[list[int], list[int]]:
    """Sizes of the all-reduces of a forward and of its backward."""
    mesh = own_mesh()
    model: Any = tiny_model(family, num_hidden_layers=layers).train()
    model = adapted(model) if lora else model
    apply_tensor_parallel(model, mesh)
    apply_activation_checkpointing(model, mode)
    with AllReduces() as forward:
        output = model.base_model(IDS, use_cache=False).last_hidden_state
    with AllReduces() as backward:
        output.sum().backward()
    return forward.elements, backward.elements


def reductions_of_a_layer(family: Any, mode: Any, lora: bool = False) -> tuple[list[int], list[int]]:
    more, fewer = (reductions(family, mode, lora, layers) for layers in (2, 1))
    for left, taken in zip(more, fewer, strict=True):
        for size in taken:
            left.remove(size)
    return sorted(more[0]), sorted(more[1])


@pytest.mark.parametrize(
    ("family", "mode", "forward", "backward"),
    [
        ("qwen2", None, [HIDDEN] * 2, [HIDDEN] * 2),
        ("gemma2", None, [HIDDEN] * 2, [HIDDEN] * 2),
        ("qwen3", None, [HIDDEN] * 2, [16] * 2 + [HIDDEN] * 2),  # and weights of the norms of queries and keys
        # The output of o_proj is summed again; that of down_proj is not needed, unless a norm follows.
        ("qwen2", "full", [HIDDEN] * 2, [HIDDEN] * 3),
        ("qwen2", "selective", [HIDDEN] * 2, [HIDDEN] * 3),
        ("gemma2", "full", [HIDDEN] * 2, [HIDDEN] * 4),
    ],
)
def test_all_reduces_of_a_layer(family: Any, mode: Any, forward: list[int], backward: list[int]) -> None:
    for made in run_ranks(reductions_of_a_layer, 2, family, mode):
        assert made == (forward, backward)


def test_all_reduces_of_adapters_are_small() -> None:
    # Forward: the narrow outputs of A before o_proj and down_proj, 32 x 4. Backward: A's weights of q, v, up, 4 x 64.
    for made in run_ranks(reductions_of_a_layer, 2, "llama", None, True):
        assert made == ([128] * 2 + [HIDDEN] * 2, [256] * 3 + [HIDDEN] * 2)


# ---- gradients -------------------------------------------------------------------------------------------------------


def gradients(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states and the gradients of all parameters, whole."""
    output = model.base_model(IDS, use_cache=False).last_hidden_state
    (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is not None:
            found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return output.detach(), found


def make_model(family: Any, lora: bool) -> Any:
    options = {"mlp_only_layers": [0]} if family == "qwen3_moe" else {}  # one dense layer, one with a router
    model: Any = tiny_model(family, **options).train()
    return adapted(model) if lora else model


def compare(cases: list[tuple[Any, bool]]) -> list[tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]]:
    mesh, found = own_mesh(), []
    for family, lora in cases:
        alone, cut = make_model(family, lora), make_model(family, lora)
        apply_tensor_parallel(cut, mesh)
        (expected, whole), (actual, parts) = gradients(alone), gradients(cut)
        found.append((actual, expected, parts, whole))
    return found


def assert_equal(found: Any) -> None:
    actual, expected, parts, whole = found
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert parts.keys() == whole.keys()
    for name, gradient in whole.items():
        error = (parts[name] - gradient).norm()
        assert error <= 1e-5 * gradient.norm() + 1e-5, name  # k_proj's bias has none but rounding


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_gradients_are_those_of_a_whole_model(lora: bool) -> None:
    families = ["llama", "qwen3"] if lora else FAMILIES
    for rank in run_ranks(compare, 2, [(family, lora) for family in families]):
        for found in rank:
            assert len(found[2]) > 10
            assert_equal(found)


class Scaled(nn.Module):
    """An MLP with a whole layer that reads what the cut ones read."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        generator = torch.Generator().manual_seed(0)
        self.scale = nn.Parameter(torch.randn(1, 64, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.silu(self.gate_proj(x)) * self.up_proj(x)
        output: Tensor = self.down_proj(inner) * functional.linear(x, self.scale).sigmoid()
        return output


def beside_a_whole_layer() -> Any:
    models: list[Any] = [tiny_model("llama", num_hidden_layers=2).train() for _ in range(2)]
    for model in models:
        for layer in model.model.layers:
            layer.mlp = Scaled(layer.mlp)
    apply_tensor_parallel(models[1], own_mesh())
    (expected, whole), (actual, parts) = map(gradients, models)
    return actual, expected, parts, whole


def test_what_a_whole_layer_reads_too_is_not_summed_for_it() -> None:
    for found in run_ranks(beside_a_whole_layer, 2):
        assert "model.layers.1.mlp.scale" in found[2]
        assert_equal(found)


def with_dropout() -> dict[str, Tensor]:
    model = adapted(tiny_model("llama").train(), lora_dropout=0.5)
    apply_tensor_parallel(model, own_mesh())
    torch.manual_seed(dist.get_rank())  # each rank drops out other inputs
    found = gradients(model)[1]
    return {name: gradient for name, gradient in found.items() if "lora" in name}


def test_adapters_stay_equal_whatever_ranks_drop_out() -> None:
    first, second = run_ranks(with_dropout, 2)
    assert len(first) == 2 * 2 * len(TARGETS)
    for name, gradient in first.items():
        assert torch.equal(gradient, second[name]), name


# ---- what is refused -------------------------------------------------------------------------------------------------


class Doubled(nn.Linear):
    """Computes what cutting it would not know of."""

    def forward(self, inputs: Tensor) -> Tensor:
        return 2 * super().forward(inputs)


def refused() -> str:
    with pytest.raises(TypeError) as caught:
        cut_linears(Doubled(4, 4), "colwise", own_mesh())
    return str(caught.value)


def test_linear_layers_of_their_own_kind_are_refused() -> None:
    for message in run_ranks(refused, 2):
        assert message == (
            "Doubled is planned as colwise, but only torch.nn.Linear can be cut so; set its role's tp to 1."
        )


def adapter_refused() -> str:
    adapted = inject_adapter_in_model(
        LoraConfig(r=2, use_dora=True, target_modules=["0"]), nn.Sequential(nn.Linear(4, 4))
    )
    with pytest.raises(TypeError) as caught:
        cut_linears(adapted[0], "rowwise", own_mesh())
    return str(caught.value)


def test_adapters_that_are_more_than_lora_are_refused() -> None:
    for message in run_ranks(adapter_refused, 2):
        assert message.startswith(
            "Linear has the adapter 'default' of DoraLinearVariant, but only plain LoRA can be cut"
        )
