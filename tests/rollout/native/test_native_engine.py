"""The native engine samples what ``generate`` of transformers samples, whatever the batch, the cache and the memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from lightning_verl.rollout.base import FinishReason, RolloutEngine, Rollouts
from lightning_verl.rollout.native import NativeEngine, NativeOptions
from lightning_verl.rollout.native import engine as engine_module
from lightning_verl.rollout.sampling import SamplingParams
from lightning_verl.rollout.transformers import TransformersEngine
from lightning_verl.testing import char_tokenizer, tiny_model
from lightning_verl.testing.tiny import Family

FAMILIES: tuple[Family, ...] = get_args(Family)
PAD, EOS = 0, 2
LENGTHS = (1, 3, 17, 16, 40, 33, 8, 25)
"""Of the prompts: from one token to more than two blocks of 16, and more than every sliding window (8 and 20)."""
GENERATOR = torch.Generator().manual_seed(0)
PROMPTS = [torch.randint(3, 128, (length,), generator=GENERATOR).tolist() for length in LENGTHS]
SIZES = {"pad_token_id": PAD, "eos_token_ids": [EOS]}


@cache
def model_of(family: Family) -> Any:
    """With a head of its own: tied to the embedding, it would repeat the last token whatever attention says."""
    return tiny_model(family, **({} if family == "gpt2" else {"tie_word_embeddings": False}))


@cache
def reference(family: Family, temperature: float) -> Rollouts:
    """What the reference engine samples, four responses of up to 24 tokens a prompt."""
    sampling = SamplingParams(n=4, temperature=temperature, max_new_tokens=24)
    return TransformersEngine(model_of(family), **SIZES).generate(PROMPTS, sampling)


def native(model: Any, *, blocks: int | None = None, tokenizer: Any = None, **options: Any) -> NativeEngine:
    """An engine whose cache has at most so many blocks of float32."""
    if blocks is not None:
        config = model.config
        heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        options["kv_cache_bytes"] = blocks * 2 * config.num_hidden_layers * heads * size * 16 * 4
    return NativeEngine(model, **SIZES, tokenizer=tokenizer, options=NativeOptions(**options))


def responses(rollouts: Rollouts) -> list[list[int]]:
    rows = zip(rollouts.response_ids.tolist(), rollouts.lengths.tolist(), strict=True)
    return [row[:length] for row, length in rows]


def assert_same(rollouts: Rollouts, expected: Rollouts, atol: float = 1e-5) -> None:
    """Equal tokens, and log-probs within 1e-5."""
    assert torch.equal(rollouts.response_ids, expected.response_ids)
    assert torch.equal(rollouts.lengths, expected.lengths)
    assert torch.equal(rollouts.prompt_rows, expected.prompt_rows)
    assert rollouts.finish_reasons == expected.finish_reasons
    torch.testing.assert_close(rollouts.logprobs, expected.logprobs, atol=atol, rtol=0)


def forward_logprobs(model: Any, prompt: Sequence[int], response: Sequence[int], temperature: float) -> Tensor:
    """Log-probs of the response from one plain forward pass over the joined sequence."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    logprobs: Tensor = (logits / (temperature or 1.0)).log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(response)[:, None])[:, 0]


def assert_forward(model: Any, rollouts: Rollouts, temperature: float, atol: float = 1e-5) -> None:
    for row, response in enumerate(responses(rollouts)):
        expected = forward_logprobs(model, PROMPTS[int(rollouts.prompt_rows[row])], response, temperature)
        torch.testing.assert_close(rollouts.logprobs[row, : len(response)], expected, atol=atol, rtol=0)


# ---- every family ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("family", FAMILIES)
class TestFamilies:
    sampling = SamplingParams(n=4, max_new_tokens=24)

    def test_tokens_and_log_probs(self, family: Family, temperature: float) -> None:
        engine = native(model_of(family))
        rollouts = engine.generate(PROMPTS, replace(self.sampling, temperature=temperature))
        assert_same(rollouts, reference(family, temperature))
        assert_forward(model_of(family), rollouts, temperature)
        lengths = set(rollouts.lengths.tolist())
        assert 24 in lengths
        assert len(lengths) > 1 or temperature == 0
        report = engine.report
        assert report is not None
        assert (report.preemptions, report.swapped_bytes, report.host_bytes) == (0, 0, 0)
        # Prompts are computed once, and every token but the last of each response.
        assert report.computed_tokens == sum(LENGTHS) + int(rollouts.lengths.sum()) - len(rollouts.lengths)
        assert report.steps == 24
        assert 0 < report.used_bytes < report.cache_bytes

    def test_alone(self, family: Family, temperature: float) -> None:
        engine = native(model_of(family))
        for row in (0, 4, 6):
            alone = engine.generate(
                [PROMPTS[row]], replace(self.sampling, temperature=temperature), prompt_indices=[row]
            )
            expected = reference(family, temperature)
            for sample in range(4):
                length = int(alone.lengths[sample])
                assert responses(alone)[sample] == responses(expected)[4 * row + sample]
                torch.testing.assert_close(
                    alone.logprobs[sample, :length], expected.logprobs[4 * row + sample, :length], atol=1e-5, rtol=0
                )

    def test_when_memory_runs_out(self, family: Family, temperature: float) -> None:
        offload = temperature > 0  # greedy samples that step back are computed again, the others come back
        engine = native(model_of(family), blocks=9, offload_kvcache=offload)
        rollouts = engine.generate(PROMPTS, replace(self.sampling, temperature=temperature))
        assert_same(rollouts, reference(family, temperature))
        report = engine.report
        assert report is not None
        block = report.cache_bytes // 9
        assert report.preemptions > 0
        assert report.used_bytes == 8 * block
        assert (report.swapped_bytes > 0) is (report.host_bytes > 0) is offload
        assert report.swapped_bytes % (2 * block) == 0  # what goes comes back
        least = sum(LENGTHS) + int(rollouts.lengths.sum()) - len(rollouts.lengths)
        assert report.computed_tokens > least if not offload else report.computed_tokens >= least


def test_engine_follows_the_protocol() -> None:
    engine = native(model_of("llama"))
    assert isinstance(engine, RolloutEngine)
    assert (engine.weight_version, engine.report) == (0, None)


# ---- sampling options ------------------------------------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {"top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.3},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.1, "temperature": 1.7},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 1.8, "temperature": 0.0},
    {"logit_bias": {EOS: 4.0, 9: -math.inf, 7: 2.5}},
    {"min_new_tokens": 9, "logit_bias": {EOS: 6.0}, "stop_token_ids": (30, 31, 32)},
    {"stop_token_ids": tuple(range(40, 60))},
    {"stop_strings": ("a", "B", "7", "no such text")},
    {"stop_strings": ("a", "e", "B", "7"), "min_new_tokens": 6},
    {"temperature": 0.7},
    {"temperature": 0.05},
    {"max_new_tokens": 1},
    {"n": 1},
    {"n": 9, "seed": 3},
    {"repetition_penalty": 0.7, "logit_bias": {5: 1.0}, "min_new_tokens": 3, "top_k": 30, "temperature": 0.9},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_every_option_samples_what_the_reference_engine_samples(family: Family, options: dict[str, Any]) -> None:
    sampling = SamplingParams(**{"n": 3, "max_new_tokens": 20, **options})
    model, tokenizer = model_of(family), char_tokenizer()
    expected = TransformersEngine(model, **SIZES, tokenizer=tokenizer).generate(PROMPTS, sampling, step=5)
    for blocks in (None, 9):
        engine = native(model, blocks=blocks, tokenizer=tokenizer)
        # A low temperature magnifies what is left of the differences between two orders of summation.
        assert_same(engine.generate(PROMPTS, sampling, step=5), expected, atol=1e-5 / min(1, sampling.temperature or 1))
    reasons = set(expected.finish_reasons)
    assert (FinishReason.STOP_STRING in reasons) is ("stop_strings" in options)
    assert FinishReason.EOS in reasons or not {"stop_token_ids", "logit_bias"} & options.keys()


@pytest.mark.parametrize(
    ("temperature", "logprobs"),
    [
        (1.0, [-0.407606, -1.407606, -2.407606]),
        (0.5, [-0.142932, -2.142932, -4.142932]),
        (2.0, [-0.680270, -1.180270, -1.680270]),
    ],
)
def test_logits_are_divided_by_the_temperature_before_the_softmax(temperature: float, logprobs: list[float]) -> None:
    """The logits 2, 1, 0 of three tokens; the others are forbidden."""
    model = tiny_model("llama")
    torch.nn.init.zeros_(model.lm_head.weight)
    bias = {**dict.fromkeys(range(128), -math.inf), 10: 2.0, 11: 1.0, 12: 0.0}
    sampling = SamplingParams(n=200, temperature=temperature, max_new_tokens=2, logit_bias=bias)
    rollouts = native(model).generate([[5]], sampling)
    assert set(rollouts.response_ids.flatten().tolist()) == {10, 11, 12}
    expected = torch.tensor(logprobs)[rollouts.response_ids - 10]
    torch.testing.assert_close(rollouts.logprobs, expected, atol=1e-6, rtol=0)
    greedy = native(model).generate([[5]], SamplingParams(temperature=0, max_new_tokens=2, logit_bias=bias))
    assert greedy.response_ids.tolist() == [[10, 10]]
    torch.testing.assert_close(greedy.logprobs, torch.full((1, 2), -0.407606), atol=1e-6, rtol=0)


def test_the_reports_of_a_temperature_are_those_of_training() -> None:
    model = model_of("qwen3")
    rollouts = native(model).generate(PROMPTS, SamplingParams(n=2, temperature=0.7, max_new_tokens=16))
    for row, response in enumerate(responses(rollouts)):
        recomputed = forward_logprobs(model, PROMPTS[int(rollouts.prompt_rows[row])], response, 0.7)
        ratio = (recomputed - rollouts.logprobs[row, : len(response)]).exp()
        torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-4, rtol=0)


# ---- what the result does not depend on ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_a_sample_depends_on_nothing_but_its_own(family: Family) -> None:
    """Not on batch mates, their order, n, the call it is part of, its place there, or on the memory."""
    model, sampling = model_of(family), SamplingParams(n=4, max_new_tokens=24)
    whole = responses(native(model).generate(PROMPTS, sampling, step=3))
    state = torch.get_rng_state()
    order = [5, 2, 7, 0, 4, 6, 1, 3]
    shuffled = [PROMPTS[row] for row in order]
    for blocks in (None, 9):
        engine = native(model, blocks=blocks)
        mixed = responses(engine.generate(shuffled, sampling, step=3, prompt_indices=order))
        assert [whole[4 * row : 4 * row + 4] for row in order] == [mixed[4 * at : 4 * at + 4] for at in range(8)]
        halves = [
            responses(engine.generate(shuffled[part], sampling, step=3, prompt_indices=order[part]))
            for part in (slice(0, 3), slice(3, 8))
        ]
        assert halves[0] + halves[1] == mixed
        for n in (1, 3, 7):
            other = responses(engine.generate(PROMPTS, replace(sampling, n=n), step=3))
            for row in range(8):
                common = min(n, 4)
                assert other[n * row : n * row + common] == whole[4 * row : 4 * row + common]
    assert torch.equal(torch.get_rng_state(), state)
    assert responses(native(model).generate(PROMPTS, sampling, step=4)) != whole
    assert responses(native(model).generate(PROMPTS, replace(sampling, seed=1), step=3)) != whole


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Several divide a matrix product by its rows."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2"])
def test_log_probs_of_dense_models_do_not_depend_on_the_batch_to_the_last_bit(family: Family) -> None:
    engine, sampling = native(model_of(family)), SamplingParams(n=2, max_new_tokens=12)
    whole = engine.generate(PROMPTS, sampling)
    for row in (0, 2, 4, 6):
        alone = engine.generate([PROMPTS[row]], sampling, prompt_indices=[row])
        for sample, length in enumerate(alone.lengths.tolist()):
            assert torch.equal(alone.logprobs[sample, :length], whole.logprobs[2 * row + sample, :length])


@pytest.mark.parametrize(
    ("family", "bounds"),
    [
        ("qwen3", {"tokens": 5}),  # a prompt of 40 tokens takes eight steps or more
        ("mistral", {"tokens": 1}),
        ("gemma2", {"tokens": 7, "rows": 3}),
        ("gpt2", {"rows": 2}),  # the last samples of a group come late
        ("gemma3", {"block_size": 4, "rows": 5, "tokens": 9}),
        ("llama", {"block_size": 64}),
        ("gemma2", {"block_size": 1}),
    ],
    ids=str,
)
def test_the_bounds_of_a_step_change_nothing(
    family: Family, bounds: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = replace(engine_module._BOUNDS["cpu"], **bounds)
    monkeypatch.setitem(engine_module._BOUNDS, "cpu", changed)
    sampling = SamplingParams(n=4, temperature=0.7, max_new_tokens=24)
    engine = native(model_of(family))
    assert_same(engine.generate(PROMPTS, sampling), reference(family, 0.7))
    assert engine.report is not None
    assert engine.report.preemptions == 0
    if changed.tokens < 10:
        small = native(model_of(family), blocks=9, offload_kvcache=True)
        assert_same(small.generate(PROMPTS, sampling), reference(family, 0.7))


@pytest.mark.parametrize(("kind", "mean", "largest"), [("bfloat16", 0.003, 0.02), ("fp8", 0.05, 0.3)])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "qwen3_moe"])
def test_a_smaller_cache_dtype_stays_close(family: Family, kind: Any, mean: float, largest: float) -> None:
    """Measured: means of 0.0005 to 0.0021 and 0.007 to 0.034, largest 0.012 and 0.22 (with experts 0.17 and 0.40)."""
    model = model_of(family)
    engine = native(model, kv_cache_dtype=kind, keep_kvcache=True)
    rollouts = engine.generate(PROMPTS, SamplingParams(n=2, max_new_tokens=24))
    assert engine._cache is not None
    assert engine._cache.data.dtype is {"bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[kind]
    differences = torch.cat(
        [
            rollouts.logprobs[row, : len(response)] - forward_logprobs(model, PROMPTS[row // 2], response, 1.0)
            for row, response in enumerate(responses(rollouts))
        ]
    ).abs()
    assert 1e-4 < float(differences.mean()) < mean
    if family != "qwen3_moe":  # there a rounded key may turn a token to another expert
        assert float(differences.max()) < largest


@pytest.mark.parametrize("kind", ["bfloat16", "fp8"])
def test_a_smaller_cache_dtype_comes_back_from_the_host_as_it_was(kind: Any) -> None:
    model, sampling = model_of("llama"), SamplingParams(n=4, max_new_tokens=24)
    whole = native(model, kv_cache_dtype=kind).generate(PROMPTS, sampling)
    engine = native(model, blocks=5 if kind == "bfloat16" else 3, kv_cache_dtype=kind, offload_kvcache=True)
    assert_same(engine.generate(PROMPTS, sampling), whole, atol=0.01)  # a last bit of fp32 may turn one of bfloat16
    assert engine.report is not None
    assert engine.report.swapped_bytes > 0


# ---- frequencies -----------------------------------------------------------------------------------------------------

FREQUENCIES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"top_k": 4},
    {"top_p": 0.7},
    {"min_p": 0.3},
    {"repetition_penalty": 1.5, "logit_bias": {3: 0.7, 4: -math.inf}},
]


def expected_probabilities(model: Any, before: list[int], params: SamplingParams) -> list[float]:
    """The distribution of the next token, by the definition of each option."""
    with torch.no_grad():
        logits = model(torch.tensor([before])).logits[0, -1].double().tolist()
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    for token in set(before):
        factor = params.repetition_penalty
        logits[token] = logits[token] * factor if logits[token] < 0 else logits[token] / factor
    weights = [math.exp(logit / params.temperature) for logit in logits]
    order = sorted(range(len(weights)), key=lambda token: -weights[token])[: params.top_k]
    mass, kept = 0.0, []
    for token in order:
        if mass < params.top_p * sum(weights[token] for token in order):
            kept.append(token)
            mass += weights[token]
    kept = [token for token in kept if weights[token] >= params.min_p * weights[order[0]]]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(weights))]


@pytest.mark.parametrize("options", FREQUENCIES, ids=str)
def test_frequencies_are_those_of_the_model(options: dict[str, Any]) -> None:
    """Pairs of tokens of 3000 samples, by Pearson's chi-square, whose mean is k and variance 2k at k degrees.

    Pairs that are expected less than 5 times count as one.
    """
    model = tiny_model("llama", vocab_size=10, initializer_range=0.15)
    params = SamplingParams(n=3000, max_new_tokens=2, **options)
    prompt = [5, 6, 7]
    rollouts = NativeEngine(model, pad_token_id=PAD, eos_token_ids=[]).generate([prompt], params, step=11)
    counts = Counter(tuple(row) for row in rollouts.response_ids.tolist())
    first = expected_probabilities(model, prompt, params)
    cells: list[tuple[float, int]] = []
    for token, chance in enumerate(first):
        for other, follows in enumerate(expected_probabilities(model, [*prompt, token], params)):
            cells.append((3000 * chance * follows, counts[token, other]))
    assert all(seen == 0 for expected, seen in cells if expected == 0)
    rare = [cell for cell in cells if 0 < cell[0] < 5]
    cells = [cell for cell in cells if cell[0] >= 5]
    if rare:
        cells.append((sum(expected for expected, _ in rare), sum(seen for _, seen in rare)))
    statistic = sum((seen - expected) ** 2 / expected for expected, seen in cells)
    degrees = len(cells) - 1
    assert degrees > 5
    assert abs(statistic - degrees) < 3 * math.sqrt(2 * degrees)
