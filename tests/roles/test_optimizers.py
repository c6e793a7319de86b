"""The optimizers of roles: which are fused, what they are refused for, and AdamW with moments of 8 bits."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_verl import Actor, Critic, HybridStrategy
from lightning_verl.resharding.layouts import local_part
from lightning_verl.roles.optimizers import make_optimizer
from lightning_verl.strategies.checkpoint import CheckpointMismatchError
from lightning_verl.strategies.offload import StateOffload
from lightning_verl.testing import run_ranks, tiny_model, tiny_rollouts

torchao = pytest.mark.torchao
BETAS = (0.9, 0.999)


def after_steps(optimizer: torch.optim.Optimizer, steps: int = 3) -> list[Tensor]:
    """Parameters after steps along gradients that follow from them."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = parameter.detach() * 2 + 1
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


# ---- fused -----------------------------------------------------------------------------------------------------------


def test_the_fused_update_on_the_cpu_is_adamw_by_hand() -> None:
    # p = 2, g = 2 p + 1 = 5: m / (1 - b1) = 5, v / (1 - b2) = 25, so p (1 - lr wd) - lr 5 / 5 = 2 x 0.99 - 0.1 = 1.88.
    parameter = nn.Parameter(torch.full((3,), 2.0))
    optimizer = make_optimizer("adamw", [parameter], 0.1, 0.1, BETAS)
    assert optimizer.param_groups[0]["fused"] is True
    torch.testing.assert_close(after_steps(optimizer, 1), [torch.full((3,), 1.88)])


def test_an_unknown_device_or_a_complex_parameter_is_updated_one_by_one() -> None:
    for parameter in (nn.Parameter(torch.ones(3, device="meta")), nn.Parameter(torch.ones(3, dtype=torch.complex64))):
        assert make_optimizer("adamw", [parameter], 0.1, 0.0, BETAS).param_groups[0]["fused"] is None


def fused_on_meshes() -> tuple[list[int], list[Tensor], list[Tensor]]:
    """Parameters of two meshes and a plain one: the sizes of the groups, and the values with and without fusing."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    whole = [torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    parts = [
        distribute_tensor(whole[0], mesh, [Shard(0), Shard(1)]),
        distribute_tensor(whole[1], mesh["b"], [Shard(0)]),
        distribute_tensor(whole[2], mesh["b"], [Shard(1)]),
    ]
    fused = make_optimizer("adamw", [nn.Parameter(part) for part in [*parts, whole[3].clone()]], 0.1, 0.1, BETAS)
    plain = torch.optim.AdamW([nn.Parameter(tensor) for tensor in whole], lr=0.1, weight_decay=0.1, betas=BETAS)
    results = [part.full_tensor() if hasattr(part, "full_tensor") else part for part in after_steps(fused)]
    assert all(group["fused"] for group in fused.param_groups)
    return [len(group["params"]) for group in fused.param_groups], results, after_steps(plain)


def test_parameters_of_several_meshes_are_fused_mesh_by_mesh() -> None:
    for sizes, fused, plain in run_ranks(fused_on_meshes, 2):
        assert sizes == [1, 2, 1]
        torch.testing.assert_close(fused, plain)


def stepped_together(made_before: bool) -> tuple[set[Any], list[Tensor]]:
    """An actor with a tensor axis and no FSDP2, whose norms stay plain, after a step."""
    fabric = Fabric(accelerator="cpu", strategy=HybridStrategy((1, 2, 1, 1)))
    fabric.launch()
    actor = Actor(tiny_model(), learning_rate=1e-2)
    if made_before:
        wrapped, optimizer = fabric.setup(actor, actor.configure_optimizers())
    else:
        wrapped = fabric.setup_module(actor)
        optimizer = fabric.setup_optimizers(actor.configure_optimizers())
    fabric.backward(wrapped(tiny_rollouts())[0].sum())
    optimizer.step()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in actor.parameters()]
    return {group["fused"] for group in optimizer.param_groups}, [tensor.detach() for tensor in whole]


def test_an_optimizer_from_before_sharding_is_not_fused_over_several_meshes() -> None:
    (before, values), *_ = run_ranks(stepped_together, 2, True)
    (after, fused_values), *_ = run_ranks(stepped_together, 2, False)
    assert (before, after) == ({False}, {True})
    torch.testing.assert_close(values, fused_values)


# ---- by name ---------------------------------------------------------------------------------------------------------


def test_unknown_and_missing_optimizers_are_refused_with_the_role(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"Actor.*optimizer 'adam'"):
        Actor(tiny_model(), optimizer="adam")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"Critic: optimizer='adamw8bit' needs torchao.*lightning-verl\[8bit\]"):
        Critic(tiny_model(), optimizer="adamw8bit")


# ---- 8 bits ----------------------------------------------------------------------------------------------------------


@contextmanager
def uncompiled() -> Iterator[None]:
    """torchao compiles its step, for 10 to 20 s on a CPU; run as it is written it takes milliseconds."""
    with torch.compiler.set_stance("force_eager"):
        yield


def moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = optimizer.state.values()
    return [local_part(state[key]) for state in states for key in ("exp_avg", "exp_avg_sq")]


def eight_bit(parameter: nn.Parameter, learning_rate: float = 0.1) -> torch.optim.Optimizer:
    return make_optimizer("adamw8bit", [parameter], learning_rate, 0.0, BETAS)


@torchao
def test_moments_take_a_byte_and_a_scale_for_256_and_rates_are_numbers() -> None:
    parameter = nn.Parameter(torch.full((64, 128), 2.0))
    optimizer = eight_bit(parameter)
    with uncompiled():
        (after,) = after_steps(optimizer, 1)
        torch.testing.assert_close(after, torch.full((64, 128), 1.9))  # a first step is the rate, 0.1
        optimizer.param_groups[0]["lr"] = 0.0  # as a schedule does
        after_steps(optimizer, 1)
    torch.testing.assert_close(parameter.detach(), torch.full((64, 128), 1.9))
    assert optimizer.param_groups[0]["lr"] == 0.0
    for moment in moments(optimizer):
        assert (moment.codes.nbytes, moment.scale.nbytes, moment.qmap.nbytes) == (8192, 4 * 8192 // 256, 4 * 256)


def compiled_or_not(stance: str) -> list[Tensor]:
    parameter = nn.Parameter(torch.randn(64, 128, generator=torch.Generator().manual_seed(0)))
    with torch.compiler.set_stance(stance):
        return after_steps(eight_bit(parameter))


@torchao
def test_the_compiled_step_is_the_one_that_is_written() -> None:
    """In a process of its own: the compiler leaves threads behind."""
    results = [run_ranks(compiled_or_not, 1, stance)[0] for stance in ("default", "force_eager")]
    torch.testing.assert_close(results[0], results[1])


@torchao
def test_8_bit_moments_go_to_the_host_and_back() -> None:
    optimizer = eight_bit(nn.Parameter(torch.randn(64, 128)))
    with uncompiled():
        after_steps(optimizer)
    before = [moment.dequantize() for moment in moments(optimizer)]
    offload = StateOffload(torch.device("cpu"))
    optimizer.zero_grad()
    offload.start([optimizer])
    offload.free()
    assert sum(moment.codes.untyped_storage().nbytes() for moment in moments(optimizer)) == 0
    assert offload.report.moved_bytes == 2 * (8192 + 4 * 8192 // 256 + 4 * 256)
    offload.bring_back()
    offload.wait()
    torch.testing.assert_close([moment.dequantize() for moment in moments(optimizer)], before, rtol=0, atol=0)


def actor_and_optimizer(options: dict[str, Any], seed: int, name: str) -> tuple[Fabric, dict[str, Any]]:
    fabric = Fabric(accelerator="cpu", strategy=HybridStrategy(**options))
    fabric.launch()
    actor = Actor(tiny_model(seed=seed, vocab_size=129), optimizer=name, learning_rate=1e-3)
    wrapped = fabric.setup_module(actor)
    return fabric, {"actor": wrapped, "optimizer": fabric.setup_optimizers(actor.configure_optimizers())}


def step(fabric: Fabric, state: dict[str, Any]) -> Tensor:
    fabric.backward(state["actor"](tiny_rollouts())[0].square().sum())
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    with torch.no_grad():
        return state["actor"](tiny_rollouts())[0]


def save_8bit(folder: str, options: dict[str, Any]) -> tuple[Tensor, int]:
    """The log-probs after a third step, and how many moments were in 8 bits."""
    with uncompiled():
        fabric, state = actor_and_optimizer(options, 0, "adamw8bit")
        step(fabric, state)
        step(fabric, state)
        fabric.save(folder, state)
        return step(fabric, state), sum(hasattr(moment, "codes") for moment in moments(state["optimizer"]))


def load_and_step(folder: str, options: dict[str, Any], name: str) -> tuple[Tensor | None, str]:
    """The log-probs after one more step, or the refusal."""
    with uncompiled():
        fabric, state = actor_and_optimizer(options, 7, name)
        try:
            fabric.load(folder, state)
        except CheckpointMismatchError as error:
            return None, str(error)
        return step(fabric, state), ""


@torchao
@pytest.mark.parametrize("mesh_shape", [None, (2, 1, 1, 1), (1, 2, 1, 1)], ids=["one", "data2", "tensor2"])
def test_a_resumed_8_bit_run_is_the_uninterrupted_one(tmp_path: Path, mesh_shape: tuple[int, ...] | None) -> None:
    options = {"mesh_shape": mesh_shape}
    ranks = 1 if mesh_shape is None else 2
    saved = run_ranks(save_8bit, ranks, str(tmp_path / "run"), options)
    loaded = run_ranks(load_and_step, ranks, str(tmp_path / "run"), options, "adamw8bit")
    for (expected, eight), (after, problem) in zip(saved, loaded, strict=True):
        assert eight > 0, problem
        torch.testing.assert_close(after, expected, rtol=0, atol=0)


@torchao
def test_8_bit_moments_are_refused_where_their_blocks_are_cut_and_by_plain_adamw(tmp_path: Path) -> None:
    """129 rows of 64 elements: in fp32 on one rank, 65 and 64 rows on two, of which 16 x 256 are in blocks."""
    folder = str(tmp_path / "run")
    run_ranks(save_8bit, 1, folder, {})
    for after, problem in run_ranks(load_and_step, 2, folder, {"mesh_shape": (1, 2, 1, 1)}, "adamw8bit"):
        assert after is None
        assert "in blocks of 256 elements" in problem
    ((after, problem),) = run_ranks(load_and_step, 1, folder, {}, "adamw")
    assert after is None
    assert "holds another optimizer as optimizer, without the options ['capturable'" in problem


def save_adamw(folder: str) -> Tensor:
    """The log-probs after a third step of AdamW."""
    fabric, state = actor_and_optimizer({}, 0, "adamw")
    step(fabric, state)
    step(fabric, state)
    fabric.save(folder, state)
    return step(fabric, state)


@torchao
def test_8_bit_moments_begin_with_those_of_adamw(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    (expected,) = run_ranks(save_adamw, 1, folder)
    ((after, _),) = run_ranks(load_and_step, 1, folder, {}, "adamw8bit")
    # Log-probs of up to 4 in size: rounded moments move them by less than 0.001, new ones by 0.3.
    torch.testing.assert_close(after, expected, rtol=0, atol=2e-3)
