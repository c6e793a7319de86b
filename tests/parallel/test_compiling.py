"""Compiled decoder layers: the same numbers, few compilations, whatever else is asked of the layers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh

from lightning_verl import Actor, HybridStrategy
from lightning_verl.data.experience import RolloutBatch
from lightning_verl.data.microbatches import MicroBatches, Packing
from lightning_verl.models import attention
from lightning_verl.models.heads import packed_states
from lightning_verl.parallel import compiling
from lightning_verl.parallel.checkpointing import apply_activation_checkpointing
from lightning_verl.parallel.compiling import compile_layers
from lightning_verl.parallel.fsdp import fsdp_units
from lightning_verl.parallel.structure import decoder_layers
from lightning_verl.parallel.tensor import apply_tensor_parallel
from lightning_verl.rollout.native import compiled
from lightning_verl.rollout.native.compiled import CompiledLayers
from lightning_verl.testing import char_tokenizer, run_ranks, tiny_model, tiny_rollouts

IDS = torch.arange(3, 35).view(2, 16)
LORA = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "o_proj", "up_proj"], "init_lora_weights": False}
MODES: list[Any] = [None, "full", "selective", ["self_attn.o_proj", "mlp.down_proj"]]


class Compiler:
    """Compiles with a backend of torch, and counts."""

    def __init__(self, backend: str) -> None:
        self.runs, self._backend = 0, backend

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.runs += 1
        return lookup_backend(self._backend)(graph, list(inputs))


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """What others compiled does not count."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def make_actor(family: Any = "qwen2", lora: Any = None) -> Actor:
    torch.manual_seed(0)  # adapters are drawn from the global state
    return Actor(tiny_model(family), tokenizer=char_tokenizer(), lora_config=lora)


def make_batch(seed: int, rows: int = 6) -> RolloutBatch:
    """Groups of two with a prompt in common, other lengths for each seed."""
    generator = torch.Generator().manual_seed(seed)
    batch = tiny_rollouts(rows)
    batch.group_ids = torch.arange(rows) // 2
    batch.prompt_lengths = torch.randint(1, 8, (rows,), generator=generator)[batch.group_ids]
    batch.response_lengths = torch.randint(0, 20, (rows,), generator=generator)
    ids = torch.randint(3, 128, (rows, 27), generator=generator)
    batch.input_ids = torch.where(torch.arange(27) < batch.prompt_lengths[:, None], ids[batch.group_ids], ids)
    batch.rollout_logprobs = torch.zeros(rows, 20)
    return batch


def run(actor: Actor, seeds: Sequence[int], packing: Packing) -> list[Tensor]:
    """Log-probs of a pass without gradients and of one with, and the gradients, over micro-batches of many lengths."""
    figures = []
    for seed in seeds:
        batch = make_batch(seed)
        batches = MicroBatches.cut(batch.sizes(), 20 + 7 * seed, packing).filled_up(7)  # the last ones are empty
        for number in range(len(batches)):
            rows = batches.take(batch, number)
            if packing == "padded":
                with torch.no_grad():
                    figures.append(actor(rows)[0])
                figures.append(actor(rows)[0])
                figures[-1].sum().backward()
                continue
            with actor.without_padding():
                with torch.no_grad():
                    figures.append(actor(rows)[0])
                figures.append(actor(rows)[0])
                figures[-1].sum().backward()
    gradients = [parameter.grad for parameter in actor.parameters() if parameter.grad is not None]
    return [*(figure.detach() for figure in figures), *gradients]


def test_compiled_layers_compute_the_same() -> None:
    """The quick one of these tests: no backward graph is made."""
    expected, actor = run(make_actor(), range(3), "shared"), make_actor()
    compiler = Compiler("eager")
    compile_layers(actor, compiler)
    for one, other in zip(run(actor, range(3), "shared"), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert 4 <= compiler.runs <= 6
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_compiled_layers_learn_the_same_with_few_compilations(mode: Any) -> None:
    """Two passes, with and without gradients, each compiled for one token (a rank without rows) and for more.

    All layers share that; sizes that are equal by chance may cost one compilation more of each.
    """
    expected, actor = run(make_actor(), range(6), "shared"), make_actor()
    names, compiler = list(actor.state_dict()), Compiler("aot_eager")
    apply_activation_checkpointing(actor, mode)
    assert compile_layers(actor, compiler)
    actual = run(actor, range(6), "shared")
    assert len(actual) == len(expected) > 84
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert list(actor.state_dict()) == names
    assert 4 <= compiler.runs <= 6
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["rows", "padded"])
def test_other_packings_are_compiled_too(packing: Packing) -> None:
    expected, actor = run(make_actor(), range(4), packing), make_actor()
    compiler = Compiler("eager")
    compile_layers(actor, compiler)
    for one, other in zip(run(actor, range(4), packing), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert compiler.runs <= 8
    assert not counters["graph_break"]


@pytest.mark.slow
def test_adapters_are_compiled_too() -> None:
    """The first layer's input needs no gradient, so it is compiled apart."""
    expected, actor = run(make_actor(lora=LORA), range(3), "shared"), make_actor(lora=LORA)
    compiler = Compiler("aot_eager")
    apply_activation_checkpointing(actor, "selective")
    compile_layers(actor, compiler)
    for one, other in zip(run(actor, range(3), "shared"), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert compiler.runs <= 8
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_windows_and_caps_are_compiled_once_each(family: Any) -> None:
    expected, actor = run(make_actor(family), range(2), "shared"), make_actor(family)
    compiler = Compiler("eager")
    compile_layers(actor, compiler)
    for one, other in zip(run(actor, range(2), "shared"), expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-5)
    assert compiler.runs <= 2 * 6
    assert not counters["graph_break"]


@pytest.mark.slow
def test_the_kernel_for_unequal_lengths_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On torch's meta device, which has no numbers but runs forward and backward of the same operator."""
    monkeypatch.setattr(attention, "_has_kernel", lambda query: True)
    model: Any = tiny_model("qwen2").to("meta")
    compiler = Compiler("aot_eager")
    apply_activation_checkpointing(model, "selective")
    compile_layers(model, compiler)
    for seed in range(8):
        batch = make_batch(seed)
        rows = MicroBatches.cut(batch.sizes(), 1000, "shared").take(batch, 0)
        assert rows.packed is not None
        sequence = attention.PackedSequence(rows.input_ids.to("meta"), rows.packed.to(torch.device("meta")))
        assert sequence.seen is not None
        with attention.attention_named(model, attention.NAME):
            packed_states(model, sequence).sum().backward()
    assert compiler.runs <= 2  # the second where sizes were equal by chance at first
    assert not counters["graph_break"]


def kept_by_a_layer(mode: Any, backend: Any) -> list[tuple[int, ...]]:
    """Shapes of what a layer keeps for its backward, besides its weights, its input and the rotary embedding."""
    model: Any = tiny_model("qwen2", intermediate_size=144).train()
    apply_activation_checkpointing(model, mode)
    compile_layers(model, backend)
    states = torch.randn(1, 30, 64, requires_grad=True)
    rotary = model.model.rotary_emb(states, torch.arange(30)[None])
    given = {tensor.untyped_storage().data_ptr() for tensor in [states, *rotary, *model.parameters()]}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in given and tensor.dim() and tensor.is_floating_point():
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model.layers[0](states, position_embeddings=rotary)
    return sorted(tuple(tensor.shape) for tensor in kept.values())


@pytest.mark.slow
def test_what_is_recomputed_is_compiled_along() -> None:
    # Attention with its log-sum-exp; k_proj and v_proj, q_proj and o_proj.
    assert kept_by_a_layer("selective", "aot_eager") == [
        *((1, 4, 30), (1, 4, 30, 16), (30, 32), (30, 32), (30, 64), (30, 64)),
    ]
    assert kept_by_a_layer("full", "aot_eager") == []
    assert len(kept_by_a_layer(None, "aot_eager")) > 10


def test_what_cannot_be_compiled_says_why(caplog: pytest.LogCaptureFixture) -> None:
    experts = tiny_model("qwen3_moe")
    with caplog.at_level(logging.WARNING):
        assert not compile_layers(experts)
        assert not compile_layers(nn.Linear(1, 1))
    assert all("forward" not in vars(layer) for layer in decoder_layers(experts))
    assert "Qwen3MoeForCausalLM: its decoder layers are not compiled: experts take as many tokens" in caplog.text
    assert "Linear: its decoder layers are not compiled: none were found." in caplog.text


@pytest.mark.parametrize(("flag", "expected"), [(None, False), (False, False), (True, True)])
def test_a_cpu_compiles_only_when_asked(monkeypatch: pytest.MonkeyPatch, flag: Any, expected: bool) -> None:
    compiler = Compiler("eager")
    monkeypatch.setattr(compiling, "BACKEND", compiler)
    fabric = Fabric(accelerator="cpu", devices=1, strategy=HybridStrategy(compile_layers=flag))
    fabric.launch()
    actor = make_actor()
    fabric.setup_module(actor)
    actor(tiny_rollouts(2))
    assert (compiler.runs > 0) is expected


def test_sizes_and_epsilons_stay_numbers_under_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 marks modules for the compiler, which would then make kernels for any size; it takes floats for tensors."""
    inputs: list[str] = []

    def note(graph: torch.fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        inputs.extend(node.name for node in graph.graph.find_nodes(op="placeholder"))
        return graph.forward

    monkeypatch.setattr(compiling, "BACKEND", note)
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed", strategy=HybridStrategy(compile_layers=True))
    fabric.launch()
    actor = make_actor()
    assert fsdp_units(fabric.setup_module(actor).module)
    actor(tiny_rollouts(2))
    dist.destroy_process_group()
    assert [name for name in inputs if "q_proj" in name]
    assert not [name for name in inputs if any(part in name for part in ("head_dim", "epsilon", "scaling"))]


def test_roles_do_not_use_up_each_others_compilations() -> None:
    """Three models where torch allows two compilations of one piece of code."""
    compiler = Compiler("eager")
    with torch._dynamo.config.patch(recompile_limit=2), torch.no_grad():
        for width in (128, 144, 160):
            model = tiny_model("llama", intermediate_size=width, num_hidden_layers=1)
            compile_layers(model, compiler)
            model(input_ids=torch.arange(3, 9)[None], use_cache=False)
    assert compiler.runs == 3


def test_a_rollout_leaves_compiled_layers_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles rotary embeddings, the same layers anew without what training does to them, and the norm behind."""
    model: Any = tiny_model("llama")
    expected = model(input_ids=IDS, use_cache=False).logits
    learning, rollout = Compiler("eager"), Compiler("eager")
    monkeypatch.setattr(compiled, "_backend", rollout)
    apply_activation_checkpointing(model, "full")
    compile_layers(model, learning)
    own = object()
    model.model.layers[1]._compiled_call_impl = own
    forwards = [layer.forward for layer in model.model.layers]
    layers = CompiledLayers(model)
    with torch.no_grad(), layers.enabled():
        torch.testing.assert_close(model(input_ids=IDS, use_cache=False).logits, expected)
    assert (learning.runs, rollout.runs) == (0, 3)
    assert [layer._compiled_call_impl for layer in model.model.layers] == [None, own]
    assert [layer.forward for layer in model.model.layers] == forwards
    with pytest.raises(KeyboardInterrupt), layers.enabled():
        raise KeyboardInterrupt
    assert [layer._compiled_call_impl for layer in model.model.layers] == [None, own]
    assert [layer.forward for layer in model.model.layers] == forwards


def compilations_of_a_rollout(layers: int) -> tuple[int, float]:
    """Of a rollout view on two tensor ranks, and how far its logits are from those without."""
    compiler = Compiler("eager")
    compiled._backend = compiler
    fabric = Fabric(accelerator="cpu", devices=2, strategy=HybridStrategy(mesh_shape=(1, 2, 1, 1)))
    fabric.launch()
    actor = Actor(tiny_model("llama", num_hidden_layers=layers), tokenizer=char_tokenizer(), engine="native")
    fabric.setup_module(actor)
    with fabric.strategy.rollout(actor) as engine, torch.no_grad():
        expected = engine.model(input_ids=IDS, use_cache=False).logits
        with CompiledLayers(engine.model).enabled():
            actual = engine.model(input_ids=IDS, use_cache=False).logits
    return compiler.runs, float((actual - expected).abs().max())


def test_layers_that_tensor_ranks_share_are_compiled_once() -> None:
    """Rotary embeddings, one layer for all four, and the last norm; torch would give up at the ninth of a code."""
    for runs, gap in run_ranks(compilations_of_a_rollout, 2, 4):
        assert runs == 3
        assert gap < 1e-5


def test_layers_with_a_cache_are_not_compiled() -> None:
    model, compiler = tiny_model("qwen3"), Compiler("eager")
    expected = model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
    compile_layers(model, compiler)
    assert torch.equal(model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0), expected)
    assert compiler.runs == 0


def problem_on_a_tensor_axis() -> str | None:
    dist.init_process_group("gloo")
    model = tiny_model("llama")
    assert compiling.compiling_problem(model, is_cut=False) is None
    apply_tensor_parallel(model, init_device_mesh("cpu", (2,), mesh_dim_names=("actor_tensor",)))
    assert not compile_layers(model)
    return compiling.compiling_problem(model, is_cut=True)


def test_matrices_on_a_tensor_axis_are_not_compiled() -> None:
    for problem in run_ranks(problem_on_a_tensor_axis, 2):
        assert problem is not None
        assert "for which layers are not compiled yet" in problem


def test_the_product_of_a_gated_mlp_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an MLP its two halves are kept; torch alone would keep their activation or product too."""

    def kept(backend: Any) -> int:
        torch._dynamo.reset()
        actor = make_actor()
        compile_layers(actor, backend)
        weights = {parameter.untyped_storage().data_ptr() for parameter in actor.parameters()}
        places: set[int] = set()

        def note(tensor: Tensor) -> Tensor:
            if tensor.shape[-1] == actor.model.config.intermediate_size:
                places.add(tensor.untyped_storage().data_ptr())
            return tensor

        with saved_tensors_hooks(note, lambda tensor: tensor):
            hidden = actor.model.base_model(input_ids=IDS, use_cache=False).last_hidden_state
        hidden.sum().backward()
        return len(places - weights)

    partitioned = "aot_eager_decomp_partition"  # divides as inductor does, and compiles nothing
    layers = len(decoder_layers(make_actor()))
    assert kept(partitioned) == 3 * layers
    monkeypatch.setattr(compiling, "lookup_backend", lambda name: lookup_backend(partitioned))
    assert kept(compiling.inductor) == 2 * layers
