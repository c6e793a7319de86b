"""One trial: a few steps of a run, in processes of its own, so that what it breaks or leaves behind ends with them.

``run_trial`` starts it and reads what it wrote. The process is this module; with several ranks Fabric starts the
others from it, as it does in a run.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch

from lightning_verl.config import TrainConfig, read_config
from lightning_verl.train import check_libraries, make_fabric, make_trainer
from lightning_verl.tuning.files import write_config
from lightning_verl.tuning.probe import Probe
from lightning_verl.tuning.record import Record, load
from lightning_verl.tuning.traffic import RECORDER_SIZE

GIB = 2**30
_RECORD, _PROBLEM, _CONFIG = "record.json", "problem-", "config.yaml"
_TAIL = 300
"""Characters of what a process said last that are kept where it says nothing else."""


# ---- from outside ----------------------------------------------------------------------------------------------------


def run_trial(
    config: TrainConfig, modules: Path, *, steps: int, warmup: int, memory_gib: float | None, time_limit: float
) -> Record:
    """Take a few steps of a run, in processes of its own.

    Args:
        config: The run; nothing is left in its ``output``.
        modules: The folder that its rewards lie in.
        steps: Steps that count.
        warmup: Steps before them.
        memory_gib: Most memory of a GPU, in GiB; None: all of it.
        time_limit: Seconds after which it is ended.

    Returns:
        What it measured, or why not.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_config(folder / _CONFIG, config)
        words = [str(folder), str(modules), "--steps", str(steps), "--warmup", str(warmup)]
        words += [] if memory_gib is None else ["--memory", str(memory_gib)]
        return run_process([sys.executable, "-m", "lightning_verl.tuning.trial", *words], folder, time_limit)


def run_process(command: Sequence[str], folder: Path, time_limit: float) -> Record:
    """Run a command whose ranks leave a record, or say why they failed, in a folder.

    Args:
        command: Its words.
        folder: Where ``record_path`` and ``reporting`` write.
        time_limit: Seconds after which it and all that it started is ended.
    """
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": str(RECORDER_SIZE), "TOKENIZERS_PARALLELISM": "false"}
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(  # noqa: S603, this interpreter with words of our own
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status, problem = process.wait(time_limit), ""
        except subprocess.TimeoutExpired:
            status, problem = 1, f"it took longer than {time_limit:g} s"
        finally:
            _end_session(process)
    record = load(record_path(folder)) if record_path(folder).exists() else Record()
    said = [path.read_text() for path in sorted(folder.glob(f"{_PROBLEM}*"))]
    memory = next((text for text in said if "out of memory" in text), None)
    if not status and not record.seconds:
        status, problem = 1, "it ended before the steps that count: the data has too few prompts"
    if not status:
        return record
    if status == -signal.SIGKILL and not problem:
        memory = memory or "out of memory: the system ended the process"
    problem = problem or memory or next(iter(said), "") or log.read_text()[-_TAIL:].strip() or f"status {status}"
    return replace(record, problem=problem, out_of_memory=memory is not None)


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started, which are in a session of its own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# ---- from inside -----------------------------------------------------------------------------------------------------


def record_path(folder: Path) -> Path:
    """Where rank 0 of a trial writes its record."""
    return folder / _RECORD


@contextmanager
def reporting(folder: Path) -> Iterator[None]:
    """Leave the error that ends a rank where ``run_process`` finds it."""
    try:
        yield
    except BaseException as error:
        rank = os.environ.get("LOCAL_RANK", "0")
        kind = "out of memory" if isinstance(error, torch.OutOfMemoryError) else type(error).__name__
        text = str(error).strip().splitlines()
        (folder / f"{_PROBLEM}{rank}").write_text(f"{kind}: {text[0]}" if text else kind)
        raise


def limit_memory(device: torch.device, memory_gib: float | None) -> None:
    """Bound the memory that PyTorch may take of a GPU; elsewhere nothing does."""
    if memory_gib is not None and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory_gib * GIB / total), device)


def main(words: Sequence[str] | None = None) -> None:
    """Take the steps of a trial."""
    from lightning_verl.callbacks import Throughput

    options = _parser().parse_args(words)
    sys.path[:0] = [str(options.modules), str(Path.cwd())]
    with reporting(options.folder):
        config = read_config([str(options.folder / _CONFIG)])
        check_libraries(config)
        probe = Probe(record_path(options.folder), options.warmup, options.steps)
        fabric = make_fabric(config, [Throughput(), probe])
        limit_memory(fabric.device, options.memory)
        trainer = make_trainer(config, fabric)
        trainer.fit(probe.total)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Take a few steps of a run and measure them.")
    parser.add_argument("folder", type=Path, help="holds the config; record and problems are written there")
    parser.add_argument("modules", type=Path, help="the folder of the rewards")
    parser.add_argument("--steps", type=int, required=True, help="steps that count")
    parser.add_argument("--warmup", type=int, required=True, help="steps before them")
    parser.add_argument("--memory", type=float, help="most GiB of a GPU")
    return parser


if __name__ == "__main__":
    main()
