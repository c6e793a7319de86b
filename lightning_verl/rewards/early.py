"""Scores samples of a rollout as soon as they have ended, while others are still sampled.

With threads (``num_workers`` or a time limit) functions run beside the loop that generates. Without, they run in the
calling thread, in the moments in which it would only wait for the device: a call that outlasts such a moment takes from
the rollout what it would have taken after it. A function for a whole batch sees all rows, so it runs after the rollout.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from lightning_verl.data.experience import PromptBatch
from lightning_verl.rewards.functions import CallPolicy, RewardInput, Scorer
from lightning_verl.rewards.pool import THREAD_PREFIX, Call, CallQueue, Outcome, run_here, run_queue

_SWITCH_SECONDS = 5e-4
"""How long a thread may keep the interpreter while another waits for it. At Python's own 5 ms, a decode step that
launches sixteen graphs would wait 80 ms behind functions that compute in Python."""

_Key = tuple[tuple[int, ...], tuple[int, ...]]
"""Prompt and response of a sample, as token ids."""


class EarlyScores:
    """Watches one rollout (``rollout.base.SampleWatch``) and calls reward functions on what has ended.

    Args:
        scorers: The functions; those for a whole batch are left out.
        policy: How they are called.
        prompts: The prompts of the rollout.
        samples: Samples a prompt.
        decode: Makes text of a response.

    Raises:
        ValueError: A function asks for something that a prompt does not have.
    """

    def __init__(
        self,
        scorers: Sequence[Scorer],
        policy: CallPolicy,
        prompts: PromptBatch,
        samples: int,
        decode: Callable[[list[int]], str],
    ) -> None:
        self._scorers = {number: scorer for number, scorer in enumerate(scorers) if not scorer.batched}
        self._policy, self._samples, self._decode = policy, samples, decode
        self._prompts, self._ids, self._fields = prompts.texts, prompts.token_lists(), prompts.fields
        for row in range(len(prompts)):
            self._calls(self._input(row, [], ""))
        self._ended: deque[tuple[int, list[int]]] = deque()
        self._texts: dict[int, str] = {}
        self._inputs: list[RewardInput] = []
        self._outcomes: list[Outcome] = []
        self._pending: deque[Call] = deque()
        self._queue = CallQueue()
        self._is_over = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._interval = sys.getswitchinterval()
        if policy.workers and self._scorers:
            self._thread = threading.Thread(target=self._run, name=f"{THREAD_PREFIX}-books", daemon=True)
            sys.setswitchinterval(min(self._interval, _SWITCH_SECONDS))
            self._thread.start()

    def finished(self, row: int, response: Sequence[int]) -> None:
        """Take a sample that has ended.

        Args:
            row: Its place in the rollout: those of a prompt are adjacent.
            response: Its token ids.
        """
        self._ended.append((row, list(response)))  # the device waits for the next step: no more than that

    def meanwhile(self, busy: Callable[[], bool]) -> None:
        """Use the time while the device works: for text, and without threads for functions.

        Args:
            busy: Whether it still works.
        """
        self._take()
        while self._pending and self._thread is None and busy():
            self._outcomes.append(run_here(self._pending.popleft()))
            if self._policy.on_error == "raise" and self._outcomes[-1].error is not None:
                self._pending.clear()

    @property
    def texts(self) -> dict[int, str]:
        """The text of each response that has ended, by its row."""
        self._take()
        return self._texts

    def _take(self) -> None:
        """Make text of what has ended, and calls, while the rollout goes on."""
        while self._ended:
            row, ids = self._ended.popleft()
            self._texts[row] = self._decode(ids)
            if self._is_over:
                continue
            self._inputs.append(self._input(row // self._samples, ids, self._texts[row]))
            calls = self._calls(self._inputs[-1])
            if self._thread is not None:
                self._queue.add(calls)
            else:
                self._pending.extend(calls)

    def end(self) -> None:
        """The rollout is over: nothing more will come."""
        self._take()
        self._pending.clear()
        if self._thread is not None and not self._is_over:
            self._queue.close()
            sys.setswitchinterval(self._interval)
        self._is_over = True

    def outcomes(self, inputs: RewardInput) -> dict[tuple[int, int], Outcome]:
        """What functions have said of rows that were watched; waits for those that still run.

        Args:
            inputs: The rows that are scored now.

        Returns:
            By number of the function and row; only rows that are as they were then.

        Raises:
            BaseException: What a function raised, if it is no ``Exception``.
        """
        self.end()
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        known: dict[_Key, list[int]] = defaultdict(list)
        for number, sample in enumerate(self._inputs):
            known[_key(sample, 0)].append(number)
        found = {}
        for row in range(len(inputs)):
            same = known.get(_key(inputs, row), [])
            places = [number for number in same if _sees_the_same(self._inputs[number], inputs, row)]
            if not places:
                continue
            same.remove(places[0])
            first = places[0] * len(self._scorers)
            for scorer, outcome in zip(self._scorers, self._outcomes[first : first + len(self._scorers)], strict=False):
                found[scorer, row] = outcome
        return found

    def _run(self) -> None:
        try:
            self._outcomes = run_queue(self._queue, self._policy.workers, self._policy.on_error == "raise")
        except BaseException as error:  # raised again where the scores are asked for
            self._error = error

    def _input(self, prompt: int, ids: list[int], text: str) -> RewardInput:
        return RewardInput(
            prompts=[self._prompts[prompt]],
            responses=[text],
            prompt_ids=[self._ids[prompt]],
            response_ids=[ids],
            fields=[self._fields[prompt]],
        )

    def _calls(self, sample: RewardInput) -> list[Call]:
        return [call for scorer in self._scorers.values() for call in scorer.calls(sample, self._policy.time_limit)]


def _key(inputs: RewardInput, row: int) -> _Key:
    return tuple(inputs.prompt_ids[row]), tuple(inputs.response_ids[row])


def _sees_the_same(sample: RewardInput, inputs: RewardInput, row: int) -> bool:
    """Whether functions see the same of a row as they saw of a sample, whose ids are equal."""
    texts: tuple[Any, ...] = (inputs.prompts[row], inputs.responses[row])
    return (sample.prompts[0], sample.responses[0]) == texts and sample.fields[0] is inputs.fields[row]
