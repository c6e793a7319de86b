"""What a trial of benchmarks/largest.py will take, from the project's planner and what that does not know of."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from largest_results import GIB, WAYS, Case, Forecast
from largest_trial import CHECKPOINTING, PRECISION, compiles, roles_config

from lightning_verl import Reward, SamplingParams
from lightning_verl.config import (
    BatchConfig,
    DataConfig,
    ModelConfig,
    RewardConfig,
    StrategyConfig,
    TrainConfig,
)
from lightning_verl.parallel.offloading import LEAST_BYTES
from lightning_verl.planning.memory import Item, Moment, RoleMemory
from lightning_verl.planning.model import RoleModel, build_on_meta, describe
from lightning_verl.planning.plan import Plan, make_plan
from lightning_verl.strategies.precision import HybridPrecision
from lightning_verl.tuning.arm_process import KL
from lightning_verl.tuning.candidates import LORA

HELD = ("parameters", "optimizer state", "gradients")
"""What lies in host memory with ``offload_parameters``."""
PROCESS_BYTES = 8 * GIB
"""Host memory of two processes that have imported everything, with CUDA."""
FORWARDS = 13
"""Forward passes that a step is worth: two updates of four each with recomputation, a rollout, four scorings."""
FLOPS = 400e12
"""FLOP/s that a step is reckoned with."""


def train_config(case: Case, folder: str) -> TrainConfig:
    """The config that describes a case, as far as one can: rewards are functions there."""
    way = WAYS[case.way]
    return TrainConfig(
        model=ModelConfig(folder, lora=LORA if way.lora else None, activation_checkpointing=CHECKPOINTING),
        data=DataConfig("none", max_prompt_length=case.prompt_tokens),
        algorithm={"name": "ppo", "kl": KL},
        steps=2,
        output="none",
        rewards=RewardConfig(["none:none"]),
        sampling=SamplingParams(max_new_tokens=case.new_tokens),
        batch=BatchConfig(
            rollout_batch_size=case.prompts, samples_per_prompt=1, max_tokens_per_micro_batch=case.tokens
        ),
        strategy=StrategyConfig(activation_offload=way.offload, compile_layers=compiles(case)),
        precision=PRECISION,
    )


def foresee(case: Case) -> Forecast:
    """What a case will take on one GPU."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=f"precision='{PRECISION}'")
        config = roles_config(case)
        config.save_pretrained(folder)
        plan = make_plan(train_config(case, folder), 1)
        precision = HybridPrecision(PRECISION)
    reward = describe(build_on_meta(lambda: Reward(config), precision), precision)
    roles = [*(memory.model for memory in plan.roles.values()), reward]
    hosted = WAYS[case.way].offload
    peak = gpu_peak(plan, _bytes(reward), hosted)
    if hosted:  # before that, roles are whole on the GPU
        peak = max(peak, sum(map(_bytes, roles)))
    return Forecast(peak, host_bytes(case, plan, roles) if hosted else PROCESS_BYTES, step_seconds(case, plan))


def _bytes(model: RoleModel) -> int:
    return sum(parameter.held_bytes(parameter.numel) for parameter in model.parameters)


# ---- the GPU ---------------------------------------------------------------------------------------------------------


def gpu_peak(plan: Plan, reward_bytes: int, hosted: bool) -> int:
    """Bytes at the highest moment of a step.

    The planner does not know of a reward model, and takes it that FSDP2 gathers parameters and reduces gradients, which
    one GPU without mixed precision and without ``offload_parameters`` does not need; with it, what is held is in host
    memory, and a rollout has a copy of the weights.

    Args:
        plan: The plan of the other roles.
        reward_bytes: Parameters of the reward model.
        hosted: Whether parameters, gradients and optimizer states lie in host memory.
    """
    weights = plan.roles["actor"].parameters
    peaks = []
    for phase in plan.memory[0].phases:
        for moment in phase.moments:
            if hosted:
                taken = sum(item.bytes for item in moment.items if item.what not in HELD)
                peaks.append(taken + weights * (phase.name == "rollout"))
            elif moment.name != "reduction of the root":
                peaks.append(sum(item.bytes for item in _without_fsdp(moment)) + reward_bytes)
    return max(peaks)


def _without_fsdp(moment: Moment) -> Iterable[Item]:
    last = moment.name == "backward of the embedding"  # all gradients are there, each where it stays
    left_out = ("gathered units", "gradients on their way") if last else ("gathered units",)
    return (item for item in moment.items if item.what not in left_out)


# ---- the host --------------------------------------------------------------------------------------------------------


def host_bytes(case: Case, plan: Plan, roles: Iterable[RoleModel]) -> int:
    """Bytes of the host at the peak, where everything is offloaded.

    Parameters, gradients and activations are pinned, which comes in powers of two; gradients and activations of the
    critic make room for the actor's. Optimizer states are not pinned.

    Args:
        case: The case.
        plan: Its plan.
        roles: The models of all roles.
    """
    trained = [plan.roles[role] for role in ("actor", "critic")]
    parameters = sum(pinned(parameter.held_bytes(parameter.numel)) for model in roles for parameter in model.parameters)
    gradients = max(_pinned_gradients(role) for role in trained)
    states = sum(role.optimizer for role in trained)
    decoder = plan.roles["actor"].model.decoder
    first = case.prompts * (case.first_prompt_tokens + case.new_tokens)
    inputs = [tokens * decoder.hidden * plan.roles["actor"].model.compute_bytes for tokens in {first, case.tokens}]
    activations = decoder.layers * sum(pinned(size) for size in inputs if size >= LEAST_BYTES)
    return PROCESS_BYTES + parameters + gradients + states + activations


def _pinned_gradients(role: RoleMemory) -> int:
    return sum(pinned(p.held_bytes(p.numel)) for p in role.model.parameters if p.trained)


def pinned(size: int) -> int:
    """Bytes that pinned memory of a size takes."""
    return 1 << (size - 1).bit_length() if size else 0


def host_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or less where its group has a limit."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        path = Path(name)
        text = path.read_text().strip() if path.is_file() else ""
        sizes += [int(text)] if text.isdecimal() else []
    return min(sizes)


# ---- time ------------------------------------------------------------------------------------------------------------


def step_seconds(case: Case, plan: Plan) -> float:
    """Seconds of a step, from its FLOPs alone."""
    cost: Any = plan.roles["actor"].model.cost
    rows = torch.full((case.prompts,), case.row_tokens, dtype=torch.float64)
    forward = 2 * (cost.trained + cost.frozen) * rows.sum() + 2 * cost.attention * rows.square().sum()
    return FORWARDS * float(forward) / FLOPS
