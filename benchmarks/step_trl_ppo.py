"""The side of benchmarks/step.py with TRL's PPOTrainer, which starts it in a process of its own.

TRL has had no PPO since 1.13: this process needs TRL 1.12, be it from a folder on its ``PYTHONPATH``. All four models
are made here with random weights; nothing comes from a network.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from rollout_results import Work
from step_common import KL, LEARNING_RATE, StepMeter, check_tokens, meter_for, prompt_texts, side_parser, word_tokenizer
from step_trl import Phases
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

from lightning_verl.callbacks.throughput import UpdateCost
from lightning_verl.tuning.shapes import SHAPES, model_config


class Recorder(TrainerCallback):  # type: ignore[misc]
    """Ends the steps of the meter, and tells apart what the trainer calls.

    Args:
        work: What is done.
        meter: Keeps the steps.
        critic: The critic, to tell it from the reward model.
        pad: The padding token.
    """

    def __init__(self, work: Work, meter: StepMeter, critic: Any, pad: int) -> None:
        self._work, self._meter, self._critic, self._pad = work, meter, critic, pad
        self._phases = Phases()
        self._update: AbstractContextManager[None] | None = None
        self._lengths = torch.zeros(0)

    def watch(self, functions: Any) -> None:
        """Time the functions that the trainer calls, by wrapping them.

        Args:
            functions: The trainer's module, in which it looks them up for each call.
        """
        generate, get_reward = functions.batch_generation, functions.get_reward

        @wraps(generate)
        def generating(*arguments: Any, **options: Any) -> Any:
            with self._phases("generation"):
                answer = generate(*arguments, **options)
            self._lengths = (answer[0] != self._pad).sum(1)
            return answer

        @wraps(get_reward)
        def judging(model: Any, *arguments: Any, **options: Any) -> Any:
            with self._phases("scoring" if model is self._critic else "reward"):
                return get_reward(model, *arguments, **options)

        functions.batch_generation, functions.get_reward = generating, judging
        # The reference, and old log-probs from the logits of the rollout; both are called in the update too.
        functions.forward = self._scoring_or_update(functions.forward)
        functions.selective_log_softmax = self._scoring_or_update(functions.selective_log_softmax)

    def _scoring_or_update(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The first call with gradients begins the update, which only the end of the step ends."""

        @wraps(function)
        def called(*arguments: Any, **options: Any) -> Any:
            if not torch.is_grad_enabled():
                with self._phases("scoring"):
                    return function(*arguments, **options)
            if self._update is None:
                self._update = self._phases("update")
                self._update.__enter__()
            return function(*arguments, **options)

        return called

    def on_train_begin(self, *arguments: Any, **options: Any) -> None:
        """Begin."""
        self._meter.begin()

    def on_step_end(self, *arguments: Any, model: Any, **options: Any) -> None:
        """End a step, and the update with it: between the two are a few figures for the log."""
        if self._update is not None:
            self._update.__exit__(None, None, None)
            self._update = None
        tokens = int(self._lengths.sum())
        check_tokens(self._work, tokens)
        # One pass trains both, so that the FLOPs are those of both.
        costs = [UpdateCost.of(part) for part in (model.policy, model.value_model)]
        flops = sum(float(cost.flops(self._lengths)) for cost in costs if cost is not None)
        self._meter.end_step(tokens, self._phases.take(), flops)


# ---- the trainer -----------------------------------------------------------------------------------------------------


def tokenizer_for(work: Work) -> PreTrainedTokenizerFast:
    """Padding is a token that cannot be sampled, as the end token: TRL takes a response to end at the first of them."""
    tokenizer = word_tokenizer(work, eos=SHAPES[work.shape][5])
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def make_models(work: Work, dtype: torch.dtype) -> dict[str, Any]:
    """Policy, reference, critic and reward model of one shape, by the trainer's names for them."""
    config = model_config(work.shape)
    config.num_labels = 1
    models = {}
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        for name in ("model", "ref_model", "value_model", "reward_model"):
            torch.manual_seed(0)
            kind = AutoModelForCausalLM if name in ("model", "ref_model") else AutoModelForSequenceClassification
            models[name] = kind.from_config(config, dtype=dtype)
    return models


def make_trainer(options: argparse.Namespace, steps: int, folder: str) -> Any:
    """TRL's trainer with its defaults, but for what the comparison fixes.

    Args:
        options: Those of the command line.
        steps: So many are taken.
        folder: For what it writes.
    """
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    work = Work(**options.work)
    rows = work.prompts * work.n
    tokenizer = tokenizer_for(work)
    config = PPOConfig(
        output_dir=folder,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=rows // options.micro_batch,
        local_rollout_forward_batch_size=options.rollout_rows,
        num_mini_batches=1,
        num_ppo_epochs=1,
        total_episodes=rows * steps,
        num_sample_generations=0,
        response_length=work.new_tokens,
        temperature=1.0,
        kl_coef=KL,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    prompts = tokenizer(prompt_texts(work, steps)[: work.prompts * steps])["input_ids"]
    return PPOTrainer(
        args=config,
        processing_class=tokenizer,
        train_dataset=[{"input_ids": prompt} for prompt in prompts for _ in range(work.n)],
        **make_models(work, torch.bfloat16 if options.precision == "bf16-true" else torch.float32),
    )


def measure(options: argparse.Namespace, meter: StepMeter) -> None:
    """Take the steps."""
    import trl
    import trl.experimental.ppo.ppo_trainer as functions

    versions = {**meter.side.versions, "TRL for PPO": trl.__version__}
    meter.side = replace(meter.side, rollout_rows=options.rollout_rows, versions=versions)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(options, meter.total, folder)
        pad = trainer.processing_class.pad_token_id
        recorder = Recorder(Work(**options.work), meter, trainer.value_model, pad)
        recorder.watch(functions)
        trainer.add_callback(recorder)
        trainer.train()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the side as JSON; where it fails, with the first line of the error."""
    parser = side_parser(__doc__)
    parser.add_argument("--rollout-rows", type=int, required=True, help="rows that it generates and scores at once")
    options = parser.parse_args(arguments)
    meter = meter_for(options)
    try:
        measure(options, meter)
    except Exception as error:
        meter.side = replace(meter.side, problem=f"{type(error).__name__}: {error}".splitlines()[0])
        meter.write()
        raise


if __name__ == "__main__":
    main()
