"""Mini-batches cut into micro-batches, the parts that one forward and backward pass takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from lightning_verl.data.experience import Experience, RolloutBatch
from lightning_verl.data.packed_rows import PackedRows
from lightning_verl.data.packing import RowSize, group_cost, pack_groups, pack_padded

Packing = Literal["shared", "rows", "padded"]
"""How rows run together: side by side with the prompt of a group once, side by side, or padded to the longest."""


def tokens_of(sizes: Sequence[RowSize], packing: Packing) -> int:
    """Tokens that a pass over rows runs on, padding left out.

    Args:
        sizes: Those of the rows.
        packing: How rows run together.
    """
    return group_cost(sizes) if packing == "shared" else sum(size.tokens for size in sizes)


TRows = TypeVar("TRows", RolloutBatch, Experience)


@dataclass(frozen=True)
class MicroBatches:
    """Which rows of a mini-batch run together, and how."""

    sizes: Sequence[RowSize]
    """Those of all rows."""
    bins: Sequence[Sequence[int]]
    """The rows of each micro-batch; one may be empty."""
    packing: Packing
    """How they lie in it."""

    @classmethod
    def cut(cls, sizes: Sequence[RowSize], budget: int, packing: Packing) -> MicroBatches:
        """Cut rows into few micro-batches.

        Args:
            sizes: Those of the rows.
            budget: Most tokens that one pass runs on: a shared prompt counts once, padding counts too. A single row
                that is longer gets a micro-batch of its own.
            packing: How rows run together.
        """
        if packing == "padded":
            return cls(sizes, pack_padded([size.tokens for size in sizes], budget), packing)
        alone = sizes if packing == "shared" else [RowSize(s.prompt, s.response, row) for row, s in enumerate(sizes)]
        return cls(sizes, pack_groups(alone, budget), packing)

    def __len__(self) -> int:
        return len(self.bins)

    def filled_up(self, count: int) -> MicroBatches:
        """With empty micro-batches behind, to be as many as another rank has."""
        return MicroBatches(self.sizes, [*self.bins, *[[]] * (count - len(self.bins))], self.packing)

    def take(self, rows: TRows, number: int) -> TRows:
        """The rows of a micro-batch, without columns that none of them uses.

        Args:
            rows: All rows, in the order of ``sizes``.
            number: Which micro-batch.
        """
        part = self.bins[number]
        sizes = [self.sizes[row] for row in part]
        taken = rows.select(part).narrowed(
            max((size.tokens for size in sizes), default=1), max((size.response for size in sizes), default=1)
        )
        if self.packing == "padded":
            return taken
        rollout = taken if isinstance(taken, RolloutBatch) else taken.rollout
        width = rollout.input_ids.shape[1]
        packed = PackedRows.of(sizes, width, share_prompts=self.packing == "shared")
        return taken.with_packed(packed.to(rollout.input_ids.device))
