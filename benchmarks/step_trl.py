"""The TRL side of benchmarks/step.py, which starts it in a process of its own.

Nothing comes from a network: model and tokenizer are made here, saved, and loaded by TRL as from any folder.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
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
from transformers import AutoModelForCausalLM, LogitsProcessor, TrainerCallback

from lightning_verl.callbacks.throughput import UpdateCost
from lightning_verl.tuning.shapes import SHAPES, model_config


class ForcedLengths(LogitsProcessor):  # type: ignore[misc]
    """Forces the end token at a length for each row, and forbids it before.

    Args:
        lengths: Tokens of each response, the end token included.
        eos: The end token.
        prompt_tokens: Tokens of each prompt.
    """

    def __init__(self, lengths: Sequence[int], eos: int, prompt_tokens: int) -> None:
        self._lengths, self._eos, self._prompt_tokens = torch.tensor(lengths), eos, prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Write the end token's logit, in place: no other's chance is above 0 behind 1e4."""
        self._lengths = self._lengths.to(scores.device)
        ends = input_ids.shape[1] - self._prompt_tokens + 1 >= self._lengths
        scores[:, self._eos] = torch.where(ends, 1e4, -torch.inf).to(scores.dtype)
        return scores


class Phases:
    """Seconds by phase; what a phase inside takes is not counted for the one around it."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._inside: list[float] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Be in a phase."""
        started = self._now()
        self._inside.append(0.0)
        try:
            yield
        finally:
            took = self._now() - started
            self._seconds[name] = self._seconds.get(name, 0.0) + took - self._inside.pop()
            if self._inside:
                self._inside[-1] += took

    def around(self, name: str, owner: Any, method: str) -> None:
        """Let each call of an object's method be a phase."""
        inner = getattr(owner, method)

        @wraps(inner)
        def timed(*arguments: Any, **options: Any) -> Any:
            with self(name):
                return inner(*arguments, **options)

        setattr(owner, method, timed)

    def take(self) -> dict[str, float]:
        """What was measured since the last call."""
        taken, self._seconds = self._seconds, {}
        return taken

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


class Recorder(TrainerCallback):  # type: ignore[misc]
    """Ends the steps of the meter, and times the optimizer.

    Args:
        work: What is done.
        meter: Keeps the steps.
        phases: Of the trainer.
    """

    def __init__(self, work: Work, meter: StepMeter, phases: Phases) -> None:
        self._work, self._meter, self._phases = work, meter, phases
        self._optimizer: AbstractContextManager[None] | None = None
        self.lengths: list[int] = []
        """Tokens of the sequences of this step."""

    def on_train_begin(self, *arguments: Any, **options: Any) -> None:
        """Begin."""
        self._meter.begin()

    def on_pre_optimizer_step(self, *arguments: Any, **options: Any) -> None:
        """The optimizer is part of the update."""
        self._optimizer = self._phases("update")
        self._optimizer.__enter__()

    def on_optimizer_step(self, *arguments: Any, **options: Any) -> None:
        """It is done."""
        if self._optimizer is not None:
            self._optimizer.__exit__(None, None, None)

    def on_step_end(self, *arguments: Any, model: Any, **options: Any) -> None:
        """End a step."""
        check_tokens(self._work, sum(self.lengths))
        cost = UpdateCost.of(model)
        flops = 0.0 if cost is None else float(cost.flops(torch.tensor(self.lengths)))
        self._meter.end_step(sum(self.lengths), self._phases.take(), flops)


# ---- the trainer -----------------------------------------------------------------------------------------------------


def saved_model(work: Work, folder: Path, eos: int, dtype: torch.dtype) -> Path:
    """The folder with the model and its tokenizer, which is written by the first process that wants it."""
    target = folder / f"eos-{eos}"
    if target.exists():
        return target
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(model_config(work.shape, eos), dtype=dtype)
    word_tokenizer(work, eos).save_pretrained(str(target))
    model.save_pretrained(target)
    return target


def make_trainer(options: argparse.Namespace, meter: StepMeter) -> Any:
    """TRL's trainer with its defaults, but for what the comparison fixes."""
    import pyarrow
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    work, on_cuda = Work(**options.work), torch.cuda.is_available()
    with_vllm, rows = options.engine == "vLLM", work.prompts * work.n
    # An end token out of the vocabulary is never sampled; with ``generate`` drawn lengths need one that can be.
    vocabulary = SHAPES[work.shape][5]
    eos = vocabulary - 1 if work.drawn and not with_vllm else vocabulary
    dtype = torch.bfloat16 if options.precision == "bf16-true" else torch.float32
    folder = saved_model(work, options.folder, eos, dtype)
    extra: dict[str, Any] = {}
    if with_vllm:
        longest = work.prompt_tokens + work.new_tokens
        extra = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": longest}
        extra["generation_kwargs"] = {"ignore_eos": True}
    config = GRPOConfig(
        output_dir=str(options.folder / "out"),
        model_init_kwargs={"dtype": str(dtype).removeprefix("torch.")},
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=rows // options.micro_batch,
        steps_per_generation=rows // options.micro_batch,
        num_generations=work.n,
        max_completion_length=work.new_tokens,
        max_steps=meter.total,
        beta=KL,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        bf16=True,
        use_cpu=not on_cuda,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **extra,
    )
    # A fingerprint of our own: the one that ``Dataset.from_dict`` makes pickles pyarrow, which not all versions can.
    texts = pyarrow.table({"prompt": prompt_texts(work, meter.total)})
    return GRPOTrainer(
        model=str(folder),
        reward_funcs=scores,
        args=config,
        train_dataset=Dataset(texts, fingerprint="step"),
        processing_class=word_tokenizer(work, eos),
    )


def scores(completions: list[str], **_: Any) -> list[float]:
    """The same reward as on the other side."""
    return [score(completion) for completion in completions]


def watch(trainer: Any, work: Work, meter: StepMeter) -> None:
    """Time the trainer's phases by wrapping its methods."""
    phases = Phases()
    recorder = Recorder(work, meter, phases)
    trainer.add_callback(recorder)
    generate, logprobs = trainer._generate_single_turn, trainer._get_per_token_logps_and_entropies

    def generating(prompt_ids: list[list[int]], *arguments: Any, **options: Any) -> Any:
        with phases("generation"):
            answer = generate(prompt_ids, *arguments, **options)
        recorder.lengths = [len(prompt) + len(ids) for prompt, ids in zip(prompt_ids, answer[0], strict=True)]
        return answer

    def scoring(model: Any, *arguments: Any, **options: Any) -> Any:
        if torch.is_grad_enabled():  # in the update
            return logprobs(model, *arguments, **options)
        with phases("reference" if model is trainer.ref_model else "old log-probs"):
            return logprobs(model, *arguments, **options)

    trainer._generate_single_turn, trainer._get_per_token_logps_and_entropies = generating, scoring
    phases.around("reward", trainer, "_calculate_rewards")
    phases.around("other", trainer, "_generate_and_score_completions")
    phases.around("update", trainer, "training_step")  # rollouts begin inside of it, and are taken off
    if trainer.use_vllm:
        phases.around("weights", trainer.vllm_generation, "sync_weights")


def draw_lengths(trainer: Any, work: Work) -> None:
    """Give each response its length: as a limit of its own with vLLM, else by forcing the end token."""
    lengths = work.lengths()
    if not trainer.use_vllm:
        forced = ForcedLengths(lengths, trainer.processing_class.eos_token_id, work.prompt_tokens)
        trainer.model.generate = partial(trainer.model.generate, logits_processor=[forced])
        return
    llm = trainer.vllm_generation.llm
    generate: Callable[..., Any] = llm.generate

    def generating(prompts: Any, sampling_params: Any, **options: Any) -> Any:
        limited = [sampling_params.clone() for _ in lengths]
        for parameters, length in zip(limited, lengths, strict=True):
            parameters.max_tokens = length
        return generate(prompts, sampling_params=limited, **options)

    llm.generate = generating


def measure(options: argparse.Namespace) -> None:
    """Take the steps."""
    import trl

    work, versions = Work(**options.work), {"TRL": trl.__version__}
    if options.engine == "vLLM":
        import vllm

        versions["vLLM"] = vllm.__version__
    meter = meter_for(options, **versions)
    trainer = make_trainer(options, meter)
    if work.drawn:
        draw_lengths(trainer, work)
    watch(trainer, work, meter)
    trainer.train()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the side as JSON; where a library is missing, that is what it says."""
    parser = side_parser(__doc__)
    parser.add_argument("--engine", choices=("generate", "vLLM"), required=True, help="what generates")
    parser.add_argument("--folder", type=Path, required=True, help="where the model is, or is to be")
    options = parser.parse_args(arguments)
    try:
        measure(options)
    except ImportError as error:
        meter = meter_for(options)
        meter.side = replace(meter.side, problem=f"{type(error).__name__}: {error}")
        meter.write()


if __name__ == "__main__":
    main()
