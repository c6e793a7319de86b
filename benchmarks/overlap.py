"""Measures what it is worth to do something beside something else, each with and without, in turn, in one run.

    python benchmarks/overlap.py --output docs/benchmarks/overlap.json
    python benchmarks/overlap.py --table-only

The first line measures on one GPU and writes the JSON file. The second one measures nothing and writes the page
docs/benchmarks/overlap.md from docs/benchmarks/overlap.json. Both arms of a case do the same work; a case whose results
differ between them ends the run. On a CPU it runs too, with ``--shape tiny``, and shows nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from rollout_results import Work
from step_common import prompt_texts, word_tokenizer
from step_ours import FixedLengthsActor

from lightning_verl import AsyncRolloutDataset, HybridDataFlow, HybridStrategy, Reference, RewardFunction
from lightning_verl.callbacks import PrefetchLoader
from lightning_verl.data.experience import PromptBatch, RolloutBatch
from lightning_verl.rollout.batch import join_rollouts
from lightning_verl.rollout.sampling import SamplingParams
from lightning_verl.strategies.offload import StateOffload
from lightning_verl.tuning.shapes import SHAPES, model_config

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "benchmarks" / "overlap.json"
PAGE = RESULTS.with_suffix(".md")
COMMAND = "python benchmarks/overlap.py --output docs/benchmarks/overlap.json"
REFERENCE_ROWS = 32
"""Rows that the reference scores at once."""


@dataclass(frozen=True)
class Comparison:
    """One case: seconds of each repeat in both arms."""

    name: str
    """What runs beside what."""
    measured: str
    """What the seconds are of."""
    apart: list[float]
    """One after the other."""
    beside: list[float]
    """At once."""

    @property
    def gain(self) -> float:
        """Seconds that it saves, by medians."""
        return statistics.median(self.apart) - statistics.median(self.beside)


class Bench:
    """A data flow on one device, and the rollouts that it measures with.

    Args:
        work: What is sampled.
        repeats: Times that each arm runs, after one that does not count.
    """

    def __init__(self, work: Work, repeats: int) -> None:
        self.work, self._repeats = work, repeats
        strategy = HybridStrategy(hybrid_engine_config={"offload_to_cpu": True})  # without an optimizer nothing moves
        on_cuda = torch.cuda.is_available()
        self.fabric = Fabric(devices=1, strategy=strategy, precision="bf16-true" if on_cuda else "32-true")
        self.fabric.launch()
        config, self.tokenizer = model_config(work.shape), word_tokenizer(work, eos=SHAPES[work.shape][5])
        with self.fabric.device:
            self.fabric.seed_everything(0, verbose=False)
            actor = FixedLengthsActor(config, tokenizer=self.tokenizer)
            actor.lengths = work.lengths()
            self.flow = HybridDataFlow(actor, reward=RewardFunction(waiting), reference=Reference(config))
        self.flow.setup(self.fabric)
        self.sampling = SamplingParams(max_new_tokens=work.new_tokens, n=work.n)
        with self.data().loader(work.prompts, list(range(work.prompts))) as loader:
            self.prompts: PromptBatch = next(iter(loader)).to(self.fabric.device)

    def data(self) -> AsyncRolloutDataset:
        """The prompts of all steps."""
        rows = [{"prompt": text} for text in prompt_texts(self.work, 2 * self._repeats + 2)]
        return AsyncRolloutDataset(rows, tokenizer=self.tokenizer, shuffle=False)

    def compare(self, name: str, measured: str, arms: Sequence[Callable[[], tuple[float, Any]]]) -> Comparison:
        """Run both arms in turn; each returns its seconds and its results, a list of tensors."""
        seconds: list[list[float]] = [[], []]
        for turn in range(self._repeats + 1):
            results = []
            for times, arm in zip(seconds, arms, strict=True):
                took, result = arm()
                results.append(result)
                if turn:
                    times.append(took)
            for apart, beside in zip(*results, strict=True):
                if not torch.allclose(apart.float(), beside.float(), atol=1e-3):
                    raise RuntimeError(f"overlap: the arms of {name!r} differ in their results")
        return Comparison(name, measured, *seconds)

    def timed(self, function: Callable[[], Any]) -> tuple[float, Any]:
        """Seconds until the device is through, and what came out."""
        self.synchronize()
        started = time.perf_counter()
        result = function()
        self.synchronize()
        return time.perf_counter() - started, result

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.fabric.device.type == "cuda":
            torch.cuda.synchronize()


# ---- rewards ---------------------------------------------------------------------------------------------------------


def computing(response: str) -> float:
    """Some milliseconds in Python's interpreter."""
    total = len(response)
    for number in range(30_000):
        total = (total * 31 + number) % 1_000_003
    return float(total % 7)


def waiting(response: str) -> float:
    """A fifth of a second somewhere else: a sandbox, a judge."""
    time.sleep(0.2)
    return float(len(response) % 7)


REWARDS: dict[str, tuple[Callable[[str], float], int]] = {
    "a function that computes, in the calling thread": (computing, 0),
    "a function that computes, in 4 threads": (computing, 4),
    "a function that waits 0.2 s, in 16 threads": (waiting, 16),
}
"""The functions, and their ``num_workers``."""


def rewards(bench: Bench) -> Iterator[Comparison]:
    """Reward functions beside the rollout."""
    for name, (function, workers) in REWARDS.items():

        def run(during: bool, function: Any = function, workers: int = workers) -> tuple[float, list[torch.Tensor]]:
            reward = RewardFunction(function, num_workers=workers, during_rollout=during)
            bench.flow.modules["reward"] = reward

            def step() -> list[torch.Tensor]:
                with bench.flow.scoring_meanwhile():
                    batch = bench.flow.rollout(bench.prompts, bench.sampling, 0)
                return [batch.input_ids, bench.flow.score(batch).scores]

            return bench.timed(step)

        yield bench.compare(f"{name}: rollout", "rollout and rewards", [lambda: run(False), lambda: run(True)])


# ---- prompts ---------------------------------------------------------------------------------------------------------


def prompts(bench: Bench) -> Comparison:
    """The next prompts beside the rollout; seconds are those that a step waits for them."""
    loaders: dict[str, Any] = {}
    for name in ("apart", "beside"):
        wrapped = {"train": bench.data().loader(bench.work.prompts, list(range(bench.work.prompts)))}
        if name == "beside":
            PrefetchLoader().on_loader_setup(wrapped, bench.fabric.device)
        loaders[name] = wrapped["train"]
    batches = {name: iter(loader) for name, loader in loaders.items()}

    def wait(name: str) -> tuple[float, list[torch.Tensor]]:
        seconds, batch = bench.timed(lambda: next(batches[name]).to(bench.fabric.device))
        bench.flow.rollout(batch, bench.sampling, 0)
        return seconds, [batch.ids]

    try:
        return bench.compare(
            "`PrefetchLoader`: the step", "`time/data_wait`", [lambda: wait("apart"), lambda: wait("beside")]
        )
    finally:
        for loader in loaders.values():
            loader.close()


# ---- optimizer states ------------------------------------------------------------------------------------------------


@contextmanager
def waited_for() -> Iterator[None]:
    """Let every copy of optimizer states be waited for at once."""
    real = {name: getattr(StateOffload, name) for name in ("start", "bring_back")}

    def and_wait(name: str) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            real[name](*arguments)
            if torch.cuda.is_available():
                torch.cuda.synchronize()

        return run

    for name in real:
        setattr(StateOffload, name, and_wait(name))
    try:
        yield
    finally:
        for name, method in real.items():
            setattr(StateOffload, name, method)


def states(bench: Bench) -> Comparison:
    """Optimizer states to the host beside the resharding, and back beside the reference's pass."""
    flow = bench.flow
    flow.setup_optimizers()
    optimizer = flow.optimizers["actor"]
    for parameter in flow.modules["actor"].parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()

    def step() -> list[torch.Tensor]:
        batch = flow.rollout(bench.prompts, bench.sampling, 0)
        return [batch.input_ids, flow.reference_logprobs(batch)]

    def apart() -> tuple[float, list[torch.Tensor]]:
        with waited_for():
            return bench.timed(step)

    name = "`offload_to_cpu`: resharding and the reference's pass"
    return bench.compare(name, "rollout and reference", [apart, lambda: bench.timed(step)])


# ---- the reference ---------------------------------------------------------------------------------------------------


class ReferenceBeside:
    """Runs the reference on samples that have ended, on a stream of its own, in the time that the host has.

    Args:
        bench: The data flow.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench, self.rows, self.sums = bench, [], []
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    def finished(self, row: int, response: Sequence[int]) -> None:
        """A sample has ended."""
        self.rows.append((row, list(response)))

    def meanwhile(self, busy: Callable[[], bool]) -> None:
        """Launch what fills a micro-batch."""
        while len(self.rows) >= REFERENCE_ROWS and busy():
            self.run()

    def run(self) -> None:
        """One micro-batch."""
        batch = self._batch(self.rows[:REFERENCE_ROWS])
        del self.rows[:REFERENCE_ROWS]
        with torch.no_grad(), torch.cuda.stream(self._stream):
            self.sums.append(self._bench.flow.modules["reference"](batch)[0].sum())

    def finish(self) -> list[torch.Tensor]:
        """What is left; the sum of each micro-batch's log-probs."""
        while self.rows:
            self.run()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        return [torch.stack(self.sums)]

    def _batch(self, rows: list[tuple[int, list[int]]]) -> RolloutBatch:
        from lightning_verl.rollout.base import FinishReason
        from lightning_verl.rollout.inputs import rollouts_of

        bench, device = self._bench, self._bench.fabric.device
        rollouts = rollouts_of(
            [ids for _, ids in rows],
            [[0.0] * len(ids) for _, ids in rows],
            [FinishReason.LENGTH] * len(rows),
            1,
            pad_token_id=0,
            weight_version=0,
            device=device,
        )
        prompts = bench.prompts.select([row // bench.work.n for row, _ in rows])
        texts = dict.fromkeys(range(len(rows)), "")
        return join_rollouts(prompts, rollouts, bench.tokenizer, bench.sampling, True, texts)


def reference(bench: Bench) -> Comparison:
    """The reference's pass over samples that have ended, beside the tail of the rollout."""

    def run(during: bool) -> tuple[float, list[torch.Tensor]]:
        watch = ReferenceBeside(bench)
        if not during:
            watch.meanwhile = lambda busy: None  # type: ignore[method-assign]

        def step() -> list[torch.Tensor]:
            with bench.fabric.strategy.rollout(bench.flow.modules["actor"]) as engine:
                engine.generate(bench.prompts, bench.sampling, watch=watch)
            return watch.finish()

        return bench.timed(step)

    arms = [lambda: run(False), lambda: run(True)]
    return bench.compare("the reference's pass: the tail of the rollout", "rollout and reference", arms)


# ---- results ---------------------------------------------------------------------------------------------------------


def save(path: Path, work: Work, cases: Sequence[Comparison]) -> None:
    """Write the results."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {"device": device, "torch": str(torch.__version__), "work": asdict(work), "cases": list(map(asdict, cases))}
    path.write_text(json.dumps(kept, indent=2) + "\n")


def page(path: Path) -> str:
    """The Markdown page of a results file."""
    kept = json.loads(path.read_text())
    work, cases = Work(**kept["work"]), [Comparison(**case) for case in kept["cases"]]
    rows = [
        f"| {case.name} | {case.measured} | {statistics.median(case.apart):.3f} | {statistics.median(case.beside):.3f} "
        f"| {case.gain:+.3f} |"
        for case in cases
    ]
    return "\n".join(
        [
            "# One thing beside another",
            "",
            "Written by `python benchmarks/overlap.py --table-only`; do not edit. Made with:",
            "",
            f"```bash\n{COMMAND}\n```",
            "",
            f"Seconds, medians of {len(cases[0].apart)} repeats, the arms in turn; {work.name}.",
            "Results are the same in both arms. What wins is the default.",
            "",
            "| what runs beside what | measured | apart | beside | saved |",
            "|---|---|---|---|---|",
            *rows,
            "",
            f"{kept['device']}, torch {kept['torch']}.",
            "",
        ]
    )


def measure(work: Work, repeats: int) -> list[Comparison]:
    """All cases."""
    bench = Bench(work, repeats)
    cases: list[Comparison] = []
    for case in [*rewards(bench), prompts(bench), reference(bench), states(bench)]:
        print(f"{case.name}: {case.gain:+.3f} s", flush=True)
        cases.append(case)
    return cases


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write, or write the page."""
    parser = argparse.ArgumentParser(description="Measure what overlap is worth.")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the JSON file")
    parser.add_argument("--table-only", action="store_true", help="measure nothing, only write the page again")
    parser.add_argument("--shape", choices=SHAPES, default="1.5B")
    parser.add_argument("--prompts", type=int, default=32, help="different prompts, 8 samples each")
    parser.add_argument("--new-tokens", type=int, default=512, help="most tokens of a response; the least is 16")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    if not options.table_only:
        work = Work(options.shape, prompts=options.prompts, new_tokens=options.new_tokens, drawn=True)
        save(options.output, work, measure(work, options.repeats))
    options.output.with_suffix(".md").write_text(page(options.output))


if __name__ == "__main__":
    main()
