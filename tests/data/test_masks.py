"""Masks over tokens."""

from __future__ import annotations

import pytest
import torch

from lightning_verl.data.masks import check_same_shape, masked_float, response_mask

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("ids", "eos_ids", "lengths", "expected"),
    [
        ([5, 6, 7, 0, 0], 2, [3], [1, 1, 1, 0, 0]),  # no end token: only the engine's length tells the padding apart
        ([5, 6, 7, 0, 0], 2, None, [1, 1, 1, 1, 1]),  # without a length nothing does
        ([5, 6, 2, 0, 0], 2, None, [1, 1, 1, 0, 0]),
        ([5, 6, 2, 2, 2], 2, None, [1, 1, 1, 0, 0]),  # the padding is the end token: the first one counts
        ([5, 6, 2, 2, 2], 2, [3], [1, 1, 1, 0, 0]),
        ([5, 6, 2, 2, 2], 2, [2], [1, 1, 0, 0, 0]),  # cut after two tokens: the end token in column 2 is padding
        ([5, 2, 7, 2, 0], 2, None, [1, 1, 0, 0, 0]),  # text after the end
        ([5, 2, 7, 2, 0], 2, [5], [1, 1, 0, 0, 0]),
        ([5, 9, 0, 0], {2, 9}, None, [1, 1, 0, 0]),
        ([5, 6, 9, 2], (2, 9), None, [1, 1, 1, 0]),
        ([2, 5, 6], [2], None, [1, 0, 0]),
        ([5, 6, 7], [], [2], [1, 1, 0]),
        ([5, 6, 7], [], [0], [0, 0, 0]),
    ],
)
def test_response_mask(ids, eos_ids, lengths, expected):
    mask = response_mask(torch.tensor([ids]), eos_ids, lengths)
    assert mask.dtype == torch.bool
    assert mask.int().tolist() == [expected]


def test_response_mask_treats_rows_alone():
    ids = torch.tensor([[5, 2, 0, 0], [5, 6, 7, 0], [2, 2, 2, 2]])
    mask = response_mask(ids, 2, torch.tensor([2, 3, 1]))
    assert mask.int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0]]


def test_response_mask_of_no_columns_and_no_rows():
    assert response_mask(torch.zeros(2, 0, dtype=torch.long), 2).shape == (2, 0)
    assert response_mask(torch.zeros(0, 3, dtype=torch.long), 2, []).shape == (0, 3)


def test_response_mask_refuses_wrong_shapes():
    with pytest.raises(ValueError, match=r"response_mask: ids has shape \(3,\), but must be \[B, T\]"):
        response_mask(torch.tensor([1, 2, 3]), 2)
    with pytest.raises(ValueError, match=r"lengths has shape \(1,\), but ids has 2 rows"):
        response_mask(torch.ones(2, 3, dtype=torch.long), 2, [3])


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_masked_float_stops_poison_in_value_and_gradient(poison):
    values = torch.tensor([2.0, poison], requires_grad=True)
    result = masked_float(values, torch.tensor([1, 0]))
    assert result.tolist() == [2.0, 0.0]
    (result * torch.tensor([3.0, poison])).nansum().backward()
    assert values.grad.tolist() == [3.0, 0.0]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.bool, torch.float32),
        (torch.int64, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_masked_float_widens_to_float32_at_least(given, expected):
    assert masked_float(torch.ones(2, dtype=given), torch.ones(2)).dtype == expected


def test_check_same_shape_names_caller_and_shapes():
    check_same_shape("f", a=torch.ones(2, 3), b=torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"^f: got a \(2, 3\), b \(2,\), but all must have one shape"):
        check_same_shape("f", a=torch.ones(2, 3), b=torch.ones(2))
