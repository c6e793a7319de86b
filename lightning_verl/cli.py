"""The command line, ``lightning-verl`` or ``python -m lightning_verl``. Each command loads only what it needs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from lightning_verl import __version__

PROGRAM = "lightning-verl"


class UsageError(Exception):
    """A mistake in what the user wrote: shown as one message, without a traceback."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The words behind the program's name; None takes those of the process.

    Returns:
        The exit status: 0, or 2 for a mistake in the command line or a config. ``--help``, and a command that argparse
        refuses, raise ``SystemExit`` as usual.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    command = _parser().parse_args(words[:1]).command
    try:
        COMMANDS[command](words[1:])
    except UsageError as error:
        print(f"{PROGRAM} {command}: {error}", file=sys.stderr)
        return 2
    return 0


def quickstart(words: Sequence[str]) -> None:
    """train a tiny model here, without a GPU or a network"""
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} quickstart",
        description="Teach a tiny model to sort digits: from examples first, then from rewards. The last line is its "
        "greedy accuracy on unseen prompts before and after the rewards.",
    )
    parser.add_argument("--algorithm", choices=("grpo", "ppo"), default="grpo", help="default: grpo")
    parser.add_argument(
        "--engine", choices=("auto", "native", "transformers", "vllm"), default="auto", help="default: auto"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, data and samples (default: 0)")
    parser.add_argument("--output", type=Path, help="folder of the run (default: runs/quickstart-<algorithm>)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the folder")
    parser.add_argument("--sft-steps", type=int, help="steps of learning from examples, for a shorter run")
    parser.add_argument("--rl-steps", type=int, help="steps of learning from rewards, for a shorter run")
    given = {name: value for name, value in vars(parser.parse_args(words)).items() if value is not None}
    resume = given.pop("resume")
    given.setdefault("output", Path("runs") / f"quickstart-{given['algorithm']}")

    from lightning_verl.quickstart.main import Quickstart, RunFolderError, run_quickstart
    from lightning_verl.rollout.engines import check_engine

    try:
        check_engine("quickstart", given["engine"], {})
    except ImportError as error:
        raise UsageError(str(error)) from error
    try:
        run_quickstart(Quickstart(**given), resume)
    except RunFolderError as error:
        raise UsageError(str(error)) from error


def train(words: Sequence[str]) -> None:
    """train what a YAML file describes"""
    from lightning_verl.config import ConfigError, read_config
    from lightning_verl.train import run_training

    try:
        config = read_config(words)
        with _modules_from(Path(words[0]).parent.resolve(), Path.cwd()):
            run_training(config)
    except ConfigError as error:
        raise UsageError(str(error)) from error


def plan(words: Sequence[str]) -> None:
    """tell how a YAML file's run lies on the ranks, what it takes there, and what to change"""
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} plan",
        description="Print what `train` would do with a config: the layout of each role, memory of a rank in each "
        "phase, bytes between ranks, batches, and advice. Starts nothing, reads no weights, needs no GPU.",
        epilog=f"Options of `{PROGRAM} train`, such as --batch.epochs 2, go before what the file says here too.",
        allow_abbrev=False,
    )
    parser.add_argument("config", help="the YAML file")
    parser.add_argument(
        "--ranks", type=_positive(int), help="processes to plan for (default: devices, or those of one mesh, or 1)"
    )
    parser.add_argument(
        "--memory", type=_positive(float), default=80.0, metavar="GIB", help="memory of a GPU (default: 80)"
    )
    parser.add_argument(
        "--link",
        type=_positive(float),
        metavar="GB/S",
        help="bandwidth between GPUs (default: 280 within 8 ranks that follow each other, 50 beyond)",
    )
    given, options = parser.parse_known_args(words)

    from lightning_verl.config import ConfigError, read_config
    from lightning_verl.planning.plan import Hardware, make_plan
    from lightning_verl.planning.report import report

    try:
        config = read_config([given.config, *options])
        print(report(make_plan(config, given.ranks, Hardware(given.memory, given.link))), end="")
    except ConfigError as error:
        raise UsageError(str(error)) from error


def tune(words: Sequence[str]) -> None:
    """find the fastest settings for a YAML file on this machine, and write them"""
    from lightning_verl.config import ConfigError
    from lightning_verl.tuning.candidates import KNOBS
    from lightning_verl.tuning.search import TuneError
    from lightning_verl.tuning.tune import tune as search

    names = [knob.name for knob in KNOBS]
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} tune",
        description="Take a few steps of a config with one setting after the other, each trial in processes of its "
        "own, and keep what is measurably faster or needed to fit. The order: " + ", ".join(names) + ".",
        epilog=f"Options of `{PROGRAM} train`, such as --batch.epochs 2, go before what the file says here too.",
        allow_abbrev=False,
    )
    parser.add_argument("config", help="the YAML file; devices says on how many ranks")
    parser.add_argument("--write", type=Path, metavar="FILE", help="where the result goes (default: CONFIG.tuned.yaml)")
    parser.add_argument("--only", nargs="+", choices=names, default=[], help="settings to try (default: all)")
    parser.add_argument(
        "--trial-steps", type=_positive(int), default=3, help="steps of a trial that count (default: 3)"
    )
    parser.add_argument(
        "--memory", type=_positive(float), metavar="GIB", help="memory of a GPU to stay within (default: all of it)"
    )
    parser.add_argument(
        "--time-limit", type=_positive(float), default=900.0, metavar="S", help="seconds that a trial may take"
    )
    given, options = parser.parse_known_args(words)
    written = given.write or Path(given.config).with_suffix(".tuned.yaml")
    try:
        search(
            [given.config, *options],
            written,
            only=given.only,
            steps=given.trial_steps,
            memory_gib=given.memory,
            time_limit=given.time_limit,
        )
    except (ConfigError, TuneError) as error:
        raise UsageError(str(error)) from error


def tunings(words: Sequence[str]) -> None:
    """measure what each tuning is worth on this machine"""
    from lightning_verl.tuning.tunings import main

    main(words)


def run(words: Sequence[str]) -> None:
    """start a script with Fabric's launcher, which then knows --strategy hybrid"""
    # Fabric's command line freezes its list of strategies when it is imported; `import lightning_verl` has been before.
    from lightning.fabric import cli

    if not hasattr(cli, "_main"):
        raise UsageError("Fabric's launcher needs click; install it with `pip install click`.")
    cli._main(["run", *words], prog_name=PROGRAM)


def version(words: Sequence[str]) -> None:
    """print the versions of this package and of those that it stands on"""
    argparse.ArgumentParser(prog=f"{PROGRAM} version").parse_args(words)
    below = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "lightning"))
    print(f"{PROGRAM} {__version__} ({below})")


def _positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    """A type of options: numbers above 0."""

    def number(word: str) -> float:
        value = kind(word)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"it must be above 0, got {word!r}")
        return value

    number.__name__ = kind.__name__  # argparse names it where a word is no number at all
    return number


@contextmanager
def _modules_from(*folders: Path) -> Iterator[None]:
    """Find a user's modules in these folders too; unlike `python -m`, an installed command has none of its own."""
    added = [str(folder) for folder in folders if str(folder) not in sys.path]
    sys.path[:0] = added
    try:
        yield
    finally:
        for folder in added:
            sys.path.remove(folder)


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "quickstart": quickstart,
    "train": train,
    "plan": plan,
    "tune": tune,
    "tunings": tunings,
    "run": run,
    "version": version,
}


def _parser() -> argparse.ArgumentParser:
    lines = [f"  {name:<12}{command.__doc__}" for name, command in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} COMMAND ...",
        description="RL post-training for language models as a Lightning Fabric strategy.",
        epilog="\n".join(["commands:", *lines, "", f"`{PROGRAM} COMMAND --help` shows the options of a command."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=tuple(COMMANDS), help=argparse.SUPPRESS)
    return parser
