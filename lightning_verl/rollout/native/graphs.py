"""Decoding on a GPU: a step is captured once as a CUDA graph for each batch size, and replayed token after token.

Everything that changes from one token to the next is on the device and is advanced by the graph itself, so that the
host launches one graph a token and reads the results once a burst.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightning_verl.models.heads import hidden_states, output_logits
from lightning_verl.rollout.adjust import LogitAdjuster
from lightning_verl.rollout.native.attention import PagedBatch, attending
from lightning_verl.rollout.native.cache import KVCache, unreserved_bytes
from lightning_verl.rollout.native.compiled import CompiledLayers
from lightning_verl.rollout.native.draw import draw_tokens, draw_uniforms
from lightning_verl.rollout.native.memory import graph_bytes
from lightning_verl.rollout.native.runner import Drawn, Runner
from lightning_verl.rollout.native.scheduler import Step
from lightning_verl.rollout.native.state import CachePlaces, DecodeState
from lightning_verl.rollout.sampling import SamplingParams

_log = logging.getLogger(__name__)

BURST = 16
"""Most tokens between two looks of the host: a sample that ended is computed for half as many on average in vain."""
SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
"""Batch sizes that are captured, each when it is first needed."""
LONGER = 256
"""Tokens of a prompt and its response are rounded up to a multiple, so that the next rollout needs no new graphs."""
PATIENCE = 64
"""Tokens for which a captured size serves fewer samples before theirs is captured: that takes as long as such tokens
lose, and samples that end one after the other would have every size captured for the few tokens that it is needed."""


class DecodeGraphs(Runner):
    """Runs steps, those that only decode as replayed graphs.

    Graphs outlive a rollout and its cache: weights and state stay where they are in memory, and the kernels look up
    where the cache is.

    Args:
        model: The model, in eval mode, its attention on the cache.
        cache: The first cache; see :meth:`use`.
        sampling: How to draw.
        adjuster: What happens to logits before that.
        rows: Most samples at once.
        longest: Most tokens of a prompt and its response.
        layers: The model's layers, compiled; None runs them as they are.
        warm: Rows, sizes and sampling that ran before with the same model, so that capturing them finds nothing to
            compile; added to.
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
        warm: set[tuple[int, int, SamplingParams]],
    ) -> None:
        super().__init__(model, cache, sampling, adjuster)
        self._layers, self._warm = layers, warm
        rows = next((size for size in SIZES if size >= rows), SIZES[-1])
        known = getattr(model.config.get_text_config(), "max_position_embeddings", None) or longest
        self._longest = max(longest, min(-(-longest // LONGER) * LONGER, known))
        width = -(-(self._longest + BURST) // cache.block_size)
        vocabulary = model.config.get_text_config().vocab_size if adjuster.needs_seen else 0
        self._state = DecodeState(rows, width, BURST, self._longest, vocabulary, cache.data.device)
        self._places = CachePlaces(cache)
        self._replays: dict[int, Callable[[], None]] = {}
        self._patience = PATIENCE
        self._pool: Any = None
        self._captures = True

    def serves(self, sampling: SamplingParams, rows: int, longest: int) -> bool:
        """Whether it can run other steps of the same model, sampled like this."""
        return sampling == self.sampling and longest <= self._longest and rows <= self._state.rows

    def use(self, cache: KVCache) -> None:
        """Go on with another cache, of the same type and shape of a block."""
        self.cache = cache
        self._places.point_to(cache)
        self._state.forget()

    def let_go(self) -> None:
        """Hold no cache until :meth:`use`."""
        vars(self).pop("cache", None)
        self.watch = None
        self._state.forget()

    def run(self, step: Step) -> Drawn:
        """Run a step; see :meth:`Runner.run`."""
        samples = step.samples
        if not step.decodes or len(samples) > self._state.rows or not samples:
            self._state.forget()
            return super().run(step)
        self.cache.swap_out(step.swap_out)
        self.cache.swap_in(step.swap_in)
        if step.swap_in:  # the same samples may have come back to other blocks
            self._state.forget()
        size = self._size_for(len(samples), step.tokens)
        decode = self._replays.get(size) or self._capture(size)
        self._state.load(samples)
        for _ in range(step.tokens):
            decode()
        self.let_others_run()
        return self._state.drawn(step.tokens, len(samples))

    def forward(self, step: Step) -> Tensor:
        """See :meth:`Runner.forward`."""
        with self._compiled():
            return super().forward(step)

    def _size_for(self, samples: int, tokens: int) -> int:
        """The batch size that so many samples decode so many tokens in."""
        fitting = [size for size in SIZES if size >= samples]
        captured = [size for size in fitting if size in self._replays]
        if not captured or captured[0] == fitting[0] or self._patience <= 0:
            self._patience = PATIENCE
            return fitting[0]
        self._patience -= tokens
        return captured[0]

    def _capture(self, size: int) -> Callable[[], None]:
        """Capture a step; returns what replays it."""
        self._state.clear()
        kind = (self._state.rows, size, self.sampling)
        if kind not in self._warm:  # compiles kernels and sets libraries up, which no graph can hold
            with _beside():
                self._decode(size)
            self._warm.add(kind)
        self._replays[size] = (self._captures and self._graph(size)) or partial(self._decode, size)
        return self._replays[size]

    def _graph(self, size: int) -> Callable[[], None] | None:
        """The step as a graph; None where the model does what no graph can hold, such as look at a tensor's value."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        vocabulary = int(self.model.config.get_text_config().vocab_size)
        _make_room(graph_bytes(self.sampling) * size * vocabulary, self.cache.data.device)
        graph = torch.cuda.CUDAGraph()
        try:
            with _capturing(graph, self._pool):
                self._decode(size)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if isinstance(error.__context__, KeyboardInterrupt | torch.OutOfMemoryError):
                raise error.__context__ from None  # what ended the capture, whose end failed then
            self._captures = False
            reason = str(error).splitlines()[0]
            _log.warning("NativeEngine: %s is decoded without a CUDA graph: %s", type(self.model).__name__, reason)
            return None
        return graph.replay

    def _decode(self, size: int) -> None:
        """One token for each of the first rows, from and to the state."""
        state = self._state
        tokens, positions = state.last(size)
        seeds, produced = state.source(size)
        batch = PagedBatch(self.cache.data, tiles=state.tiles(size, self._places))
        with attending(batch), self._compiled():
            hidden = hidden_states(self.model, tokens[None], positions[None])
        logits = output_logits(self.model, hidden[0])
        if self.adjuster.active:
            logits = self.adjuster(logits, produced, state.seen(size))
        state.advance(*draw_tokens(logits, self.sampling, draw_uniforms(seeds, produced)))

    @contextmanager
    def _compiled(self) -> Iterator[None]:
        if self._layers is None:
            yield
            return
        with self._layers.enabled():
            yield


def _make_room(needed: int, device: torch.device) -> None:
    """Have torch give back what it keeps for other streams, if a capture would lack it: a capture itself cannot."""
    if unreserved_bytes(device) < needed:
        torch.cuda.empty_cache()


@contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Capture what is called as a graph.

    ``torch.cuda.graph`` collects garbage and empties torch's cache of memory before, which takes longer than the
    capture and would happen again in every rollout.
    """
    torch.cuda.synchronize()
    collects = gc.isenabled()
    gc.disable()  # what a collection frees may call CUDA, which no capture allows
    try:
        with _beside():
            # Other threads, such as NCCL's watchdog, go on calling CUDA meanwhile.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                yield
            finally:
                graph.capture_end()
    finally:
        if collects:
            gc.enable()


@contextmanager
def _beside() -> Iterator[None]:
    """Launch on a stream of its own, behind the current one and before what it gets next."""
    stream = _stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        torch.cuda.current_stream().wait_stream(stream)


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """Always the same: cuBLAS keeps 32 MiB for each stream that it has been called on."""
    return torch.cuda.Stream(device)
