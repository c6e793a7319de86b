"""The schedule of learning rates: a linear rise, and a linear fall where one is asked for."""

from __future__ import annotations


def check_schedule(owner: str, warmup_steps: int, decay_steps: int | None) -> None:
    """Refuse a schedule that cannot be.

    Args:
        owner: The class that was given it, for the message.
        warmup_steps: Steps of the rise.
        decay_steps: Steps until 0, those of the rise included; None for no fall.

    Raises:
        ValueError: The rise is of fewer than 0 steps, or it is not over before the rates have fallen to 0.
    """
    if warmup_steps < 0:
        raise ValueError(f"{owner} got warmup_steps={warmup_steps}; it takes a whole number of at least 0.")
    if decay_steps is not None and decay_steps <= warmup_steps:
        raise ValueError(
            f"{owner} got decay_steps={decay_steps} with warmup_steps={warmup_steps}; learning rates fall after the "
            "warm-up, so give the number of steps that the whole run takes, or None to keep them."
        )


def learning_rate_scale(step: int, warmup_steps: int, decay_steps: int | None) -> float:
    """What learning rates are multiplied by.

    ``(step + 1) / warmup_steps`` during the warm-up; behind it 1, or
    ``(decay_steps - step) / (decay_steps - warmup_steps)``, which is 1 at its first step and above 0 at the last one.

    Args:
        step: Steps done before this one.
        warmup_steps: Steps of the rise.
        decay_steps: Steps until 0, those of the rise included; None for no fall.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if decay_steps is None:
        return 1.0
    return max(0.0, (decay_steps - step) / (decay_steps - warmup_steps))
