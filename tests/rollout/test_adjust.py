"""Bias, repetition penalty and minimum length by hand, in order, and against transformers' own processors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lightning_verl.rollout.adjust import LogitAdjuster, seen_tokens
from lightning_verl.rollout.sampling import SamplingParams, sample_seeds, sample_tokens, support_logprobs, uniforms

INF = math.inf
CPU = torch.device("cpu")
LOGITS = torch.tensor([[2.0, -1.0, 0.0, 3.0]])


def adjuster(end_token_ids: tuple[int, ...] = (), vocabulary: int = 4, **params: Any) -> LogitAdjuster:
    return LogitAdjuster(SamplingParams(**params), end_token_ids, vocabulary, CPU)


def seen_rows(*rows: list[int], vocabulary: int = 4) -> Tensor:
    seen = torch.zeros(len(rows), vocabulary, dtype=torch.bool)
    for row, tokens in enumerate(rows):
        seen[row, tokens] = True
    return seen


# ---- each by hand ----------------------------------------------------------------------------------------------------


def test_defaults_return_the_input_itself() -> None:
    same = adjuster(end_token_ids=(1,))
    assert (same.active, same.needs_seen) == (False, False)
    assert same(LOGITS, 0) is LOGITS


def test_bias_is_added() -> None:
    biased = adjuster(logit_bias={1: 2.5, 3: -INF})
    assert (biased.active, biased.needs_seen) == (True, False)
    assert biased(LOGITS, 0).tolist() == [[2.0, 1.5, 0.0, -INF]]
    assert LOGITS.tolist() == [[2.0, -1.0, 0.0, 3.0]]


@pytest.mark.parametrize(
    ("penalty", "expected"),
    [
        (2.0, [1.0, -2.0, 0.0, 3.0]),  # 2 / 2, -1 * 2, 0; 3 was not seen
        (0.5, [4.0, -0.5, 0.0, 3.0]),  # below 1 it rewards: 2 / 0.5, -1 * 0.5
    ],
)
def test_seen_logits_are_divided_where_positive_and_multiplied_where_negative(
    penalty: float, expected: list[float]
) -> None:
    penalised = adjuster(repetition_penalty=penalty)
    assert (penalised.active, penalised.needs_seen) == (True, True)
    assert penalised(LOGITS, 0, seen_rows([0, 1, 2])).tolist() == [expected]


def test_rows_are_penalised_for_their_own_tokens() -> None:
    result = adjuster(repetition_penalty=2.0)(LOGITS.expand(2, 4), 0, seen_rows([3], []))
    assert result.tolist() == [[2.0, -1.0, 0.0, 1.5], [2.0, -1.0, 0.0, 3.0]]


def test_end_tokens_are_masked_until_the_minimum_is_reached() -> None:
    patient = adjuster(end_token_ids=(0,), min_new_tokens=2, stop_token_ids=(3,))
    assert patient.active
    masked, free = [-INF, -1.0, 0.0, -INF], LOGITS[0].tolist()
    assert patient(LOGITS.expand(3, 4), torch.tensor([1, 2, 0])).tolist() == [masked, free, masked]
    # The token sampled after `produced` others is number produced + 1: the second may not be an end yet, the third may.
    assert [patient(LOGITS, produced)[0].tolist() for produced in range(4)] == [masked, masked, free, free]


def test_a_minimum_without_end_tokens_is_nothing_to_do() -> None:
    assert not adjuster(min_new_tokens=2).active
    assert not adjuster(end_token_ids=(4, 50), min_new_tokens=2).active  # out of the vocabulary: never sampled anyway
    assert adjuster(end_token_ids=(1, 50), min_new_tokens=2)(LOGITS, 0).tolist() == [[2.0, -INF, 0.0, 3.0]]


def test_bias_comes_before_the_penalty_and_the_mask_last() -> None:
    both = adjuster(end_token_ids=(3,), logit_bias={0: -3.0, 1: 2.0, 3: 9.0}, repetition_penalty=2.0, min_new_tokens=1)
    # Token 0: 2 - 3 = -1 is negative, times 2 (penalty first: 2 / 2 - 3 = -2 too; so token 1 tells them apart).
    # Token 1: -1 + 2 = 1 is positive, 1 / 2 = 0.5; penalty first it were -1 * 2 + 2 = 0.
    # Token 3: forbidden in spite of its bias of 9; then (3 + 9) / 2 = 6.
    seen = seen_rows([0, 1, 3])
    assert both(LOGITS, 0, seen).tolist() == [[-2.0, 0.5, 0.0, -INF]]
    assert both(LOGITS, 1, seen).tolist() == [[-2.0, 0.5, 0.0, 6.0]]


def test_a_forbidden_token_stays_forbidden_at_any_penalty() -> None:
    for penalty in (0.5, 2.0):
        banned = adjuster(logit_bias={0: -INF}, repetition_penalty=penalty)
        assert banned(LOGITS, 0, seen_rows([0]))[0, 0] == -INF


def test_half_precision_logits_are_adjusted_in_float32() -> None:
    logits = LOGITS.bfloat16()
    result = adjuster(repetition_penalty=3.0)(logits, 0, seen_rows([0]))
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, torch.tensor([[2 / 3, -1.0, 0.0, 3.0]]), atol=1e-7, rtol=0)
    assert logits.tolist() == LOGITS.tolist()


def test_a_call_reads_no_value_and_has_fixed_shapes() -> None:
    """Tensors of the meta device have no values: whatever would wait for one, or size a tensor by one, fails."""
    meta = torch.device("meta")
    params = SamplingParams(logit_bias={1: 1.0}, repetition_penalty=1.5, min_new_tokens=3)
    everything = LogitAdjuster(params, (2,), 8, meta)
    result = everything(
        torch.empty(5, 8, device=meta),
        torch.empty(5, dtype=torch.int64, device=meta),
        torch.empty(5, 8, dtype=torch.bool, device=meta),
    )
    assert (result.shape, result.device) == ((5, 8), meta)


# ---- seen ------------------------------------------------------------------------------------------------------------


def test_seen_tokens_leave_padding_out_but_not_real_tokens_of_the_same_id() -> None:
    ids = torch.tensor([[0, 0, 2, 3], [0, 3, 0, 3], [1, 1, 1, 1]])
    real = torch.tensor([[False, False, True, True], [False, True, True, True], [False] * 4])
    seen = seen_tokens(ids, real, vocabulary=4)
    assert seen.dtype == torch.bool
    assert torch.equal(seen, seen_rows([2, 3], [0, 3], []))
    assert torch.equal(seen.scatter_(1, torch.tensor([[1], [0], [2]]), True), seen_rows([1, 2, 3], [0, 3], [2]))


def test_a_penalty_without_seen_is_refused() -> None:
    with pytest.raises(ValueError, match=r"LogitAdjuster: repetition_penalty=1.5 .* seen is None"):
        adjuster(repetition_penalty=1.5)(LOGITS, 0)


# ---- bad values ------------------------------------------------------------------------------------------------------


def test_biases_out_of_the_vocabulary_are_refused() -> None:
    message = r"LogitAdjuster: logit_bias names the token ids \[4, 9\], but the vocabulary has 4 tokens"
    with pytest.raises(ValueError, match=message):
        adjuster(logit_bias={9: 1.0, 3: 1.0, 4: 1.0})


def test_a_vocabulary_without_any_token_left_is_refused() -> None:
    most = {0: -INF, 1: -INF, 2: -INF}
    with pytest.raises(
        ValueError, match=r"forbids 3 tokens and min_new_tokens=1 the end tokens \[3\], which leaves none"
    ):
        adjuster(end_token_ids=(3,), min_new_tokens=1, logit_bias=most)
    with pytest.raises(
        ValueError, match=r"forbids 4 tokens and min_new_tokens=0 the end tokens \[\], which leaves none"
    ):
        adjuster(end_token_ids=(3,), logit_bias={**most, 3: -INF})
    assert adjuster(end_token_ids=(3,), logit_bias=most)(LOGITS, 0).tolist() == [[-INF, -INF, -INF, 3.0]]


# ---- against transformers --------------------------------------------------------------------------------------------


def random_rows(vocabulary: int = 50) -> tuple[Tensor, Tensor]:
    """Logits of 64 rows, and 12 tokens of each: 8 of a prompt, 4 of a response."""
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(64, vocabulary, generator=generator)
    return logits, torch.randint(vocabulary, (64, 12), generator=generator)


BIAS = {0: -4.0, 7: 2.5, 11: 6.0, 49: -1.0}


@pytest.mark.parametrize(
    ("params", "processors"),
    [
        ({"logit_bias": BIAS}, [SequenceBiasLogitsProcessor({(token,): bias for token, bias in BIAS.items()})]),
        ({"repetition_penalty": 1.3}, [RepetitionPenaltyLogitsProcessor(1.3)]),
        ({"repetition_penalty": 0.7}, [RepetitionPenaltyLogitsProcessor(0.7)]),
        ({"min_new_tokens": 5}, [MinNewTokensLengthLogitsProcessor(8, 5, [2, 11])]),
        ({"min_new_tokens": 4}, [MinNewTokensLengthLogitsProcessor(8, 4, [2, 11])]),
        (
            {"logit_bias": BIAS, "repetition_penalty": 1.3, "min_new_tokens": 5},
            [
                SequenceBiasLogitsProcessor({(token,): bias for token, bias in BIAS.items()}),
                RepetitionPenaltyLogitsProcessor(1.3),
                MinNewTokensLengthLogitsProcessor(8, 5, [2, 11]),
            ],
        ),
    ],
)
def test_adjusted_logits_equal_transformers(params: dict[str, Any], processors: list[Any]) -> None:
    logits, ids = random_rows()
    seen = seen_tokens(ids, torch.ones_like(ids, dtype=torch.bool), 50)
    expected = LogitsProcessorList(processors)(ids, logits.clone())
    result = adjuster(end_token_ids=(2,), vocabulary=50, stop_token_ids=(11,), **params)(logits, 4, seen)
    assert torch.equal(result, expected)
    assert torch.equal(result, logits) is (params == {"min_new_tokens": 4})


def test_the_whole_chain_equals_transformers_in_its_order() -> None:
    logits, ids = random_rows()
    chain = [
        SequenceBiasLogitsProcessor({(token,): bias for token, bias in BIAS.items()}),
        RepetitionPenaltyLogitsProcessor(1.3),
        MinNewTokensLengthLogitsProcessor(8, 5, [2]),
        TemperatureLogitsWarper(1.4),
        TopKLogitsWarper(30),
        TopPLogitsWarper(0.9),
        MinPLogitsWarper(0.05),
    ]
    expected = LogitsProcessorList(chain)(ids, logits.clone()).log_softmax(-1)
    params = SamplingParams(
        logit_bias=BIAS, repetition_penalty=1.3, min_new_tokens=5, temperature=1.4, top_k=30, top_p=0.9, min_p=0.05
    )
    seen = seen_tokens(ids, torch.ones_like(ids, dtype=torch.bool), 50)
    result = support_logprobs(LogitAdjuster(params, (2,), 50, CPU)(logits, torch.full((64,), 4), seen), params)
    assert torch.equal(result.isfinite(), expected.isfinite())
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)
    for left_out in range(len(chain)):  # each of them takes part
        without = LogitsProcessorList(chain[:left_out] + chain[left_out + 1 :])(ids, logits.clone()).log_softmax(-1)
        assert not torch.allclose(without, expected, atol=1e-3)


# ---- what is sampled -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(logit_bias={0: 1.0, 2: -INF, 4: -0.5}),
        SamplingParams(repetition_penalty=1.8),
        SamplingParams(min_new_tokens=1),
        SamplingParams(
            logit_bias={1: 2.0},
            repetition_penalty=1.3,
            min_new_tokens=1,
            temperature=1.4,
            top_k=5,
            top_p=0.95,
            min_p=0.1,
        ),
    ],
)
def test_frequencies_follow_the_adjusted_distribution(params: SamplingParams) -> None:
    draws = 20_000
    logits = torch.tensor([[0.5, -1.0, 2.0, 1.0, 0.0, 1.5]])
    adjusted = LogitAdjuster(params, (5,), 6, CPU)(logits, 0, seen_rows([1, 2, 4], vocabulary=6))
    uniform = uniforms(sample_seeds(5, 0, torch.arange(draws), 1), 2)
    tokens, logprobs = sample_tokens(adjusted.expand(draws, 6), params, uniform)
    expected = support_logprobs(adjusted, params)[0]
    assert torch.equal(logprobs, expected[tokens])
    assert not torch.allclose(expected, support_logprobs(logits, SamplingParams())[0], atol=1e-2)
    kept = expected.isfinite()
    counts, ideal = torch.bincount(tokens, minlength=6), expected.exp() * draws
    assert int(counts[~kept].sum()) == 0
    # Chi-square, at most 5 degrees of freedom: 0.999 quantile 20.5.
    assert float(((counts - ideal)[kept] ** 2 / ideal[kept]).sum()) < 20.5


def test_greedy_takes_the_likeliest_adjusted_token_and_its_log_prob() -> None:
    params = SamplingParams(temperature=0.0, logit_bias={3: -2.0}, repetition_penalty=2.0, min_p=1.0)
    adjusted = LogitAdjuster(params, (), 4, CPU)(LOGITS, 0, seen_rows([0]))
    tokens, logprobs = sample_tokens(adjusted, params, torch.zeros(1, dtype=torch.float64))
    # Adjusted: 2 / 2 = 1, -1, 0, 3 - 2 = 1: of the equal ones the lower id.
    # Its log-prob: 1 - log(2 e + exp(-1) + 1) = 1 - log(6.804443) = -0.917575.
    assert tokens.tolist() == [0]
    torch.testing.assert_close(logprobs, torch.tensor([-0.917575]), atol=1e-6, rtol=0)
