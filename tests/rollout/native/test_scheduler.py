"""The scheduler without a model: schedules worked out by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from lightning_verl.rollout.base import FinishReason
from lightning_verl.rollout.native.blocks import BlockPool
from lightning_verl.rollout.native.engine import _blocks_needed, _Bounds
from lightning_verl.rollout.native.scheduler import Group, Limits, Request, Scheduler, Step
from lightning_verl.rollout.sampling import SamplingParams
from lightning_verl.rollout.stopping import StopRule

END = -1
LIMITS = Limits(block_size=4, rows=8, tokens=64, burst=1, response=6, longest=24)


# ---- by hand ---------------------------------------------------------------------------------------------------------


def requests_of(group: Group, *rows: int) -> list[Request]:
    return [Request(row, seed=row, group=group) for row in rows]


def scheduler_of(*sizes: tuple[int, int], blocks: int = 40, host: int = 0, **limits: int) -> Scheduler:
    """Prompts of some lengths, each with some samples; rows are counted through. Tokens are 100, 101, 102..."""
    bounds = replace(LIMITS, **limits)
    rule = StopRule(SamplingParams(max_new_tokens=bounds.response), [END])
    scheduler = Scheduler(bounds, BlockPool(blocks + 1), rule, BlockPool(host + 1) if host else None)
    row = 0
    for length, samples in sizes:
        group = Group(list(range(100, 100 + length)))
        scheduler.add(group, requests_of(group, *range(row, row + samples)))
        row += samples
    return scheduler


def chunks(step: Step | None) -> list[tuple[int, int, int, list[int]]]:
    """Row, start, count, and the rows that draw from it."""
    assert step is not None
    return [(c.request.row, c.start, c.count, [s.row for s in c.samples]) for c in step.chunks]


def draw(scheduler: Scheduler, step: Step | None, **ends: int) -> None:
    """Draw 7 for everyone; ``r2=1`` ends row 2 with its first token of this step."""
    assert step is not None
    tokens = []
    for request in step.samples:
        drawn = [7] * step.tokens
        if f"r{request.row}" in ends:
            drawn[ends[f"r{request.row}"] - 1] = END
        tokens.append(drawn)
    scheduler.record(step, tokens, [[-0.5] * step.tokens for _ in tokens])


def take(scheduler: Scheduler, **ends: int) -> Step:
    step = scheduler.next_step()
    draw(scheduler, step, **ends)
    assert step is not None
    return step


def test_samples_share_the_full_blocks_and_copy_the_last() -> None:
    scheduler = scheduler_of((6, 3))
    first = take(scheduler)
    assert chunks(first) == [(0, 0, 6, [0, 1, 2])]
    assert first.copies == [(2, 3), (2, 4)]  # block 2 holds tokens 4 and 5
    assert [request.blocks for request in first.samples] == [[1, 2], [1, 3], [1, 4]]
    assert scheduler.pool.free == 40 - 4
    second = take(scheduler)
    assert chunks(second) == [(0, 6, 1, [0]), (1, 6, 1, [1]), (2, 6, 1, [2])]
    assert (second.copies, scheduler.pool.free) == ([], 40 - 4)


def test_a_prompt_of_whole_blocks_needs_no_copy() -> None:
    scheduler = scheduler_of((8, 3))
    first = take(scheduler)
    assert (chunks(first), first.copies) == ([(0, 0, 8, [0, 1, 2])], [])
    assert scheduler.pool.free == 40 - 2
    second = take(scheduler)
    assert [request.blocks for request in second.samples] == [[1, 2, 3], [1, 2, 4], [1, 2, 5]]


def test_a_sample_that_ends_gives_its_own_blocks_back_only() -> None:
    scheduler = scheduler_of((6, 2))
    take(scheduler, r0=1)
    assert scheduler.pool.free == 40 - 2  # row 1 has block 1, which was shared, and its copy
    step = take(scheduler, r1=1)
    assert chunks(step) == [(1, 6, 1, [1])]
    assert scheduler.pool.free == 40
    assert scheduler.next_step() is None


def test_who_drew_what_is_kept_up_to_the_end() -> None:
    scheduler = scheduler_of((3, 2), burst=4)
    samples = take(scheduler).samples
    step = scheduler.next_step()
    assert step is not None
    assert step.tokens == 4
    scheduler.record(step, [[5, END, 6, 6], [1, 2, 3, 4]], [[-1.0, -2.0, -3.0, -3.0], [-4.0, -5.0, -6.0, -7.0]])
    assert samples[0].response == [7, 5, END]
    assert samples[0].logprobs == [-0.5, -1.0, -2.0]
    assert (samples[0].reason, samples[1].reason) == (FinishReason.EOS, None)
    assert (samples[1].response, samples[1].cached) == ([7, 1, 2, 3, 4], 7)  # the last one is not cached yet
    step = take(scheduler)
    assert (chunks(step), step.tokens) == ([(1, 7, 1, [1])], 1)  # only one token is left
    assert samples[1].reason is FinishReason.LENGTH
    assert scheduler.pool.free == 40


def test_long_prompts_are_cut_and_decoding_goes_on_beside_them() -> None:
    scheduler = scheduler_of((2, 1), (12, 2), tokens=5)
    assert chunks(take(scheduler)) == [(0, 0, 2, [0]), (1, 0, 3, [])]
    assert chunks(take(scheduler)) == [(0, 2, 1, [0]), (1, 3, 4, [])]
    assert chunks(take(scheduler)) == [(0, 3, 1, [0]), (1, 7, 4, [])]
    assert chunks(take(scheduler)) == [(0, 4, 1, [0]), (1, 11, 1, [1, 2])]
    assert chunks(take(scheduler)) == [(0, 5, 1, [0]), (1, 12, 1, [1]), (2, 12, 1, [2])]


def test_the_last_to_enter_steps_back_and_is_computed_again() -> None:
    scheduler = scheduler_of((4, 1), (4, 1), (4, 1), blocks=5, response=4, longest=20)
    assert chunks(take(scheduler)) == [(0, 0, 4, [0]), (1, 0, 4, [1]), (2, 0, 4, [2])]
    assert scheduler.pool.free == 2  # but three want a second block
    for place in range(3):
        assert chunks(take(scheduler)) == [(0, 4 + place, 1, [0]), (1, 4 + place, 1, [1])]
    assert scheduler.preemptions == 1
    assert scheduler.pool.free == 5  # both have ended
    step = take(scheduler)
    assert chunks(step) == [(2, 0, 5, [2])]  # its prompt and the token that it has
    assert step.samples[0].response == [7, 7]


def test_those_that_stepped_back_return_in_their_old_order_and_before_others() -> None:
    scheduler = scheduler_of((4, 1), (4, 1), (4, 1), (4, 1), blocks=6, rows=3, response=12, longest=16)
    assert chunks(take(scheduler)) == [(0, 0, 4, [0]), (1, 0, 4, [1]), (2, 0, 4, [2])]
    for place in range(4):  # two blocks each
        assert [row for row, *_ in chunks(take(scheduler))] == [0, 1, 2], place
    for _ in range(4):  # rows 0 and 1 have three
        assert [row for row, *_ in chunks(take(scheduler))] == [0, 1]
    assert [row for row, *_ in chunks(take(scheduler))] == [0]  # row 0 wants a fourth, so row 1 steps back as well
    assert scheduler.preemptions == 2
    assert [row for row, *_ in chunks(take(scheduler, r0=1))] == [0]
    assert chunks(take(scheduler)) == [(1, 0, 13, [1])]  # all six were free; row 2 would leave it none


def test_blocks_go_to_the_host_and_come_back() -> None:
    scheduler = scheduler_of((4, 1), (4, 1), (4, 1), blocks=5, host=4, response=4, longest=20)
    take(scheduler)
    step = take(scheduler)
    assert (step.swap_out, chunks(step)) == ([(3, 1)], [(0, 4, 1, [0]), (1, 4, 1, [1])])
    take(scheduler)
    assert take(scheduler).swap_in == []
    step = take(scheduler)
    assert chunks(step) == [(2, 4, 1, [2])]  # nothing is computed again
    assert [source for source, _ in step.swap_in] == [1]
    assert [target for _, target in step.swap_in] == step.samples[0].blocks[:1]


def test_a_full_host_has_the_sample_computed_again() -> None:
    scheduler = scheduler_of((4, 1), (8, 1), blocks=5, host=1, response=12, longest=20)
    assert chunks(take(scheduler)) == [(0, 0, 4, [0]), (1, 0, 8, [1])]
    for _ in range(4):  # row 0 takes the fourth block, row 1 the last
        step = take(scheduler)
    step = take(scheduler)  # row 0 wants a third; three of row 1 do not fit into one block of the host
    assert (step.swap_out, chunks(step)) == ([], [(0, 8, 1, [0])])
    assert chunks(take(scheduler, r0=1)) == [(0, 9, 1, [0])]
    assert chunks(take(scheduler)) == [(1, 0, 13, [1])]


def test_late_samples_use_the_prompt_that_was_kept() -> None:
    for length, reused in ((9, 8), (8, 4)):  # of a prompt of two blocks one token at least is computed, for its logits
        scheduler = scheduler_of((length, 3), rows=2)
        step = take(scheduler)
        assert chunks(step) == [(0, 0, length, [0, 1])]
        group = step.samples[0].group
        assert group.prefix == [1, 2]
        take(scheduler, r0=1)
        step = take(scheduler)
        assert chunks(step) == [(1, length + 1, 1, [1]), (2, reused, length - reused, [2])]
        assert step.samples[1].blocks[: reused // 4] == [1, 2][: reused // 4]
        assert group.prefix == []  # nobody is left to wait for
        take(scheduler, r1=1, r2=1)
        assert scheduler.pool.free == 40


def test_a_kept_prompt_is_forgotten_under_pressure() -> None:
    scheduler = scheduler_of((8, 3), rows=2, blocks=5, response=8, longest=16)
    step = take(scheduler)
    group = step.samples[0].group
    assert group.prefix == [1, 2]
    for _ in range(4):
        assert [row for row, *_ in chunks(take(scheduler))] == [0, 1]
    assert (group.prefix, scheduler.pool.free) == ([1, 2], 1)
    assert chunks(take(scheduler)) == [(0, 12, 1, [0])]  # two want a block: the prompt is forgotten, row 1 steps back
    assert (group.prefix, scheduler.preemptions) == ([], 1)
    take(scheduler, r0=1)
    assert chunks(take(scheduler)) == [(1, 0, 13, [1])]
    take(scheduler, r1=1)
    assert chunks(take(scheduler, r2=1)) == [(2, 0, 8, [2])]
    assert (scheduler.pool.free, scheduler.next_step()) == (5, None)


def test_samples_join_only_where_those_that_run_can_grow() -> None:
    scheduler = scheduler_of((6, 3), blocks=5, longest=12)
    # Row 1 takes the third block. Row 2 would take the fourth, and one would be left for the three to grow into.
    assert chunks(take(scheduler)) == [(0, 0, 6, [0, 1])]
    assert scheduler.pool.free == 2
    for place in range(5):
        assert chunks(take(scheduler)) == [(0, 6 + place, 1, [0]), (1, 6 + place, 1, [1])]
    assert chunks(take(scheduler, r2=1)) == [(2, 4, 2, [2])]
    assert (scheduler.preemptions, scheduler.pool.free, scheduler.next_step()) == (0, 5, None)


def test_others_enter_once_an_eighth_of_the_rows_is_free() -> None:
    scheduler = scheduler_of(*[(2, 1)] * 20, rows=16)
    assert [row for row, *_ in chunks(take(scheduler, r3=1))] == list(range(16))
    assert len(chunks(take(scheduler, r5=1))) == 15  # one row of 16 is free, and two are wanted
    step = take(scheduler)
    assert chunks(step)[-2:] == [(16, 0, 2, [16]), (17, 0, 2, [17])]
    assert len(step.chunks) == 16


def test_bursts_need_blocks_and_have_no_newcomers() -> None:
    scheduler = scheduler_of((4, 1), (4, 1), blocks=5, burst=4, response=6, longest=20)
    assert take(scheduler).tokens == 1
    assert take(scheduler).tokens == 4  # one more block each
    scheduler = scheduler_of((4, 1), (4, 1), blocks=5, burst=6, response=12, longest=20)
    take(scheduler)
    step = take(scheduler)  # two more each are not there, one is
    assert (step.tokens, scheduler.preemptions) == (1, 0)
    group = Group([1, 2])
    scheduler = scheduler_of((4, 1), burst=4)
    take(scheduler)
    assert take(scheduler).tokens == 4
    scheduler.add(group, requests_of(group, 9))
    step = take(scheduler)
    assert (step.tokens, chunks(step)) == (1, [(0, 8, 1, [0]), (9, 0, 2, [9])])


def test_a_pool_too_small_for_one_sample_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a sample of 24 tokens takes 6 blocks of 4 tokens, but the cache has 5"):
        scheduler_of((4, 1), blocks=5)
    assert scheduler_of((4, 1), blocks=6).next_step() is not None


# ---- the size of the cache ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_with_the_blocks_that_are_asked_for_nobody_steps_back(seed: int) -> None:
    dice = random.Random(seed)  # noqa: S311
    bounds = _Bounds(
        block_size=dice.choice([1, 4, 16]), rows=dice.choice([2, 5, 100]), tokens=dice.choice([8, 500]), burst=8
    )
    limits = Limits(bounds.block_size, bounds.rows, bounds.tokens, 8, response=dice.choice([1, 9, 33]), longest=80)
    groups = []
    row = 0
    for _ in range(12):
        group = Group([0] * dice.randint(1, 47))
        requests = requests_of(group, *range(row, row + dice.choice([1, 3, 8])))
        row += len(requests)
        groups.append((group, requests))
    blocks = _blocks_needed(groups, limits.response, bounds)
    longest = max(len(group.prompt) for group, _ in groups) + limits.response
    rule = StopRule(SamplingParams(max_new_tokens=limits.response), [END])
    scheduler = Scheduler(replace(limits, longest=longest), BlockPool(blocks), rule)
    for group, requests in groups:
        scheduler.add(group, requests)
    while (step := scheduler.next_step()) is not None:
        draw(scheduler, step)  # everyone takes the longest response
    assert scheduler.preemptions == 0
    assert scheduler.pool.free == scheduler.pool.size


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("response", [1, 4, 7])
def test_the_blocks_that_are_asked_for_one_sample_hold_it(length: int, response: int) -> None:
    group = Group([0] * length)
    blocks = _blocks_needed(
        [(group, requests_of(group, 0))], response, _Bounds(block_size=4, rows=1, tokens=9, burst=1)
    )
    limits = replace(LIMITS, response=response, longest=length + response)
    rule = StopRule(SamplingParams(max_new_tokens=response), [END])
    assert Scheduler(limits, BlockPool(blocks), rule).next_step() is None  # it would refuse a pool that is too small


# ---- requests --------------------------------------------------------------------------------------------------------


def test_the_tokens_of_a_request() -> None:
    request = Request(0, 0, Group([1, 2, 3]), response=[4, 5])
    whole: list[Any] = [1, 2, 3, 4, 5]
    for start in range(6):
        for count in range(6 - start):
            assert request.tokens(start, count) == whole[start : start + count]
    assert (request.length, request.pending) == (5, 5)
    request.cached = 4
    assert request.pending == 1


def test_a_request_may_have_a_limit_of_its_own() -> None:
    group = Group([1, 2, 3])
    requests = [Request(0, 0, group, limit=2), Request(1, 0, group)]
    rule = StopRule(SamplingParams(max_new_tokens=5), ())
    scheduler = Scheduler(Limits(4, 8, 100, 4, response=5, longest=8), BlockPool(9), rule)
    scheduler.add(group, requests)
    while (step := scheduler.next_step()) is not None:
        drawn = [[9] * step.tokens for _ in step.samples]
        scheduler.record(step, drawn, [[0.0] * step.tokens for _ in step.samples])
    assert [request.response for request in requests] == [[9, 9], [9] * 5]
    assert [request.reason for request in requests] == [FinishReason.LENGTH] * 2
