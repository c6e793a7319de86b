"""The lightning_verl side of benchmarks/step.py, which starts it in a process of its own."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from lightning.fabric import Fabric
from rollout import FixedLengths
from rollout_results import Work
from step_common import (
    KL,
    LEARNING_RATE,
    StepMeter,
    check_tokens,
    meter_for,
    prompt_texts,
    score,
    side_parser,
    word_tokenizer,
)

import lightning_verl
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
from lightning_verl.callbacks import Throughput
from lightning_verl.callbacks.throughput import UpdateCost
from lightning_verl.rollout.base import RolloutEngine
from lightning_verl.tuning.shapes import SHAPES, model_config


class FixedLengthsActor(Actor):
    """An actor with a length for each response."""

    lengths: Sequence[int] = ()

    @property
    def engine(self) -> RolloutEngine:
        """The native engine with these lengths."""
        if self._engine is None:
            engine = FixedLengths(self._generator[0], pad_token_id=0, eos_token_ids=())
            engine.lengths = self.lengths
            self._engine = engine
        return self._engine


class Recorder:
    """Hands what ``Throughput`` measured to the meter; it stands behind it in the list of callbacks."""

    def __init__(self, work: Work, meter: StepMeter, algorithm: str) -> None:
        self._work, self._meter = work, meter
        # With one update a rollout GRPO needs no pass for old log-probs: the reference is all there is.
        self._scoring = "reference" if algorithm == "grpo" else "scoring"
        self._lengths = torch.zeros(0)

    def on_run_start(self) -> None:
        """Begin."""
        self._meter.begin()

    def on_rollout_end(self, batch: Any) -> None:
        """Keep the lengths of the sequences."""
        self._lengths = batch.lengths

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        """End a step."""
        tokens = int(metrics["rollout/prompt_tokens"] + metrics["rollout/response_tokens"])
        check_tokens(self._work, tokens)
        weights = metrics.get("time/reshard", 0.0)
        phases = {
            "generation": metrics["time/rollout"] - weights,
            "weights": weights,
            "reward": metrics["time/reward"],
            self._scoring: metrics["time/scoring"],
            "critic update": metrics.get("time/critic_update", 0.0),
            "update": metrics["time/actor_update"],
        }
        peaks = [int(value * 2**30) for name, value in metrics.items() if name.startswith("memory/")]
        cost = UpdateCost.of(trainer.dataflow.modules["actor"].model)
        flops = 0.0 if cost is None else float(cost.flops(self._lengths))
        self._meter.end_step(tokens, phases, flops, peaks)


def measure(options: argparse.Namespace) -> None:
    """Take the steps."""
    work = Work(**options.work)
    meter = meter_for(options, lightning_verl=lightning_verl.__version__)
    fabric = Fabric(
        accelerator="auto",
        devices=1,
        strategy=HybridStrategy(),
        precision=options.precision,
        callbacks=[Throughput(), Recorder(work, meter, options.algorithm)],
    )
    fabric.launch()
    config, tokenizer = model_config(work.shape), word_tokenizer(work, eos=SHAPES[work.shape][5])
    with fabric.device:
        fabric.seed_everything(0, verbose=False)
        actor = (FixedLengthsActor if work.drawn else Actor)(config, tokenizer=tokenizer, learning_rate=LEARNING_RATE)
        fabric.seed_everything(0, verbose=False)
        reference = Reference(config)
        with_models = options.algorithm == "ppo"
        critic = Critic(config, learning_rate=LEARNING_RATE) if with_models else None
        reward = Reward(config) if with_models else RewardFunction(score)
    if isinstance(actor, FixedLengthsActor):
        actor.lengths = work.lengths()
    flow = HybridDataFlow(
        actor=actor,
        critic=critic,
        reward=reward,
        reference=reference,
        max_tokens_per_micro_batch=options.micro_batch,
    )
    rows = [{"prompt": text} for text in prompt_texts(work, meter.total)]
    trainer = RLTrainer(
        fabric,
        flow,
        PPO(kl=KL) if with_models else GRPO(kl=KL),
        AsyncRolloutDataset(rows, tokenizer=tokenizer, shuffle=False),
        rollout_batch_size=work.prompts,
        samples_per_prompt=work.n,
        sampling=SamplingParams(max_new_tokens=work.new_tokens),
    )
    trainer.fit(meter.total)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the side as JSON."""
    parser = side_parser(__doc__)
    parser.add_argument(
        "--algorithm", choices=("grpo", "ppo"), default="grpo", help="ppo has a critic and a reward model"
    )
    measure(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
