"""Tests of how reward functions are bound, read and combined."""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightning_verl.data.experience import RolloutBatch
from lightning_verl.rewards.functions import (
    CallPolicy,
    RewardError,
    RewardInput,
    Scorer,
    batch_reward,
    check_weights,
    combine_scores,
    refuse_lora,
    run_scorers,
    unique_names,
)

NAN = math.nan


def make_inputs(rows: int = 3, **fields: list[Any]) -> RewardInput:
    return RewardInput(
        prompts=[f"p{row}" for row in range(rows)],
        responses=[f"r{row}" for row in range(rows)],
        prompt_ids=[[1, row] for row in range(rows)],
        response_ids=[[2, row] for row in range(rows)],
        fields=[{name: values[row] for name, values in fields.items()} for row in range(rows)],
    )


def run(function: Callable[..., Any], inputs: RewardInput, **policy: Any) -> tuple[list[float], int]:
    raw, fallbacks = run_scorers([Scorer(function)], inputs, CallPolicy(**policy))
    return raw[0].tolist(), fallbacks


def returning(value: Any) -> Callable[..., Any]:
    return lambda response: value


# What functions get


def test_input_from_rollout_has_text_and_ids_without_padding() -> None:
    batch = RolloutBatch(
        input_ids=torch.tensor([[5, 6, 7, 8, 0], [5, 9, 0, 0, 0], [5, 6, 7, 0, 0]]),
        prompt_lengths=torch.tensor([2, 1, 3]),
        response_lengths=torch.tensor([2, 1, 0]),
        rollout_logprobs=torch.zeros(3, 2),
        group_ids=torch.tensor([40, 41, 40]),
        truncated=torch.zeros(3, dtype=torch.bool),
        prompt_texts=["ab", "a", "abc"],
        response_texts=["cd", "e", ""],
        fields=[{"answer": 1}, {"answer": 2}, {"answer": 3}],
    )
    inputs = RewardInput.from_rollout(batch)
    assert inputs.prompts == ["ab", "a", "abc"]
    assert inputs.responses == ["cd", "e", ""]
    assert inputs.prompt_ids == [[5, 6], [5], [5, 6, 7]]
    assert inputs.response_ids == [[7, 8], [9], []]
    assert inputs.fields == [{"answer": 1}, {"answer": 2}, {"answer": 3}]
    assert inputs.sample_ids == ["40/0", "41/0", "40/1"]
    assert len(inputs) == 3


def test_lists_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one entry a row, got .*'prompts': 1, 'responses': 2"):
        RewardInput(["p"], ["r", "r"], [[1]], [[2]], [{}])


def test_a_function_gets_only_what_it_names() -> None:
    def score(response: str, answer: int, bonus: float = 0.5) -> float:
        assert response in ("r0", "r1", "r2")
        return answer + bonus

    assert run(score, make_inputs(answer=[1, 2, 3], other=[0, 0, 0])) == ([1.5, 2.5, 3.5], 0)
    assert run(score, make_inputs(answer=[1, 2, 3], bonus=[0.0, 1.0, 2.0])) == ([1.0, 3.0, 5.0], 0)


def test_a_function_with_kwargs_gets_everything() -> None:
    seen: list[dict[str, Any]] = []

    def score(response: str, **kwargs: Any) -> float:
        seen.append(kwargs)
        return 1.0

    run(score, make_inputs(1, answer=[4]))
    assert seen == [{"prompt": "p0", "prompt_ids": [1, 0], "response_ids": [2, 0], "answer": 4}]


def test_callable_objects_partials_and_keyword_only_parameters_work() -> None:
    class Judge:
        def __call__(self, *, answer: int) -> int:
            return answer

    def scaled(answer: int, scale: int) -> int:
        return answer * scale

    inputs = make_inputs(2, answer=[1, 2])
    assert run(Judge(), inputs) == ([1.0, 2.0], 0)
    assert run(functools.partial(scaled, scale=3), inputs) == ([3.0, 6.0], 0)


def test_the_policy_s_own_text_and_ids_win_over_fields_of_the_same_name() -> None:
    def score(response: str) -> float:
        return float(response == "r0")

    assert run(score, make_inputs(1, response=["from the data"])) == ([1.0], 0)


def test_a_function_that_alters_its_ids_does_not_alter_the_next_one_s() -> None:
    def emptying(response_ids: list[int]) -> int:
        response_ids.clear()
        return 0

    def counting(response_ids: list[int]) -> int:
        return len(response_ids)

    raw, _ = run_scorers([Scorer(emptying), Scorer(counting)], make_inputs(2), CallPolicy())
    assert raw.tolist() == [[0.0, 0.0], [2.0, 2.0]]


def test_a_missing_field_is_named_before_anything_runs() -> None:
    ran: list[str] = []

    def first(response: str) -> float:
        ran.append(response)
        return 0.0

    def exact(response: str, solution: str) -> float:
        return 0.0

    inputs = make_inputs(2, answer=[1, 2])
    message = "'exact' needs 'solution', which row 0 .* does not have. Available: answer, prompt, response, prompt_ids"
    with pytest.raises(ValueError, match=message):
        run_scorers([Scorer(first), Scorer(exact)], inputs, CallPolicy(on_error="fallback"))
    assert ran == []


def test_a_field_that_only_some_rows_have_is_missing_in_the_others() -> None:
    inputs = make_inputs(2)
    inputs.fields = [{"answer": 1}, {}]
    with pytest.raises(ValueError, match=r"needs 'answer', which row 1 \(sample 1\), prompt 'p1' does not have"):
        run(lambda answer: answer, inputs)


def test_functions_that_cannot_be_called_by_name_are_refused() -> None:
    with pytest.raises(ValueError, match="parameter 'obj' of reward function 'len' is positional only"):
        Scorer(len)
    with pytest.raises(ValueError, match="signature of reward function 'Odd' cannot be read"):
        Scorer(type("Odd", (), {"__call__": lambda: None, "__signature__": 3})())
    with pytest.raises(ValueError, match="got 3, but a reward function must be callable"):
        Scorer(3)  # type: ignore[arg-type]


def test_names_come_from_the_functions() -> None:
    assert Scorer(test_names_come_from_the_functions).name == "test_names_come_from_the_functions"
    assert Scorer(returning(1)).name == "lambda"
    assert Scorer(functools.partial(run, policy=1)).name == "run"
    assert Scorer(batch_reward(run)).name == "run"
    assert unique_names(["f", "f_2", "f", "g", "f"]) == ["f", "f_2", "f_3", "g", "f_4"]


# Batch functions


def test_a_batch_function_gets_lists_and_none_for_a_missing_field() -> None:
    seen: list[dict[str, Any]] = []

    @batch_reward
    def judge(prompts: list[str], responses: list[str], **kwargs: Any) -> list[float | None]:
        seen.append({"prompts": prompts, "responses": responses, **kwargs})
        return [1.0, None]

    inputs = make_inputs(2)
    inputs.fields = [{"answer": 1}, {}]
    scores, fallbacks = run(judge, inputs)
    assert (scores[0], math.isnan(scores[1]), fallbacks) == (1.0, True, 0)
    ids = {"prompt_ids": [[1, 0], [1, 1]], "response_ids": [[2, 0], [2, 1]]}
    assert seen == [{"prompts": ["p0", "p1"], "responses": ["r0", "r1"], "answer": [1, None], **ids}]
    assert judge(["p"], ["r"]) == [1.0, None]  # still callable as before


@pytest.mark.parametrize(
    "returned", [(1, 2), np.array([1.0, 2.0]), torch.tensor([1.0, 2.0], dtype=torch.bfloat16), [True, np.float32(2)]]
)
def test_a_batch_function_may_return_any_list_of_numbers(returned: Any) -> None:
    assert run(batch_reward(lambda responses: returned), make_inputs(2)) == ([1.0, 2.0], 0)


def test_a_batch_function_is_not_called_for_no_rows() -> None:
    assert run(batch_reward(lambda responses: 1 / 0), make_inputs(0)) == ([], 0)


def test_wrong_results_of_a_batch_function_are_refused_whatever_the_policy() -> None:
    def judge(responses: list[str]) -> list[float]:
        return [1.0, 2.0]

    with pytest.raises(ValueError, match="'judge' returned 2 scores for 3 rows"):
        run(batch_reward(judge), make_inputs(3), on_error="fallback")
    with pytest.raises(ValueError, match="'lambda' returned a float, but must return a list, .* of 3 scores"):
        run(batch_reward(lambda responses: 1.0), make_inputs(3))  # type: ignore[arg-type,return-value]
    with pytest.raises(ValueError, match="'lambda' returned a str"):
        run(batch_reward(lambda responses: "abc"), make_inputs(3))
    with pytest.raises(ValueError, match="needs 'response', which the batch does not have. Available: prompts, resp"):
        run(batch_reward(lambda response: response), make_inputs(3))


def test_an_exception_in_a_batch_function_names_the_batch() -> None:
    def judge(responses: list[str]) -> list[float]:
        raise OSError("service down")

    with pytest.raises(RewardError, match=r"'judge' failed on a batch of 3 rows that begins with row 0 .*service down"):
        run(batch_reward(judge), make_inputs(3))
    assert run(batch_reward(judge), make_inputs(3), on_error="fallback", fallback=-1.0) == ([-1.0] * 3, 3)


# What functions return


@pytest.mark.parametrize(
    "value",
    [
        1,
        True,
        1.0,
        np.float32(1),
        np.int64(1),
        np.bool_(True),
        np.array(1.0),
        torch.tensor(1.0, dtype=torch.bfloat16),
        torch.tensor(1),
        torch.tensor([1.0]),
        torch.tensor(1.0, requires_grad=True),
    ],
)
def test_every_kind_of_number_is_a_score(value: Any) -> None:
    assert run(returning(value), make_inputs(2)) == ([1.0, 1.0], 0)


def test_none_abstains_or_is_an_error() -> None:
    scores, fallbacks = run(returning(None), make_inputs(1))
    assert math.isnan(scores[0])
    assert fallbacks == 0
    with pytest.raises(RewardError, match="row 0 .* returned None, and on_none='error'"):
        run(returning(None), make_inputs(1), on_none="error")
    assert run(returning(None), make_inputs(1), on_none="error", on_error="fallback") == ([0.0], 1)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (NAN, "returned nan, which is no finite"),
        (torch.tensor(-math.inf), "returned -inf, which is no finite"),
        (1e39, r"returned 1e\+39, which is no finite float32"),
        (10**400, "returned inf, which is no finite"),
        ("1.0", "returned a str, but a score is one real number or None"),
        (1j, "returned a complex"),
        (torch.ones(2), "returned a Tensor"),
        ([1.0], "returned a list"),
    ],
)
def test_a_result_that_is_no_finite_number_names_function_row_and_prompt(value: Any, reason: str) -> None:
    def odd(answer: Any) -> Any:
        return answer

    inputs = make_inputs(2, answer=[1.0, value])
    with pytest.raises(RewardError, match=rf"'odd' failed on row 1 \(sample 1\), prompt 'p1': \w+: {reason}"):
        run(odd, inputs)
    assert run(odd, inputs, on_error="fallback", fallback=0.25) == ([1.0, 0.25], 1)


def test_a_long_prompt_is_cut_in_messages() -> None:
    inputs = make_inputs(1)
    inputs.prompts = ["x" * 200]
    assert inputs.describe(0) == f"row 0 (sample 0), prompt '{'x' * 80}...'"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_exception_surfaces_with_function_row_prompt_and_cause(num_workers: int) -> None:
    def divide(answer: int) -> float:
        return 1 / answer

    with pytest.raises(
        RewardError, match=r"'divide' failed on row 1 \(sample 1\), prompt 'p1': ZeroDivisionError: "
    ) as caught:
        run(divide, make_inputs(answer=[1, 0, 2]), num_workers=num_workers)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_the_first_failing_row_is_reported_when_several_fail_at_once() -> None:
    barrier = threading.Barrier(3, timeout=10)

    def fail(response: str) -> float:
        barrier.wait()
        raise ValueError(response)

    with pytest.raises(RewardError, match="row 0 .*ValueError: r0"):
        run(fail, make_inputs(3), num_workers=3)


def test_fallbacks_are_counted_and_logged_once_a_function(caplog: pytest.LogCaptureFixture) -> None:
    def divide(answer: int) -> float:
        return 1 / answer

    with caplog.at_level(logging.WARNING):
        scores, fallbacks = run(divide, make_inputs(6, answer=[0, 2, 0, 0, 0, 4]), on_error="fallback", fallback=-2.0)
    assert scores == [-2.0, 0.5, -2.0, -2.0, -2.0, 0.25]
    assert fallbacks == 4
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(
        "Reward function 'divide': 4 of 6 samples take the fallback -2.0; "
        "row 0 (sample 0), prompt 'p0': ZeroDivisionError: division by zero; row 2 (sample 2)"
    )
    assert message.endswith("; and 1 more")


def test_a_fallback_of_none_abstains() -> None:
    scores, fallbacks = run(lambda response: 1 / 0, make_inputs(1), on_error="fallback", fallback=None)
    assert math.isnan(scores[0])
    assert fallbacks == 1


def test_a_batch_function_has_the_limit_of_all_its_rows(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    slow = batch_reward(lambda responses: [float(gate.wait(0.6))] * len(responses))
    # 0.6 s is within 3 rows x 0.5 s and beyond 3 rows x 0.02 s.
    assert run(slow, make_inputs(3), time_limit=0.5) == ([0.0] * 3, 0)
    assert run(slow, make_inputs(3), time_limit=0.02, fallback=9.0) == ([9.0] * 3, 3)
    assert "3 of 3 samples take the fallback 9.0; row 0 (sample 0), prompt 'p0': ran out of its 0.02 s" in caplog.text


@pytest.mark.parametrize("num_workers", [0, 1])
def test_gradients_are_off_while_functions_run(num_workers: int) -> None:
    assert run(lambda response: torch.is_grad_enabled(), make_inputs(1), num_workers=num_workers) == ([0.0], 0)
    assert torch.is_grad_enabled()


def test_workers_use_the_cuda_device_of_the_calling_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []
    exchange = torch.cuda._exchange_device
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "_exchange_device", lambda device: entered.append(device) or exchange(-1))
    run(returning(1.0), make_inputs(1), num_workers=1)
    assert entered == [1]


# Policy, weights, combination


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"time_limit": 0.0}, "time_limit=0.0 must be above 0 seconds"),
        ({"time_limit": math.inf}, "time_limit=inf must be above 0 seconds, or None"),
        ({"fallback": NAN}, "fallback=nan must be a finite number"),
        ({"on_error": "ignore"}, "on_error='ignore' must be 'raise' or 'fallback'"),
        ({"on_none": "raise"}, "on_none='raise' must be 'abstain' or 'error'"),
        ({"num_workers": -1}, "num_workers=-1 must be at least 0 with time_limit=None"),
        ({"num_workers": 0, "time_limit": 1.0}, "num_workers=0 must be at least 1 with time_limit=1.0"),
    ],
)
def test_a_policy_out_of_range_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CallPolicy(**values)


def test_a_time_limit_brings_workers() -> None:
    assert [CallPolicy().workers, CallPolicy(time_limit=1.0).workers, CallPolicy(num_workers=3).workers] == [0, 4, 3]


def test_the_sum_is_over_the_functions_that_scored_and_not_rescaled() -> None:
    raw = torch.tensor([[1, 0, NAN, 0], [0, 1, 1, 0]], dtype=torch.float64)
    values, valid = combine_scores(raw, (1.0, 1.0))
    assert values.tolist() == [1.0, 1.0, 1.0, 0.0]
    assert values.dtype == torch.float32
    assert valid.tolist() == [True] * 4
    # 0.25 x 1 + 0.75 x 2 = 1.75; 0.25 x 1 alone = 0.25; nothing = 0, not valid
    raw = torch.tensor([[1, 1, NAN], [2, NAN, NAN]], dtype=torch.float64)
    values, valid = combine_scores(raw, (0.25, 0.75))
    assert values.tolist() == [1.75, 0.25, 0.0]
    assert valid.tolist() == [True, True, False]


def test_a_function_of_weight_0_does_not_make_a_row_valid() -> None:
    values, valid = combine_scores(torch.tensor([[NAN, 1.0], [120.0, 80.0]], dtype=torch.float64), (1.0, 0.0))
    assert values.tolist() == [0.0, 1.0]
    assert valid.tolist() == [False, True]


def test_weights_are_checked() -> None:
    assert check_weights(None, 2) == (1.0, 1.0)
    assert check_weights([1, -0.5], 2) == (1.0, -0.5)
    with pytest.raises(ValueError, match=r"weights \(2\) must match functions \(3\)"):
        check_weights([1, 2], 3)
    for weights in ([0.0, 0.0], [1.0, NAN]):
        with pytest.raises(ValueError, match="must be finite, and one at least other than 0"):
            check_weights(weights, 2)


def test_lora_on_a_reward_is_refused_with_the_reason() -> None:
    refuse_lora("RewardModel", None)
    with pytest.raises(
        ValueError, match="RewardModel: got .*'r': 8.* a reward is frozen, an adapter would have nothing"
    ):
        refuse_lora("RewardModel", {"r": 8})
