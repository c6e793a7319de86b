"""Copies to a device: the same values, and from pinned memory where the device is a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_verl.data.transfer import float32, int64, to_device


def test_on_the_cpu_the_tensor_itself_comes_back() -> None:
    tensor = torch.arange(3)
    assert to_device(tensor, "cpu") is tensor


def test_a_gpu_gets_it_out_of_pinned_memory_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    # There is no GPU here: what is called on the tensors is recorded.
    calls: list[Any] = []

    class Recorded(torch.Tensor):
        def pin_memory(self, *_: Any) -> Any:
            calls.append("pin")
            return self

        def to(self, *arguments: Any, **options: Any) -> Any:
            calls.append((arguments, options))
            return self

    to_device(torch.arange(3).as_subclass(Recorded), torch.device("cuda"))
    assert calls == ["pin", ((torch.device("cuda"),), {"non_blocking": True})]


def test_numbers_become_tensors_of_one_dtype() -> None:
    assert int64([[1, 2], [3, 2**62]]).equal(torch.tensor([[1, 2], [3, 2**62]]))
    assert int64([]).dtype == torch.int64
    assert float32([0.1, -2.0]).equal(torch.tensor([0.1, -2.0]))
