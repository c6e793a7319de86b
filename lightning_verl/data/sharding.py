"""Which prompts of a global batch each data rank holds: integer arithmetic only, the same on every rank.

Ranks that hold parts of one model copy (tensor, pipeline and expert axes) share a data coordinate, so they get the same
prompts: always pass the size and the coordinate of the role's *data* axis, never the world's.
"""

from __future__ import annotations


def split(count: int, parts: int, index: int) -> range:
    """Return part ``index`` of ``range(count)`` cut into ``parts`` contiguous, balanced parts.

    Part ``i`` is ``count * i // parts`` up to ``count * (i + 1) // parts``: sizes differ by at most one, and parts are
    empty where ``count < parts``.

    Args:
        count: How many items there are, at least 0.
        parts: Into how many parts they are cut, at least 1.
        index: The wanted part, in ``[0, parts)``.

    Raises:
        ValueError: An argument is out of its range.
    """
    if count < 0:
        raise ValueError(f"split: count={count}, but a number of items is at least 0.")
    if parts < 1:
        raise ValueError(f"split: parts={parts}, but there is at least 1 part; pass the size of the data axis.")
    if not 0 <= index < parts:
        raise ValueError(
            f"split: index={index} is outside [0, {parts}) for parts={parts}; pass the coordinate on the data axis."
        )
    return range(count * index // parts, count * (index + 1) // parts)


def rollout_rows(rollout_batch_size: int, update_batch_size: int, data_size: int, data_rank: int) -> list[int]:
    """Return the positions of a global rollout batch that one data rank holds, mini-batch by mini-batch.

    The rollout batch is cut into mini-batches of ``update_batch_size`` consecutive prompts (the last may be shorter)
    and each of them is split over the data ranks. Mini-batch ``j`` thus has the same prompts for any number of ranks.

    Args:
        rollout_batch_size: Prompts of a rollout batch, over all ranks.
        update_batch_size: Prompts of a mini-batch, over all ranks.
        data_size: Size of the role's data axis.
        data_rank: Coordinate of this rank on it.

    Returns:
        Positions in ``[0, rollout_batch_size)``, ascending; empty where there are fewer prompts than ranks.

    Raises:
        ValueError: A size is below 1, or ``data_rank`` is outside ``[0, data_size)``.
    """
    parts = _minibatch_parts(rollout_batch_size, update_batch_size, data_size, data_rank)
    return [position for part in parts for position in part]


def local_minibatch_sizes(rollout_batch_size: int, update_batch_size: int, data_size: int, data_rank: int) -> list[int]:
    """Return how many prompts of each mini-batch one data rank holds, in the order of `rollout_rows`.

    Every rank's list has one entry for each mini-batch, 0 where the rank holds none of it; it sums to its rows.

    Args:
        rollout_batch_size: Prompts of a rollout batch, over all ranks.
        update_batch_size: Prompts of a mini-batch, over all ranks.
        data_size: Size of the role's data axis.
        data_rank: Coordinate of this rank on it.

    Raises:
        ValueError: A size is below 1, or ``data_rank`` is outside ``[0, data_size)``.
    """
    parts = _minibatch_parts(rollout_batch_size, update_batch_size, data_size, data_rank)
    return [len(part) for part in parts]


def _minibatch_parts(rollout_batch_size: int, update_batch_size: int, data_size: int, data_rank: int) -> list[range]:
    for name, value in (("rollout_batch_size", rollout_batch_size), ("update_batch_size", update_batch_size)):
        if value < 1:
            raise ValueError(f"rollout_rows: {name}={value}, but a batch has at least 1 prompt.")
    parts = []
    for start in range(0, rollout_batch_size, update_batch_size):
        size = min(update_batch_size, rollout_batch_size - start)
        part = split(size, data_size, data_rank)
        parts.append(range(start + part.start, start + part.stop))
    return parts
