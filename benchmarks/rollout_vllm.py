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


def measure(work: Work, repeats: int, output: Path) -> None:
    """Both kinds of run on one ``LLM``."""
    from vllm import LLM
    from vllm import SamplingParams as VLLMSampling

    with tempfile.TemporaryDirectory() as folder:
        model = build(work.shape, torch.device("meta"), torch.bfloat16)
        model.config.architectures = ["Qwen2ForCausalLM"]
        model.config.save_pretrained(folder)
        prompts, lengths, made = Prompts(work), work.lengths(), []

        def construct() -> None:
            made.append(
                LLM(
                    model=folder,
                    skip_tokenizer_init=True,
                    load_format="dummy",
                    dtype="bfloat16",
                    gpu_memory_utilization=0.5,
                    max_model_len=work.prompt_tokens + work.new_tokens + 16,
                    max_num_seqs=256,
                )
            )
            once(2, None)

        def once(limit: int | None, logprobs: int | None) -> None:
            parameters = [
                VLLMSampling(
                    n=1 if work.drawn else work.n,
                    temperature=1.0,
                    max_tokens=limit or length,
                    ignore_eos=True,
                    logprobs=logprobs,
                    detokenize=False,
                )
                for length in (lengths if work.drawn else lengths[:: work.n])
            ]
            inputs = [{"prompt_token_ids": row} for row in prompts() for _ in range(work.n if work.drawn else 1)]
            made[0].generate(inputs, parameters, use_tqdm=False)

        first = timed(construct)
        held = torch.cuda.memory_allocated()
        speeds = {}
        for name, logprobs in (("with log-probs", 0), ("without", None)):
            seconds = [timed(lambda: once(None, logprobs)) for _ in range(repeats + 1)][1:]  # noqa: B023
            median = statistics.median(seconds)
            speeds[name] = Speed(median, sum(lengths) / median, first, None, held)
        again = []
        for _ in range(3):
            made[0].reset_prefix_cache()
            again.append(timed(lambda: once(2, 0)))
        entries = {name: {**asdict(speed), "again": statistics.median(again)} for name, speed in speeds.items()}
        output.write_text(json.dumps(entries))


def main() -> None:
    """Measure one piece of work and write the speeds as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=json.loads, required=True, help="fields of ``Work`` as JSON")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    os.environ.update(SETTINGS)
    measure(Work(**options.work), options.repeats, options.output)


if __name__ == "__main__":
    main()
