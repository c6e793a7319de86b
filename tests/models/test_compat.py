"""Version checks, and the adapters for what differs between versions."""

from __future__ import annotations

import sys
from datetime import timedelta
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_verl.models import compat
from lightning_verl.testing import run_ranks, tiny_model


def _pretend(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    def version(distribution: str) -> str:
        found = versions.get(distribution)
        if found is None:
            raise metadata.PackageNotFoundError(distribution)
        return found

    monkeypatch.setattr(metadata, "version", version)


def _record_questions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The libraries that are checked from now on, by name; the checks themselves go on."""
    asked: list[str] = []
    require = compat._require

    def recorded(name: str, *arguments: Any) -> None:
        asked.append(name)
        require(name, *arguments)

    monkeypatch.setattr(compat, "_require", recorded)
    return asked


def test_the_installed_versions_are_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _record_questions(monkeypatch)
    compat.check_versions()
    assert asked == ["torch", "transformers"]


@pytest.mark.parametrize("torch_version", ["2.11.0", "2.11.0a0+git1234", "2.13.0+cpu", "3.0"])
@pytest.mark.parametrize("transformers_version", ["5.17.0", "5.24.0", "5.25.0.dev0"])
def test_supported_versions_pass(
    monkeypatch: pytest.MonkeyPatch, torch_version: str, transformers_version: str
) -> None:
    _pretend(monkeypatch, torch=torch_version, transformers=transformers_version)
    asked = _record_questions(monkeypatch)
    compat.check_versions()
    assert asked == ["torch", "transformers"]


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({"torch": "2.10.1"}, r"needs torch>=2\.11, but torch 2\.10\.1 is installed .*pip install 'torch>=2\.11'"),
        ({"torch": None}, r"needs torch>=2\.11, but torch is not installed"),
        ({"transformers": "5.16.1"}, r"needs transformers<6,>=5\.17, but transformers 5\.16\.1 is installed"),
        ({"transformers": "6.0.0"}, r"needs transformers<6,>=5\.17, but transformers 6\.0\.0 is installed"),
        ({"transformers": None}, r"transformers is not installed .*pip install 'transformers<6,>=5\.17'"),
    ],
)
def test_other_versions_are_refused(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str | None], message: str
) -> None:
    _pretend(monkeypatch, **{"torch": "2.13.0", "transformers": "5.19.0", **versions})
    with pytest.raises(ImportError, match=message):
        compat.check_versions()


@pytest.mark.parametrize("version", ["0.22.0", "0.32.0+cpu"])
def test_vllm_is_checked_where_it_is_used(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))  # type: ignore[misc]
    asked = _record_questions(monkeypatch)
    compat.check_versions(vllm=True)
    assert asked == ["torch", "transformers", "vllm"]


def test_an_old_or_missing_vllm_is_refused_only_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.21.0"))  # type: ignore[misc]
    compat.check_versions()
    with pytest.raises(ImportError, match=r"needs vllm>=0\.22, but vllm 0\.21\.0 is installed .*running engine"):
        compat.check_versions(vllm=True)
    monkeypatch.setitem(sys.modules, "vllm", None)  # type: ignore[arg-type]  # how Python marks a missing module
    with pytest.raises(ImportError, match=r"needs vllm>=0\.22, but vllm is not installed"):
        compat.check_versions(vllm=True)


@pytest.mark.parametrize(
    ("version", "name"), [("5.17.0", "past_key_values"), ("5.23.2", "past_key_values"), ("5.24.0", "cache")]
)
def test_cache_argument_by_version(monkeypatch: pytest.MonkeyPatch, version: str, name: str) -> None:
    _pretend(monkeypatch, transformers=version)
    assert compat.cache_argument() == name


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_cache_argument_fits_the_installed_transformers(family: Any) -> None:
    model, ids, name = tiny_model(family), torch.arange(4, 10)[None], compat.cache_argument()
    with torch.no_grad():
        whole = model(ids).logits
        first = model(ids[:, :4], use_cache=True)
        rest = model(ids[:, 4:], use_cache=True, **{name: getattr(first, name)})
    torch.testing.assert_close(rest.logits, whole[:, 4:])


def _descending_group() -> tuple[int, str, float]:
    dist.init_process_group("gloo")
    group = compat.new_group([1, 0], backend="gloo", timeout=timedelta(seconds=30), description="critic data")
    received = torch.tensor(float(dist.get_rank()))
    dist.broadcast(received, group=group, group_src=0)
    return dist.get_rank(group), group.group_desc, received.item()


def test_group_ranks_follow_the_given_order() -> None:
    # World rank 1 is the group's rank 0 and sends its number, 1.
    assert run_ranks(_descending_group, 2) == [(1, "critic data", 1.0), (0, "critic data", 1.0)]


def test_a_torch_that_sorts_ranks_takes_ascending_ones_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[int]] = []

    def old_new_group(
        ranks: list[int], timeout: object, backend: object, pg_options: object, group_desc: object
    ) -> str:
        calls.append(ranks)
        return "group"

    monkeypatch.setattr(dist, "new_group", old_new_group)
    assert compat.new_group((0, 2)) == "group"
    with pytest.raises(ValueError, match=r"ranks \[2, 0\] do not ascend, and torch .* would sort them silently"):
        compat.new_group([2, 0])
    assert calls == [[0, 2]]
