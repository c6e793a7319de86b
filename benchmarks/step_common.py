"""What both sides of benchmarks/step.py share: model, tokenizer, prompts, reward, and the clock."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
import transformers
from rollout_results import Work
from step_results import PHASES, Side, Step
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from lightning_verl.tuning.profile import busy_share, kernels_of
from lightning_verl.tuning.shapes import SHAPES

LEARNING_RATE = 1e-6
KL = 0.04


def word_tokenizer(work: Work, eos: int) -> PreTrainedTokenizerFast:
    """A word for each token. An ``eos`` as large as the vocabulary can never be sampled."""
    words = {"<pad>": 0, "<unk>": 1, "<eos>": eos}
    words |= {f"w{token}": token for token in range(2, SHAPES[work.shape][5]) if token != eos}
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<eos>"}
    backend = Tokenizer(WordLevel(words, unk_token=special["unk_token"]))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **special)


def prompt_texts(work: Work, steps: int) -> list[str]:
    """New random prompts for so many steps, and one batch to spare for what loads ahead."""
    size = (work.prompts * (steps + 1), work.prompt_tokens)
    rows = torch.randint(2, SHAPES[work.shape][5] - 1, size, generator=torch.Generator().manual_seed(1))
    return [" ".join(f"w{token}" for token in row) for row in rows.tolist()]


def score(response: str) -> float:
    """Anything that differs between samples."""
    return sum(map(ord, response[:16])) % 7 / 7


def check_tokens(work: Work, tokens: int) -> None:
    """Refuse a step in which responses had other lengths than they should."""
    expected = work.prompts * work.n * work.prompt_tokens + sum(work.lengths())
    if tokens != expected:
        raise RuntimeError(f"a step had {tokens} tokens of prompts and responses, it should have {expected}.")


# ---- the clock -------------------------------------------------------------------------------------------------------


class StepMeter:
    """Times whole steps, each from the end of the one before; the last one runs under the profiler.

    Args:
        side: What is known before the first step.
        output: The file that the side is written to, before the profiler starts and after it.
        warmup: Steps that do not count.
        steps: Steps that do.
        profile: Whether one more step is profiled, which only a GPU can be.
    """

    def __init__(self, side: Side, output: Path, warmup: int, steps: int, profile: bool) -> None:
        self.side, self._output = side, output
        self._on_cuda = torch.cuda.is_available()
        self._warmup, self._steps, self._profiles = warmup, steps, profile and self._on_cuda
        self._done, self._started = 0, 0.0
        self._profiler: torch.profiler.profile | None = None

    @property
    def total(self) -> int:
        """Steps to take."""
        return self._warmup + self._steps + self._profiles

    def begin(self) -> None:
        """The first step begins."""
        if self._on_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self._started = time.perf_counter()

    def end_step(
        self, tokens: int, phases: dict[str, float], update_flops: float, phase_peaks: Sequence[int] = ()
    ) -> None:
        """A step has ended, and the next one begins.

        Args:
            tokens: Of prompts and responses.
            phases: Seconds by phase; "other" is what is missing.
            update_flops: What the update asked for.
            phase_peaks: Peak memory of phases before which the statistics were reset.
        """
        if self._on_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._started
        peak = max([torch.cuda.max_memory_allocated(), *phase_peaks]) if self._on_cuda else None
        known = {phase: phases.get(phase, 0.0) for phase in PHASES if phase != "other"}
        step = Step(seconds, {**known, "other": seconds - sum(known.values())}, tokens, peak)
        self._done += 1
        print(f"step {self._done} of {self.total}: {seconds:.2f} s", file=sys.stderr, flush=True)
        if self._profiler is not None:
            self._profiler.stop()
            spans = [(kernel.start, kernel.end) for kernel in kernels_of(self._profiler)]
            self.side = replace(self.side, busy=busy_share(spans, seconds * 1e9))
            self.write()
        elif self._done > self._warmup:
            self.side = replace(self.side, steps=[*self.side.steps, step], update_flops=update_flops)
            if len(self.side.steps) == self._steps:
                self.write()  # should the profiler fail
                self._start_profiler()
        self.begin()

    def _start_profiler(self) -> None:
        if self._profiles:
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profiler.start()

    def write(self) -> None:
        """Write what is known so far."""
        self._output.write_text(json.dumps(asdict(self.side)))


# ---- the processes ---------------------------------------------------------------------------------------------------


def side_parser(description: str | None) -> argparse.ArgumentParser:
    """The options that both sides take."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=json.loads, required=True, help="the fields of ``Work``, as JSON")
    parser.add_argument("--precision", choices=("bf16-true", "bf16-mixed"), required=True, help="ours")
    parser.add_argument("--micro-batch", type=int, required=True, help="rows for TRL, tokens for lightning_verl")
    parser.add_argument("--warmup", type=int, default=1, help="steps that do not count")
    parser.add_argument("--steps", type=int, default=3, help="steps that do")
    parser.add_argument("--profile", action="store_true", help="one more step, under the profiler")
    parser.add_argument("--output", type=Path, required=True, help="the JSON file")
    return parser


def meter_for(options: argparse.Namespace, **versions: str) -> StepMeter:
    """The meter of a process."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    shared = {"torch": torch.__version__, "transformers": transformers.__version__}
    side = Side(options.micro_batch, device=device, versions={**shared, **versions})
    return StepMeter(side, options.output, options.warmup, options.steps, options.profile)
