"""A Triton kernel for up to three linear layers of one input, for the few rows of a step that decodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_verl.rollout.native.kernels import shared_bytes

_MOST = 3
"""Layers that a launch takes."""
_MOST_FLOPS = 2e9
"""Measured on an H200: beyond, cuBLAS is faster with a product for each layer."""
_COLUMNS = 64
"""Outputs of a tile, of which tensor cores take no fewer."""


class _Tiling(NamedTuple):
    """How the layers are divided; measured on an H200."""

    rows: int
    """Of a tile."""
    step: int
    """Inputs that are multiplied at once."""
    stages: int
    """Steps whose inputs are on their way or in use at once."""

    @classmethod
    def of(cls, rows: int) -> _Tiling:
        """For so many rows of the input."""
        if rows > 128:
            return cls(64, 256, 3)
        return cls(32 if rows > 64 else 16, 128, 5)

    @property
    def shared_bytes(self) -> int:
        """Shared memory that it takes."""
        return self.stages * self.step * (_COLUMNS + self.rows) * 2


def pays(hidden: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> bool:
    """Whether :func:`joined_linear` computes such layers, and faster than one product for each.

    Args:
        hidden: ``[..., H]``.
        weights: ``[N, H]`` each.
        biases: ``[N]`` or None, one for each.
    """
    tensors = [hidden, *weights, *(bias for bias in biases if bias is not None)]
    return (
        len(weights) <= _MOST
        and len({bias is None for bias in biases}) == 1
        and hidden.dtype in (torch.bfloat16, torch.float16)
        and len({tensor.dtype for tensor in tensors}) == 1
        and all(tensor.is_contiguous() for tensor in tensors)
        and 2 * hidden.numel() * sum(map(len, weights)) <= _MOST_FLOPS
        and _Tiling.of(hidden.numel() // hidden.shape[-1]).shared_bytes <= shared_bytes(hidden.device)
    )


def joined_linear(hidden: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """Linear layers of one input in one launch.

    Args:
        hidden: ``[..., H]``, on a GPU; this and all others contiguous and of one type.
        weights: One to three, ``[N, H]`` each.
        biases: ``[N]`` for each, or None for each.

    Returns:
        ``[..., N]`` for each; sums are in float32.
    """
    rows = hidden.view(-1, hidden.shape[-1])
    outputs = [rows.new_empty(len(rows), len(weight)) for weight in weights]
    spare = _MOST - len(weights)
    kinds = [weights, weights if biases[0] is None else biases, outputs]
    tiling = _Tiling.of(len(rows))
    tiles = sum(triton.cdiv(len(weight), _COLUMNS) for weight in weights)
    _linear[(triton.cdiv(len(rows), tiling.rows), tiles)](
        rows, *(tensor for kind in kinds for tensor in [*kind, *[kind[0]] * spare]),
        len(rows), *map(len, weights), *[0] * spare, INPUTS=rows.shape[1], BIASED=biases[0] is not None,
        ROWS=tiling.rows, COLUMNS=_COLUMNS, STEP=tiling.step, num_warps=4, num_stages=tiling.stages,
    )  # fmt: skip
    return [output.view(*hidden.shape[:-1], -1) for output in outputs]


@triton.jit
def _linear(
    hidden, weight_0, weight_1, weight_2, bias_0, bias_1, bias_2, output_0, output_1, output_2,
    rows, width_0, width_1, width_2,
    INPUTS: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """A tile of one layer, transposed: outputs times rows."""
    tile = tl.program_id(1)
    tiles_0 = tl.cdiv(width_0, COLUMNS)
    tiles_1 = tl.cdiv(width_1, COLUMNS)
    if tile < tiles_0:
        weight, bias, output, width, first = weight_0, bias_0, output_0, width_0, tile
    elif tile < tiles_0 + tiles_1:
        weight, bias, output, width, first = weight_1, bias_1, output_1, width_1, tile - tiles_0
    else:
        weight, bias, output, width, first = weight_2, bias_2, output_2, width_2, tile - tiles_0 - tiles_1
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = first * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, STEP)
    known_row = (row < rows)[None, :]
    known_column = (column < width)[:, None]
    weights = weight + column[:, None] * INPUTS + step[None, :]
    inputs = hidden + row[None, :] * INPUTS + step[:, None]
    result = tl.zeros([COLUMNS, ROWS], dtype=tl.float32)
    for start in range(0, INPUTS, STEP):
        inside = start + step < INPUTS
        some_weights = tl.load(weights + start, mask=known_column & inside[None, :], other=0.0)
        some_inputs = tl.load(inputs + start, mask=known_row & inside[:, None], other=0.0)
        result = tl.dot(some_weights, some_inputs, result)
    if BIASED:
        result += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[:, None]
    target = output + row[None, :] * width + column[:, None]
    tl.store(target, result.to(output.dtype.element_ty), mask=known_row & known_column)
