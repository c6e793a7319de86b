"""Runs the steps of a rollout: the model's forward over the cache, then the draw of the next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from lightning_verl.data.transfer import int64, to_device
from lightning_verl.models.heads import hidden_states, output_logits
from lightning_verl.rollout.adjust import LogitAdjuster, seen_tokens
from lightning_verl.rollout.base import SampleWatch
from lightning_verl.rollout.native.attention import SeenLayer, attending, probing
from lightning_verl.rollout.native.batch import LEAST_ROWS, forward_input
from lightning_verl.rollout.native.cache import CacheShape, KVCache
from lightning_verl.rollout.native.scheduler import Request, Step
from lightning_verl.rollout.sampling import SamplingParams, sample_tokens, uniforms


@dataclass(frozen=True)
class Drawn:
    """What a step has drawn: K tokens for each of L samples, on the CPU."""

    tokens: list[list[int]]
    """``[L][K]``."""
    logprobs: list[list[float]]
    """``[L][K]``."""


class Runner:
    """Runs steps one after the other, without anything captured or compiled.

    Args:
        model: The model, in eval mode, its attention on the cache.
        cache: The cache.
        sampling: How to draw.
        adjuster: What happens to logits before that.
    """

    def __init__(
        self, model: PreTrainedModel, cache: KVCache, sampling: SamplingParams, adjuster: LogitAdjuster
    ) -> None:
        self.model, self.cache, self.sampling, self.adjuster = model, cache, sampling, adjuster
        self.watch: SampleWatch | None = None
        """Gets the host while the device works."""

    def run(self, step: Step) -> Drawn:
        """Run a step that draws one token for each of its samples."""
        self.cache.swap_out(step.swap_out)
        self.cache.swap_in(step.swap_in)
        logits = self.forward(step)
        self.cache.copy(step.copies)
        if not step.samples:
            return Drawn([], [])
        counts = [len(chunk.samples) for chunk in step.chunks if chunk.samples]
        logits = logits.repeat_interleave(torch.tensor(counts, device=logits.device), dim=0)
        tokens, logprobs = self.draw(logits, step.samples)
        self.let_others_run()
        return Drawn(tokens[:, None].tolist(), logprobs[:, None].tolist())

    def let_others_run(self) -> None:
        """Give the host to whoever watches until the device has done what was launched."""
        if self.watch is None:
            return
        if self.cache.data.device.type != "cuda":
            self.watch.meanwhile(lambda: False)
            return
        launched = torch.cuda.Event()
        launched.record()
        self.watch.meanwhile(lambda: not launched.query())

    def forward(self, step: Step) -> Tensor:
        """The logits that tokens are drawn from, ``[L, V]``."""
        batch = forward_input(step.chunks, self.cache)
        with attending(batch.attention):
            hidden = hidden_states(self.model, batch.ids, batch.positions)
        last = batch.last
        if last.device.type == "cpu":
            last = functional.pad(last, (0, max(0, LEAST_ROWS - len(last))))
        return output_logits(self.model, hidden[0, last])[: len(batch.last)]

    def draw(self, logits: Tensor, requests: Sequence[Request]) -> tuple[Tensor, Tensor]:
        """Draw the next token of some samples: tokens int64 ``[L]`` and log-probs float32 ``[L]``."""
        device = logits.device
        seeds = to_device(int64([request.seed for request in requests]), device)
        produced = to_device(int64([len(request.response) for request in requests]), device)
        if self.adjuster.active:
            seen = seen_of(requests, logits.shape[-1], device) if self.adjuster.needs_seen else None
            logits = self.adjuster(logits, produced, seen)
        return sample_tokens(logits, self.sampling, uniforms(seeds, produced))


def seen_of(requests: Sequence[Request], vocabulary: int, device: torch.device) -> Tensor:
    """Which tokens prompt and response of some samples hold, bool ``[L, V]``."""
    rows = [request.tokens(0, request.length) for request in requests]
    width = max(map(len, rows))
    ids = to_device(int64([row + [0] * (width - len(row)) for row in rows]), device)
    lengths = to_device(int64([len(row) for row in rows]), device)
    return seen_tokens(ids, torch.arange(width, device=device) < lengths[:, None], vocabulary)


def probe(model: Any) -> CacheShape:
    """Run the model on one token to see what its attention layers keep.

    Raises:
        ValueError: Layers keep different shapes, or some attend without the interface of transformers.
    """
    token = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
    with probing() as seen:
        hidden_states(model, token, token)
    expected = model.config.get_text_config().num_hidden_layers
    kinds = {(layer.heads, layer.head_dim, layer.dtype) for layer in seen}
    if [layer.index for layer in seen] != list(range(expected)) or len(kinds) != 1:
        raise ValueError(
            f"NativeEngine: {type(model).__name__} has {expected} layers, and {len(seen)} of them attend through the "
            f"interface of transformers, with {len(kinds)} shapes of keys; it takes models whose layers all do, with "
            "one shape. Use engine='transformers'."
        )
    first: SeenLayer = seen[0]
    return CacheShape(expected, first.heads, first.head_dim, first.dtype)
