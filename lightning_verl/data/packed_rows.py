"""Rows of a micro-batch side by side in one sequence, without padding, and the prompt of a group only once.

Shape letters: T tokens of the sequence, M response tokens.

A group of three samples lies as ``prompt, response, response, response``. Every response goes on from the prompt: its
positions follow the prompt's, it attends to the prompt and to itself, and its first token is predicted by the prompt's
last. A row that shares its prompt with no other is one run of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_verl.data.packing import RowSize
from lightning_verl.data.transfer import to_device


@dataclass(frozen=True)
class Run:
    """Tokens that lie one after the other and attend to those before them, and to a prompt that lies elsewhere."""

    start: int
    """Where the first of them lies."""
    count: int
    """How many they are."""
    prefix: int = 0
    """Tokens of the prompt that they go on from."""
    prefix_start: int = 0
    """Where the first of those lies."""

    @property
    def seen(self) -> int:
        """Tokens that the last of the run attends to, itself included."""
        return self.prefix + self.count


@dataclass(frozen=True)
class PackedRows:
    """Where the tokens of some rows lie in one sequence."""

    source: Tensor
    """The place of each token in the rows, ``row x width + column``, int64 ``[T]``."""
    positions: Tensor
    """Its position in its row, int64 ``[T]``."""
    predicting: Tensor
    """Where the tokens lie that predict each response token, row after row, int64 ``[M]``."""
    responses: Tensor
    """The places of the response tokens in the rows, row after row, int64 ``[M]``."""
    last: Tensor
    """Where the last token of each row lies, int64 ``[rows]``."""
    runs: tuple[Run, ...]
    """The sequence, run by run."""

    @classmethod
    def of(cls, sizes: Sequence[RowSize], width: int, *, share_prompts: bool = True) -> PackedRows:
        """Lay rows side by side, on the CPU.

        Args:
            sizes: Those of the rows. None: the sequence is one token that belongs to no row, because a rank without
                rows must still run the model.
            width: Columns of the right-padded rows.
            share_prompts: Whether the rows of a group have one prompt in common, that of the first of them.
        """
        if not sizes:
            none = _joined([])
            return cls(_joined([range(1)]), _joined([range(1)]), none, none, none, (Run(0, 1),))
        runs: list[Run] = []
        source: list[range] = []
        positions: list[range] = []
        predicting: dict[int, tuple[int, range]] = {}
        for run, row, first, prompt_end, response in _lay(sizes, share_prompts):
            if run.count:
                runs.append(run)
                source.append(range(row * width + first, row * width + first + run.count))
                positions.append(range(first, first + run.count))
            predicting[row] = prompt_end, range(response, response + sizes[row].response)
        rows = range(len(sizes))
        before = [part for row in rows for part in _before(*predicting[row])]
        lasts = [predicting[row][1][-1] if predicting[row][1] else predicting[row][0] for row in rows]
        targets = [
            range(row * width + size.prompt, row * width + size.tokens) for row, size in zip(rows, sizes, strict=True)
        ]
        return cls(
            source=_joined(source),
            positions=_joined(positions),
            predicting=_joined(before),
            responses=_joined(targets),
            last=torch.tensor(lasts),
            runs=tuple(runs),
        )

    def to(self, device: torch.device) -> PackedRows:
        """The same with its tensors on a device."""
        source, positions, predicting, responses, last = (
            to_device(tensor, device)
            for tensor in (self.source, self.positions, self.predicting, self.responses, self.last)
        )
        return PackedRows(source, positions, predicting, responses, last, self.runs)


def _lay(sizes: Sequence[RowSize], share_prompts: bool) -> Iterator[tuple[Run, int, int, int, int]]:
    """Go through the rows, group after group.

    Yields:
        A run, the row that its tokens are taken from, the column of the first of them there, and where the last token
        of the row's prompt and the first of its response lie. The run of a shared prompt comes with its first row,
        before that row's own.
    """
    groups: dict[int, list[int]] = {}
    for row, size in enumerate(sizes):
        groups.setdefault(size.group if share_prompts else row, []).append(row)
    at = 0
    for rows in groups.values():
        prompt = sizes[rows[0]].prompt
        if len(rows) == 1:
            yield Run(at, sizes[rows[0]].tokens), rows[0], 0, at + prompt - 1, at + prompt
            at += sizes[rows[0]].tokens
            continue
        prompt_start = at
        yield Run(at, prompt), rows[0], 0, at + prompt - 1, at + prompt
        at += prompt
        for row in rows:
            yield Run(at, sizes[row].response, prompt, prompt_start), row, prompt, prompt_start + prompt - 1, at
            at += sizes[row].response


def _before(prompt_end: int, response: range) -> tuple[range, ...]:
    """Where the tokens lie that predict those of a response: the prompt's last, then all of its own but the last."""
    return (range(prompt_end, prompt_end + 1), response[:-1]) if response else ()


def _joined(parts: Sequence[range]) -> Tensor:
    """The numbers of some ranges, one after the other, int64."""
    arrays = [np.arange(part.start, part.stop, dtype=np.int64) for part in parts]
    return torch.from_numpy(np.concatenate(arrays)) if arrays else torch.zeros(0, dtype=torch.int64)
