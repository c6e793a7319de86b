"""Hands out the blocks of a key-value cache and counts who uses them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class BlockPool:
    """Blocks with counted users. A block is free again once its last user has given it back.

    Block 0 is never handed out: padding rows of a batch write there.

    Args:
        count: Blocks of the cache, block 0 included; at least 2.

    Raises:
        ValueError: ``count`` is below 2.
    """

    def __init__(self, count: int) -> None:
        if count < 2:
            raise ValueError(f"BlockPool got count={count}; it needs block 0 for padding and at least one to hand out.")
        self.size = count - 1
        """Blocks that can be in use at once."""
        self.most_used = 0
        """Most blocks that were in use at once."""
        self._free = list(range(count - 1, 0, -1))
        self._users = [0] * count

    @property
    def free(self) -> int:
        """Blocks that nobody uses."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take free blocks.

        Raises:
            RuntimeError: There are not so many; the caller asks ``free`` before.
        """
        if not count:
            return []
        if count > len(self._free):
            raise RuntimeError(f"BlockPool.take({count}): only {len(self._free)} of {self.size} blocks are free.")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._users[block] = 1
        self.most_used = max(self.most_used, self.size - len(self._free))
        return taken

    def share(self, blocks: Sequence[int]) -> list[int]:
        """Become another user of blocks that are in use; returns them."""
        for block in blocks:
            self._users[block] += 1
        return list(blocks)

    def give_back(self, blocks: Iterable[int]) -> None:
        """Stop using blocks."""
        for block in blocks:
            self._users[block] -= 1
            if self._users[block] == 0:
                self._free.append(block)
