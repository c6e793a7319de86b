"""Rewards of train.yaml, which names them by their path."""

from __future__ import annotations


def right(response: str, answer: str) -> float:
    """1 for the right answer, else 0."""
    return float(response == answer)


def right_digits(response: str, answer: str) -> float:
    """The share of digits in their place, 0 for an answer of another length."""
    if len(response) != len(answer):
        return 0.0
    return sum(given == wanted for given, wanted in zip(response, answer, strict=True)) / len(answer)
