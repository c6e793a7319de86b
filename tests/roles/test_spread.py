"""Values of response tokens, put back in their rows."""

from __future__ import annotations

from dataclasses import replace

import torch

from lightning_verl.roles.base import spread
from lightning_verl.testing import tiny_rollouts


def test_values_get_to_their_rows_and_gradients_back() -> None:
    batch = replace(tiny_rollouts(3), response_lengths=torch.tensor([2, 0, 1]), rollout_logprobs=torch.zeros(3, 3))
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    rows = spread(values, batch)
    assert rows.tolist() == [[1, 2, 0], [0, 0, 0], [3, 0, 0]]
    weights = torch.tensor([[10.0, 20.0, 40.0], [80.0, 160.0, 320.0], [640.0, 1280.0, float("inf")]])
    torch.where(batch.response_mask, rows * weights, 0.0).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [10.0, 20.0, 640.0]  # nothing of what lies outside of the responses


def test_a_batch_without_tokens_keeps_its_gradient_path() -> None:
    batch = replace(tiny_rollouts(2), response_lengths=torch.tensor([0, 0]))
    values = torch.zeros(0, requires_grad=True)
    rows = spread(values, batch)
    assert rows.tolist() == [[0.0] * 5] * 2
    rows.sum().backward()
    assert values.grad is not None
    assert values.grad.shape == (0,)
