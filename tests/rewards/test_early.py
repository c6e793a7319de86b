"""Reward functions that run on samples while others are still sampled."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lightning_verl import RewardFunction
from lightning_verl.data.experience import PromptBatch, RolloutBatch
from lightning_verl.rewards.early import EarlyScores
from lightning_verl.rewards.functions import RewardError, batch_reward

PROMPTS = ["p0", "p1"]
RESPONSES = [[3], [4, 5], [3], [6, 7, 8]]
"""Two of each prompt; those of rows 0 and 2 are equal."""


def text(ids: list[int]) -> str:
    return "".join(chr(97 + token) for token in ids)


def prompts(**fields: list[Any]) -> PromptBatch:
    rows = [{name: values[row] for name, values in fields.items()} for row in range(2)]
    return PromptBatch(torch.tensor([[1, 2], [2, 0]]), torch.tensor([2, 1]), torch.arange(2), PROMPTS, rows)


def batch_of(source: PromptBatch, responses: list[list[int]] = RESPONSES) -> RolloutBatch:
    whole = [source.token_lists()[row // 2] + ids for row, ids in enumerate(responses)]
    width = max(map(len, whole))
    return RolloutBatch(
        input_ids=torch.tensor([ids + [0] * (width - len(ids)) for ids in whole]),
        prompt_lengths=torch.tensor([2, 2, 1, 1]),
        response_lengths=torch.tensor([len(ids) for ids in responses]),
        rollout_logprobs=torch.zeros(4, 3),
        group_ids=torch.tensor([0, 0, 1, 1]),
        truncated=torch.zeros(4, dtype=torch.bool),
        prompt_texts=[PROMPTS[row // 2] for row in range(4)],
        response_texts=[text(ids) for ids in responses],
        fields=[source.fields[row // 2] for row in range(4)],
    )


class Counting:
    """A function that keeps what it was called with: the length of the response and of the prompt in tokens."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.threads: set[str] = set()

    def __call__(self, prompt: str, response: str, prompt_ids: list[int]) -> float:
        self.calls.append((prompt, response))
        self.threads.add(threading.current_thread().name)
        return len(response) + 10 * len(prompt_ids)


WANTED = [21.0, 22.0, 11.0, 13.0]


def begin(reward: RewardFunction, source: PromptBatch) -> EarlyScores:
    watch = reward.watch(source, 2, text)
    assert watch is not None
    return watch


@pytest.fixture(autouse=True)
def _switch_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    assert sys.getswitchinterval() == before
    assert not [t for t in threading.enumerate() if t.name.startswith("lightning-verl-reward")]


@pytest.mark.parametrize("workers", [1, 3])
def test_samples_are_scored_in_threads_and_once(workers: int) -> None:
    counting, source = Counting(), prompts()
    reward = RewardFunction(
        [counting, batch_reward(lambda responses: [len(responses)] * len(responses))], num_workers=workers
    )
    watch = begin(reward, source)
    assert sys.getswitchinterval() < 0.005
    for row in (3, 0, 2):  # row 1 is the last, and comes with the batch only
        watch.finished(row, RESPONSES[row])
    assert watch.texts == {3: "ghi", 0: "d", 2: "d"}
    watch.meanwhile(lambda: True)
    scores = reward.score(batch_of(source))
    assert scores.components["Counting"].tolist() == WANTED
    assert scores.values.tolist() == [value + 4 for value in WANTED]  # the batch function sees all four rows
    assert sorted(counting.calls) == [("p0", "d"), ("p0", "ef"), ("p1", "d"), ("p1", "ghi")]
    assert "MainThread" not in counting.threads


def test_without_threads_calls_run_here_while_the_device_works() -> None:
    counting, source = Counting(), prompts()
    reward = RewardFunction(counting)
    watch = begin(reward, source)
    for row, response in enumerate(RESPONSES):
        watch.finished(row, response)
    assert counting.calls == []
    turns = iter([True, True, False])
    watch.meanwhile(lambda: next(turns))
    assert counting.calls == [("p0", "d"), ("p0", "ef")]
    assert reward.score(batch_of(source)).values.tolist() == WANTED
    assert counting.calls == [("p0", "d"), ("p0", "ef"), ("p1", "d"), ("p1", "ghi")]
    assert counting.threads == {"MainThread"}
    assert reward.score(batch_of(source)).values.tolist() == WANTED
    assert len(counting.calls) == 8, "what was scored early is used once"


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_that_are_not_what_they_were_are_scored_anew(workers: int) -> None:
    counting, source = Counting(), prompts()
    reward = RewardFunction(counting, num_workers=workers)
    watch = begin(reward, source)
    for row, response in enumerate(RESPONSES):
        watch.finished(row, response)
    watch.meanwhile(lambda: True)
    batch = batch_of(source, [[3], [4, 6], [3], [6, 7, 8]]).select([3, 1, 0])
    batch.fields[0] = {"another": 1}
    assert reward.score(batch).values.tolist() == [13.0, 22.0, 21.0]
    assert sorted(counting.calls) == [
        ("p0", "d"),
        ("p0", "ef"),
        ("p0", "eg"),
        ("p1", "d"),
        ("p1", "ghi"),
        ("p1", "ghi"),
    ]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_early_error_is_raised_with_its_row_and_stops_the_others(workers: int) -> None:
    called: list[str] = []

    def broken(response: str) -> float:
        called.append(response)
        raise KeyError(response)

    source = prompts()
    reward = RewardFunction(broken, num_workers=workers)
    watch = begin(reward, source)
    watch.finished(3, RESPONSES[3])
    watch.meanwhile(lambda: True)
    while not called:
        pass
    with pytest.raises(RewardError, match=r"failed on row 3 \(sample 1/1\), prompt 'p1': KeyError: 'ghi'"):
        reward.score(batch_of(source))
    assert called == ["ghi"]


def test_errors_take_the_fallback_and_none_abstains() -> None:
    def picky(response: str) -> float | None:
        if response == "ef":
            return None
        return 1 / (len(response) - 1)

    source = prompts()
    reward = RewardFunction(picky, num_workers=2, on_error="fallback", fallback=-1.0)
    watch = begin(reward, source)
    for row, response in enumerate(RESPONSES):
        watch.finished(row, response)
    scores = reward.score(batch_of(source))
    assert scores.values.tolist() == [-1.0, 0.0, -1.0, 0.5]
    assert scores.valid.tolist() == [True, False, True, True]
    assert scores.fallbacks == 2


def test_a_call_that_ends_the_process_is_raised_where_scores_are_asked_for() -> None:
    def leaving(response: str) -> float:
        raise SystemExit(response)

    source = prompts()
    reward = RewardFunction(leaving, num_workers=1)
    watch = begin(reward, source)
    watch.finished(0, RESPONSES[0])
    watch.meanwhile(lambda: False)
    with pytest.raises(SystemExit, match="d"):
        reward.score(batch_of(source))


def test_a_stuck_sample_takes_the_fallback(gate: threading.Event) -> None:
    def stuck(response: str) -> float:
        return float(response != "ef" or gate.wait(30))

    source = prompts()
    reward = RewardFunction(stuck, time_limit=0.2, fallback=-2.0)
    watch = begin(reward, source)
    for row, response in enumerate(RESPONSES):
        watch.finished(row, response)
    assert reward.score(batch_of(source)).values.tolist() == [1.0, -2.0, 1.0, 1.0]
    gate.set()
    for thread in threading.enumerate():
        if thread.name.startswith("lightning-verl-reward"):
            thread.join()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_a_rollout_that_failed_leaves_no_thread() -> None:
    reward = RewardFunction(Counting(), num_workers=2)
    watch = begin(reward, prompts())
    watch.finished(0, RESPONSES[0])
    watch.end()
    watch._thread.join()
    watch.finished(1, RESPONSES[1])
    assert watch.texts == {0: "d", 1: "ef"}


@pytest.mark.parametrize(
    "reward",
    [
        lambda: RewardFunction(Counting(), during_rollout=False, num_workers=1),
        lambda: RewardFunction(batch_reward(lambda responses: [0.0] * len(responses)), num_workers=1),
        lambda: RewardFunction(lambda answer: float(answer), num_workers=1),  # the prompts have no such field
    ],
    ids=["off", "batch", "missing"],
)
def test_what_has_to_wait_for_all_rows_waits(reward: Callable[[], RewardFunction]) -> None:
    assert reward().watch(prompts(), 2, text) is None
