"""Decoding on a GPU: a step is captured once as a CUDA graph for each batch size, and replayed token after token.

Everything that changes from one token to the next is on the device and is advanced by the graph itself, so that the
host launches one graph a token and reads the results once a burst.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightning_verl.data.transfer import int64, to_device
from lightning_verl.models.heads import hidden_states, output_logits
from lightning_verl.rollout.adjust import LogitAdjuster
from lightning_verl.rollout.native.attention import PagedBatch, attending
from lightning_verl.rollout.native.batch import block_tables
from lightning_verl.rollout.native.cache import KVCache
from lightning_verl.rollout.native.compiled import CompiledLayers
from lightning_verl.rollout.native.draw import draw_tokens
from lightning_verl.rollout.native.kernels import Tiles
from lightning_verl.rollout.native.runner import Drawn, Runner, seen_of
from lightning_verl.rollout.native.scheduler import Request, Step
from lightning_verl.rollout.sampling import SamplingParams, uniforms

_log = logging.getLogger(__name__)

BURST = 16
"""Most tokens between two looks of the host: a sample that ended is computed for half as many on average in vain."""
SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
"""Batch sizes that are captured, each when it is first needed."""


class DecodeGraphs(Runner):
    """Runs steps, those that only decode as replayed graphs.

    Args:
        model: The model, in eval mode, its attention on the cache. Its weights stay where they are in memory.
        cache: The cache; it stays where it is too.
        sampling: How to draw.
        adjuster: What happens to logits before that.
        rows: Most samples at once.
        longest: Most tokens of a prompt and its response.
        layers: The model's layers, compiled; None runs them as they are.
        warm: What ran before in this process, with the same model; added to. It need not run before it is captured.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        sampling: SamplingParams,
        adjuster: LogitAdjuster,
        rows: int,
        longest: int,
        layers: CompiledLayers | None,
        warm: set[tuple[int, SamplingParams]],
    ) -> None:
        super().__init__(model, cache, sampling, adjuster)
        self._layers, self._longest, self._warm = layers, longest, warm
        device = cache.data.device
        self._rows = next((size for size in SIZES if size >= rows), SIZES[-1])
        width = -(-(longest + BURST) // cache.block_size)
        self._tables = torch.zeros(self._rows, width, dtype=torch.int32, device=device)
        self._state = torch.zeros(4, self._rows, dtype=torch.int64, device=device)
        """Rows: the last token, its position, the seed, and how many tokens the response has."""
        self._turn = torch.zeros(1, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(BURST, self._rows, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(BURST, self._rows, dtype=torch.float32, device=device)
        vocabulary = model.config.get_text_config().vocab_size
        seen = (self._rows, vocabulary) if adjuster.needs_seen else (0, 0)
        self._seen = torch.zeros(*seen, dtype=torch.bool, device=device)
        self._places = torch.arange(self._rows, dtype=torch.int32, device=device)
        self._ones, self._zeros = torch.ones_like(self._places), torch.zeros_like(self._places)
        self._replays: dict[int, Callable[[], None]] = {}
        self._pool: Any = None
        self._captures = True
        self._loaded: list[Request] = []
        """Whose state the device holds, as the last burst left it."""
        self._loaded_blocks = 0

    def run(self, step: Step) -> Drawn:
        """Run a step; see :meth:`Runner.run`."""
        samples = step.samples
        if not step.decodes or len(samples) > self._rows or not samples:
            self._loaded = []
            return super().run(step)
        self.cache.swap_out(step.swap_out)
        self.cache.swap_in(step.swap_in)
        if step.swap_in:  # the same samples may have come back to other blocks
            self._loaded = []
        count = len(samples)
        size = next(size for size in SIZES if size >= count)
        decode = self._replays.get(size) or self._capture(size)
        self._load(samples)
        for _ in range(step.tokens):
            decode()
        self.let_others_run()
        tokens = self._tokens[: step.tokens, :count].T.tolist()
        return Drawn(tokens, self._logprobs[: step.tokens, :count].T.tolist())

    def forward(self, step: Step) -> Tensor:
        """See :meth:`Runner.forward`."""
        with self._compiled():
            return super().forward(step)

    def _load(self, requests: list[Request]) -> None:
        """Bring the state of samples to the device, as far as it is not there since the last burst."""
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
            (*request.tokens(request.length - 1, 1), request.length - 1, request.seed, len(request.response))
            for request in requests
        ]
        self._state.zero_()
        state = int64(columns).T
        self._state[:, : len(requests)] = to_device(state, self._state.device)
        if self.adjuster.needs_seen:
            self._seen[: len(requests)] = seen_of(requests, self._seen.shape[1], self._seen.device)

    def _capture(self, size: int) -> Callable[[], None]:
        """Capture a step; returns what replays it."""
        self._tables.zero_()
        self._state.zero_()
        self._turn.zero_()
        self._loaded = []
        if (size, self.sampling) not in self._warm:  # compiles kernels and sets libraries up, which no graph can hold
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._decode(size)
            torch.cuda.current_stream().wait_stream(stream)
            self._warm.add((size, self.sampling))
        self._replays[size] = (self._captures and self._graph(size)) or partial(self._decode, size)
        return self._replays[size]

    def _graph(self, size: int) -> Callable[[], None] | None:
        """The step as a graph; None where the model does what no graph can hold, such as look at a tensor's value."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with _capturing(graph, self._pool):
                self._decode(size)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._captures = False
            reason = str(error).splitlines()[0]
            _log.warning("NativeEngine: %s is decoded without a CUDA graph: %s", type(self.model).__name__, reason)
            return None
        return graph.replay

    def _decode(self, size: int) -> None:
        """One token for each of the first rows, from and to the state."""
        tokens, positions, seeds, produced = (row[:size] for row in self._state)
        tables, block_size = self._tables[:size], self.cache.block_size
        # A row that has ended runs on until the burst is over; its position must stay one that the model knows.
        at = positions.clamp(max=self._longest - 1)
        block = tables.gather(1, (at // block_size)[:, None]).squeeze(1).long()
        places, ones, zeros = self._places[:size], self._ones[:size], self._zeros[:size]
        tiles = Tiles(tables, (at + 1).int(), places, ones, places, zeros, queries=1)
        batch = PagedBatch(self.cache.data, block, at % block_size, tiles=tiles)
        with attending(batch), self._compiled():
            hidden = hidden_states(self.model, tokens[None], at[None])
        logits = output_logits(self.model, hidden[0])
        if self.adjuster.active:
            logits = self.adjuster(logits, produced, self._seen[:size] if self.adjuster.needs_seen else None)
        drawn, logprobs = draw_tokens(logits, self.sampling, uniforms(seeds, produced))
        self._tokens[:, :size].index_copy_(0, self._turn, drawn[None])
        self._logprobs[:, :size].index_copy_(0, self._turn, logprobs[None])
        if self.adjuster.needs_seen:
            self._seen[:size].scatter_(1, drawn[:, None], True)
        tokens.copy_(drawn)
        positions.add_(1)
        produced.add_(1)
        self._turn.add_(1)

    @contextmanager
    def _compiled(self) -> Iterator[None]:
        if self._layers is None:
            yield
            return
        with self._layers.enabled():
            yield


@contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Capture what is called as a graph.

    ``torch.cuda.graph`` collects garbage and empties torch's cache of memory before, which takes longer than the
    capture and would happen again in every rollout.
    """
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    collects = gc.isenabled()
    gc.disable()  # what a collection frees may call CUDA, which no capture allows
    try:
        with torch.cuda.stream(stream):
            # Other threads, such as NCCL's watchdog, go on calling CUDA meanwhile.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                yield
            finally:
                graph.capture_end()
    finally:
        if collects:
            gc.enable()
    torch.cuda.current_stream().wait_stream(stream)
