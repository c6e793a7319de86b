"""The strategy inside Fabric: names, launch, meshes, optimizers, and the traps of sharded training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_verl import Actor, Critic, HybridDataFlow, HybridStrategy, Reference
from lightning_verl.strategies.precision import HybridPrecision
from lightning_verl.testing import run_ranks, tiny_model, tiny_rollouts


def launched(precision: Any = "32-true", **options: Any) -> Fabric:
    fabric = Fabric(accelerator="cpu", strategy=HybridStrategy(**options), precision=precision)
    fabric.launch()
    return fabric


# ---- one process ---------------------------------------------------------------------------------------------------


def test_one_cpu_process_needs_no_process_group() -> None:
    fabric = launched()
    assert not dist.is_initialized()
    assert (fabric.world_size, fabric.strategy.data_rank("actor")) == (1, 0)
    assert fabric.strategy.group("actor", "scores") is None
    with pytest.raises(RuntimeError, match="one CPU process has none"):
        _ = fabric.strategy.device_mesh


def test_by_name() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, strategy="hybrid")
    assert isinstance(fabric.strategy, HybridStrategy)


def test_ranks_that_do_not_fit_fail_before_launch() -> None:
    with pytest.raises(ValueError, match=r"1 = k x \(4 x 1 x 1 x 1 = 4\)"):
        Fabric(accelerator="cpu", devices=1, strategy=HybridStrategy((4, 1, 1, 1)))


def test_role_of_a_module() -> None:
    strategy = HybridStrategy()
    with pytest.raises(ValueError, match="cannot tell the role of Linear"):
        strategy.role_of(nn.Linear(1, 1))
    assert strategy.role_of(strategy.assign_role(nn.Linear(1, 1), "critic")) == "critic"
    with pytest.raises(ValueError, match="unknown role 'critics'.*Did you mean 'critic'"):
        strategy.assign_role(nn.Linear(1, 1), "critics")


def test_an_optimizer_belongs_to_one_role() -> None:
    fabric = launched()
    actor, critic = Actor(tiny_model()), Critic(tiny_model())
    fabric.setup_module(actor)
    fabric.setup_module(critic)
    both = torch.optim.SGD([*actor.parameters(), *critic.parameters()], lr=0.1)
    with pytest.raises(ValueError, match="takes the parameters of one role"):
        fabric.setup_optimizers(both)
    with pytest.raises(ValueError, match="a module not set up"):
        fabric.setup_optimizers(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))


def test_a_users_module_takes_the_place_of_a_role() -> None:
    class OwnCritic(LightningModule):
        role = "critic"

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 1)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head(inputs)

    fabric = launched()
    critic = OwnCritic()
    module, optimizer = fabric.setup(critic, torch.optim.SGD(critic.parameters(), lr=1.0))
    before = critic.head.bias.detach().clone()
    fabric.backward(module(torch.ones(1, 2)).sum())
    optimizer.step()
    torch.testing.assert_close(critic.head.bias, before - 1.0)
    assert fabric.strategy.weight_version("critic") == 1


def test_frozen_roles_get_no_gradient() -> None:
    fabric = launched()
    reference = fabric.setup_module(Reference(tiny_model()))
    logprobs, _ = reference(tiny_rollouts())
    assert not logprobs.requires_grad
    assert not any(parameter.requires_grad for parameter in reference.parameters())


def test_a_users_reward_and_reference_are_frozen_too() -> None:
    class OwnReward(LightningModule):
        role = "reward"

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 1)

    fabric = launched()
    flow = HybridDataFlow(Actor(tiny_model()), reward=OwnReward())
    flow.setup(fabric)
    flow.setup_optimizers()
    assert set(flow.optimizers) == {"actor"}
    assert not any(parameter.requires_grad for parameter in flow.modules["reward"].parameters())


def test_groups_are_set_before_the_role() -> None:
    fabric = launched()
    fabric.setup_module(Actor(tiny_model()))
    with pytest.raises(RuntimeError, match="'actor' is set up already"):
        fabric.strategy.set_group("actor", "reduce", None)  # type: ignore[arg-type]


def test_another_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="'16-true'.*bf16-mixed"):
        Fabric(accelerator="cpu", strategy=HybridStrategy(), precision="16-true")


# ---- precision -----------------------------------------------------------------------------------------------------


def mixed_precision_facts() -> dict[str, Any]:
    fabric = launched("bf16-mixed")
    actor = Actor(tiny_model())
    module = fabric.setup_module(actor)
    reference = fabric.setup_module(Reference(tiny_model()))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(actor.parameters(), lr=1e-3))
    seen: list[torch.dtype] = []
    actor.model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    logprobs, _ = module(tiny_rollouts())
    fabric.backward(logprobs.sum())
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    facts = {
        "plugin": isinstance(fabric.strategy.precision, HybridPrecision),
        "masters": {parameter.dtype for parameter in actor.parameters()},
        "gradients": {parameter.grad.dtype for parameter in actor.parameters() if parameter.grad is not None},
        "states": {state.dtype for state in states},
        "frozen": {parameter.dtype for parameter in reference.parameters()},
        "compute": set(seen),
        "output": logprobs.dtype,
    }
    fabric.strategy.teardown()
    return facts


@pytest.mark.parametrize("ranks", [1, 2])
def test_mixed_precision_keeps_fp32_masters(ranks: int) -> None:
    for facts in run_ranks(mixed_precision_facts, ranks):
        assert facts == {
            "plugin": True,
            "masters": {torch.float32},
            "gradients": {torch.float32},
            "states": {torch.float32},
            "frozen": {torch.bfloat16},
            "compute": {torch.bfloat16},
            "output": torch.float32,
        }


def test_small_updates_vanish_in_bf16_and_not_in_fp32_masters() -> None:
    """1000 steps of 1e-6 from 1.0: bf16 stays at 1.0 (its spacing there is 0.0078), fp32 arrives at 0.999."""
    weights = {}
    for precision in ("bf16-true", "bf16-mixed"):
        plugin = HybridPrecision(precision)
        linear = plugin.convert_module(nn.Linear(1, 1, bias=False))
        nn.init.ones_(linear.weight)
        for _ in range(1000):
            linear.weight.data -= 1e-6
        weights[precision] = linear.weight.item()
    assert weights["bf16-true"] == 1.0
    assert weights["bf16-mixed"] == pytest.approx(0.999, abs=2e-5)


def test_bf16_true_warns_of_small_learning_rates() -> None:
    with pytest.warns(UserWarning, match="updates smaller than 1/256 of a weight are lost"):
        HybridPrecision("bf16-true")


# ---- several processes ---------------------------------------------------------------------------------------------


def mesh_facts() -> dict[str, Any]:
    fabric = launched(mesh_shape=(1, 2, 1, 1), parallelism_config={"critic": {"dp": 2}})
    strategy = fabric.strategy
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.arange(8)), batch_size=2))
    return {
        "names": [strategy.role_mesh(role).mesh_dim_names for role in ("actor", "critic")],
        "world": [
            strategy.group(role, operation) is dist.group.WORLD
            for role in ("actor", "critic")
            for operation in ("gather", "tensor", "scores")
        ],
        "rows": torch.cat([batch[0] for batch in loader]).tolist(),
        "equal_meshes": strategy.role_mesh("actor") == strategy.role_mesh("critic"),
    }


def test_meshes_have_names_and_groups_of_their_own() -> None:
    for facts in run_ranks(mesh_facts, 2):
        assert facts["names"] == [
            ("actor_replicate", "actor_shard", "actor_tensor"),
            ("critic_replicate", "critic_shard", "critic_tensor"),
        ]
        assert not any(facts["world"]), "an axis that spans the world must not use WORLD's group"
        assert not facts["equal_meshes"]
        assert facts["rows"] == list(range(8)), "ranks of one tensor axis read the same rows"


def sampler_facts() -> list[int]:
    fabric = launched(mesh_shape=(2, 2, 1, 1))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.arange(8)), batch_size=2))
    return torch.cat([batch[0] for batch in loader]).tolist()


def test_samplers_cut_over_the_data_axis() -> None:
    # data 2 x tensor 2: data rank 0 is ranks 0 and 1; the world-size fault would give 0,4 | 1,5 | 2,6 | 3,7.
    assert run_ranks(sampler_facts, 4) == [[0, 2, 4, 6], [0, 2, 4, 6], [1, 3, 5, 7], [1, 3, 5, 7]]


def sharding_facts() -> dict[str, Any]:
    fabric = launched()
    torch.manual_seed(fabric.global_rank)  # ranks draw different heads and must end up with one
    critic = Critic(tiny_model())
    nn.init.normal_(critic.value_head.weight)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)  # made before sharding
    module, optimizer = fabric.setup(critic, optimizer)
    batch = tiny_rollouts()
    with torch.no_grad():
        before = module(batch)
        for parameter in critic.parameters():
            parameter.mul_(1.5)  # a change of the shards after a forward without gradients
        after = module(batch)
    own = batch.select([2 * fabric.global_rank, 2 * fabric.global_rank + 1])
    fabric.backward(module(own).sum())
    head = critic.value_head.weight.grad
    with fabric.no_backward_sync(module, enabled=False):
        pass
    synchronised = all(
        group.reduce_grads for unit in critic.modules() if isinstance(unit, FSDPModule) for group in _param_groups(unit)
    )
    return {
        "rebound": all(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]),
        "update_seen": not torch.equal(before, after),
        "root_is_role": isinstance(critic, FSDPModule),
        "head_gradient": head.full_tensor(),
        "head": critic.value_head.weight.full_tensor(),
        "still_synchronised": synchronised,
    }


def _param_groups(unit: FSDPModule) -> list[Any]:
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups is not None else [state._fsdp_param_group]


def test_sharding_traps() -> None:
    first, second = run_ranks(sharding_facts, 2)
    for facts in (first, second):
        assert facts["rebound"], "optimizers made before sharding point at the shards"
        assert facts["update_seen"], "a gathered root would not see a change of its shards"
        assert facts["root_is_role"]
        assert facts["still_synchronised"], "no_backward_sync(enabled=False) leaves synchronisation on"
    torch.testing.assert_close(first["head"], second["head"], atol=0, rtol=0)
    torch.testing.assert_close(first["head_gradient"], second["head_gradient"], atol=0, rtol=0)
    assert first["head_gradient"].abs().max() > 0


def isolation_facts() -> tuple[bool, float]:
    """Two roles on one tensor axis: the reductions of the second run on its own group, not on the first's."""
    fabric = launched(mesh_shape=(1, 2, 1, 1))
    groups = {role: dist.new_group([0, 1], group_desc=role) for role in ("actor", "reference")}
    for role, group in groups.items():
        fabric.strategy.set_group(role, "tensor", group)
    actor, reference = fabric.setup_module(Actor(tiny_model())), fabric.setup_module(Reference(tiny_model()))
    with torch.no_grad():
        actor(tiny_rollouts())
    counts = {role: group._get_backend(torch.device("cpu")) for role, group in groups.items()}
    before = {role: backend._get_sequence_number_for_group() for role, backend in counts.items()}
    with torch.no_grad():
        logprobs, _ = reference(tiny_rollouts())
    after = {role: backend._get_sequence_number_for_group() for role, backend in counts.items()}
    return after["actor"] == before["actor"] and after["reference"] > before["reference"], float(logprobs.sum())


def test_a_role_communicates_on_its_own_groups() -> None:
    (own, first), (_, second) = run_ranks(isolation_facts, 2)
    assert own
    assert first == pytest.approx(second)


def clip_facts() -> tuple[float, float]:
    fabric = launched(mesh_shape=(1, 2, 1, 1))
    actor = Actor(tiny_model())
    module = fabric.setup_module(actor)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(actor.parameters(), lr=0.1))
    fabric.backward(module(tiny_rollouts())[0].sum())
    norm = fabric.clip_gradients(module, optimizer, max_norm=1.0)
    clipped = fabric.clip_gradients(module, optimizer, max_norm=1e9)
    return float(norm), float(clipped)


def test_clipping_uses_the_one_true_norm_over_mixed_meshes() -> None:
    alone = Actor(tiny_model())
    alone(tiny_rollouts())[0].sum().backward()
    expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0).item()
    for norm, clipped in run_ranks(clip_facts, 2):
        assert norm == pytest.approx(expected, rel=1e-5)
        assert clipped == pytest.approx(1.0, rel=1e-4)


def test_a_norm_that_is_not_finite_is_an_error() -> None:
    fabric = launched()
    actor = Actor(tiny_model())
    module = fabric.setup_module(actor)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(actor.parameters(), lr=0.1))
    fabric.backward(module(tiny_rollouts())[0].sum() * float("nan"))
    with pytest.raises(RuntimeError, match="gradient norm is nan.*nothing was changed"):
        fabric.clip_gradients(module, optimizer, max_norm=1.0)


def few_heads() -> None:
    fabric = launched(mesh_shape=(1, 4, 1, 1))
    fabric.setup_module(Actor(tiny_model()))


def test_fewer_key_value_heads_than_tensor_ranks_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"num_key_value_heads=2, which tp=4 does not divide"):
        run_ranks(few_heads, 4)
