"""Measures what a communicator of its own is worth: the critic's gradient reduction behind gathers of the actor.

    torchrun --nproc-per-node 2 benchmarks/groups.py --output docs/benchmarks/groups.json
    python benchmarks/groups.py --table-only

The first line measures on two GPUs and writes the JSON file. The second one measures nothing and writes the page
docs/benchmarks/groups.md from docs/benchmarks/groups.json. Every repeat measures all three kinds of groups, one after
the other: the one that actor and critic share, groups of their own, and groups of their own on high-priority streams. A
latency is that of the slower rank, from the issue of the reduction to its end. On CPUs (gloo) it runs too; priorities
mean nothing there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_verl import NCCLGroupManager
from lightning_verl.models.compat import all_gather_flat

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "benchmarks" / "groups.json"
PAGE = RESULTS.with_suffix(".md")
COMMAND = "torchrun --nproc-per-node 2 benchmarks/groups.py --output docs/benchmarks/groups.json"
KINDS = ("shared", "isolated", "isolated, high priority")


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    gathers: int = 20
    """Parameter gathers that the actor queues."""
    gather_mib: float = 256.0
    """Size of each, gathered."""
    reduce_mib: float = 64.0
    """Size of the critic's gradient, all-reduced."""
    repeats: int = 30
    """Times that each kind is measured."""
    warmup: int = 5
    """Times before that."""


@dataclass(frozen=True)
class Latency:
    """What one kind of groups took, in milliseconds."""

    mean: float
    """Over the repeats."""
    largest: float
    """The worst of them."""


@dataclass(frozen=True)
class Result:
    """One run of the benchmark."""

    sizes: Sizes
    """What was measured."""
    latencies: dict[str, Latency]
    """By kind, see ``KINDS``."""
    device: str
    """The GPU's name, or "cpu"."""
    ranks: int
    """Processes."""
    versions: dict[str, str]
    """Of torch and NCCL."""

    @property
    def ratio(self) -> float:
        """How many times faster the reduction is on groups of its own, by means."""
        return self.latencies["shared"].mean / self.latencies["isolated"].mean


def measure(sizes: Sizes, device: torch.device) -> Result:
    """Measure all kinds (a collective call of all ranks); the result is the same on every rank."""
    everybody = range(dist.get_world_size())
    create = lambda high: NCCLGroupManager.create_group(everybody, high_priority=high)  # noqa: E731
    shared = create(False)
    groups = {
        "shared": (shared, shared),
        "isolated": (create(False), create(False)),
        "isolated, high priority": (create(False), create(True)),
    }
    run = _Behind(sizes, device)
    own: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(sizes.warmup + sizes.repeats):
        for kind in KINDS:
            own[kind].append(run.once(*groups[kind]))
    of_all: list[dict[str, list[float]]] = [own] * len(everybody)
    dist.all_gather_object(of_all, {kind: own[kind][sizes.warmup :] for kind in KINDS})
    slowest = {kind: [max(times) for times in zip(*(rank[kind] for rank in of_all), strict=True)] for kind in KINDS}
    latencies = {kind: Latency(statistics.fmean(times), max(times)) for kind, times in slowest.items()}
    on_cuda = device.type == "cuda"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if on_cuda else "none"
    name = torch.cuda.get_device_name(device) if on_cuda else "cpu"
    return Result(sizes, latencies, name, len(everybody), {"torch": str(torch.__version__), "nccl": nccl})


class _Behind:
    """Issues a reduction behind queued gathers and takes its time."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self._gathers, self._device = sizes.gathers, device
        part = int(sizes.gather_mib * 2**20) // 2 // dist.get_world_size()  # bf16 weights
        self._weights = torch.ones(part, dtype=torch.bfloat16, device=device)
        self._gathered = self._weights.new_empty(part * dist.get_world_size())
        self._gradient = torch.ones(int(sizes.reduce_mib * 2**20) // 4, device=device)

    def once(self, actor: dist.ProcessGroup, critic: dist.ProcessGroup) -> float:
        """Milliseconds from the issue of the reduction to its end."""
        self._finish()
        dist.barrier()
        self._finish()
        queued = [all_gather_flat(self._gathered, self._weights, actor, async_op=True) for _ in range(self._gathers)]
        stop = self._clock()
        work = dist.all_reduce(self._gradient, op=dist.ReduceOp.MAX, group=critic, async_op=True)
        work.wait()
        milliseconds = stop()
        for gather in queued:
            gather.wait()
        return milliseconds

    def _clock(self) -> Callable[[], float]:
        if self._device.type != "cuda":
            started = time.perf_counter()
            return lambda: (time.perf_counter() - started) * 1e3
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()  # this stream waits for no gather, so it is now

        def stop() -> float:
            end.record()  # this stream waits for the reduction
            end.synchronize()
            return start.elapsed_time(end)

        return stop

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def save(path: Path, result: Result) -> None:
    """Write a result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**asdict(result), "ratio": result.ratio}, indent=2) + "\n")


def load(path: Path) -> Result | None:
    """Read a result; None without a file."""
    if not path.is_file():
        return None
    kept = json.loads(path.read_text())
    latencies = {kind: Latency(**values) for kind, values in kept["latencies"].items()}
    return Result(Sizes(**kept["sizes"]), latencies, kept["device"], kept["ranks"], kept["versions"])


def page(result: Result | None) -> str:
    """Return the Markdown page of a result."""
    head = "# A communicator of its own\n\nWritten by `python benchmarks/groups.py --table-only`; do not edit.\n\n"
    if result is None:
        return f"{head}Not measured yet:\n\n```bash\n{COMMAND}\n```\n"
    sizes = result.sizes
    rows = [f"| {kind} | {took.mean:.2f} | {took.largest:.2f} |" for kind, took in result.latencies.items()]
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    return head + "\n".join(
        [
            f"The critic's gradients ({sizes.reduce_mib:g} MiB, all-reduced) behind {sizes.gathers} parameter gathers "
            f"of {sizes.gather_mib:g} MiB that the actor has queued, in milliseconds from issue to end:",
            "",
            "| groups | mean | largest |",
            "|---|---|---|",
            *rows,
            "",
            f"On groups of its own the reduction is {result.ratio:.1f} times faster than on a shared one (means). "
            f"{sizes.repeats} repeats after {sizes.warmup}, the kinds in turn; {result.ranks} x {result.device}; "
            f"{versions}.",
            "",
            *_reason(result),
        ]
    )


def _reason(result: Result) -> list[str]:
    """What the ratio is made of."""
    shared, isolated, high = (result.latencies[kind] for kind in KINDS)
    wait, sizes = shared.mean - isolated.mean, result.sizes
    return [
        "One communicator works off what it is given in the order of issue, so that on the shared one the reduction "
        "waits until the gathers in front of it are done; on groups of their own both run at a time, over the same "
        f"links. The difference, {wait:.2f} of {shared.mean:.2f} ms, is {wait / sizes.gathers:.2f} ms for each of the "
        f"{sizes.gathers} gathers. The ratio is thus one of this queue: it grows with what is queued, and a reduction "
        "with nothing in front of it has nothing to gain. What the gathers lose to the reduction beside them was not "
        f"measured. High priority changes the mean little ({isolated.mean:.2f} to {high.mean:.2f} ms); the slowest of "
        f"{sizes.repeats} took {high.largest:.2f} ms instead of {isolated.largest:.2f}.",
        "",
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure what groups of their own are worth; start it with torchrun.")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the JSON file to write")
    parser.add_argument("--table-only", action="store_true", help="measure nothing, only write the page again")
    for name, default in asdict(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the result, or only write the page."""
    options = _parser().parse_args(arguments)
    if options.table_only:
        PAGE.write_text(page(load(RESULTS)))
        return
    on_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_cuda else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank(0)) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    result = measure(Sizes(**{name: getattr(options, name) for name in asdict(Sizes())}), device)
    if dist.get_rank() == 0:
        save(options.output, result)
        print(page(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
