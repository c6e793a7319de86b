"""The options that a group of high priority is made with; no NCCL is needed to see them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lightning_verl import NCCLGroupManager
from lightning_verl.models import compat


class Options:
    """Stands for ``ProcessGroupNCCL.Options``, which torch's CPU builds lack; a time-out of its own, as there."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(seconds=600)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """What ``compat.new_group`` is given, in a world of NCCL with this process as rank 1."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)

    def new_group(ranks: Any, **arguments: Any) -> str:
        calls.append({"ranks": list(ranks), **arguments})
        return "a group"

    monkeypatch.setattr(compat, "new_group", new_group)
    yield calls
    monkeypatch.undo()  # before what looks for groups that a test left


@pytest.mark.parametrize("backend", [None, "nccl"], ids=["of the world", "asked for"])
def test_high_priority_is_a_stream_option_with_the_groups_own_timeout(
    made: list[dict[str, Any]], backend: str | None
) -> None:
    wait = timedelta(seconds=77)
    group = NCCLGroupManager.create_group([0, 1], backend, wait, high_priority=True, description="critic")
    assert group == "a group"  # type: ignore[comparison-overlap]
    (call,) = made
    options = call.pop("options")
    assert call == {"ranks": [0, 1], "backend": backend, "timeout": wait, "description": "critic"}
    assert options.is_high_priority_stream is True
    assert options._timeout == wait  # NCCL takes the options' one, not the argument


@pytest.mark.parametrize(("backend", "high_priority"), [("gloo", True), ("nccl", False), (None, False)])
def test_without_nccl_or_priority_there_are_no_options(
    made: list[dict[str, Any]], backend: str | None, high_priority: bool
) -> None:
    assert NCCLGroupManager.create_group([0, 2], backend, high_priority=high_priority) is None  # rank 1 is outside
    assert [call["options"] for call in made] == [None]
