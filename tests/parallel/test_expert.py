"""Expert parallelism: dispatched experts compute and learn what whole ones do, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from lightning_verl import Actor, HybridStrategy
from lightning_verl.callbacks import NCCLGroupIsolation
from lightning_verl.data.sharding import split
from lightning_verl.parallel.expert import check_experts, dispatch_experts, expert_modules
from lightning_verl.rollout.base import Rollouts
from lightning_verl.rollout.sampling import SamplingParams
from lightning_verl.testing import char_tokenizer, run_ranks, tiny_model, tiny_rollouts

HIDDEN, EXPERTS = 64, 4


# ---- one block -----------------------------------------------------------------------------------------------------


def block() -> Any:
    return tiny_model("qwen3_moe", num_hidden_layers=1).model.layers[0].mlp


def tokens(count: int, seed: int) -> Tensor:
    return torch.randn(1, count, HIDDEN, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def figures(moe: Any, inputs: list[Tensor]) -> dict[str, Any]:
    """Outputs, and the gradients of their squares, of one block on several inputs."""
    outputs = [moe(rows) for rows in inputs]
    sum(output.square().sum() for output in outputs).backward()
    return {
        "outputs": [output.detach() for output in outputs],
        "inputs": [rows.grad for rows in inputs],
        "router": moe.gate.weight.grad,
        "experts": {name: parameter.grad for name, parameter in moe.experts.named_parameters()},
    }


def aim(moe: Any, experts: list[int]) -> None:
    """Make the router choose these experts only: with such a weight, logits grow with the first feature."""
    with torch.no_grad():
        moe.gate.weight.zero_()
        for number, expert in enumerate(experts):
            moe.gate.weight[expert, 0] = 10.0 + number


def block_facts(expert: int, tensor: int, counts: list[int], aimed: list[int] | None) -> dict[str, Any]:
    """A block whose experts lie on expert x tensor ranks; expert rank e has ``counts[e]`` tokens."""
    dist.init_process_group("gloo")
    here, rank = dist.get_rank(), 0
    groups: dict[str, Any] = {"expert": None, "tensor": None}
    for axis, lines in (
        ("expert", [[e * tensor + t for e in range(expert)] for t in range(tensor)]),
        ("tensor", [[e * tensor + t for t in range(tensor)] for e in range(expert)]),
    ):
        for line in lines:
            group = dist.new_group(line)
            if here in line and len(line) > 1:
                groups[axis] = group
    moe = block()
    if aimed is not None:
        aim(moe, aimed)
    own = EXPERTS // (expert * tensor)
    for name, parameter in list(moe.experts.named_parameters()):
        setattr(moe.experts, name, nn.Parameter(parameter.detach()[here * own : (here + 1) * own].clone()))
    dispatch_experts(moe.experts, groups["expert"], groups["tensor"])
    rank = here // tensor
    rows = tokens(counts[rank], seed=rank)
    if aimed is not None:
        rows.data[..., 0] = 1.0
    return figures(moe, [rows])


@pytest.mark.parametrize(
    ("expert", "tensor", "counts", "aimed"),
    [
        (2, 1, [5, 3], None),
        (2, 1, [4, 0], None),
        (2, 1, [5, 3], [0, 1]),  # both choices of every token lie on rank 0: rank 1 computes nothing
        (1, 2, [6], None),
        (2, 2, [1, 7], None),
    ],
    ids=["expert2", "a-rank-without-tokens", "a-rank-without-work", "tensor2", "expert2xtensor2"],
)
def test_dispatched_experts_equal_whole_ones(expert: int, tensor: int, counts: list[int], aimed: Any) -> None:
    moe = block()
    inputs = [tokens(count, seed=rank) for rank, count in enumerate(counts)]
    if aimed is not None:
        aim(moe, aimed)
        for rows in inputs:
            rows.data[..., 0] = 1.0
    whole = figures(moe, inputs)
    parts = run_ranks(block_facts, expert * tensor, expert, tensor, counts, aimed)
    own = EXPERTS // len(parts)
    router = torch.zeros(EXPERTS, HIDDEN)
    for number, facts in enumerate(parts):
        rank = number // tensor
        torch.testing.assert_close(facts["outputs"][0], whole["outputs"][rank], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(facts["inputs"][0], whole["inputs"][rank], atol=1e-4, rtol=1e-5)
        router += facts["router"] / tensor  # whole on each tensor rank
        for name, gradient in facts["experts"].items():
            wanted = whole["experts"][name][number * own : (number + 1) * own] / expert
            torch.testing.assert_close(gradient, wanted, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(router, whole["router"], atol=1e-4, rtol=1e-5)
    if aimed is not None:
        assert parts[1]["experts"]["down_proj"].abs().max() == 0


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_every_implementation_of_the_model_is_used(implementation: str) -> None:
    plain, moe = block(), block()
    for one in (plain, moe):
        one.experts.config._experts_implementation = implementation
    dispatch_experts(moe.experts, None)
    moe.experts.config._experts_implementation = "batched_mm"  # as generate does on CUDA; what was set up stays
    expected, actual = figures(plain, [tokens(6, 0)]), figures(moe, [tokens(6, 0)])
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert vars(moe.experts).keys() - vars(plain.experts).keys() == {"forward"}, "nothing gathered may be kept"


def test_expert_modules_are_found_and_checked() -> None:
    model = tiny_model("qwen3_moe")
    assert expert_modules(model) == [layer.mlp.experts for layer in model.model.layers]
    assert expert_modules(tiny_model("qwen3")) == []
    check_experts(tiny_model("qwen3"), 8, 1, 1)
    check_experts(model, 1, 1, 64)
    with pytest.raises(ValueError, match="num_experts=4, which ep x tp = 3 x 2 = 6 does not divide"):
        check_experts(model, 3, 2, 1)
    with pytest.raises(ValueError, match=r"ep x tp = 4 parts has 1 experts, and dp=3 divides neither that nor 64"):
        check_experts(model, 4, 1, 3)
    model.model.layers[1].mlp.experts.scale = nn.Parameter(torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"scale has shape \(3, 2\): its first dim is not the 4 experts"):
        check_experts(model, 2, 1, 1)


def test_adapters_on_packed_experts_are_refused_where_experts_are_divided() -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    model = inject_adapter_in_model(config, tiny_model("qwen3_moe"))
    check_experts(model, 1, 1, 1)
    with pytest.raises(ValueError, match=r"has a LoRA adapter on packed experts.*\['q_proj', 'v_proj'\]"):
        check_experts(model, 2, 1, 1)


# ---- the strategy --------------------------------------------------------------------------------------------------


def launched(
    mesh: tuple[int, int, int, int] | None, precision: Any = "32-true", **options: Any
) -> tuple[Fabric, HybridStrategy]:
    strategy = HybridStrategy(mesh, **options)
    fabric = Fabric(accelerator="cpu", strategy=strategy, precision=precision)
    fabric.launch()
    return fabric, strategy


def layout_facts(mesh: tuple[int, int, int, int]) -> dict[str, Any]:
    isolation = NCCLGroupIsolation()
    fabric, strategy = launched(mesh)
    isolation.on_groups_setup(strategy)
    actor = Actor(tiny_model("qwen3_moe"))
    module = fabric.setup_module(actor)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(actor.parameters(), lr=0.1))
    experts, gate = actor.model.model.layers[0].mlp.experts, actor.model.model.layers[0].mlp.gate
    fabric.backward(module(tiny_rollouts())[0].sum())
    norm = fabric.clip_gradients(module, optimizer, max_norm=1.0)
    again = fabric.clip_gradients(module, optimizer, max_norm=1e9)
    return {
        "experts": tuple(experts.gate_up_proj.to_local().shape),
        "names": experts.gate_up_proj.device_mesh.mesh_dim_names,
        "router": tuple(gate.weight.to_local().shape) if isinstance(gate.weight, DTensor) else tuple(gate.weight.shape),
        "norm": (float(norm), float(again)),
        "operations": [group.operation for group in isolation.report if group.role == "actor"],
    }


@pytest.mark.parametrize(
    ("ranks", "mesh", "experts", "router", "names"),
    [
        (2, (1, 1, 1, 2), (2, 64, 64), (2, 64), ("actor_expert_shard", "actor_expert")),
        (4, (2, 1, 1, 2), (1, 64, 64), (1, 64), ("actor_expert_shard", "actor_expert")),
        (4, (1, 1, 1, 2), (2, 64, 64), (2, 64), ("actor_expert_replicate", "actor_expert_shard", "actor_expert")),
        (4, (1, 2, 1, 2), (1, 64, 64), (2, 64), ("actor_expert_shard", "actor_expert", "actor_expert_tensor")),
        (4, (2, 2, 1, 1), (1, 64, 64), (2, 64), ("actor_shard", "actor_tensor")),
    ],
    ids=["expert2", "data2xexpert2", "replicas2xexpert2", "expert2xtensor2", "data2xtensor2"],
)
def test_experts_and_the_rest_are_cut_over_their_own_axes(
    ranks: int, mesh: Any, experts: Any, router: Any, names: Any
) -> None:
    """4 experts over ep x tp, and dp; the router's 4 rows over dp x ep. The gradient norm is that of one process."""
    alone = Actor(tiny_model("qwen3_moe"))
    alone(tiny_rollouts())[0].sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0).item()
    for facts in run_ranks(layout_facts, ranks, mesh):
        assert (facts["experts"], facts["router"], facts["names"]) == (experts, router, names)
        assert facts["norm"] == pytest.approx((norm, 1.0), rel=1e-4)
        # Lines of one rank need no group: experts have shards of their own on a data axis only.
        assert ("expert" in facts["operations"]) is (mesh[3] > 1)
        assert ("expert_reduce" in facts["operations"]) is (mesh[3] > 1 and mesh[0] > 1)


def mixed_precision_facts(mesh: tuple[int, int, int, int] | None) -> dict[str, Any]:
    fabric, strategy = launched(mesh, precision="bf16-mixed")
    actor = Actor(tiny_model("qwen3_moe"))
    module = fabric.setup_module(actor)
    seen: list[torch.dtype] = []
    actor.model.model.layers[0].mlp.experts.register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    logprobs, _ = module(tiny_rollouts())
    fabric.backward(logprobs.sum())
    facts = {
        "masters": {parameter.dtype for parameter in actor.parameters()},
        "gradients": {parameter.grad.dtype for parameter in actor.parameters()},
        "compute": set(seen),
        "logprobs": logprobs.detach(),
    }
    strategy.teardown()
    return facts


def test_mixed_precision_computes_experts_in_bf16() -> None:
    (alone,) = run_ranks(mixed_precision_facts, 1, None)
    for facts in run_ranks(mixed_precision_facts, 2, (1, 1, 1, 2)):
        assert (facts["masters"], facts["gradients"]) == ({torch.float32}, {torch.float32})
        assert facts["compute"] == {torch.bfloat16}
        torch.testing.assert_close(facts["logprobs"], alone["logprobs"], atol=0.02, rtol=0)


def refused() -> None:
    fabric, _ = launched((1, 1, 1, 2))
    fabric.setup_module(Actor(tiny_model("qwen3_moe", num_experts=3)))


def test_experts_that_do_not_divide_are_refused_at_set_up() -> None:
    with pytest.raises(RuntimeError, match="num_experts=3, which ep x tp = 2 x 1 = 2 does not divide"):
        run_ranks(refused, 2)


# ---- rollout -------------------------------------------------------------------------------------------------------

PROMPTS = [[1, 40, 41], [1, 50], [1, 7, 8, 9, 60]]


def rollout(mesh: tuple[int, int, int, int] | None, count: int, **options: Any) -> tuple[list[int], Rollouts]:
    """Sample for the first ``count`` prompts, this data rank's part of them."""
    fabric, strategy = launched(mesh, **options)
    actor = Actor(tiny_model("qwen3_moe"), tokenizer=char_tokenizer())
    fabric.setup_module(actor)
    own = split(count, strategy.layout("rollout").data_size, strategy.data_rank("rollout"))
    sampling = SamplingParams(n=2, max_new_tokens=8, stop_token_ids=tuple(range(30, 70)))
    with strategy.rollout(actor) as engine:
        return list(own), engine.generate([PROMPTS[i] for i in own], sampling, step=3, prompt_indices=list(own))


@pytest.mark.parametrize(
    ("ranks", "mesh", "count", "options"),
    [
        (2, (1, 1, 1, 2), 3, {}),
        (2, (1, 1, 1, 2), 1, {}),
        (2, (1, 1, 1, 2), 3, {"enable_3d_hybrid": False}),
        (4, (2, 1, 1, 2), 3, {"hybrid_engine_config": {"rollout_tp": 2}}),
        (4, (1, 2, 1, 2), 3, {"hybrid_engine_config": {"rollout_tp": 1}}),
        (4, (4, 1, 1, 1), 3, {"hybrid_engine_config": {"rollout_tp": 2}}),
    ],
    ids=["expert2", "a-rank-without-prompts", "gathered", "data2-to-tensor2", "tensor2-to-data2", "data4-to-tensor2"],
)
def test_rollouts_equal_those_of_one_process(ranks: int, mesh: Any, count: int, options: Any) -> None:
    """Responses end at different steps (40 of 128 tokens stop them), on different ranks."""
    _, whole = rollout(None, count)
    assert count == 1 or len(set(whole.lengths.tolist())) > 1
    seen = set()
    for own, part in run_ranks(rollout, ranks, mesh, count, **options):
        rows = [2 * i + sample for i in own for sample in range(2)]
        seen |= set(rows)
        width = part.response_ids.shape[1]
        assert part.lengths.tolist() == whole.lengths[rows].tolist()
        assert part.finish_reasons == [whole.finish_reasons[row] for row in rows]
        assert part.response_ids.shape[0] == len(rows)
        if rows:
            assert torch.equal(part.response_ids, whole.response_ids[rows, :width])
            torch.testing.assert_close(part.logprobs, whole.logprobs[rows, :width], atol=1e-5, rtol=1e-5)
    assert seen == set(range(2 * count))


def prompts_too_long_for_one_rank() -> str:
    fabric, strategy = launched((1, 1, 1, 2))
    actor = Actor(tiny_model("qwen3_moe"), tokenizer=char_tokenizer())
    fabric.setup_module(actor)
    prompts = [[5] * (200 if fabric.global_rank == 1 else 2)]
    with strategy.rollout(actor) as engine, pytest.raises((ValueError, RuntimeError)) as caught:
        engine.generate(prompts, SamplingParams(max_new_tokens=4))
    return str(caught.value)


def test_prompts_that_one_rank_refuses_stop_the_others() -> None:
    first, second = run_ranks(prompts_too_long_for_one_rank, 2)
    assert "another rank of the step group refused its prompts" in first
    assert "prompt 0 has 200 tokens" in second


# ---- checkpoint ----------------------------------------------------------------------------------------------------


def role_state(mesh: Any, number: int, seed: int) -> tuple[Fabric, dict[str, Any]]:
    fabric, _ = launched(mesh)
    actor = Actor(tiny_model("qwen3_moe", num_experts=number, seed=seed))
    module = fabric.setup_module(actor)
    return fabric, {
        "actor": module,
        "optimizer": fabric.setup_optimizers(torch.optim.SGD(actor.parameters(), lr=0.1, momentum=0.9)),
    }


def step(fabric: Fabric, state: dict[str, Any]) -> None:
    """One step; every rank has all rows, so the mean over data ranks is the same for any number of them."""
    fabric.backward(state["actor"](tiny_rollouts())[0].square().mean())
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def weights(state: dict[str, Any]) -> dict[str, Tensor]:
    state = get_model_state_dict(state["actor"].module, options=StateDictOptions(full_state_dict=True))
    return {name: value.clone() for name, value in state.items()}


def write(folder: str, mesh: Any, number: int) -> list[dict[str, Tensor]]:
    fabric, state = role_state(mesh, number, seed=0)
    step(fabric, state)
    fabric.save(folder, state)
    saved = weights(state)
    step(fabric, state)
    return [saved, weights(state)]


def read(folder: str, mesh: Any, number: int) -> list[dict[str, Tensor]]:
    fabric, state = role_state(mesh, number, seed=5)
    fabric.load(folder, state)
    loaded = weights(state)
    step(fabric, state)
    return [loaded, weights(state)]


@pytest.mark.parametrize(
    ("number", "writers", "write_mesh", "readers", "read_mesh"),
    [
        (4, 2, (1, 1, 1, 2), 2, (2, 1, 1, 1)),
        (2, 4, (2, 1, 1, 2), 1, None),  # one expert a rank, so FSDP2 cuts it on its second dim
        (4, 1, None, 4, (2, 1, 1, 2)),
        (4, 4, (1, 2, 1, 2), 4, (2, 2, 1, 1)),
    ],
    ids=["expert2-to-data2", "data2xexpert2-to-1", "1-to-data2xexpert2", "expert2xtensor2-to-data2xtensor2"],
)
def test_checkpoints_load_on_another_expert_axis(
    tmp_path: Path, number: int, writers: int, write_mesh: Any, readers: int, read_mesh: Any
) -> None:
    folder = str(tmp_path / "checkpoint")
    saved = run_ranks(write, writers, folder, write_mesh, number)[0]
    assert any((saved[0][name] - saved[1][name]).abs().max() > 1e-4 for name in saved[0] if "experts" in name)
    for loaded in run_ranks(read, readers, folder, read_mesh, number):
        torch.testing.assert_close(loaded[0], saved[0], atol=0, rtol=0)
        torch.testing.assert_close(loaded[1], saved[1], atol=1e-5, rtol=1e-5)
