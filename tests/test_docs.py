"""The pages at the root and in docs/: every fenced python, bash and yaml block works.

Python blocks of one file run as one script, one after the other. A block that cannot run in a test stands behind
``<!-- no-run: reason -->``, with one of the reasons below. Of bash blocks, each line that starts one of this project's
commands is checked to exist with its options; yaml blocks must parse.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import re
import shlex
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from script_runs import run_script

from lightning_verl.cli import main

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]

MOST_UNRUN = {
    "a fragment of a longer script": 12,
    "downloads weights from a model hub": 8,
    "needs several GPUs": 8,
    "needs several processes": 8,
    "needs vLLM": 4,
}
"""The reasons for a block not to run, and how many blocks may give each."""

_BLOCK = re.compile(
    r"(?:^<!-- no-run:(?P<reason>[^\n]*?)-->\n+)?^```(?P<language>\w+)[^\n]*\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_TARGET = re.compile(r"^([a-z][\w.-]*):(?!=)", re.MULTILINE)
_ENVIRONMENT = re.compile(r"^(\w+=\S* +)+")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    language: str
    code: str
    reason: str | None
    """Why it does not run; None: it runs."""


def blocks(page: Path, text: str | None = None) -> list[Block]:
    """Return the fenced blocks of a page that name a language."""
    found = _BLOCK.finditer(page.read_text() if text is None else text)
    return [Block(page, m["language"], m["code"], m["reason"] and m["reason"].strip()) for m in found]


def commands(code: str) -> list[list[str]]:
    """Return the lines that run something of this project, as words, without variables in front and what follows."""
    lines = [_ENVIRONMENT.sub("", line.strip().removeprefix("$ ")) for line in code.replace("\\\n", " ").splitlines()]
    parts = [part.strip() for line in lines for part in re.split(r"&&|\|\||[|;]", line)]
    words = [shlex.split(part, comments=True) for part in parts]
    return [line for line in words if line and line[0] in {"lightning-verl", "python", "torchrun", "make"}]


def problem(words: list[str]) -> str | None:
    """Return what is wrong with a command, None if nothing is."""
    program, *rest = words
    if program == "lightning-verl" or (program == "python" and rest[:2] == ["-m", "lightning_verl"]):
        return _cli_problem(rest if program == "lightning-verl" else rest[2:])
    if program == "make":
        targets = [word for word in rest if "=" not in word and not word.startswith("-")]
        unknown = set(targets) - set(_TARGET.findall((ROOT / "Makefile").read_text()))
        return f"no target {sorted(unknown)} in the Makefile" if unknown else None
    if program == "python" and rest[:1] == ["-m"]:
        return None if importlib.util.find_spec(rest[1]) else f"no module {rest[1]}"
    scripts = [word for word in rest if word.endswith(".py")]
    return next((f"no file {script}" for script in scripts if not (ROOT / script).is_file()), None)


def _cli_problem(words: list[str]) -> str | None:
    subcommand = tuple(word for word in words[:1] if not word.startswith("-"))
    code, output = _help(subcommand)
    if code:
        return f"`lightning-verl {' '.join(subcommand)} --help` ends with {code}: {output[-500:]}"
    options = {word.partition("=")[0] for word in words if word.startswith("--")}
    unknown = {option for option in options if not re.search(rf"{re.escape(option)}(?![\w.-])", output)}
    return f"no option {sorted(unknown)} in the help of {subcommand}" if unknown else None


@functools.cache
def _help(subcommand: tuple[str, ...]) -> tuple[int, str]:
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output), pytest.raises(SystemExit) as end:
        main([*subcommand, "--help"])
    return int(end.value.code or 0), output.getvalue()


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    code = "\n".join(block.code for block in blocks(page) if block.language == "python" and block.reason is None)
    (tmp_path / "page.py").write_text(code)
    if code:
        run_script(tmp_path / "page.py", timeout=280)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_commands_exist(page: Path) -> None:
    lines = [line for block in blocks(page) if block.language == "bash" for line in commands(block.code)]
    problems = {" ".join(words): found for words in lines if (found := problem(words))}
    assert problems == {}


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_yaml_blocks_parse(page: Path) -> None:
    for block in blocks(page):
        if block.language == "yaml":
            assert isinstance(yaml.safe_load(block.code), dict | list), block.code


def test_blocks_that_do_not_run_are_few_and_say_why() -> None:
    reasons = Counter(block.reason for page in PAGES for block in blocks(page) if block.reason is not None)
    assert set(reasons) <= set(MOST_UNRUN), "give one of the reasons in MOST_UNRUN"
    assert reasons <= Counter(MOST_UNRUN), "run more of the blocks"


def test_blocks_are_found_with_their_reasons() -> None:
    text = "```python\na = 1\n```\n\n<!-- no-run: needs vLLM -->\n\n```bash\nmake\n```\n"
    text += "<!-- no-run: -->\n```yaml\nb: 2\n```\n"
    found = [(block.language, block.code, block.reason) for block in blocks(ROOT, text)]
    assert found == [("python", "a = 1\n", None), ("bash", "make\n", "needs vLLM"), ("yaml", "b: 2\n", "")]


def test_commands_are_found_and_checked() -> None:
    code = (
        "cd x && make test ARGS=-x  # all\nOMP_NUM_THREADS=1 torchrun --nproc-per-node 2 \\\n  nowhere.py --a 1\nls\n"
    )
    found = commands(code + "$ python -m no_such_module\nmake no-such-target\n")
    assert found[:2] == [["make", "test", "ARGS=-x"], ["torchrun", "--nproc-per-node", "2", "nowhere.py", "--a", "1"]]
    assert [problem(words) for words in found] == [
        None,
        "no file nowhere.py",
        "no module no_such_module",
        "no target ['no-such-target'] in the Makefile",
    ]
