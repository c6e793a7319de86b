"""Long random schedules over a simulated cache."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from lightning_verl.rollout.base import FinishReason
from lightning_verl.rollout.native.blocks import BlockPool
from lightning_verl.rollout.native.scheduler import Group, Limits, Request, Scheduler, Step
from lightning_verl.rollout.sampling import SamplingParams
from lightning_verl.rollout.stopping import StopRule

END = -1


@dataclass
class World:
    """How a random run is made."""

    limits: Limits
    blocks: int
    host: int = 0
    requests: int = 10_000
    samples: int = 5
    """Most samples of a prompt."""
    seed: int = 0


class Simulation:
    """Runs the steps of a scheduler over a cache of plain lists, which hold tokens in the place of keys and values.

    Every token says what it is: of which group or row, and where. So a list of tokens equals a sequence only if
    attention would have read exactly that sequence.
    """

    def __init__(self, world: World) -> None:
        self.world, self.random = world, random.Random(world.seed)  # noqa: S311
        limits = world.limits
        self.pool, self.host = BlockPool(world.blocks + 1), BlockPool(world.host + 1) if world.host else None
        rule = StopRule(SamplingParams(max_new_tokens=limits.response), [END])
        self.scheduler = Scheduler(limits, self.pool, rule, self.host)
        self.memory: dict[int, list[int]] = {block: [0] * limits.block_size for block in range(world.blocks + 1)}
        self.host_memory: dict[int, list[int]] = {}
        self.groups: list[Group] = []
        self.made: list[Request] = []
        self.ends: list[int] = []
        """How long the response of each row is."""
        self.steps = self.swapped = self.copied = self.reused = self.bursts = 0

    def arrive(self) -> None:
        """One more prompt, with some samples."""
        limits, name = self.world.limits, len(self.groups) + 1
        length = self.random.randint(1, limits.longest - limits.response)
        group = Group([name * 1000 + place for place in range(length)])
        count = min(self.random.randint(1, self.world.samples), self.world.requests - len(self.made))
        rows = range(len(self.made), len(self.made) + count)
        requests = [Request(row, seed=row, group=group) for row in rows]
        self.groups.append(group)
        self.made += requests
        self.ends += [self.random.randint(1, limits.response) for _ in rows]
        self.scheduler.add(group, requests)

    def run(self) -> None:
        while True:
            waiting = len(self.scheduler._waiting)
            while len(self.made) < self.world.requests and waiting < 30 and self.random.random() < 0.7:
                self.arrive()
                waiting = len(self.scheduler._waiting)
            step = self.scheduler.next_step()
            if step is None:
                if len(self.made) == self.world.requests:
                    return
                continue
            self.steps += 1
            self.check(step)
            tokens = self.execute(step)
            self.scheduler.record(step, tokens, [[float(token) for token in drawn] for drawn in tokens])

    def check(self, step: Step) -> None:
        """Limits hold, and every block has exactly the users that it should have."""
        limits, running = self.world.limits, self.scheduler._running
        assert step.chunks or step.swap_out
        assert len(running) <= limits.rows
        assert sum(chunk.count for chunk in step.chunks) <= limits.tokens
        assert all(chunk.count > 0 for chunk in step.chunks)
        assert 1 <= step.tokens <= limits.burst
        assert step.tokens == 1 or step.decodes
        users: Counter[int] = Counter()
        of: dict[int, tuple[Group, int]] = {}
        for request in running:
            users.update(request.blocks)
            full = len(request.group.prompt) // limits.block_size
            for place, block in enumerate(request.blocks):
                if block in of:  # a shared one is the same full block of the same prompt
                    assert of[block] == (request.group, place)
                    assert place < full
                of[block] = (request.group, place)
        for group in {request.group for request in self.scheduler._waiting}:
            users.update(group.prefix)
            for place, block in enumerate(group.prefix):
                assert of.setdefault(block, (group, place)) == (group, place)
        assert 0 not in users
        assert {block: count for block, count in enumerate(self.pool._users) if count} == users
        assert self.pool.free == self.world.blocks - len(users)

    def execute(self, step: Step) -> list[list[int]]:
        """Move blocks, compute, and draw; returns the tokens of each sample."""
        assert len({target for _, target in step.swap_out}) == len(step.swap_out)
        for source, target in step.swap_out:
            self.host_memory[target] = list(self.memory[source])
        for source, target in step.swap_in:
            self.memory[target] = self.host_memory.pop(source)
        self.swapped += len(step.swap_in)
        kept = {  # what those that run have in the cache: nobody may write there
            (block, place)
            for request in self.scheduler._running
            if request.cached
            for block, place in self.slots(request, request.cached)
            if request not in step.samples or request.response
        }
        for chunk in step.chunks:
            request, size = chunk.request, self.world.limits.block_size
            self.reused += chunk.start > 0 and not request.response and len(chunk.samples) > 0
            tokens = request.tokens(chunk.start, chunk.count)
            assert len(tokens) == chunk.count
            for place, token in enumerate(tokens, chunk.start):
                block = request.blocks[place // size]
                assert (block, place % size) not in kept
                self.memory[block][place % size] = token
            self.reads_its_own(request, chunk.start + chunk.count, [*request.group.prompt, *request.response])
        drawn = [self.draw(request, step.tokens) for request in step.samples]
        for source, target in step.copies:
            assert (target, 0) not in kept
            self.memory[target] = list(self.memory[source])
        self.copied += len(step.copies)
        for chunk in step.chunks:
            for request in chunk.samples:  # those that joined, at the end of the prompt
                cached = chunk.start + chunk.count
                self.reads_its_own(request, cached, [*request.group.prompt, *request.response])
        return drawn

    def slots(self, request: Request, count: int) -> Iterator[tuple[int, int]]:
        size = self.world.limits.block_size
        return ((request.blocks[place // size], place % size) for place in range(count))

    def reads_its_own(self, request: Request, count: int, sequence: list[int]) -> None:
        """The first tokens in the blocks of a sample are those of its prompt and response."""
        read: list[int] = []
        for block in request.blocks[: -(-count // self.world.limits.block_size)]:
            read += self.memory[block]
        assert read[:count] == sequence[:count]

    def draw(self, request: Request, count: int) -> list[int]:
        """Draw tokens one after the other; all but the last are computed in this step already, ended or not."""
        limits = self.world.limits
        drawn: list[int] = []
        for turn in range(count):
            place = len(request.response) + turn
            end = place == self.ends[request.row] - 1 and self.ends[request.row] < limits.response
            drawn.append(END if end else -(request.row * 1000 + place + 2))
            if turn < count - 1:
                at = min(request.length + turn, limits.longest - 1)  # rows that have ended stay within the model
                self.memory[request.blocks[at // limits.block_size]][at % limits.block_size] = drawn[-1]
        self.bursts += count > 1
        return drawn

    def all_is_right(self) -> None:
        """Nothing was lost, doubled or leaked."""
        assert [request.row for request in self.made] == list(range(self.world.requests))
        for request, end in zip(self.made, self.ends, strict=True):
            full = end == self.world.limits.response
            expected = [-(request.row * 1000 + place + 2) for place in range(end)]
            if not full:
                expected[-1] = END
            assert request.response == expected
            assert request.logprobs == [float(token) for token in expected]
            assert request.reason is (FinishReason.LENGTH if full else FinishReason.EOS)
            assert request.blocks == request.host_blocks == []
        assert self.pool.free == self.pool.size
        assert not any(self.pool._users)
        assert self.host is None or self.host.free == self.host.size
        assert all(not group.prefix and not group.newcomers for group in self.groups)


def run(world: World) -> Simulation:
    simulation = Simulation(world)
    simulation.run()
    simulation.all_is_right()
    return simulation


SMALL = Limits(block_size=4, rows=12, tokens=40, burst=1, response=12, longest=36)


@pytest.mark.parametrize("burst", [1, 8])
@pytest.mark.parametrize("host", [0, 30])
def test_ten_thousand_random_requests(burst: int, host: int) -> None:
    simulation = run(World(replace(SMALL, burst=burst), blocks=20, host=host, seed=burst + host))
    scheduler = simulation.scheduler
    assert scheduler.preemptions > 100
    assert simulation.pool.most_used == 20
    assert simulation.copied > 100
    assert simulation.reused > 100  # prompts that were cut, or kept for late samples
    assert (simulation.swapped > 100) is (host > 0)
    assert (simulation.bursts > 100) is (burst > 1)


@pytest.mark.parametrize("burst", [1, 8])
def test_extremes(burst: int) -> None:
    tightest = replace(SMALL, burst=burst)
    for changes, blocks in (
        ({}, 9),  # room for one sample of the greatest length, no more
        ({"rows": 1}, 9),
        ({"tokens": 1}, 20),
        ({"tokens": 3}, 12),
        ({"block_size": 1}, 40),
        ({"block_size": 64}, 2),
        ({"response": 1}, 12),
    ):
        for host in (0, 1, 12):
            simulation = run(World(replace(tightest, **changes), blocks, host, requests=150, seed=host))
            assert simulation.pool.free == simulation.pool.size
            assert simulation.scheduler.next_step() is None


def test_many_samples_of_each_prompt() -> None:
    simulation = run(World(replace(SMALL, rows=6), blocks=24, requests=600, samples=40))
    assert simulation.reused > 50
