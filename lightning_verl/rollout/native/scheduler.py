"""Decides what runs next: who enters the batch, whose prompt is computed, and who leaves when memory runs out.

The samples of one prompt are a group. Its first sample computes the prompt, the others join at its end: they share the
full blocks of the prompt, get a copy of the last one if it is not full, and draw their first token from the same
logits. When blocks run out, the sample that entered last steps back and is computed again later, or, with host memory
to go to, is brought back later. No decision depends on time, so that ranks with the same requests take the same steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lightning_verl.rollout.base import FinishReason
from lightning_verl.rollout.native.blocks import BlockPool
from lightning_verl.rollout.stopping import StopRule

_ENTER_SHARE = 8
"""While samples run, others enter once a share of 1/8 of the rows is free: a step with prompts costs more than one
without."""


@dataclass(eq=False, slots=True)
class Request:
    """One sample of one prompt on its way."""

    row: int
    """Its place in the result."""
    seed: int
    """Of its random numbers."""
    group: Group
    """The samples of the same prompt."""
    response: list[int] = field(default_factory=list)
    """Tokens sampled so far."""
    logprobs: list[float] = field(default_factory=list)
    """Their log-probs."""
    cached: int = 0
    """How many of its tokens the cache holds."""
    blocks: list[int] = field(default_factory=list)
    """Its blocks in the cache, in the order of its tokens."""
    host_blocks: list[int] = field(default_factory=list)
    """Its blocks in host memory, while it is paused there."""
    limit: int | None = None
    """Most tokens of its response; None takes ``Limits.response``."""
    reason: FinishReason | None = None
    """Why it ended; None while it goes on."""

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.group.prompt) + len(self.response)

    @property
    def pending(self) -> int:
        """Tokens that the cache does not hold yet; 1 while it decodes."""
        return self.length - self.cached

    def tokens(self, start: int, count: int) -> list[int]:
        """Some of its tokens."""
        prompt = self.group.prompt
        if start >= len(prompt):
            return self.response[start - len(prompt) : start - len(prompt) + count]
        return (prompt[start:] + self.response)[:count]


@dataclass(eq=False)
class Group:
    """The samples of one prompt."""

    prompt: list[int]
    """Token ids, at least one."""
    prefix: list[int] = field(default_factory=list)
    """Full blocks of the prompt, kept for samples that have yet to enter."""
    newcomers: deque[Request] = field(default_factory=deque)
    """Samples that have not entered yet."""


@dataclass(slots=True)
class Chunk:
    """The tokens of one sample that a step computes."""

    request: Request
    start: int
    """The first of them."""
    count: int
    """How many."""
    samples: tuple[Request, ...]
    """Who draws the next token from the logits of the last one: nobody, the sample, or it and those that join."""


@dataclass
class Step:
    """What runs next. Blocks move in the order of the fields: out, in, compute, copy."""

    swap_out: list[tuple[int, int]] = field(default_factory=list)
    """Blocks that go to host memory: from, to."""
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    """Blocks that come from host memory: from, to."""
    chunks: list[Chunk] = field(default_factory=list)
    """What is computed."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Blocks that are copied afterwards: from, to."""
    tokens: int = 1
    """How many tokens each sample draws, one after the other; more than one only if all of them decode."""

    @property
    def samples(self) -> list[Request]:
        """Who draws tokens, in the order of the chunks."""
        return [request for chunk in self.chunks for request in chunk.samples]

    @property
    def decodes(self) -> bool:
        """Whether every chunk is one token that the next one is drawn from."""
        return all(chunk.count == 1 and len(chunk.samples) == 1 for chunk in self.chunks)


@dataclass(frozen=True)
class Limits:
    """What bounds a step."""

    block_size: int
    """Tokens in a block."""
    rows: int
    """Most samples that run at once."""
    tokens: int
    """Most tokens that a step computes; longer prompts are cut into several steps."""
    burst: int
    """Most tokens that a sample draws in one step."""
    response: int
    """Most tokens of a response."""
    longest: int
    """Most tokens of a prompt and its response."""


class Scheduler:
    """Plans steps for requests until all of them have ended.

    Args:
        limits: What bounds a step.
        pool: The blocks of the cache. It must hold one sample of the greatest length.
        rule: Tells when a response has ended.
        host: Blocks in host memory for samples that have to step back; None has them computed again.

    Raises:
        ValueError: The pool cannot hold one sample of the greatest length.
    """

    def __init__(self, limits: Limits, pool: BlockPool, rule: StopRule, host: BlockPool | None = None) -> None:
        most = -(-limits.longest // limits.block_size)
        if most > pool.size:
            raise ValueError(
                f"Scheduler: a sample of {limits.longest} tokens takes {most} blocks of {limits.block_size} tokens, "
                f"but the cache has {pool.size}. Free memory for the rollout, or lower max_new_tokens."
            )
        self.limits, self.pool, self._rule, self._host = limits, pool, rule, host
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._growing = 0
        """How many of those that run will want another block; the next may be due for all of them at once."""
        self.preemptions = 0
        """How often a sample had to step back."""

    def add(self, group: Group, requests: Iterable[Request]) -> None:
        """Let the samples of a prompt wait for their turn."""
        requests = list(requests)
        group.newcomers.extend(requests)
        self._waiting.extend(requests)

    def next_step(self) -> Step | None:
        """What to run now; None once every sample has ended."""
        if not self._running and not self._waiting:
            return None
        step = Step()
        step.tokens = self._make_room(step)
        self._growing = sum(map(self._grows, self._running))
        budget = self.limits.tokens
        for request in list(self._running):  # those that join in this step are no part of it
            if budget:
                budget -= self._compute(request, step, budget)
        running = len(step.chunks)
        self._enter(step, budget)
        if len(step.chunks) > running or not step.decodes:
            step.tokens = 1
        return step

    def record(self, step: Step, tokens: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]) -> None:
        """Take what a step has drawn.

        Args:
            step: From ``next_step``.
            tokens: For each of ``step.samples`` its ``step.tokens`` tokens; those behind its end are ignored.
            logprobs: Their log-probs.
        """
        decodes = step.decodes
        for chunk in step.chunks:
            chunk.request.cached += chunk.count
        for request, drawn, values in zip(step.samples, tokens, logprobs, strict=True):
            left = self._left(request)
            count, request.reason = self._rule.cut(request.response, drawn[:left])
            if count == left:
                request.reason = request.reason or FinishReason.LENGTH
            request.response += drawn[:count]
            request.logprobs += values[:count]
            if decodes:
                request.cached += count - 1
            if request.reason is not None:
                self.pool.give_back(request.blocks)
                request.blocks = []
        self._running = [request for request in self._running if request.reason is None]

    def _left(self, request: Request) -> int:
        """How many tokens its response may still get."""
        return (request.limit or self.limits.response) - len(request.response)

    # ---- those that run ----------------------------------------------------------------------------------------------

    def _make_room(self, step: Step) -> int:
        """Give everyone that runs the blocks for its next tokens; returns for how many."""
        if self.limits.burst > 1 and all(request.pending == 1 for request in self._running):
            burst = min(self.limits.burst, max(map(self._left, self._running), default=1))
            wanted = [self._missing(request, burst) for request in self._running]
            if sum(wanted) <= self.pool.free:
                for request, count in zip(self._running, wanted, strict=True):
                    request.blocks += self.pool.take(count)
                return burst
        place = 0
        while place < len(self._running):
            request = self._running[place]
            missing = self._missing(request, 1)
            while missing > self.pool.free:
                if self._forget_prefix():
                    continue
                self._step_back(self._running[-1], step)
                if place == len(self._running):  # it was its own turn to go
                    return 1
            request.blocks += self.pool.take(missing)
            place += 1
        return 1

    def _grows(self, request: Request) -> bool:
        return len(request.blocks) * self.limits.block_size < request.length + self._left(request)

    def _missing(self, request: Request, burst: int) -> int:
        length = min(max(request.length, request.cached + burst), self.limits.longest)
        return max(0, -(-length // self.limits.block_size) - len(request.blocks))

    def _step_back(self, request: Request, step: Step) -> None:
        """Take the blocks of a sample away; it waits at the front."""
        self.preemptions += 1
        self._running.remove(request)
        used = request.blocks[: -(-request.cached // self.limits.block_size)]
        if self._host is not None and self._host.free >= len(used):
            request.host_blocks = self._host.take(len(used))
            step.swap_out += zip(used, request.host_blocks, strict=True)
        else:
            request.cached = 0
        self.pool.give_back(request.blocks)
        request.blocks = []
        self._waiting.appendleft(request)

    def _forget_prefix(self) -> bool:
        """Give up a prompt that is only kept for others; returns whether there was one."""
        for request in self._waiting:
            if request.group.prefix:
                self.pool.give_back(request.group.prefix)
                request.group.prefix = []
                return True
        return False

    def _compute(self, request: Request, step: Step, budget: int) -> int:
        """Add a sample's next tokens to the step; returns how many."""
        count = min(request.pending, budget)
        ends = count == request.pending
        samples = (request, *self._join(request, step)) if ends else ()
        step.chunks.append(Chunk(request, request.cached, count, samples))
        return count

    # ---- those that enter --------------------------------------------------------------------------------------------

    def _enter(self, step: Step, budget: int) -> None:
        """Let waiting samples in, in their order, as far as rows, tokens and blocks go."""
        if self._running and self.limits.rows - len(self._running) < -(-self.limits.rows // _ENTER_SHARE):
            return
        while self._waiting and budget and len(self._running) < self.limits.rows:
            request = self._waiting[0]
            prefix = [] if request.host_blocks else self._usable_prefix(request)
            need = -(-request.length // self.limits.block_size) - len(prefix)
            if self._running and need + self._growing > self.pool.free:
                return
            if need > self.pool.free:
                if not self._forget_prefix():
                    return
                continue
            self._waiting.popleft()
            self._admit(request, prefix, need, step)
            budget -= self._compute(request, step, budget)

    def _admit(self, request: Request, prefix: list[int], need: int, step: Step) -> None:
        request.blocks = self.pool.share(prefix) + self.pool.take(need)
        if request.host_blocks and self._host is not None:
            step.swap_in += zip(request.host_blocks, request.blocks, strict=False)
            self._host.give_back(request.host_blocks)
            request.host_blocks = []
        else:
            request.cached = len(prefix) * self.limits.block_size
        if request in request.group.newcomers:
            request.group.newcomers.remove(request)
        self._drop_prefix_if_last(request.group)
        self._running.append(request)
        self._growing += self._grows(request)

    def _usable_prefix(self, request: Request) -> list[int]:
        """Blocks of the prompt that are there already; one token at least is left to compute, for its logits."""
        return request.group.prefix[: (request.length - 1) // self.limits.block_size]

    def _join(self, leader: Request, step: Step) -> list[Request]:
        """Let others of the group in at the end of their prompt, which the leader computes in this step."""
        group, size = leader.group, self.limits.block_size
        joined: list[Request] = []
        if leader.response:
            return joined
        full, rest = divmod(len(group.prompt), size)
        while group.newcomers and len(self._running) < self.limits.rows:
            if (1 if rest else 0) + self._growing > self.pool.free:
                break
            request = group.newcomers.popleft()
            self._waiting.remove(request)
            request.blocks = self.pool.share(leader.blocks[:full])
            if rest:
                request.blocks += self.pool.take(1)
                step.copies.append((leader.blocks[full], request.blocks[full]))
            request.cached = len(group.prompt)
            self._running.append(request)
            joined.append(request)
            self._growing += self._grows(request)
        if group.newcomers and not group.prefix:
            group.prefix = self.pool.share(leader.blocks[:full])
        self._drop_prefix_if_last(group)
        return joined

    def _drop_prefix_if_last(self, group: Group) -> None:
        if not group.newcomers and group.prefix:
            self.pool.give_back(group.prefix)
            group.prefix = []
