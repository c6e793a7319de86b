"""Copies to host memory and back that take their time, as CUDA's do: whoever needs what they bring waits for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_verl.strategies.offload import StateOffload


class LateCopies(TorchFunctionMode):
    """Copies that need not block are made once somebody waits for the stream that they are on."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[Callable[[], Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_ and kwargs and kwargs.get("non_blocking"):
            self.pending.append(partial(func, *args))
            return args[0]
        return func(*args, **(kwargs or {}))

    def wait_stream(self, stream: Any) -> None:
        """The current stream waits for the own one."""
        for copy in self.pending:
            copy()
        self.pending.clear()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateCopies]:
    with LateCopies() as late:
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: late)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        yield late


def make_offload() -> StateOffload:
    offload = StateOffload(torch.device("cpu"))
    offload._stream = SimpleNamespace(wait_stream=lambda stream: None)  # type: ignore[assignment]
    return offload


def stepped() -> tuple[torch.optim.AdamW, Tensor, dict[str, Tensor]]:
    """An optimizer after a step, its parameter, and its states of a number for each of the parameter's."""
    parameter = nn.Parameter(torch.arange(6.0))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.square().sum().backward()
    optimizer.step()
    states = {name: value for name, value in optimizer.state[parameter].items() if value.ndim}
    assert sorted(states) == ["exp_avg", "exp_avg_sq"]
    return optimizer, parameter, states


def away(offload: StateOffload, optimizer: torch.optim.Optimizer, states: dict[str, Tensor]) -> None:
    """Send states away; copies out are through before their memory is given back."""
    offload.start([optimizer])
    offload.free()
    assert [value.untyped_storage().nbytes() for value in states.values()] == [0, 0]


def test_gradients_are_back_before_anything_is_added_to_them(copies: LateCopies) -> None:
    optimizer, parameter, states = stepped()
    before = {name: value.clone() for name, value in states.items()}
    offload = make_offload()
    for _ in range(2):  # the second time into buffers that are there
        away(offload, optimizer, states)
        assert parameter.grad is not None
        assert parameter.grad.untyped_storage().nbytes() == 0
        offload.bring_back()
        torch.testing.assert_close(parameter.grad, 2 * torch.arange(6.0), rtol=0, atol=0)
        torch.testing.assert_close(states, before, rtol=0, atol=0)


def test_states_need_not_be_back_before_somebody_waits(copies: LateCopies) -> None:
    optimizer, _, states = stepped()
    before = {name: value.clone() for name, value in states.items()}
    optimizer.zero_grad()
    offload = make_offload()
    away(offload, optimizer, states)
    offload.bring_back()
    assert len(copies.pending) == 2, "nobody needs the states yet"
    offload.wait()
    torch.testing.assert_close(states, before, rtol=0, atol=0)
    away(offload, optimizer, states)
    offload.bring_back()
    offload.start([optimizer])  # the next trip begins before anybody has asked
    offload.free()
    offload.bring_back()
    offload.wait()
    torch.testing.assert_close(states, before, rtol=0, atol=0)
