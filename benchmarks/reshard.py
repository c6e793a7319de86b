"""Measures resharding: the actor's weights on their way from the update layout to the rollout layout.

    torchrun --nproc-per-node 2 benchmarks/reshard.py --output docs/benchmarks/reshard.json
    python benchmarks/reshard.py --table-only

The first line measures on two GPUs and writes the JSON file. The second one measures nothing and writes the page
docs/benchmarks/reshard.md from docs/benchmarks/reshard.json. All sides of a comparison run in the same process on the
same weights, one after the other in every repeat; times are medians, of the slower rank. On CPUs (gloo) it runs too, on
a tiny model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import Qwen2Config

from lightning_verl import Actor, HybridStrategy
from lightning_verl.data.experience import RolloutBatch
from lightning_verl.models.compat import all_gather_flat
from lightning_verl.resharding.executor import ReshardReport
from lightning_verl.testing import char_tokenizer, tiny_config

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "benchmarks" / "reshard.json"
PAGE = RESULTS.with_suffix(".md")
COMMAND = "torchrun --nproc-per-node 2 benchmarks/reshard.py --output docs/benchmarks/reshard.json"
BUCKET_BYTES = 256 * 2**20
WARM_UP = 3
"""Turns that do not count."""

SHAPES = {
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}
"""Sizes of Qwen2.5, with random weights."""


@dataclass(frozen=True)
class Moved:
    """One resharding: what it moved, how long it and the alternatives took, and the memory it needed meanwhile."""

    case: str
    """From which layout to which."""
    received_bytes: int
    """What the busiest rank received."""
    seconds: float
    """Ours."""
    full_tensor_seconds: float | None
    """Each parameter made whole with ``full_tensor`` and cut again."""
    bare_exchange_seconds: float | None
    """The same bytes, point to point each way or as one all-gather, from one buffer to another."""
    link_share: float | None
    """``ReshardReport.link_share``, the median of all repeats, of the rank with less."""
    extra_bytes: int | None
    """Memory at the peak beyond the rollout shard; None on CPUs."""


@dataclass(frozen=True)
class Trained:
    """Training with the two placements of FSDP2's shards."""

    default_seconds: float
    """A forward and backward pass, cut along dim 0."""
    aligned_seconds: float
    """The same, cut along the dims of the rollout's tensor axis."""


@dataclass(frozen=True)
class Result:
    """All that one run measured."""

    device: str
    ranks: int
    model: str
    dtype: str
    moved: list[Moved]
    trained: Trained
    versions: dict[str, str]


# ---- measuring -------------------------------------------------------------------------------------------------------


class Meter:
    """Times functions on all ranks; a time is that of the slowest.

    Args:
        device: Where the work runs.
        repeats: Times that each function runs.
    """

    def __init__(self, device: torch.device, repeats: int) -> None:
        self._device, self._repeats = device, repeats

    def medians(self, **functions: Callable[[], object]) -> dict[str, float]:
        """Run all functions in turn, again and again, after some turns that do not count."""
        times: dict[str, list[float]] = {name: [] for name in functions}
        for turn in range(WARM_UP + self._repeats):
            for name, function in functions.items():
                seconds = self._once(function)
                if turn >= WARM_UP:
                    times[name].append(seconds)
        return {name: statistics.median(values) for name, values in times.items()}

    def _once(self, function: Callable[[], object]) -> float:
        self._synchronize()
        dist.barrier()
        started = time.perf_counter()
        function()
        self._synchronize()
        slowest = torch.tensor([time.perf_counter() - started], device=self._device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


@contextmanager
def actor_in(shape: str, precision: Any, **options: Any) -> Iterator[tuple[HybridStrategy, Actor, Any]]:
    """An actor with random weights, set up; its memory is free again at the end."""
    strategy = HybridStrategy(reshard_bucket_bytes=BUCKET_BYTES, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="precision='bf16-true'")
        fabric = Fabric(accelerator="auto", strategy=strategy, precision=precision)
    fabric.launch()
    config = tiny_config("qwen2", tie_word_embeddings=False)
    if shape != "tiny":
        sizes = {**SHAPES[shape], "vocab_size": 151936, "num_key_value_heads": 4 if shape == "7B" else 2}
        config = Qwen2Config(**sizes, tie_word_embeddings=False)
    with fabric.device:
        actor = Actor(_cheap_model(config), tokenizer=char_tokenizer())
    module = fabric.setup_module(actor)
    try:
        yield strategy, actor, module
    finally:
        del actor, module
        if fabric.device.type == "cuda":
            torch.cuda.empty_cache()


def _cheap_model(config: Any) -> Any:
    """Random weights, drawn on the device in one dtype; nothing here depends on their values."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def rollout_once(strategy: HybridStrategy, actor: Actor) -> ReshardReport:
    """Enter and leave the rollout layout."""
    with strategy.rollout(actor):
        pass
    return strategy.reshard_report  # type: ignore[return-value]


def full_tensors(actor: Actor, parts: int, index: int) -> None:
    """Make each parameter whole and keep a part of it, one after the other."""
    kept = []
    for parameter in actor.model.parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        dim = whole.ndim - 1
        kept.append(whole.detach().chunk(parts, dim)[index].clone() if whole.shape[dim] > parts else whole)


def exchange(send: Tensor, receive: Tensor) -> None:
    """One buffer each way between two ranks."""
    other = 1 - dist.get_rank()
    operations = [dist.P2POp(dist.isend, send, other), dist.P2POp(dist.irecv, receive, other)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def largest(value: float, device: torch.device) -> float:
    """The largest over ranks."""
    tensor = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def extra_memory(strategy: HybridStrategy, actor: Actor, device: torch.device) -> int | None:
    """Bytes at the peak of a resharding beyond what is held once it is over."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    with strategy.rollout(actor):
        return int(largest(torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated(), device))


def measure_case(case: str, shape: str, precision: str, repeats: int, rollout_tp: int, aligned: bool) -> Moved:
    """One update layout (FSDP2 over all ranks) to one rollout layout."""
    with actor_in(shape, precision, hybrid_engine_config={"rollout_tp": rollout_tp}) as (strategy, actor, _):
        device, rank, ranks = strategy.root_device, dist.get_rank(), dist.get_world_size()
        received = int(largest(rollout_once(strategy, actor).received_bytes, device))
        meter = Meter(device, repeats)
        shares: list[Any] = []
        sides: dict[str, Callable[[], object]] = {
            "ours": lambda: shares.append(rollout_once(strategy, actor).link_share)
        }
        if not aligned:
            sides["full"] = lambda: full_tensors(actor, rollout_tp, rank % rollout_tp)
            send = torch.ones(received, dtype=torch.uint8, device=device)
            if rollout_tp > 1:
                receive = torch.empty_like(send)
                sides["bare"] = lambda: exchange(send, receive)
            else:
                own = send[: received // (ranks - 1)]
                gathered = torch.empty(ranks * own.numel(), dtype=torch.uint8, device=device)
                sides["bare"] = lambda: all_gather_flat(gathered, own)
        medians = meter.medians(**sides)
        sides.clear()
        extra = extra_memory(strategy, actor, device)
        share = -largest(-statistics.median(shares[WARM_UP:]), device)
        return Moved(case, received, medians["ours"], medians.get("full"), medians.get("bare"), share, extra)


@contextmanager
def default_placement(enabled: bool) -> Iterator[None]:
    """Let FSDP2 cut along dim 0 in spite of a finer rollout, for the other side of a comparison."""
    from lightning_verl.strategies.engine import HybridEngine

    original = HybridEngine.aligned_dims
    if enabled:
        HybridEngine.aligned_dims = lambda self: {}  # type: ignore[method-assign]
    try:
        yield
    finally:
        HybridEngine.aligned_dims = original  # type: ignore[method-assign]


def measure_training(shape: str, precision: str, repeats: int) -> Trained:
    """A forward and backward pass under either placement, on 8 rows of 1,024 tokens a rank."""
    seconds = {}
    for name, plain in (("default", True), ("aligned", False)):
        with (
            default_placement(plain),
            actor_in(shape, precision, hybrid_engine_config={"rollout_tp": 2}) as (strategy, actor, module),
        ):
            rows = _rows(*((4, 16) if shape == "tiny" else (8, 1024)), strategy.root_device)

            def step(module: Any = module, rows: RolloutBatch = rows) -> None:
                module(rows)[0].sum().backward()
                module.zero_grad()

            seconds[name] = Meter(strategy.root_device, repeats).medians(step=step)["step"]
    return Trained(seconds["default"], seconds["aligned"])


def _rows(count: int, tokens: int, device: torch.device) -> RolloutBatch:
    return RolloutBatch(
        input_ids=torch.randint(3, 100, (count, tokens), device=device),
        prompt_lengths=torch.full((count,), tokens // 2, device=device),
        response_lengths=torch.full((count,), tokens // 2, device=device),
        rollout_logprobs=torch.zeros(count, tokens // 2, device=device),
        group_ids=torch.arange(count, device=device),
        truncated=torch.zeros(count, dtype=torch.bool, device=device),
        prompt_texts=[""] * count,
        response_texts=[""] * count,
        fields=[{}] * count,
    )


def measure(shape: str, training_shape: str, precision: str, repeats: int) -> Result:
    """Everything, on two ranks."""
    with default_placement(True):
        moved = [
            measure_case("FSDP2(2) to TP2", shape, precision, repeats, 2, aligned=False),
            measure_case("FSDP2(2) to 2 replicas", shape, precision, repeats, 1, aligned=False),
        ]
    moved.insert(1, measure_case("FSDP2(2), aligned, to TP2", shape, precision, repeats, 2, aligned=True))
    trained = measure_training(training_shape, precision, repeats)
    on_cuda = torch.cuda.is_available()
    return Result(
        device=torch.cuda.get_device_name() if on_cuda else "CPU",
        ranks=dist.get_world_size(),
        model=shape,
        dtype=precision,
        moved=moved,
        trained=trained,
        versions={"torch": torch.__version__, "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_cuda else ""},
    )


# ---- the page --------------------------------------------------------------------------------------------------------


def save(path: Path, result: Result) -> None:
    """Write the result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(result), indent=2) + "\n")


def load(path: Path) -> Result:
    """Read a result."""
    entry = json.loads(path.read_text())
    moved = [Moved(**case) for case in entry.pop("moved")]
    return Result(moved=moved, trained=Trained(**entry.pop("trained")), **entry)


def page(result: Result) -> str:
    """The page about a result."""
    lines = [
        "# Resharding",
        "",
        "Written by `python benchmarks/reshard.py --table-only`; do not edit.",
        "",
        f"{result.ranks} x {result.device}, {result.model} shape (Qwen2.5, random weights), `{result.dtype}`, torch "
        f"{result.versions['torch']}. Measured with `{COMMAND}`. All sides of a line ran in the same process; medians.",
        "",
        "| from, to | received by a rank | ours | `full_tensor` by parameter | bare exchange of the same bytes | "
        "share of the link | extra memory at the peak |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in result.moved:
        full, bare = case.full_tensor_seconds, case.bare_exchange_seconds
        lines.append(
            f"| {case.case} | {case.received_bytes / 1e6:,.1f} MB | {case.seconds * 1e3:.1f} ms | "
            f"{_times(full, case.seconds)} | {_times(bare, case.seconds)} | {_share(case.link_share)} | "
            f"{_memory(case.extra_bytes)} |"
        )
    trained = result.trained
    lines += [
        "",
        "Multiples are of our own time: above 1 the other way is slower. The bare exchange moves one buffer each "
        "way, or is one all-gather where the rollout holds whole copies. The share of the link is the rate at which "
        "bytes came while the weights moved, over that of a bare exchange of a bucket's bytes between the same ranks, "
        "which each engine measures before its first resharding (`reshard_report.link_share`); our own time counts "
        "entering and leaving the rollout too.",
        "",
        f"A forward and backward pass takes {trained.aligned_seconds / trained.default_seconds:.3f} times as long "
        f"with aligned shards ({trained.aligned_seconds * 1e3:.1f} ms) as with FSDP2's default "
        f"({trained.default_seconds * 1e3:.1f} ms): a shard of another dim than 0 is copied once more in each gather "
        "and reduction. Shards are aligned only where the rollout is cut finer than the update layout.",
        "",
    ]
    return "\n".join(lines)


def _times(other: float | None, own: float) -> str:
    return "" if other is None else f"{other * 1e3:.1f} ms ({other / own:.2f}x)"


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _memory(extra: int | None) -> str:
    return "" if extra is None else f"{extra / 2**20:,.0f} MiB"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS, help="the JSON file")
    parser.add_argument("--table-only", action="store_true", help="measure nothing, only write the page again")
    parser.add_argument("--model", choices=(*SHAPES, "tiny"), default="7B", help="what is resharded")
    parser.add_argument("--training-model", choices=(*SHAPES, "tiny"), default="1.5B", help="what is trained")
    parser.add_argument("--precision", choices=("bf16-true", "bf16-mixed", "32-true"), default="bf16-true")
    parser.add_argument("--repeats", type=int, default=10, help="times that each side runs")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the JSON file, or write the page."""
    options = _parser().parse_args(arguments)
    if not options.table_only:
        result = measure(options.model, options.training_model, options.precision, options.repeats)
        if dist.get_rank() == 0:
            save(options.output, result)
            print(page(result))
        dist.destroy_process_group()
        return
    PAGE.write_text(page(load(RESULTS)))


if __name__ == "__main__":
    main()
