"""RL post-training for language models as a Lightning Fabric strategy.

Importing the package registers the strategy under the name "hybrid"; everything else is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

from lightning.fabric.strategies import STRATEGY_REGISTRY

__version__ = "0.1.0.dev0"

_EXPORTS = {
    "Actor": "roles.actor",
    "AdaptiveKL": "algorithms.kl",
    "Algorithm": "algorithms.base",
    "AsyncRolloutDataset": "data.prompts",
    "Critic": "roles.critic",
    "DeviceMesh": "strategies.mesh",
    "FixedKL": "algorithms.kl",
    "GRPO": "algorithms.grpo",
    "HybridDataFlow": "dataflow",
    "HybridStrategy": "strategies.hybrid",
    "NCCLGroupManager": "strategies.groups",
    "PPO": "algorithms.ppo",
    "Reference": "roles.reference",
    "Reward": "roles.reward",
    "RewardEnsemble": "roles.reward_ensemble",
    "RewardFunction": "roles.reward_function",
    "RLTrainer": "trainer",
    "SFT": "algorithms.sft",
    "SamplingParams": "rollout.sampling",
    "batch_reward": "rewards.functions",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'lightning_verl' has no attribute {name!r}")
    return getattr(importlib.import_module(f"lightning_verl.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def _hybrid_strategy(**options: Any) -> Any:
    return __getattr__("HybridStrategy")(**options)


STRATEGY_REGISTRY.register(
    "hybrid", _hybrid_strategy, description="RL post-training: one mesh, a layout for each role", override=True
)
