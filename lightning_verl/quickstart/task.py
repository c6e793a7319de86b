"""The task of the quick start: write the digits of the prompt in ascending order, ``"3142>"`` to ``"1234"``.

No digit comes twice in a prompt: with nothing to count, a run ends near an accuracy of 1. Layouts differ by rounding,
which lets their samples part; were the end below the top, it would scatter with them as it does with seeds.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from lightning_verl.testing.tokenizer import char_tokenizer

Row = dict[str, str]
"""A data row: ``{"prompt": "3142>", "answer": "1234"}``."""

SHORTEST, LONGEST = 3, 6
"""Digits of a prompt, each number of them as likely."""
MAX_NEW_TOKENS = LONGEST + 1
"""The longest answer and its end token."""


def task_tokenizer() -> PreTrainedTokenizerBase:
    """The tokenizer of the task: one token a digit, one for the end of the prompt."""
    return char_tokenizer("0123456789>")


def exact(response: str, answer: str) -> float:
    """The reward: 1 for the right answer, 0 for any other."""
    return float(response == answer)


@dataclass(frozen=True)
class Split:
    """Rows to train on and rows to evaluate on, without a prompt in common.

    Raises:
        ValueError: Training would see a prompt of the evaluation.
    """

    training: Sequence[Row]
    held_out: Sequence[Row]

    def __post_init__(self) -> None:
        common = {row["prompt"] for row in self.training} & {row["prompt"] for row in self.held_out}
        if common:
            raise ValueError(
                f"Split: {len(common)} prompts, such as {min(common)!r}, are both in training and held out, so the "
                "accuracy would say nothing about unseen prompts; leave them out of training."
            )


def make_split(seed: int, training: int, held_out: int) -> Split:
    """Draw rows.

    Args:
        seed: Equal seeds give equal rows.
        training: Rows to train on; short prompts may come more than once.
        held_out: Rows to evaluate on, all different.
    """
    rng = random.Random(seed)  # noqa: S311 - data, not a secret
    seen: dict[str, Row] = {}
    while len(seen) < held_out:
        row = _draw(rng, ())
        seen[row["prompt"]] = row
    return Split([_draw(rng, seen) for _ in range(training)], list(seen.values()))


def _draw(rng: random.Random, excluded: Collection[str]) -> Row:
    while True:
        digits = "".join(rng.sample("0123456789", k=rng.randint(SHORTEST, LONGEST)))
        if f"{digits}>" not in excluded:
            return {"prompt": f"{digits}>", "answer": "".join(sorted(digits))}
