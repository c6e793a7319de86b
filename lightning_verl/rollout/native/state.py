"""What changes from token to token while samples decode on a GPU, kept there and advanced there."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_verl.data.transfer import int64, to_device
from lightning_verl.rollout.native.batch import block_tables
from lightning_verl.rollout.native.cache import KVCache
from lightning_verl.rollout.native.kernels import Tiles
from lightning_verl.rollout.native.runner import Drawn, seen_of
from lightning_verl.rollout.native.scheduler import Request


class CachePlaces:
    """Where keys and values of each layer are, for kernels in graphs that are older than the cache.

    Args:
        cache: The first of them.
    """

    def __init__(self, cache: KVCache) -> None:
        self.origin = torch.zeros(16, dtype=cache.data.dtype, device=cache.data.device)
        """Stays where it is in memory; its numbers are not used."""
        self.distances = torch.zeros(*cache.data.shape[:2], dtype=torch.int64, device=cache.data.device)
        """From the origin to keys and values of each layer, in numbers, int64 ``[layers, 2]``."""
        self.point_to(cache)

    def point_to(self, cache: KVCache) -> None:
        """Find those of another cache."""
        start, size = self.origin.data_ptr(), cache.data.element_size()
        found = [[(part.data_ptr() - start) // size for part in layer] for layer in cache.data]
        self.distances.copy_(to_device(int64(found), self.distances.device))


class DecodeState:
    """The state of R rows, each of which decodes a sample; tensors stay where they are in memory.

    Args:
        rows: R.
        width: Blocks of a sample, at most.
        burst: Tokens that are drawn between two looks of the host, at most.
        longest: Tokens of a prompt and its response, at most. A row that has ended runs on until its burst is over; its
            position must stay one that the model knows.
        vocabulary: Tokens that there are, where those that a sample has seen must be known; else 0.
        device: The GPU.
    """

    def __init__(self, rows: int, width: int, burst: int, longest: int, vocabulary: int, device: torch.device) -> None:
        self.rows = rows
        self._longest = longest
        self._tables = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self._numbers = torch.zeros(4, rows, dtype=torch.int64, device=device)
        """Rows: the last token, its position, how many tokens the response has, and the seed."""
        self._lengths = torch.ones(rows, dtype=torch.int32, device=device)
        """Tokens in the cache, the last one included, which is on its way there."""
        self._turn = torch.zeros(1, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(burst, rows, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(burst, rows, dtype=torch.float32, device=device)
        self._seen = torch.zeros(rows if vocabulary else 0, vocabulary, dtype=torch.bool, device=device)
        self._places = torch.arange(rows, dtype=torch.int32, device=device)
        self._ones, self._zeros = torch.ones_like(self._places), torch.zeros_like(self._places)
        self._loaded: list[Request] = []
        """Whose state this is, as the last burst left it."""
        self._loaded_blocks = 0

    # ---- from and to the host ----------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Load everything the next time."""
        self._loaded = []

    def clear(self) -> None:
        """Rows that decode nothing: their one token goes to block 0."""
        self._tables.zero_()
        self._numbers.zero_()
        self._lengths.fill_(1)
        self._turn.zero_()
        self.forget()

    def load(self, requests: list[Request]) -> None:
        """Bring the state of samples to the first rows, as far as it is not there since the last burst."""
        self._turn.zero_()
        blocks = sum(len(request.blocks) for request in requests)
        known, same_blocks = requests == self._loaded, blocks == self._loaded_blocks
        self._loaded, self._loaded_blocks = requests, blocks
        if not (known and same_blocks):
            tables = block_tables([request.blocks for request in requests]).int()
            self._tables.zero_()  # rows behind the last one write to block 0
            self._tables[: len(requests), : tables.shape[1]] = to_device(tables, self._tables.device)
        if known:
            return
        columns = [
            (*request.tokens(request.length - 1, 1), request.length - 1, len(request.response), request.seed)
            for request in requests
        ]
        self._numbers.zero_()
        numbers = int64(columns).T
        self._numbers[:, : len(requests)] = to_device(numbers, self._numbers.device)
        self._lengths.copy_(self._numbers[1] + 1)
        if self._seen.numel():
            self._seen[: len(requests)] = seen_of(requests, self._seen.shape[1], self._seen.device)

    def drawn(self, tokens: int, samples: int) -> Drawn:
        """What the last burst drew; waits for the GPU.

        Args:
            tokens: Of each sample.
            samples: How many, in the first rows.
        """
        return Drawn(*(values[:tokens, :samples].T.tolist() for values in (self._tokens, self._logprobs)))

    # ---- one token ---------------------------------------------------------------------------------------------------

    def last(self, size: int) -> tuple[Tensor, Tensor]:
        """The last token of the first ``size`` rows and its position, int64 ``[size]`` each."""
        return self._numbers[0, :size], self._numbers[1, :size]

    def source(self, size: int) -> tuple[Tensor, Tensor]:
        """What their next random number is made of: seed and place in the response, int64 ``[size]`` each."""
        return self._numbers[3, :size], self._numbers[2, :size]

    def seen(self, size: int) -> Tensor | None:
        """Which tokens they have had, bool ``[size, V]``; None where nobody asks."""
        return self._seen[:size] if self._seen.numel() else None

    def tiles(self, size: int, cache: CachePlaces) -> Tiles:
        """How attention divides them, and where it finds the cache."""
        places, ones, zeros = self._places[:size], self._ones[:size], self._zeros[:size]
        tables, lengths = self._tables[:size], self._lengths[:size]
        return Tiles(tables, lengths, places, ones, places, zeros, 1, cache.origin, cache.distances)

    def advance(self, tokens: Tensor, logprobs: Tensor) -> None:
        """Take what was drawn for the first rows, as results and as what the next token follows.

        Args:
            tokens: int64 ``[size]``.
            logprobs: float32 ``[size]``.
        """
        size = len(tokens)
        if self._seen.numel():
            self._seen[:size].scatter_(1, tokens[:, None], True)
        _advance[(1,)](
            tokens, logprobs, self._numbers, self._lengths, self._turn, self._tokens, self._logprobs,
            size, self.rows, self._longest, PADDED=triton.next_power_of_2(size),
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "longest"])  # they change between runners; no graph can hold a compilation
def _advance(
    drawn, values, numbers, lengths, turn, tokens, logprobs, size, rows, longest, PADDED: tl.constexpr
):  # fmt: skip
    """All rows in one program, which also counts the turns."""
    row = tl.arange(0, PADDED)
    inside = row < size
    now = tl.load(turn)
    token = tl.load(drawn + row, mask=inside)
    tl.store(tokens + now * rows + row, token, mask=inside)
    tl.store(logprobs + now * rows + row, tl.load(values + row, mask=inside), mask=inside)
    position = tl.minimum(tl.load(numbers + rows + row, mask=inside, other=0) + 1, longest - 1)
    produced = tl.load(numbers + 2 * rows + row, mask=inside, other=0) + 1
    tl.store(numbers + row, token, mask=inside)
    tl.store(numbers + rows + row, position, mask=inside)
    tl.store(numbers + 2 * rows + row, produced, mask=inside)
    tl.store(lengths + row, (position + 1).to(tl.int32), mask=inside)
    tl.debug_barrier()  # other threads of this program must have read the turn before it changes
    tl.store(turn, now + 1)
