"""Sampling: parameter checks, counter-based seeds and uniforms, top-k, top-p and min-p by hand, frequencies."""

from __future__ import annotations

import copy
import math
from dataclasses import FrozenInstanceError, asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MinPLogitsWarper

from lightning_verl.rollout.sampling import SamplingParams, sample_seeds, sample_tokens, support_logprobs, uniforms

WORD = 1 << 64
ALMOST_ONE = 1 - 2.0**-53
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def mix_by_hand(value: int) -> int:
    """SplitMix64's output function on unsigned Python integers."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % WORD
    return value ^ (value >> 31)


def seed_by_hand(*words: int) -> int:
    state = 0
    for word in words:
        state = mix_by_hand(((state ^ (word % WORD)) + 0x9E3779B97F4A7C15) % WORD)
    return state


def log_of(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities]).log()


def draw(logits: Tensor, uniform: float, **params: Any) -> int:
    tokens, _ = sample_tokens(logits, SamplingParams(**params), torch.tensor([uniform], dtype=torch.float64))
    return int(tokens)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("n", 0, "n is 0; it must be an integer of at least 1"),
        ("n", 1.5, "n is 1.5; it must be an integer"),
        ("n", True, "n is True; it must be an integer"),
        ("max_new_tokens", 0, "max_new_tokens is 0; it must be an integer of at least 1"),
        ("min_new_tokens", -1, r"min_new_tokens is -1; it must be an integer from 0 to max_new_tokens \(256\)"),
        ("min_new_tokens", 257, r"min_new_tokens is 257; it must be an integer from 0 to max_new_tokens \(256\)"),
        ("min_new_tokens", 1.0, "min_new_tokens is 1.0; it must be an integer"),
        ("temperature", -0.1, "temperature is -0.1; it must be a finite number of at least 0"),
        ("temperature", math.inf, "temperature is inf; it must be a finite number"),
        ("temperature", math.nan, "temperature is nan; it must be a finite number"),
        ("temperature", "1", "temperature is '1'; it must be a finite number"),
        ("top_k", 0, "top_k is 0; it must be an integer of at least 1, or None"),
        ("top_k", -1, "top_k is -1; it must be an integer of at least 1, or None"),
        ("top_p", 0.0, r"top_p is 0.0; it must be a number in \(0, 1\]"),
        ("top_p", 1.1, r"top_p is 1.1; it must be a number in \(0, 1\]"),
        ("top_p", math.nan, r"top_p is nan; it must be a number in \(0, 1\]"),
        ("min_p", -0.1, r"min_p is -0.1; it must be a number in \[0, 1\]"),
        ("min_p", 1.1, r"min_p is 1.1; it must be a number in \[0, 1\]"),
        ("min_p", math.nan, r"min_p is nan; it must be a number in \[0, 1\]"),
        ("repetition_penalty", 0.0, "repetition_penalty is 0.0; it must be a finite number above 0"),
        ("repetition_penalty", -1.2, "repetition_penalty is -1.2; it must be a finite number above 0"),
        ("repetition_penalty", math.inf, "repetition_penalty is inf; it must be a finite number above 0"),
        ("logit_bias", [(2, 1.0)], r"logit_bias is \[\(2, 1.0\)\]; it must be a mapping of token ids"),
        ("logit_bias", {-1: 1.0}, r"logit_bias is {-1: 1.0}; it must be a mapping of token ids of at least 0"),
        ("logit_bias", {"2": 1.0}, r"logit_bias is {'2': 1.0}; it must be a mapping of token ids"),
        ("logit_bias", {2: math.inf}, r"logit_bias is {2: inf}; it must be .* to finite numbers or -inf"),
        ("logit_bias", {2: math.nan}, r"logit_bias is {2: nan}; it must be .* to finite numbers or -inf"),
        ("logit_bias", {2: "1"}, r"logit_bias is {2: '1'}; it must be .* to finite numbers or -inf"),
        ("stop_token_ids", [2], r"stop_token_ids is \[2\]; it must be a tuple of token ids"),
        ("stop_token_ids", (-1,), r"stop_token_ids is \(-1,\); it must be a tuple of token ids of at least 0"),
        ("stop_token_ids", ("a",), r"stop_token_ids is \('a',\); it must be a tuple of token ids"),
        ("stop_strings", "END", "stop_strings is 'END'; it must be a tuple of strings"),
        (
            "stop_strings",
            ("END", ""),
            r"stop_strings is \('END', ''\); it must be a tuple of strings, none of them empty",
        ),
        ("stop_strings", (1,), r"stop_strings is \(1,\); it must be a tuple of strings"),
        ("seed", 0.5, "seed is 0.5; it must be an integer"),
    ],
)
def test_params_refuse_what_is_out_of_range(name: str, value: object, rule: str) -> None:
    with pytest.raises(ValueError, match=f"SamplingParams: {rule}"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_params_accept_the_borders() -> None:
    params = SamplingParams(
        n=1, max_new_tokens=1, temperature=0, top_k=1, top_p=1, stop_token_ids=(0,), stop_strings=("x",), seed=-1
    )
    assert (params.n, params.max_new_tokens, params.temperature, params.top_k, params.top_p) == (1, 1, 0, 1, 1)
    assert (params.stop_token_ids, params.stop_strings, params.seed) == ((0,), ("x",), -1)


def test_params_accept_the_borders_of_what_adjusts_logits() -> None:
    params = SamplingParams(
        max_new_tokens=3, min_new_tokens=3, min_p=1, repetition_penalty=0.01, logit_bias={0: -math.inf, 5: 2}
    )
    assert (params.min_new_tokens, params.min_p, params.repetition_penalty) == (3, 1, 0.01)
    assert params.logit_bias == {0: -math.inf, 5: 2}
    assert SamplingParams().logit_bias == {}


def test_params_are_values_with_a_bias_too() -> None:
    bias = {3: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[4] = 2.0  # is not seen
    assert params.logit_bias == {3: 1.0}
    for twin in (copy.deepcopy(params), SamplingParams(**asdict(params))):
        assert (twin, hash(twin)) == (params, hash(params))
    assert replace(params, n=2).logit_bias == {3: 1.0}
    assert params != SamplingParams(logit_bias={3: 2.0})
    with pytest.raises(FrozenInstanceError):
        params.logit_bias = {}  # type: ignore[misc]


@pytest.mark.parametrize("device", DEVICES)
def test_seeds_equal_the_hash_on_unsigned_integers(device: str) -> None:
    # The helper is SplitMix64 itself: its first output for seed 0 is the published 0xE220A8397B1DCDAF.
    assert seed_by_hand(0) == 0xE220A8397B1DCDAF
    seeds = sample_seeds(-3, 7, torch.tensor([5, 1 << 40], device=device), n=2)
    expected = [seed_by_hand(-3, 7, index, sample) for index in (5, 1 << 40) for sample in (0, 1)]
    assert seeds.dtype == torch.int64
    assert [value % WORD for value in seeds.tolist()] == expected


def test_seeds_wrap_large_base_seeds() -> None:
    index = torch.tensor([0])
    assert torch.equal(sample_seeds(WORD + 5, 0, index, 1), sample_seeds(5, 0, index, 1))
    assert torch.equal(sample_seeds(WORD - 1, 0, index, 1), sample_seeds(-1, 0, index, 1))


def test_seeds_differ_between_seeds_steps_prompts_and_samples() -> None:
    parts = [sample_seeds(seed, step, torch.arange(100), 8) for seed in range(4) for step in range(4)]
    assert len(set(torch.cat(parts).tolist())) == 4 * 4 * 100 * 8


def test_seeds_of_a_prompt_do_not_depend_on_its_batch() -> None:
    whole = sample_seeds(1, 2, torch.tensor([10, 11, 12]), n=3).view(3, 3)
    assert torch.equal(sample_seeds(1, 2, torch.tensor([12, 10]), n=3).view(2, 3), whole[[2, 0]])
    assert torch.equal(sample_seeds(1, 2, torch.tensor([11]), n=2), whole[1, :2])


def test_no_prompts_give_no_seeds() -> None:
    assert sample_seeds(0, 0, torch.tensor([], dtype=torch.int64), 4).shape == (0,)


@pytest.mark.parametrize("device", DEVICES)
def test_uniforms_equal_the_hash_on_unsigned_integers(device: str) -> None:
    seeds = torch.tensor([0, -1, 1 << 62], device=device)
    values = uniforms(seeds, 3)
    counter = mix_by_hand((3 + 0x9E3779B97F4A7C15) % WORD)
    assert values.dtype == torch.float64
    assert values.tolist() == [(mix_by_hand((seed % WORD) ^ counter) >> 11) * 2.0**-53 for seed in seeds.tolist()]


def test_uniforms_take_a_position_for_each_row() -> None:
    seeds = sample_seeds(0, 0, torch.arange(4), 1)
    mixed = uniforms(seeds, torch.tensor([0, 5, 0, 9]))
    assert mixed.tolist() == [float(uniforms(seeds[[row]], at)) for row, at in enumerate((0, 5, 0, 9))]


@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_uniforms_are_uniform_and_uncorrelated(along: str) -> None:
    if along == "seeds":
        values = uniforms(sample_seeds(0, 0, torch.arange(20_000), 1), 0)
    else:
        values = uniforms(torch.full((20_000,), 12345), torch.arange(20_000))
    assert float(values.min()) >= 0
    assert float(values.max()) < 1
    counts = torch.histc(values, bins=20, min=0, max=1)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 43.8  # chi-square, 19 degrees of freedom, 0.999 quantile
    centred = values - 0.5
    # The mean product of 20k independent pairs has deviation (1/12) / sqrt(20000) = 0.0006.
    assert abs(float((centred[1:] * centred[:-1]).mean())) < 0.0025


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [
        (1.0, [-0.407606, -1.407606, -2.407606]),
        (0.5, [-0.142932, -2.142932, -4.142932]),
        (2.0, [-0.680270, -1.180270, -1.680270]),
    ],
)
def test_logits_are_divided_by_the_temperature(temperature: float, expected: list[float]) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]]).repeat(3, 1)
    uniform = torch.tensor([0.0, 0.9, ALMOST_ONE], dtype=torch.float64)
    tokens, logprobs = sample_tokens(logits, SamplingParams(temperature=temperature), uniform)
    torch.testing.assert_close(
        support_logprobs(logits, SamplingParams(temperature=temperature))[0], torch.tensor(expected), atol=1e-6, rtol=0
    )
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, torch.tensor(expected)[tokens], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 0), (0.4999, 0), (0.5001, 1), (0.7999, 1), (0.8001, 2), (ALMOST_ONE, 2)]
)
def test_uniform_is_inverted_through_the_cumulative_distribution(uniform: float, token: int) -> None:
    assert draw(log_of(0.5, 0.3, 0.2), uniform) == token


def test_zero_probability_is_never_sampled() -> None:
    assert draw(log_of(0.0, 0.5, 0.5, 0.0), 0.0) == 1
    assert draw(log_of(0.0, 0.5, 0.5, 0.0), ALMOST_ONE) == 2
    assert draw(log_of(0.0, 0.5, 0.5, 0.0), 1.0) == 2  # not a uniform number, but what rounding makes of one
    assert draw(torch.tensor([[0.0, -200.0]]), ALMOST_ONE) == 0  # exp(-200) is 0 in float32
    assert draw(log_of(0.0, 1.0, 0.0), ALMOST_ONE, temperature=1e-3, top_p=0.9) == 1
    many = torch.full((1, 50_000), -math.inf)
    many[:, ::2] = torch.linspace(-5, 5, 25_000)
    uniform = torch.tensor([ALMOST_ONE], dtype=torch.float64)
    assert float(sample_tokens(many, SamplingParams(), uniform)[1]) > -math.inf


@pytest.mark.parametrize(
    ("logits", "top_k", "kept"),
    [
        ([1.0, 3.0, 2.0, 3.0, 0.0], 3, [1, 2, 3]),
        ([1.0, 3.0, 2.0, 3.0, 0.0], 2, [1, 3]),
        ([1.0, 3.0, 2.0, 3.0, 0.0], 1, [1]),  # of the two equal ones the lower id
        ([0.0, 0.0, 0.0, 0.0], 2, [0, 1]),
        ([0.0, 5.0, 0.0, 0.0], 3, [0, 1, 2]),
        ([1.0, 2.0], 2, [0, 1]),
        ([1.0, 2.0], 9, [0, 1]),
    ],
)
def test_top_k_keeps_exactly_k(logits: list[float], top_k: int, kept: list[int]) -> None:
    logprobs = support_logprobs(torch.tensor([logits]), SamplingParams(top_k=top_k))[0]
    assert torch.isfinite(logprobs).nonzero().flatten().tolist() == kept
    torch.testing.assert_close(logprobs[kept], torch.tensor(logits)[kept].log_softmax(-1))


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (1e-9, [0.0, 0.0, 1.0]),
        (0.5, [0.0, 0.0, 1.0]),  # 0.5 reaches 0.5
        (0.51, [0.0, 0.375, 0.625]),  # 0.3 / 0.8, 0.5 / 0.8
        (0.8, [0.0, 0.375, 0.625]),  # 0.5 + 0.3 reaches 0.8
        (0.81, [0.2, 0.3, 0.5]),
        (1.0, [0.2, 0.3, 0.5]),
    ],
)
def test_top_p_keeps_the_token_that_crosses(top_p: float, expected: list[float]) -> None:
    probabilities = support_logprobs(log_of(0.2, 0.3, 0.5), SamplingParams(top_p=top_p)).exp()
    torch.testing.assert_close(probabilities, torch.tensor([expected]), atol=1e-6, rtol=0)


def test_top_p_of_equal_tokens_keeps_the_lowest_ids() -> None:
    probabilities = support_logprobs(torch.zeros(1, 40), SamplingParams(top_p=0.05)).exp()
    torch.testing.assert_close(probabilities, torch.tensor([[0.5] * 2 + [0.0] * 38]))


def test_top_p_is_reached_in_spite_of_rounding() -> None:
    # The float32 logits of 0.4, 0.35, 0.25 give the first token a little less than 0.4.
    probabilities = support_logprobs(log_of(0.4, 0.35, 0.25), SamplingParams(top_p=0.4)).exp()
    assert probabilities.tolist() == [[1.0, 0.0, 0.0]]


def test_top_p_is_over_what_top_k_left_and_temperature_comes_first() -> None:
    logits = log_of(0.1, 0.4, 0.2, 0.3)
    # Alone, top-p 0.5 needs 0.4 + 0.3; after top-k 2 the first holds 0.4 / 0.7 = 0.571 by itself.
    both = support_logprobs(logits, SamplingParams(top_k=2, top_p=0.5)).exp()
    torch.testing.assert_close(both, torch.tensor([[0.0, 1.0, 0.0, 0.0]]))
    alone = support_logprobs(logits, SamplingParams(top_p=0.5)).exp()
    torch.testing.assert_close(alone, torch.tensor([[0.0, 4 / 7, 0.0, 3 / 7]]))
    # Temperature 0.5 squares: 16/30, 9/30, 4/30, 1/30; the first alone reaches 0.5.
    cold = support_logprobs(logits, SamplingParams(temperature=0.5, top_p=0.5)).exp()
    torch.testing.assert_close(cold, torch.tensor([[0.0, 1.0, 0.0, 0.0]]))


@pytest.mark.parametrize(
    ("min_p", "expected"),
    [
        (0.0, [0.1, 0.4, 0.2, 0.3]),
        (0.25, [0.1, 0.4, 0.2, 0.3]),  # 0.1 is just 0.25 x 0.4
        (0.26, [0.0, 4 / 9, 2 / 9, 3 / 9]),  # of the largest: 0.25, 1, 0.5, 0.75
        (0.5, [0.0, 4 / 9, 2 / 9, 3 / 9]),
        (0.51, [0.0, 4 / 7, 0.0, 3 / 7]),
        (0.76, [0.0, 1.0, 0.0, 0.0]),
        (1.0, [0.0, 1.0, 0.0, 0.0]),
    ],
)
def test_min_p_keeps_what_is_likely_beside_the_likeliest(min_p: float, expected: list[float]) -> None:
    probabilities = support_logprobs(log_of(0.1, 0.4, 0.2, 0.3), SamplingParams(min_p=min_p)).exp()
    torch.testing.assert_close(probabilities, torch.tensor([expected]), atol=1e-6, rtol=0)


def test_min_p_of_one_keeps_all_that_equal_the_likeliest() -> None:
    probabilities = support_logprobs(torch.tensor([[3.0, 1.0, 3.0]]), SamplingParams(min_p=1.0)).exp()
    torch.testing.assert_close(probabilities, torch.tensor([[0.5, 0.0, 0.5]]))


def test_min_p_is_reached_in_spite_of_rounding() -> None:
    # In float32 some of these differences are a little more than log(number).
    for number in range(2, 40):
        logits = torch.tensor([[1.7, 1.7 + math.log(1 / number)]])
        probabilities = support_logprobs(logits, SamplingParams(min_p=1 / number)).exp()
        torch.testing.assert_close(probabilities, torch.tensor([[number, 1.0]]) / (number + 1), atol=1e-6, rtol=0)


def test_min_p_comes_after_temperature_and_top_p() -> None:
    logits = log_of(0.1, 0.4, 0.2, 0.3)
    # Temperature 0.5 squares: of the largest 1/16, 1, 4/16, 9/16. Before it, 0.5 would keep 0.2 too.
    cold = support_logprobs(logits, SamplingParams(temperature=0.5, min_p=0.5)).exp()
    torch.testing.assert_close(cold, torch.tensor([[0.0, 16 / 25, 0.0, 9 / 25]]))
    # Top-p 0.75 needs 0.4 + 0.3 + 0.2 of all; min-p first would leave 0.4, 0.2, 0.3, where 7/9 of the two reach it.
    both = support_logprobs(logits, SamplingParams(top_p=0.75, min_p=0.3)).exp()
    torch.testing.assert_close(both, torch.tensor([[0.0, 4 / 9, 2 / 9, 3 / 9]]))
    # Against top-k the order does not matter: the largest is the same.
    after_top_k = support_logprobs(logits, SamplingParams(top_k=3, min_p=0.6)).exp()
    torch.testing.assert_close(after_top_k, torch.tensor([[0.0, 4 / 7, 0.0, 3 / 7]]))


@pytest.mark.parametrize("min_p", [0.01, 0.1, 0.5, 1.0])
def test_min_p_equals_transformers(min_p: float) -> None:
    logits = 3 * torch.randn(64, 50, generator=torch.Generator().manual_seed(0))
    expected = MinPLogitsWarper(min_p)(torch.empty(64, 0), logits).log_softmax(-1)
    result = support_logprobs(logits, SamplingParams(min_p=min_p))
    assert torch.equal(result.isfinite(), expected.isfinite())
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)


def test_rows_are_cut_one_by_one() -> None:
    logits = torch.cat([log_of(0.5, 0.3, 0.2), log_of(0.05, 0.05, 0.9)])
    probabilities = support_logprobs(logits, SamplingParams(top_p=0.6)).exp()
    torch.testing.assert_close(probabilities, torch.tensor([[0.625, 0.375, 0.0], [0.0, 0.0, 1.0]]))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7),
        SamplingParams(top_k=3),
        SamplingParams(temperature=1.5, top_k=5, top_p=0.9),
        SamplingParams(min_p=0.3),
        SamplingParams(temperature=1.5, top_k=5, top_p=0.95, min_p=0.2),
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_frequencies_follow_the_distribution(params: SamplingParams, device: str) -> None:
    draws = 20_000
    logits = torch.tensor([[0.5, -1.0, 2.0, 1.0, 0.0, 1.5]], device=device)
    uniform = uniforms(sample_seeds(11, 0, torch.arange(draws, device=device), 1), 4)
    tokens, _ = sample_tokens(logits.expand(draws, 6), params, uniform)
    expected = support_logprobs(logits, params).exp()[0] * draws
    counts = torch.bincount(tokens, minlength=6)
    kept = expected > 0
    assert int(counts[~kept].sum()) == 0
    # Chi-square, at most 5 degrees of freedom: 0.999 quantile 20.5.
    assert float(((counts - expected)[kept] ** 2 / expected[kept]).sum()) < 20.5


def test_temperature_zero_is_greedy_with_log_probs_of_temperature_one() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 3.0]])
    params = SamplingParams(temperature=0.0, top_k=1, top_p=0.1, min_p=1.0)
    tokens, logprobs = sample_tokens(logits, params, torch.full((2,), ALMOST_ONE, dtype=torch.float64))
    assert tokens.tolist() == [0, 1]
    # Row 1: -log(2 + exp(-3)) = -0.717736.
    torch.testing.assert_close(logprobs, torch.tensor([-0.407606, -0.717736]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-60])
def test_very_low_temperatures_do_not_overflow(temperature: float) -> None:
    logprobs = support_logprobs(torch.tensor([[100.0, 90.0, -100.0]]), SamplingParams(temperature=temperature))
    assert logprobs.exp().tolist() == [[1.0, 0.0, 0.0]]


def test_half_precision_logits_are_sampled_in_float32_and_left_alone() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.bfloat16)
    _, logprobs = sample_tokens(logits, SamplingParams(top_k=2), torch.zeros(1, dtype=torch.float64))
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, torch.tensor([-0.313262]), atol=1e-6, rtol=0)  # -log(1 + exp(-1))
    assert logits.tolist() == [[2.0, 1.0, 0.0]]


def test_nan_logits_show_in_the_log_prob() -> None:
    logits = torch.tensor([[math.nan, 0.0, 0.0], [0.0, 0.0, 0.0]])
    for params in (SamplingParams(), SamplingParams(min_p=0.1)):
        tokens, logprobs = sample_tokens(logits, params, torch.tensor([0.0, 0.7], dtype=torch.float64))
        assert 0 <= int(tokens[0]) < 3
        assert logprobs.isnan().tolist() == [True, False]


def test_sampling_leaves_torchs_generator_alone() -> None:
    state = torch.get_rng_state()
    sample_tokens(torch.zeros(1, 4), SamplingParams(top_k=3, top_p=0.9), uniforms(torch.tensor([1]), 0))
    assert torch.equal(torch.get_rng_state(), state)
