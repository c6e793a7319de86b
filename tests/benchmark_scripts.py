"""Loads the scripts in benchmarks/, which are no modules of the package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


def load_parts(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """Run a script that is made of several files, which find each other until the test ends."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return load_script(name)


def load_script(name: str) -> ModuleType:
    """Run ``benchmarks/<name>.py`` as a module; each time anew."""
    specification = importlib.util.spec_from_file_location(f"{name}_benchmark", FOLDER / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    return module
