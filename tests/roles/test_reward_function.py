"""Tests of the reward role over Python functions."""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor

from lightning_verl.data.experience import RolloutBatch
from lightning_verl.rewards.functions import RewardError, batch_reward
from lightning_verl.rewards.pool import THREAD_PREFIX
from lightning_verl.roles.reward_function import RewardFunction


def make_batch(responses: list[str], **fields: list[Any]) -> RolloutBatch:
    """One prompt, id 17, of two tokens; the responses are tokenised to their character codes."""
    count, longest = len(responses), max(map(len, responses))
    codes = [[1, 2, *map(ord, text), *[0] * (longest - len(text))] for text in responses]
    return RolloutBatch(
        input_ids=torch.tensor(codes),
        prompt_lengths=torch.full((count,), 2),
        response_lengths=torch.tensor([len(text) for text in responses]),
        rollout_logprobs=torch.zeros(count, longest),
        group_ids=torch.full((count,), 17),
        truncated=torch.zeros(count, dtype=torch.bool),
        prompt_texts=["What is it?"] * count,
        response_texts=responses,
        fields=[{name: values[row] for name, values in fields.items()} for row in range(count)],
    )


def reward_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(THREAD_PREFIX)]


def as_list(tensor: Tensor) -> list[float | None]:
    return [None if math.isnan(value) else value for value in tensor.tolist()]


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What a stuck function waits for, up to 30 s; opened at the end so that no thread outlives the test."""
    event = threading.Event()
    yield event
    event.set()
    end = time.monotonic() + 10
    while reward_threads() and time.monotonic() < end:
        time.sleep(0.01)
    assert reward_threads() == []


def test_abstention_is_handled_row_by_row() -> None:
    def first(f1: float | None) -> float | None:
        return f1

    def second(f2: float | None) -> float | None:
        return f2

    batch = make_batch(["a"] * 4, f1=[1, 0, None, 0], f2=[0, 1, 1, 0])
    scores = RewardFunction([first, second]).score(batch)
    assert scores.values.tolist() == [1.0, 1.0, 1.0, 0.0]
    assert scores.values.dtype == torch.float32
    assert scores.valid.tolist() == [True, True, True, True]
    assert {name: as_list(values) for name, values in scores.components.items()} == {
        "first": [1.0, 0.0, None, 0.0],
        "second": [0.0, 1.0, 1.0, 0.0],
    }
    assert scores.disagreement is None
    assert scores.fallbacks == 0

    alone = RewardFunction(first).score(batch)
    assert alone.values.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert alone.valid.tolist() == [True, True, False, True]

    nobody = RewardFunction(lambda response: None).score(batch)
    assert nobody.values.tolist() == [0.0] * 4
    assert nobody.valid.tolist() == [False] * 4


def test_weights_apply_to_the_sum_and_not_to_the_components() -> None:
    reward = RewardFunction([lambda a: a, lambda b: b], weights=[0.25, 0.75], names=["a", "b"])
    scores = reward.score(make_batch(["x", "y"], a=[1, 1], b=[2, None]))
    assert scores.values.tolist() == [1.75, 0.25]
    assert {name: as_list(values) for name, values in scores.components.items()} == {"a": [1.0, 1.0], "b": [2.0, None]}


def test_a_format_reward_sees_kept_markers_and_raw_ids() -> None:
    def formatted(response: str) -> float:
        return float(re.fullmatch(r"<think> .+ </think> .+", response) is not None)

    def has_ids(prompt_ids: list[int], response_ids: list[int], response: str) -> bool:
        return prompt_ids == [1, 2] and response_ids == [ord(letter) for letter in response]

    scores = RewardFunction([formatted, has_ids]).score(make_batch(["<think> a </think> b", "a b"]))
    assert scores.components["formatted"].tolist() == [1.0, 0.0]
    assert scores.components["has_ids"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("limit_off_main_thread", [False, True])
def test_a_stuck_function_takes_the_fallback_once(
    gate: threading.Event, caplog: pytest.LogCaptureFixture, limit_off_main_thread: bool
) -> None:
    def slow(response: str) -> float:
        return float(not gate.wait(30)) if response == "b" else 1.0

    reward = RewardFunction(slow, time_limit=0.5, fallback=-1.0)
    batch = make_batch(["a", "b", "c", "d"])
    results = []
    begin = time.monotonic()
    with caplog.at_level(logging.WARNING):
        if limit_off_main_thread:
            runner = threading.Thread(target=lambda: results.append(reward.score(batch)))
            runner.start()
            runner.join()
        else:
            results.append(reward.score(batch))
    assert time.monotonic() - begin < 5
    (scores,) = results
    assert scores.values.tolist() == [1.0, -1.0, 1.0, 1.0]
    assert scores.valid.tolist() == [True] * 4
    assert scores.fallbacks == 1
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == (
        "Reward function 'slow': 1 of 4 samples take the fallback -1.0; "
        "row 1 (sample 17/1), prompt 'What is it?': ran out of its 0.5 s"
    )


def test_a_worker_s_exception_surfaces_in_the_calling_thread_and_leaves_no_thread() -> None:
    def broken(response: str) -> float:
        raise KeyError(response)

    with pytest.raises(RewardError, match=r"'broken' failed on row 0 \(sample 17/0\), prompt 'What is it\?': KeyError"):
        RewardFunction(broken, num_workers=2).score(make_batch(["a", "b"]))
    assert reward_threads() == []


def test_no_thread_is_left_after_a_call_with_a_limit() -> None:
    scores = RewardFunction(lambda response: 1.0, time_limit=5.0).score(make_batch(["a", "b", "c"]))
    assert scores.values.tolist() == [1.0] * 3
    assert reward_threads() == []


def test_batch_and_sample_functions_mix() -> None:
    reward = RewardFunction([batch_reward(lambda responses: [len(r) for r in responses]), lambda response: 10])
    scores = reward.score(make_batch(["a", "bcd"]))
    assert scores.values.tolist() == [11.0, 13.0]
    assert list(scores.components) == ["lambda", "lambda_2"]


def test_it_is_a_frozen_role_that_fabric_can_set_up() -> None:
    reward = RewardFunction(lambda response: 2.0)
    assert (reward.role, reward.trainable) == ("reward", False)
    assert list(reward.parameters()) == []
    assert reward.state_dict() == {}
    fabric = Fabric(accelerator="cpu", devices=1)
    assert fabric.setup_module(reward).score(make_batch(["a"])).values.tolist() == [2.0]


def test_the_constructor_names_what_is_wrong() -> None:
    functions = [lambda response: 1.0] * 3
    with pytest.raises(ValueError, match="RewardFunction: got no functions; give one at least"):
        RewardFunction([])
    with pytest.raises(ValueError, match=r"RewardFunction: weights \(2\) must match functions \(3\)"):
        RewardFunction(functions, weights=[1, 2])
    for names in (["a"], ["a", "a", "b"], ["a", "b", ""]):
        with pytest.raises(ValueError, match=r"names \[.*\] must be 3 different, non-empty names"):
            RewardFunction(functions, names=names)
    with pytest.raises(ValueError, match="time_limit=-1 must be above 0"):
        RewardFunction(functions, time_limit=-1)
