"""docs/api.md: every public name has an entry, and the signatures there are those of the code."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import lightning_verl
import lightning_verl.callbacks
import lightning_verl.testing
from lightning_verl.algorithms import advantages

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
_ENTRY = re.compile(r"^### `(?P<name>[\w.]+)`\n(?:\n```text\n(?P<signature>.*?)```$)?", re.MULTILINE | re.DOTALL)
ENTRIES = {match["name"]: match["signature"] for match in _ENTRY.finditer(PAGE.read_text())}
PROTOCOLS = {"lightning_verl.rollout.base.RolloutEngine"}
"""Entries that are never called."""


def resolve(name: str) -> Any:
    """The object of a dotted name: the longest module in it, then attributes."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise LookupError(name)


def signature(name: str) -> str:
    """How to call it, without types."""
    found = inspect.signature(resolve(name))
    bare = [parameter.replace(annotation=parameter.empty) for parameter in found.parameters.values()]
    return name.rpartition(".")[2] + str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty))


@pytest.mark.parametrize("name", [name for name in ENTRIES if name not in PROTOCOLS])
def test_the_signature_is_the_codes(name: str) -> None:
    shown = ENTRIES[name]
    assert shown is not None, f"{name} has no signature; it is {signature(name)}"
    assert "".join(shown.split()) == "".join(signature(name).split())


def test_every_public_name_has_an_entry() -> None:
    public = {f"lightning_verl.{name}" for name in lightning_verl.__all__}
    public |= {f"lightning_verl.callbacks.{name}" for name in lightning_verl.callbacks.__all__}
    public |= {f"lightning_verl.testing.{name}" for name in lightning_verl.testing.__all__}
    public |= {
        f"{advantages.__name__}.{name}"
        for name, value in vars(advantages).items()
        if inspect.isfunction(value) and value.__module__ == advantages.__name__ and not name.startswith("_")
    }
    public -= {"lightning_verl.__version__", "lightning_verl.NCCLGroupManager"}  # the latter has one method, listed
    assert public <= ENTRIES.keys()
