"""What becomes of process groups when the process ends."""

from __future__ import annotations

import sys

import pytest
import torch.distributed as dist

from lightning_verl.strategies.groups import _leave_groups


@pytest.mark.parametrize(
    ("initialized", "error", "left"), [(True, None, 1), (True, ValueError("no luck"), 0), (False, None, 0)]
)
def test_groups_are_left_by_a_process_that_ends_well(
    monkeypatch: pytest.MonkeyPatch, initialized: bool, error: BaseException | None, left: int
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: initialized)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append(None))
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    _leave_groups()
    assert len(calls) == left
