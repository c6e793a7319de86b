"""The native rollout engine: the actor's own module generates, over a key-value cache in blocks.

No weight is copied or converted: the model's attention layers are pointed at the cache while ``generate`` runs. Prompts
of a group are computed once, samples that end make room for others at once, and when the cache is full samples step
back and go on later. What a response is depends on its seed alone, not on any of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from lightning_verl.data.experience import PromptBatch
from lightning_verl.models.modes import deterministic
from lightning_verl.resharding.layouts import local_part
from lightning_verl.rollout.adjust import LogitAdjuster
from lightning_verl.rollout.base import FinishReason, Rollouts, SampleWatch
from lightning_verl.rollout.inputs import (
    check_lengths,
    check_tokens,
    indices_of,
    refuse_weights,
    rollouts_of,
    starting_together,
    token_lists,
)
from lightning_verl.rollout.native.attention import paged_attention
from lightning_verl.rollout.native.blocks import BlockPool
from lightning_verl.rollout.native.cache import CacheShape, KVCache, free_bytes
from lightning_verl.rollout.native.memory import headroom
from lightning_verl.rollout.native.options import NativeOptions
from lightning_verl.rollout.native.runner import Runner, probe
from lightning_verl.rollout.native.scheduler import Group, Limits, Request, Scheduler, Step
from lightning_verl.rollout.native.support import check_native
from lightning_verl.rollout.sampling import SamplingParams, sample_seeds
from lightning_verl.rollout.stopping import Decoder, StopRule

if TYPE_CHECKING:
    from lightning_verl.rollout.native.compiled import CompiledLayers
    from lightning_verl.rollout.native.graphs import DecodeGraphs


@dataclass(frozen=True)
class RolloutReport:
    """What one ``generate`` took, on this rank."""

    steps: int
    """Forward passes."""
    computed_tokens: int
    """Tokens that went through the model; prompts that were shared count once."""
    preemptions: int
    """How often a sample had to step back because the cache was full."""
    swapped_bytes: int
    """What went to host memory and came back, both counted."""
    cache_bytes: int
    """Memory of the cache on the device."""
    used_bytes: int
    """What of it was in use at the peak."""
    host_bytes: int
    """Memory of the cache in host memory."""


@dataclass(frozen=True)
class _Bounds:
    """What bounds a step on a kind of device."""

    block_size: int
    rows: int
    tokens: int
    burst: int


_BOUNDS = {
    "cuda": _Bounds(block_size=64, rows=512, tokens=8192, burst=16),
    "cpu": _Bounds(block_size=16, rows=1024, tokens=4096, burst=1),
}


class NativeEngine:
    """Samples with the model's own layers over a cache in blocks.

    The model runs in eval mode, and every module gets its mode and its attention back, after errors and interrupts
    too. All ranks of a tensor axis must be given the same prompts; they take the same steps.

    Args:
        model: A causal language model of transformers whose layers attend through its attention interface.
        pad_token_id: Fills the right of short responses.
        eos_token_ids: The model's end tokens.
        tokenizer: Decodes responses, for stop strings only.
        options: How memory is used.
        step_group: Ranks that must take equally many steps, because a step of the model is a collective call of theirs
            (experts divided over ranks). Each must call ``generate`` with prompts of its own, or without any.
        tensor_group: Ranks that share the model's weights, who agree on the size of the cache.

    Raises:
        ValueError: The model is none that it can run.
    """

    reports_samples = True

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        pad_token_id: int,
        eos_token_ids: Sequence[int],
        tokenizer: Decoder | None = None,
        options: NativeOptions | None = None,
        step_group: dist.ProcessGroup | None = None,
        tensor_group: dist.ProcessGroup | None = None,
    ) -> None:
        check_native(model)
        # An adapter wrapper of peft hands on to the model inside, whose layers hold the adapters.
        self.model: PreTrainedModel = getattr(model, "get_base_model", lambda: model)()
        self.pad_token_id = pad_token_id
        self.eos_token_ids = tuple(eos_token_ids)
        self.tokenizer = tokenizer
        self.options = options or NativeOptions()
        self.step_group = step_group
        self.tensor_group = tensor_group
        self.weight_version = 0
        self.report: RolloutReport | None = None
        """What the last ``generate`` took."""
        self._shape: CacheShape | None = None
        self._cache: KVCache | None = None
        self._layers: CompiledLayers | None = None
        self._runner: DecodeGraphs | None = None
        self._warm: set[tuple[int, int, SamplingParams]] = set()
        self._captured_for: Held | None = None
        """Of the last rollout that graphs decoded."""
        self._stay = False
        """Whether it was the same in the rollout before."""
        self._captures = self.options.cuda_graphs and not any(isinstance(m, FSDPModule) for m in model.modules())

    def generate(
        self,
        prompts: PromptBatch | Sequence[Sequence[int]],
        sampling: SamplingParams | None = None,
        *,
        step: int = 0,
        prompt_indices: Sequence[int] | None = None,
        watch: SampleWatch | None = None,
    ) -> Rollouts:
        """Sample ``sampling.n`` responses for each prompt; see :class:`~lightning_verl.rollout.base.RolloutEngine`.

        Args:
            prompts: A prompt batch, or plain lists of token ids.
            sampling: How to sample; None takes ``SamplingParams()``.
            step: The training step.
            prompt_indices: The index of each prompt; None takes ``PromptBatch.indices``, or 0, 1, 2... for plain lists.
            watch: Is told of each sample that has ended, while others go on.

        Returns:
            The responses, on the model's device; at least one column wide.

        Raises:
            ValueError: A prompt is empty, has a token out of the vocabulary or leaves too little room for
                ``max_new_tokens``, the indices do not match the prompts, there are stop strings but no tokenizer, or
                no memory is left for one sample.
            RuntimeError: Such an error on another rank of ``step_group``.
        """
        sampling = sampling or SamplingParams()
        name, config = type(self).__name__, self.model.config
        device = next(self.model.parameters()).device
        rule = StopRule(sampling, self.eos_token_ids, self.tokenizer)
        with self._running():
            with starting_together(name, self.step_group, device):
                rows = token_lists(name, prompts)
                check_lengths(name, config.get_text_config(), rows, sampling)
                check_tokens(name, config, rows)
                indices = indices_of(name, prompts, prompt_indices)
                groups = _groups(rows, sample_seeds(sampling.seed, step, indices, sampling.n).tolist(), sampling.n)
                cache = self._cache_for(groups, sampling, device)
                scheduler = self._scheduler(groups, sampling, rule, cache)
                runner = self._runner_for(cache, sampling, scheduler.limits)
            runner.watch = watch
            self._run(scheduler, runner)
        requests = [request for _, members in groups for request in members]
        return rollouts_of(
            [request.response for request in requests],
            [request.logprobs for request in requests],
            [request.reason or FinishReason.LENGTH for request in requests],
            sampling.n,
            pad_token_id=self.pad_token_id,
            weight_version=self.weight_version,
            device=device,
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take the version of the trainer's weights, which this engine shares.

        Args:
            weights: Must be empty.
            version: The version of the weights that the model holds now.

        Raises:
            ValueError: There are weights.
        """
        refuse_weights(type(self).__name__, weights, version)
        self.weight_version = version

    def release(self) -> None:
        """Give the cache's memory back, unless ``keep_kvcache`` was asked for.

        Graphs stay once a second rollout has found the weights where they were, and what a step of theirs takes in
        memory, most of it the logits of one token of each sample. They go too where weights move between rollouts, so
        that they could not be replayed, and over tensor ranks: NCCL ends no communicator that is part of a graph.
        """
        if not self.options.keep_kvcache:
            self._drop_cache()
        if self._runner is not None and not (self._stay and self._has_whole_weights):
            self._runner = None

    @property
    def _has_whole_weights(self) -> bool:
        return self.tensor_group is None or dist.get_world_size(self.tensor_group) == 1

    def _drop_cache(self) -> None:
        self._cache = None
        if self._runner is not None:
            self._runner.let_go()

    # ---- one generate ------------------------------------------------------------------------------------------------

    @contextmanager
    def _running(self) -> Iterator[None]:
        # no_grad and not inference_mode: parameters gathered here would stay inference tensors in the update.
        with torch.no_grad(), deterministic(self.model), paged_attention(self.model):
            self._shape = self._shape or probe(self.model)
            yield

    def _run(self, scheduler: Scheduler, runner: Runner) -> None:
        """Take steps until every sample of this rank, and of those it steps with, has ended."""
        cache, device = runner.cache, runner.cache.data.device
        steps = computed = swapped = 0
        while (step := self._next_step(scheduler, device)) is not None:
            drawn = runner.run(step)
            scheduler.record(step, drawn.tokens, drawn.logprobs)
            if runner.watch is not None:
                for request in (request for request in step.samples if request.reason is not None):
                    runner.watch.finished(request.row, request.response)
            steps += step.tokens
            computed += sum(chunk.count for chunk in step.chunks) * step.tokens
            swapped += len(step.swap_out) + len(step.swap_in)
        self.report = RolloutReport(
            steps=steps,
            computed_tokens=computed,
            preemptions=scheduler.preemptions,
            swapped_bytes=swapped * cache.block_bytes,
            cache_bytes=cache.blocks * cache.block_bytes,
            used_bytes=scheduler.pool.most_used * cache.block_bytes,
            host_bytes=cache.host_blocks * cache.block_bytes,
        )

    def _runner_for(self, cache: KVCache, sampling: SamplingParams, limits: Limits) -> Runner:
        """What runs the steps. Captured graphs are used again while weights and sampling stay."""
        if limits.burst == 1:
            return Runner(self.model, cache, sampling, self._adjuster(sampling, cache.data.device))
        from lightning_verl.rollout.native.compiled import CompiledLayers
        from lightning_verl.rollout.native.graphs import DecodeGraphs

        held, before = Held.of(self.model), self._captured_for
        self._stay, self._captured_for = held == before, held
        if before is not None and held.adapters != before.adapters:
            self._warm.clear()  # other layers run
        if self._runner is not None and self._stay and self._runner.serves(sampling, limits.rows, limits.longest):
            self._runner.use(cache)
            return self._runner
        self._runner = None  # its memory first
        if self.options.compile_layers and self._layers is None:
            self._layers = CompiledLayers(self.model)
        adjuster = self._adjuster(sampling, cache.data.device)
        self._runner = DecodeGraphs(
            self.model, cache, sampling, adjuster, limits.rows, limits.longest, self._layers, self._warm
        )
        return self._runner

    def _adjuster(self, sampling: SamplingParams, device: torch.device) -> LogitAdjuster:
        return LogitAdjuster(sampling, self.eos_token_ids, self._vocabulary, device)

    def _next_step(self, scheduler: Scheduler, device: torch.device) -> Step | None:
        """The next step of this rank, an empty one while others of the step group go on."""
        step = scheduler.next_step()
        if self.step_group is None:
            return step
        running = torch.tensor([int(step is not None)], device=device)
        dist.all_reduce(running, group=self.step_group)
        return step or (Step() if running.item() else None)

    # ---- memory ------------------------------------------------------------------------------------------------------

    @property
    def _vocabulary(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def _bursts(self) -> bool:
        """Whether several tokens are drawn between two looks of the host, from graphs on a GPU."""
        return self.step_group is None and self._captures

    def _cache_for(self, groups: _Groups, sampling: SamplingParams, device: torch.device) -> KVCache:
        """The cache: as large as all samples together need, or as what is free allows."""
        shape, bounds = self._shape, _BOUNDS[device.type]
        if shape is None:
            raise RuntimeError("NativeEngine: the model was not probed yet")
        dtype = shape.stored(self.options.kv_cache_dtype)
        need = _blocks_needed(groups, sampling.max_new_tokens, bounds)
        if self._cache is not None and self._cache.blocks >= need:
            return self._cache
        self._drop_cache()  # its memory counts as free
        block = shape.block_bytes(bounds.block_size, dtype)
        samples = sum(len(requests) for _, requests in groups)
        blocks = min(need, self._room(bounds, samples, sampling, device) // block)
        if blocks < need and self._runner is not None:
            self._runner = None  # what its graphs take counts as free, but is not
            blocks = min(need, self._room(bounds, samples, sampling, device) // block)

        def allocate(blocks: int) -> KVCache:
            host = need - blocks + 1 if self.options.offload_kvcache and blocks < need else 0
            return KVCache(shape, blocks, bounds.block_size, dtype, device, host)

        longest = _longest(groups, sampling)
        least = -(-longest // bounds.block_size) + 1  # with block 0
        self._cache, found = self._largest(allocate, blocks if groups else least, least, device)
        if self._cache is None:
            raise ValueError(self._too_small(longest, least * block, found * block))
        return self._cache

    def _largest(
        self, allocate: Callable[[int], KVCache], blocks: int, least: int, device: torch.device
    ) -> tuple[KVCache | None, int]:
        """Make a cache, of half as many blocks where there is no memory for it: what is free may lie in pieces.

        Args:
            allocate: Makes one of some blocks.
            blocks: Most of them, on this rank.
            least: Blocks that one sample needs.
            device: Where.

        Returns:
            The cache, None where not even ``least`` blocks can be had, and its blocks, or those that can.
        """
        blocks = self._least_of_ranks(blocks, device)
        while blocks >= least:
            try:
                cache = allocate(blocks)
            except torch.OutOfMemoryError:
                cache = None
            if self._least_of_ranks(int(cache is not None), device):
                return cache, blocks
            del cache  # another rank had no memory for it
            self._runner = None  # what its graphs hold may be what was lacking
            blocks = max(blocks // 2, least) if blocks > least else 0
        return None, blocks

    def _too_small(self, longest: int, least: int, room: int) -> str:
        """What to say where a cache has no room for a sample.

        Args:
            longest: Tokens of the longest.
            least: Bytes of the cache that it needs.
            room: Bytes of the cache that there could be.
        """
        asked = self.options.kv_cache_bytes
        limited = asked is not None and asked < least
        found = f"kv_cache_bytes={asked} allows" if limited else "free memory allows"
        fix = f"Raise kv_cache_bytes to {least} or more" if limited else "Free memory for the rollout"
        return (
            f"NativeEngine.generate: a sample of {longest} tokens takes {least} bytes of the key-value cache, but "
            f"{found} {room}, in whole blocks. {fix}, or lower max_new_tokens."
        )

    def _least_of_ranks(self, number: int, device: torch.device) -> int:
        """The smallest of a number over the tensor ranks, who must have caches of one size."""
        if self.tensor_group is None:
            return number
        least = torch.tensor([number], device=device)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.tensor_group)
        return int(least)

    def _room(self, bounds: _Bounds, samples: int, sampling: SamplingParams, device: torch.device) -> int:
        """Bytes that the cache may have."""
        free = free_bytes(device)
        if device.type == "cuda":
            config = self.model.config.get_text_config()
            free -= headroom(config, bounds.tokens, min(bounds.rows, samples), sampling, self._bursts)
        return max(0, min(free, self.options.kv_cache_bytes or free))

    def _scheduler(self, groups: _Groups, sampling: SamplingParams, rule: StopRule, cache: KVCache) -> Scheduler:
        bounds = _BOUNDS[cache.data.device.type]
        longest = _longest(groups, sampling)
        rows = min(bounds.rows, max(1, sum(len(requests) for _, requests in groups)))
        burst = bounds.burst if self._bursts else 1
        limits = Limits(bounds.block_size, rows, bounds.tokens, burst, sampling.max_new_tokens, longest)
        host = BlockPool(cache.host_blocks) if cache.host_blocks else None
        scheduler = Scheduler(limits, BlockPool(cache.blocks), rule, host)
        for group, requests in groups:
            scheduler.add(group, requests)
        return scheduler


@dataclass(frozen=True)
class Held:
    """What captured steps of a model hold: they can be replayed while it stays the same."""

    places: list[int]
    """Of parameters and buffers in memory."""
    adapters: list[tuple[object, ...]]
    """Which adapters of peft compute, layer by layer, and their factors."""

    @classmethod
    def of(cls, model: nn.Module) -> Held:
        """Take it from a model."""
        tensors = [*model.parameters(), *model.buffers()]
        layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]
        return cls(
            [local_part(tensor).data_ptr() for tensor in tensors],
            [
                (
                    layer.disable_adapters,
                    *layer.active_adapters,
                    *layer.merged_adapters,
                    *sorted(getattr(layer, "scaling", {}).items()),
                )
                for layer in layers
            ],
        )


_Groups = list[tuple[Group, list[Request]]]


def _groups(prompts: Sequence[list[int]], seeds: Sequence[int], n: int) -> _Groups:
    """The requests of a rollout, by prompt."""
    groups = []
    for place, prompt in enumerate(prompts):
        group = Group(prompt)
        rows = range(place * n, (place + 1) * n)
        groups.append((group, [Request(row, seeds[row], group) for row in rows]))
    return groups


def _longest(groups: _Groups, sampling: SamplingParams) -> int:
    """Most tokens of a prompt and its response."""
    return max((len(group.prompt) + sampling.max_new_tokens for group, _ in groups), default=1)


def _blocks_needed(groups: _Groups, new_tokens: int, bounds: _Bounds) -> int:
    """Blocks with which no sample ever has to step back: prompts are shared, the rest of the longest counts."""
    size = bounds.block_size
    shared = sum(len(group.prompt) // size for group, _ in groups)
    own = [
        -(-(len(group.prompt) + new_tokens) // size) - len(group.prompt) // size
        for group, requests in groups
        for _ in requests
    ]
    return shared + sum(sorted(own, reverse=True)[: bounds.rows]) + 1
