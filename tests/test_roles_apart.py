"""Roles on ranks of their own: the same training as on one process, and scoring beside the others' work."""

from __future__ import annotations

import csv
import time
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from lightning_verl import (
    GRPO,
    PPO,
    Actor,
    AsyncRolloutDataset,
    Critic,
    HybridDataFlow,
    HybridStrategy,
    Reference,
    Reward,
    RewardFunction,
    RLTrainer,
    SamplingParams,
)
from lightning_verl.algorithms.base import Algorithm
from lightning_verl.callbacks import Checkpoint, NCCLGroupIsolation, PrefetchLoader, ProgressBar, RewardEMA, Throughput
from lightning_verl.data.experience import RolloutBatch
from lightning_verl.rewards.functions import Scores
from lightning_verl.strategies.dispatch import AgreedError
from lightning_verl.testing import char_tokenizer, run_ranks, tiny_config, tiny_model

TOKENIZER = char_tokenizer()
ROWS = [{"prompt": "1" * (1 + 2 * (number % 4)), "answer": str(number)} for number in range(11)]
Config = Mapping[str, Mapping[str, Any]]


class SGDActor(Actor):
    """Adam would turn the rounding of tiny gradients into steps of its own size."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class SGDCritic(Critic):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def make_trainer(
    algorithm: Algorithm,
    mesh: Any,
    config: Config,
    reward: Any = None,
    callbacks: Any = (),
    engine: Any = None,
    **options: Any,
) -> RLTrainer:
    fabric = Fabric(
        accelerator="cpu",
        strategy=HybridStrategy(mesh, config, engine),
        callbacks=list(callbacks),
        loggers=options.pop("loggers", []),
    )
    fabric.launch()
    torch.manual_seed(5)  # the reward model is drawn from the global state
    size = {"vocab_size": len(TOKENIZER)}
    reward = reward or Reward(tiny_config(**size))
    critic = SGDCritic(tiny_model(seed=1, **size)) if algorithm.needs_critic else None
    if critic is not None:
        torch.nn.init.normal_(critic.value_head.weight, std=0.1)
    reference = Reference(tiny_model(seed=2, **size)) if algorithm.needs_reference else None
    actor = SGDActor(tiny_model(**size), tokenizer=TOKENIZER)
    flow = HybridDataFlow(actor, critic, reward, reference, max_tokens_per_micro_batch=60)
    # Five prompts a step over three ranks, in mini-batches of three and two: one rank has no row of the second.
    sizes = {"rollout_batch_size": 5, "update_batch_size": 3, "samples_per_prompt": 2, **options}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="RLTrainer: one rollout batch feeds")
        data = AsyncRolloutDataset(ROWS, tokenizer=TOKENIZER, seed=0)
        return RLTrainer(fabric, flow, algorithm, data, sampling=SamplingParams(max_new_tokens=6), **sizes)


def whole(trainer: RLTrainer, role: str) -> dict[str, Tensor] | None:
    strategy = trainer.dataflow.strategy
    if not strategy.layout(role).holds(strategy.global_rank):
        return None
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(trainer.dataflow.modules[role], options=options)
    return {name: value.clone() for name, value in state.items()}


def make_algorithm(name: str) -> Algorithm:
    return GRPO(kl=0.05) if name == "grpo" else PPO(kl=0.05, kl_in="reward")


def train(name: str, mesh: Any, config: Config, engine: Any = None) -> tuple[dict[str, float], dict[str, Any], int]:
    """Two steps; the metrics, the weights of what was trained, and how many parameters the rank holds of the reward."""
    trainer = make_trainer(make_algorithm(name), mesh, config, engine=engine)
    metrics = trainer.fit(2)
    trained = {role: whole(trainer, role) for role in ("actor", "critic") if role in trainer.dataflow.modules}
    held = sum(p.numel() for p in trainer.dataflow.modules["reward"].parameters() if not p.is_meta)
    return metrics, trained, held


@cache
def alone(name: str) -> tuple[dict[str, float], dict[str, Any], int]:
    return train(name, None, {})


EXPECTED = ("actor/loss", "actor/grad_norm", "reward/mean", "rollout/response_length", "rollout/sequences")


@pytest.mark.parametrize(
    ("name", "mesh", "config", "engine"),
    [
        ("grpo", (3, 1, 1, 1), {"reward": {"dp": 1, "ranks": [3]}}, {}),
        ("ppo", (2, 1, 1, 1), {"reward": {"tp": 2, "ranks": [2, 3]}}, {"rollout_tp": 2}),
        ("ppo", (2, 1, 1, 1), {"critic": {"dp": 2, "ranks": [2, 3]}, "reference": {"dp": 1, "ranks": [3]}}, {}),
        ("ppo", (2, 2, 1, 1), {"critic": {"dp": 4}, "reward": {"dp": 1}}, {}),
    ],
    ids=["reward-on-rank-3", "reward-on-tensor2", "critic-on-data2", "critic-data4"],
)
def test_training_is_that_of_one_process(name: str, mesh: Any, config: Config, engine: Any) -> None:
    expected, weights, parameters = alone(name)
    results = run_ranks(train, 4, name, mesh, config, engine)
    for rank, (metrics, trained, held) in enumerate(results):
        for key in (*EXPECTED, *(("critic/loss",) if name == "ppo" else ())):
            assert metrics[key] == pytest.approx(expected[key], abs=1e-5, rel=1e-5), key
        for role, state in trained.items():
            claimed = config.get(role, {}).get("ranks")
            assert (state is None) == (rank not in claimed if claimed else rank >= mesh[0] * mesh[1])
            for key, value in (state or {}).items():
                torch.testing.assert_close(value, weights[role][key], atol=1e-5, rtol=1e-5)
        if "ranks" in config.get("reward", {}):
            assert (held > 0) == (rank in config["reward"]["ranks"]), "other ranks hold no memory of it"
    assert parameters > 0
    assert expected["actor/grad_norm"] > 1e-2, "the case must move weights to show anything"


# ---- scoring beside the others' work -------------------------------------------------------------------------------


def now() -> float:
    """Seconds on a clock that all processes of the machine share."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def overlap() -> tuple[dict[str, list[float]], dict[str, float], list[str]]:
    """A reward that takes a second on rank 3, and a reference that takes one on the others."""
    spans: dict[str, list[float]] = {}
    hooks: list[str] = []

    class Hooks:
        def on_rewards_computed(self) -> None:
            hooks.append("rewards")

        def on_advantages_computed(self) -> None:
            hooks.append("advantages")

    def score(response: str) -> float:
        started = spans["reward"][0] if "reward" in spans else now()
        time.sleep(0.1)  # ten rows
        spans["reward"] = [started, now()]
        return float(len(response))

    config = {"reward": {"dp": 1, "ranks": [3]}}
    trainer = make_trainer(GRPO(kl=0.05), (3, 1, 1, 1), config, RewardFunction(score), [Hooks()])
    flow = trainer.dataflow
    measure = flow.reference_logprobs

    def slow(batch: RolloutBatch) -> Tensor:
        if flow.strategy.layout("reference").holds(trainer.fabric.global_rank):
            started = now()
            time.sleep(1.0)
            spans["reference"] = [started, now()]
        return measure(batch)

    flow.reference_logprobs = slow  # type: ignore[method-assign]
    return spans, trainer.fit(1), hooks


def test_a_reward_on_its_own_rank_scores_while_the_others_go_on() -> None:
    results = run_ranks(overlap, 4)
    assert [sorted(spans) for spans, _, _ in results] == [["reference"]] * 3 + [["reward"]]
    start, end = results[3][0]["reward"]
    for spans, metrics, hooks in results:
        assert hooks == ["rewards", "advantages"]
        assert metrics["reward/mean"] == results[0][1]["reward/mean"] > 0
        assert metrics["time/reward_score"] >= 1.0
        if "reference" in spans:
            first, last = spans["reference"]
            assert max(start, first) < min(end, last), "the two seconds overlap"
            # In turn, the wait would be as long as the scoring.
            assert metrics["time/reward_wait"] < metrics["time/reward_score"]


class PartBroken(Reward):
    """Fails on the rank that has it."""

    def score(self, batch: RolloutBatch) -> Scores:
        raise OSError("no space left")


def fail_apart() -> str:
    reward = PartBroken(tiny_config(vocab_size=len(TOKENIZER)))
    trainer = make_trainer(GRPO(), (1, 1, 1, 1), {"reward": {"ranks": [1]}}, reward)
    with pytest.raises(AgreedError) as caught:
        trainer.fit(1)
    return str(caught.value)


def test_a_reward_that_fails_on_its_own_rank_fails_on_all() -> None:
    assert run_ranks(fail_apart, 2) == ["the reward phase failed on rank 1: OSError: no space left"] * 2


# ---- the loop on a rank without the actor --------------------------------------------------------------------------


class Steps:
    """What every rank sees of the run."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.ended = 0

    def on_rollout_end(self, batch: RolloutBatch) -> None:
        self.rows.append(len(batch))

    def on_run_end(self) -> None:
        self.ended += 1


def run_with_callbacks(folder: str, mesh: Any, config: Config, steps: int, resume: bool) -> dict[str, Any]:
    seen = Steps()
    callbacks = [
        seen,
        NCCLGroupIsolation(),
        Throughput(peak_flops=1e9),
        PrefetchLoader(depth=2),
        RewardEMA(0.9),
        ProgressBar(),
        Checkpoint(Path(folder) / "checkpoints", every_n_steps=1),
    ]
    loggers = [CSVLogger(folder, name="logs", version=str(steps))]
    trainer = make_trainer(make_algorithm("ppo"), mesh, config, None, callbacks, loggers=loggers)
    metrics = trainer.fit(steps, resume_from=Checkpoint.latest(Path(folder) / "checkpoints") if resume else None)
    trainer.dataflow.save_pretrained(Path(folder) / "model")
    version = {role: trainer.dataflow.strategy.weight_version(role) for role in ("actor", "critic")}
    return {
        "rows": seen.rows,
        "ended": seen.ended,
        "metrics": metrics,
        "version": version,
        "critic": whole(trainer, "critic"),
        "batches": trainer._loader_state["batches"],
    }


def test_the_loop_runs_on_ranks_without_the_actor_and_resumes_on_fewer(tmp_path: Path) -> None:
    """Two steps with reward and critic on ranks of their own, then a third on two ranks that share all roles."""
    folder = str(tmp_path)
    apart = {"reward": {"dp": 1, "ranks": [3]}, "critic": {"dp": 1, "ranks": [2]}}
    first = run_ranks(run_with_callbacks, 4, folder, (2, 1, 1, 1), apart, 2, False)
    assert [result["rows"] for result in first] == [[4, 4], [6, 6], [0, 0], [0, 0]]
    assert [(result["ended"], result["batches"]) for result in first] == [(1, 2)] * 4
    metrics = first[0]["metrics"]
    for name in ("reward/ema_mean", "throughput/mfu", "critic/loss", "time/reward_score", "learning_rate"):
        assert metrics[name] > 0, name
    assert {result["metrics"]["actor/loss"] for result in first} == {metrics["actor/loss"]}
    assert "learning_rate" not in first[3]["metrics"], "it has no optimizer"
    assert (tmp_path / "model" / "model.safetensors").is_file()
    with (tmp_path / "logs" / "2" / "metrics.csv").open() as file:
        assert [float(row["critic/loss"]) > 0 for row in csv.DictReader(file)] == [True, True], "rank 0 logs all roles"

    second = run_ranks(run_with_callbacks, 2, folder, (2, 1, 1, 1), {}, 3, True)
    other = run_with_callbacks(str(tmp_path / "alone"), None, {}, 3, False)
    for result in second:
        assert result["version"] == {"actor": 6, "critic": 6}, "two mini-batches a step"
        for name in ("actor/loss", "critic/loss", "reward/mean", "reward/ema_mean"):
            assert result["metrics"][name] == pytest.approx(other["metrics"][name], abs=1e-5, rel=1e-4), name
        for name, value in other["critic"].items():
            torch.testing.assert_close(result["critic"][name], value, atol=1e-5, rtol=1e-4)
