"""The project files: what a built distribution holds, and that the tested versions fit the declared ranges."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lightning_verl

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
IMPORT_ALL = """
import importlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
for path in sorted(root.glob("lightning_verl/**/*.py")):
    parts = path.relative_to(root).with_suffix("").parts
    if parts[-1] == "__main__":
        continue
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    module = importlib.import_module(name)
    assert pathlib.Path(module.__file__).is_relative_to(root), (name, module.__file__)
    print(name)
"""


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution, itself built from a copy of the checkout."""
    folder = tmp_path_factory.mktemp("build")
    ignore = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "runs", "logs")
    shutil.copytree(ROOT, folder / "checkout", symlinks=True, ignore=ignore)
    sdist = _build("build_sdist", source=folder / "checkout", out=folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    return _build("build_wheel", source=source, out=folder)


def _build(hook: str, source: Path, out: Path) -> Path:
    command = [sys.executable, "-c", BUILD, hook, str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


def _package_files() -> set[str]:
    files = (ROOT / "lightning_verl").rglob("*")
    return {str(path.relative_to(ROOT)) for path in files if path.is_file() and "__pycache__" not in path.parts}


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata_name = f"lightning_verl-{lightning_verl.__version__}.dist-info/METADATA"
        metadata = archive.read(metadata_name).decode()
    assert names == _package_files()
    assert "lightning_verl/py.typed" in names
    assert f"\nVersion: {lightning_verl.__version__}\n" in metadata


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_every_module_can_be_imported_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    shutil.unpack_archive(wheel, tmp_path / "site", format="zip")
    command = [sys.executable, "-c", IMPORT_ALL, str(tmp_path / "site")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), os.getenv("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert "lightning_verl.testing.launcher" in done.stdout.splitlines()


def test_the_version_is_a_literal_so_that_a_build_imports_nothing() -> None:
    tree = ast.parse((ROOT / "lightning_verl" / "__init__.py").read_text())
    assigned = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    values = {ast.unparse(getattr(node, "target", None) or node.targets[0]): node.value for node in assigned}
    assert ast.literal_eval(values["__version__"]) == lightning_verl.__version__


def test_the_links_at_the_root_lead_into_the_package() -> None:
    for name in ("strategies", "callbacks"):
        assert (ROOT / name).readlink() == Path("lightning_verl", name)
        assert (ROOT / name / "__init__.py").is_file()


def test_the_tested_versions_are_within_the_declared_ranges(project: dict[str, Any]) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    tested = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}
    extras = project["project"]["optional-dependencies"]
    for text in [*project["project"]["dependencies"], *extras["test"]]:
        declared = Requirement(text)
        assert declared.specifier.contains(tested[canonicalize_name(declared.name)]), text
    assert tested["torch"] == "2.13.0"
    assert [Requirement(text).name for text in extras["vllm"]] == ["vllm"]
