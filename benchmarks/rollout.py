"""Measures rollouts: the native engine, ``generate`` of transformers, and vLLM, on the same shapes in one run.

    python benchmarks/rollout.py --output docs/benchmarks/rollout.json
    python benchmarks/rollout.py --only drawn offload
    python benchmarks/rollout.py --table-only

The first line measures on one GPU and writes the JSON file. The second one measures parts again and keeps the rest of
the file; a case is measured whole, on all engines. The last one measures nothing and writes the page
docs/benchmarks/rollout.md from docs/benchmarks/rollout.json. Models have the shapes of Qwen2.5 and random weights, so
that no length depends on what they say. Every engine gets prompts of its own in each run, tokens are counted, and a run
ends when they are on the host. vLLM runs first, in a process of its own; where it is not installed its column stays
empty. On a CPU everything but vLLM runs too, on a tiny model (``--only tiny log-probs offload --main-shape tiny``).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rollout_results import Case, Divergence, Gap, Offload, Result, Speed, Work, load, page, save
from transformers import AutoModelForCausalLM, GenerationConfig

from lightning_verl.models.logprobs import logprobs_from_hidden
from lightning_verl.rollout.native import NativeEngine, NativeOptions
from lightning_verl.rollout.sampling import SamplingParams
from lightning_verl.tuning.shapes import SHAPES, model_config

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "benchmarks" / "rollout.json"
PAGE = RESULTS.with_suffix(".md")


# ---- engines ---------------------------------------------------------------------------------------------------------


class FixedLengths(NativeEngine):
    """The native engine with a length for each response."""

    lengths: Sequence[int] = ()

    def _scheduler(self, groups: Any, *arguments: Any) -> Any:
        requests = [request for _, members in groups for request in members]
        for request, length in zip(requests, self.lengths, strict=False):
            request.limit = length
        return super()._scheduler(groups, *arguments)


def build(shape: str, device: torch.device, dtype: torch.dtype) -> Any:
    """A model with random weights."""
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(model_config(shape), dtype=dtype).eval()


@contextmanager
def model_of(shape: str, device: torch.device, dtype: torch.dtype) -> Iterator[Any]:
    """A model whose memory is free again at the end."""
    model = build(shape, device, dtype)
    try:
        yield model
    finally:
        del model
        if device.type == "cuda":
            torch.cuda.empty_cache()


class Prompts:
    """New random prompts for every run."""

    def __init__(self, work: Work) -> None:
        self._work, self._generator = work, torch.Generator().manual_seed(1)

    def __call__(self) -> list[list[int]]:
        """``work.prompts`` lists of token ids."""
        size = (self._work.prompts, self._work.prompt_tokens)
        return torch.randint(3, SHAPES[self._work.shape][5] - 1, size, generator=self._generator).tolist()  # type: ignore[no-any-return]


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(function: Callable[[], object]) -> float:
    """Seconds of one call. The garbage collector leaves alone what is there already, as in training."""
    gc.collect()
    gc.freeze()  # else a compiler's objects, walked through time and again, slow down what runs after it
    try:
        synchronize()
        started = time.perf_counter()
        function()
        synchronize()
        return time.perf_counter() - started
    finally:
        gc.unfreeze()


def allocated() -> int:
    """Bytes of device memory in use."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def run_native(model: Any, work: Work, options: NativeOptions, repeats: int) -> Speed:
    """The native engine, from its construction on."""
    held = allocated()
    sampling, prompts, made = SamplingParams(n=work.n, max_new_tokens=work.new_tokens), Prompts(work), []

    def construct() -> None:
        made.append(FixedLengths(model, pad_token_id=0, eos_token_ids=(), options=options))
        made[0].generate(prompts(), SamplingParams(n=work.n, max_new_tokens=2))

    first = timed(construct)
    engine, seconds, again = made[0], [], []
    engine.lengths = work.lengths()
    for turn in range(repeats + 1):
        engine.release()  # as between two steps of training
        spent = timed(lambda: engine.generate(prompts(), sampling, step=turn))  # noqa: B023
        seconds += [spent] if turn else []
    engine.lengths = ()
    for _ in range(3):
        engine.release()
        again.append(timed(lambda: engine.generate(prompts(), SamplingParams(n=work.n, max_new_tokens=2))))
    engine.release()
    median = statistics.median(seconds)
    return Speed(median, sum(work.lengths()) / median, first, statistics.median(again), allocated() - held)


def run_transformers(model: Any, work: Work) -> Speed:
    """``generate`` with its dynamic cache; prompts are repeated. All rows run to the greatest length. One run."""
    prompts, device = Prompts(work), next(model.parameters()).device

    def generate(tokens: int) -> None:
        config = GenerationConfig(do_sample=True, max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0, top_k=0)
        ids = torch.tensor(prompts(), device=device).repeat_interleave(work.n, 0)
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config).tolist()

    generate(8)  # sets libraries up
    seconds = timed(lambda: generate(work.new_tokens))
    return Speed(seconds, sum(work.lengths()) / seconds)


# ---- vLLM, in a process of its own -----------------------------------------------------------------------------------


def run_vllm(works: Sequence[Work], repeats: int, output: Path) -> dict[str, dict[str, Speed]]:
    """vLLM on works of one shape, before anything else is on the GPU.

    Args:
        works: What is generated.
        repeats: Runs of each.
        output: A file for what it measured.

    Returns:
        By the name of the work and the kind of run; empty where vLLM is not installed.
    """
    command = [sys.executable, str(Path(__file__).with_name("rollout_vllm.py")), "--repeats", str(repeats)]
    command += ["--works", json.dumps([asdict(work) for work in works]), "--output", str(output)]
    subprocess.run(command, check=False)
    found = json.loads(output.read_text()) if output.exists() else {}
    output.unlink(missing_ok=True)
    return {work: {kind: Speed(**entry) for kind, entry in kinds.items()} for work, kinds in found.items()}


# ---- what else is measured -------------------------------------------------------------------------------------------


def bandwidth(device: torch.device) -> float | None:
    """Bytes a second that a copy within the device's memory reads and writes."""
    if device.type != "cuda":
        return None
    source = torch.empty(2**31, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    seconds = statistics.median(timed(lambda: target.copy_(source)) for _ in range(20))
    return 2 * source.numel() / seconds


def floor_seconds(model: Any, work: Work, rate: float | None) -> float | None:
    """Reading all weights and every row's keys and values once for each token."""
    if rate is None or work.drawn:
        return None
    _, layers, heads, kv_heads, _, _, _ = SHAPES[work.shape]
    weights = sum(parameter.nbytes for parameter in model.parameters())
    token = 2 * 2 * layers * kv_heads * (model.config.hidden_size // heads)
    context = work.prompt_tokens + work.new_tokens / 2
    return work.new_tokens * (weights + work.prompts * work.n * context * token) / rate


def gap_to_training(model: Any, work: Work, options: NativeOptions | None = None) -> Gap:
    """The engine's log-probs against those of a plain forward pass of the same weights."""
    engine = NativeEngine(model, pad_token_id=0, eos_token_ids=(), options=options)
    prompts = Prompts(work)()[:8]
    rollouts = engine.generate(prompts, SamplingParams(max_new_tokens=min(256, work.new_tokens)))
    engine.release()
    ids = torch.cat([torch.tensor(prompts, device=rollouts.response_ids.device), rollouts.response_ids], 1)
    with torch.no_grad():
        hidden = model.base_model(ids, use_cache=False).last_hidden_state[:, work.prompt_tokens - 1 : -1]
        recomputed, _ = logprobs_from_hidden(
            hidden.flatten(0, 1), model.get_output_embeddings(), rollouts.response_ids.flatten(), 1.0
        )
    gap = (recomputed.view_as(rollouts.logprobs) - rollouts.logprobs).abs()
    return Gap(str(hidden.dtype).removeprefix("torch."), float(gap.max()), float(gap.mean()))


def divergence(model: Any, work: Work) -> Divergence:
    """The same samples in a full batch and in a quarter of it."""
    engine = NativeEngine(model, pad_token_id=0, eos_token_ids=())
    # Random weights give flat distributions, in which a change in the last bit moves the choice; these are as peaked as
    # those of a trained model.
    sampling = SamplingParams(n=work.n, max_new_tokens=work.new_tokens, temperature=0.2)
    prompts = Prompts(work)()
    quarter = len(prompts) // 4
    whole = engine.generate(prompts, sampling).response_ids[: quarter * work.n]
    part = engine.generate(prompts[:quarter], sampling).response_ids
    engine.release()
    differs = whole != part
    rows = differs.any(1)
    places = differs.int().argmax(1)[rows].double()
    return Divergence(len(rows), int(rows.sum()), float(places.mean()) if len(places) else None)


def measure_logprobs(work: Work, device: torch.device, dtype: torch.dtype) -> tuple[list[Gap], Divergence]:
    """Gaps in the dtype of rollouts and, on a GPU, in fp32; and how samples depend on their batch."""
    with model_of(work.shape, device, dtype) as model:
        gaps, differing = [gap_to_training(model, work)], divergence(model, work)
        if device.type == "cuda":
            gaps.append(gap_to_training(model.float(), work, NativeOptions(compile_layers=False)))
    return gaps, differing


def measure_offload(device: torch.device, dtype: torch.dtype) -> Offload:
    """The cache that the work needs, against a share of it with host memory for those that step back."""
    work = OFFLOADS[device.type]
    model, prompts = build(work.shape, device, dtype), Prompts(work)()
    sampling = SamplingParams(n=work.n, max_new_tokens=work.new_tokens)

    def run(options: NativeOptions) -> tuple[float, int, Any, Any]:
        engine = NativeEngine(model, pad_token_id=0, eos_token_ids=(), options=options)
        engine.generate([row[:64] for row in prompts[:2]], SamplingParams(max_new_tokens=2))  # sets libraries up
        engine.release()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        made: list[Any] = []
        seconds = timed(lambda: made.append(engine.generate(prompts, sampling)))
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else engine.report.cache_bytes  # type: ignore[union-attr]
        report = engine.report
        engine.release()
        return seconds, peak, made[0], report

    seconds, peak, whole, report = run(NativeOptions())  # its cache has room for what the work needs, and no more
    small = NativeOptions(kv_cache_bytes=int(report.cache_bytes * OFFLOAD_SHARE), offload_kvcache=True)
    slower, less, offloaded, swapped = run(small)
    tokens = sum(work.lengths())
    same = float((whole.response_ids == offloaded.response_ids).double().mean())
    return Offload(
        work, peak, less, tokens / seconds, tokens / slower, swapped.swapped_bytes, swapped.preemptions, same
    )


# ---- one run ---------------------------------------------------------------------------------------------------------

VARIANTS = {
    "default": NativeOptions(),
    "layers not compiled": NativeOptions(compile_layers=False),
    "no graphs": NativeOptions(cuda_graphs=False),
    "fp8 cache": NativeOptions(kv_cache_dtype="fp8"),
}


def measure_case(work: Work, options: argparse.Namespace, device: torch.device, rate: float | None) -> Case:
    """One piece of work on every engine but vLLM."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with model_of(work.shape, device, dtype) as model:
        variants = VARIANTS if work.shape == options.main_shape and not work.drawn else {"default": NativeOptions()}
        other = None if options.no_transformers else run_transformers(model, work)
        native = {
            name: run_native(model, work, variant, options.repeats if variant.cuda_graphs else 1)
            for name, variant in variants.items()
        }
        floor = floor_seconds(model, work, rate)
    print(json.dumps({"work": work.name, "native": {k: v.tokens_per_second for k, v in native.items()}}), flush=True)
    return Case(work, native, other, {}, floor)


CASES: dict[str, Work] = {
    "tiny": Work("tiny", 4, 4, 12, 16),
    "tiny drawn": Work("tiny", 4, 4, 12, 32, drawn=True),
    "0.5B": Work("0.5B"),
    "1.5B": Work("1.5B"),
    "drawn": Work("1.5B", new_tokens=1024, drawn=True),
    "7B": Work("7B"),
}
OFFLOAD_SHARE = 0.4
"""Of the cache that all rows need; prompts alone take three quarters of that."""
OFFLOADS = {"cuda": Work("7B", 32, 1, 6144, 2048), "cpu": Work("tiny", 8, 1, 24, 40)}


PARTS = ("log-probs", "offload")
"""What is measured beside the cases: log-probs and samples of the main shape, and ``offload_kvcache``."""


def measure(options: argparse.Namespace) -> Result:
    """Everything that was asked for; the rest is what the file held. What stands is saved after each part."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    name, rate = torch.cuda.get_device_name() if device.type == "cuda" else "CPU", bandwidth(device)
    result = load(options.output) if options.output.exists() else Result(name, rate, [])
    result = replace(result, device=name, bandwidth=rate, versions={**result.versions, "torch": torch.__version__})
    works = [CASES[part] for part in options.only if part in CASES]
    shared = [work for work in works if work.shape == options.main_shape]
    speeds: dict[str, dict[str, Speed]] = {}
    if device.type == "cuda" and shared and not options.no_vllm:
        speeds = run_vllm(shared, options.repeats, options.output.with_suffix(".vllm.json"))
    if speeds:
        result = replace(result, versions={**result.versions, "vLLM": str(import_module("vllm").__version__)})
    for work in works:
        case = replace(measure_case(work, options, device, rate), vllm=speeds.get(work.name, {}))
        result = result.with_case(case)
        save(options.output, result)
    if "log-probs" in options.only:
        gaps, differing = measure_logprobs(CASES[options.main_shape], device, dtype)
        result = replace(result, gaps=gaps, divergence=differing)
        save(options.output, result)
    if "offload" in options.only:
        result = replace(result, offload=measure_offload(device, dtype))
        save(options.output, result)
    return result


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS, help="the JSON file")
    parser.add_argument("--table-only", action="store_true", help="measure nothing, only write the page again")
    parser.add_argument(
        "--only",
        nargs="*",
        choices=[*CASES, *PARTS],
        default=["0.5B", "1.5B", "drawn", "7B", *PARTS],
        help="what is measured; the rest of the file stays",
    )
    shapes = [name for name in CASES if name in SHAPES]
    parser.add_argument("--main-shape", choices=shapes, default="1.5B", help="what all variants and vLLM run on")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each engine, after one that does not count")
    parser.add_argument("--no-vllm", action="store_true", help="leave vLLM out")
    parser.add_argument("--no-transformers", action="store_true", help="leave generate out")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the JSON file, or write the page."""
    options = _parser().parse_args(arguments)
    if options.table_only:
        PAGE.write_text(page(load(RESULTS)))
        return
    print(page(measure(options)))


if __name__ == "__main__":
    main()
