"""Roles in host memory: training, clipping, resharding, adapters and checkpoints are those of roles on the device.

FSDP2's policy runs on CPU ranks too, where the host's memory is the device's.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy

from lightning_verl import Actor, HybridStrategy
from lightning_verl.parallel.fsdp import fsdp_units
from lightning_verl.roles.adapter import AdapterReference
from lightning_verl.strategies import hybrid
from lightning_verl.strategies.hosted import check_hosted, host_policy, link_bytes
from lightning_verl.strategies.layout import RoleLayout
from lightning_verl.testing import char_tokenizer, run_ranks, tiny_model, tiny_rollouts

LORA = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "down_proj"]}


def test_the_policy_is_pinned_and_for_cuda_only() -> None:
    policy = host_policy(torch.device("cuda"))
    assert isinstance(policy, CPUOffloadPolicy)
    assert policy.pin_memory
    fabric = Fabric(accelerator="cpu", strategy=HybridStrategy(offload_parameters=True))
    with pytest.raises(ValueError, match="offload_parameters=True on device 'cpu'.*leave it out"):
        fabric.launch()


def test_what_cannot_live_in_host_memory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"offload_to_cpu=True with offload_parameters=True.*Leave one of them out"):
        HybridStrategy(hybrid_engine_config={"offload_to_cpu": True}, offload_parameters=True)
    with pytest.raises(ValueError, match=r"experts of the critic are divided over 2 ranks.*ep to 1"):
        check_hosted(RoleLayout("critic", 1, 1, 1, (0, 1), expert=2))


def test_the_bytes_of_a_micro_batch_by_hand() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 5, bias=False), torch.nn.Linear(5, 2, bias=False))
    module[0].requires_grad_(False).to(torch.bfloat16)
    # 15 frozen of 2 bytes and 10 trained of 4, there twice; 10 gradients of 4 come back.
    assert link_bytes(module) == 2 * (30 + 40) + 40


def trained(folder: str, hosted: bool, lora: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Two steps with a checkpoint and a rollout in between: norms, weights of the rollout, outputs."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        patch.setattr(hybrid, "host_policy", lambda device: CPUOffloadPolicy(pin_memory=False))
        fabric = Fabric(accelerator="cpu", strategy=HybridStrategy(**options, offload_parameters=hosted))
        fabric.launch()
        torch.manual_seed(0)
        actor: Any = Actor(
            tiny_model("qwen2"), tokenizer=char_tokenizer(), lora_config=LORA if lora else None, learning_rate=1e-2
        )
        wrapped = fabric.setup_module(actor)
    optimizer = fabric.setup_optimizers(actor.configure_optimizers())
    reference = AdapterReference(actor)
    state, norms, rolled = {"actor": wrapped, "optimizer": optimizer}, [], []
    for _ in range(2):
        fabric.backward(wrapped(tiny_rollouts())[0].square().sum())
        norms.append(fabric.clip_gradients(wrapped, optimizer, max_norm=0.5))
        optimizer.step()
        optimizer.zero_grad()
        with fabric.strategy.rollout(wrapped):
            rolled.append([p.detach().clone() for p in actor.engine.model.parameters()])
    fabric.save(folder, state)
    with torch.no_grad():
        outputs = [wrapped(tiny_rollouts())[0]]
        with reference.in_place():
            outputs.append(wrapped(tiny_rollouts())[0])
    optimizer.zero_grad()
    fabric.load(folder, state)
    with torch.no_grad():
        outputs.append(wrapped(tiny_rollouts())[0])
    groups = [group for unit in fsdp_units(actor) for group in unit._get_fsdp_state()._fsdp_param_groups]
    engine = fabric.strategy._rollouts._engine
    resharder = None if engine is None else engine._resharder
    return {
        "tensors": [*norms, *(tensor for part in rolled for tensor in part), *outputs],
        "on the host": {parameter.offload_to_cpu for group in groups for parameter in group.fsdp_params},
        "warnings": [str(w.message) for w in warned if "offload_parameters" in str(w.message)],
        "moved": link_bytes(actor),
        "sources kept": resharder is not None and resharder._binding is not None,
    }


@pytest.mark.parametrize(
    ("lora", "options"),
    [
        (False, {"hybrid_engine_config": {"rollout_tp": 2}}),
        (True, {}),
        (False, {"enable_3d_hybrid": False}),
    ],
    ids=["resharded", "adapter", "gathered"],
)
def test_roles_in_host_memory_train_and_roll_out_like_others(tmp_path: Path, lora: bool, options: Any) -> None:
    hosted = run_ranks(trained, 2, str(tmp_path / "hosted"), True, lora, options)
    device = run_ranks(trained, 2, str(tmp_path / "device"), False, lora, options)
    for there, here in zip(hosted, device, strict=True):
        assert (there["on the host"], here["on the host"]) == ({True}, {False})
        assert not there["sources kept"], "copies on the device would stay there"
        assert here["sources kept"] == options.get("enable_3d_hybrid", True)
        tensors: list[Tensor] = there["tensors"]
        torch.testing.assert_close(tensors, here["tensors"], rtol=0, atol=0)
    (text,) = hosted[0]["warnings"]
    assert f"moves {hosted[0]['moved'] / 1e9:.3g} GB over" in text
    assert f"{1000 * hosted[0]['moved'] / 53e9:.3g} ms at 53 GB/s" in text
    assert [rank["warnings"] for rank in (hosted[1], *device)] == [[], [], []]
