"""Masks over tokens: which tokens the policy produced, and how masked positions are kept out of arithmetic.

Imports torch alone, so that the pure functions of ``algorithms`` can build on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def response_mask(ids: Tensor, eos_ids: int | Iterable[int], lengths: Tensor | Sequence[int] | None = None) -> Tensor:
    """Mark the response tokens that the policy produced.

    The first end token of a row was produced, everything after it was not, whatever id the padding has. A response that
    was cut by its length, a stop string or an abort holds no end token: only ``lengths`` tells its padding apart, so
    pass it wherever the engine knows it.

    Args:
        ids: Response token ids, int ``[B, T]``, right-padded. Without the prompt: ids in a prompt end nothing.
        eos_ids: The end token, or all of them; an empty collection ends no row.
        lengths: Tokens that the engine produced for each row, ``[B]``; None: all up to the first end token.

    Returns:
        True at produced tokens, bool ``[B, T]``.

    Raises:
        ValueError: ``ids`` is not ``[B, T]``, or ``lengths`` is not ``[B]``.
    """
    if ids.dim() != 2:
        raise ValueError(
            f"response_mask: ids has shape {tuple(ids.shape)}, but must be [B, T]; pass ids[None] for one response."
        )
    ends = [eos_ids] if isinstance(eos_ids, int) else list(eos_ids)
    is_end = torch.isin(ids, torch.tensor(ends, dtype=ids.dtype, device=ids.device))
    ends_before = is_end.cumsum(dim=1) - is_end.long()
    produced = ends_before == 0
    if lengths is None:
        return produced
    lengths = torch.as_tensor(lengths, device=ids.device)
    if lengths.shape != ids.shape[:1]:
        raise ValueError(
            f"response_mask: lengths has shape {tuple(lengths.shape)}, but ids has {ids.shape[0]} rows; "
            f"pass one length a row, shape ({ids.shape[0]},)."
        )
    return produced & (torch.arange(ids.shape[1], device=ids.device) < lengths[:, None])


def masked_float(values: Tensor, mask: Tensor) -> Tensor:
    """Return ``values`` in float32 (float64 stays float64), exactly 0 where ``mask`` is 0.

    To be called before any arithmetic: multiplying by the mask afterwards would let a NaN through (0 x NaN is NaN), in
    the result or, where only the result is replaced, in the gradient.

    Args:
        values: Any shape, any real dtype.
        mask: Bool or 0/1, the shape of ``values``.
    """
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    return wide.masked_fill(~mask.bool(), 0.0)


def check_same_shape(caller: str, **tensors: Tensor) -> None:
    """Check that all tensors have one shape: broadcasting ``[B]`` against ``[B, T]`` would go unnoticed.

    Args:
        caller: The function that the error names.
        **tensors: The tensors under the names that the error shows.

    Raises:
        ValueError: Two shapes differ.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"{caller}: got {listed}, but all must have one shape; align or expand them first.")
