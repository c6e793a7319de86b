"""The vLLM side of benchmarks/rollout.py, which starts it in a process of its own.

python benchmarks/rollout_vllm.py --work '{"shape": "1.5B"}' --output speeds.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rollout import Prompts, build, timed
from rollout_results import Speed, Work

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "TVM_FFI_DISABLE_TORCH_C_DLPACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
}
"""Set before vLLM is imported: one process, no network, no kernels that are compiled with tools a host may lack."""


def measure(works: list[Work], repeats: int, output: Path) -> None:
    """All works on one ``LLM``, with and without log-probs; the file is written after each."""
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        config = build(works[0].shape, torch.device("meta"), torch.bfloat16).config
        config.architectures = ["Qwen2ForCausalLM"]
        config.save_pretrained(folder)
        made: list[Any] = []

        def construct() -> None:
            made.append(
                LLM(
                    model=folder,
                    skip_tokenizer_init=True,
                    load_format="dummy",
                    dtype="bfloat16",
                    gpu_memory_utilization=0.5,
                    max_model_len=max(work.prompt_tokens + work.new_tokens for work in works) + 16,
                    max_num_seqs=256,
                )
            )
            Run(made[0], works[0])(None, limit=2)

        first = timed(construct)
        entries: dict[str, dict[str, Any]] = {}
        for work in works:
            run = Run(made[0], work)
            entries[work.name] = {}
            for name, logprobs in (("without", None), ("with log-probs", 0)):
                seconds = [timed(lambda: run(logprobs)) for _ in range(repeats + 1)][1:]  # noqa: B023
                median = statistics.median(seconds)
                made[0].reset_prefix_cache()
                again = timed(lambda: run(logprobs, limit=2))  # noqa: B023
                speed = Speed(median, sum(work.lengths()) / median, first, again, torch.cuda.memory_allocated())
                entries[work.name][name] = asdict(speed)
            output.write_text(json.dumps(entries))


class Run:
    """One piece of work on vLLM, with new prompts in each call."""

    def __init__(self, llm: Any, work: Work) -> None:
        self._llm, self._work, self._prompts = llm, work, Prompts(work)

    def __call__(self, logprobs: int | None, limit: int | None = None) -> None:
        """Generate, with ``limit`` tokens if that is given."""
        from vllm import SamplingParams

        work, lengths = self._work, self._work.lengths()
        parameters = [
            SamplingParams(
                n=1 if work.drawn else work.n,
                temperature=1.0,
                max_tokens=limit or length,
                ignore_eos=True,
                logprobs=logprobs,
                detokenize=False,
            )
            for length in (lengths if work.drawn else lengths[:: work.n])
        ]
        copies = work.n if work.drawn else 1
        inputs = [{"prompt_token_ids": row} for row in self._prompts() for _ in range(copies)]
        self._llm.generate(inputs, parameters, use_tqdm=False)


def main() -> None:
    """Measure and write the speeds as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", type=json.loads, required=True, help="a list of the fields of ``Work``, as JSON")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each, after one that does not count")
    parser.add_argument("--output", type=Path, required=True, help="the JSON file")
    options = parser.parse_args()
    os.environ.update(SETTINGS)
    measure([Work(**work) for work in options.works], options.repeats, options.output)


if __name__ == "__main__":
    main()
