"""The native engine on a GPU: every family, sampling option and use of memory gives what plain passes give.

In fp32, so that tokens can be held against each other; attention of the plain passes is transformers' own, written out.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from lightning_verl.rollout.adjust import LogitAdjuster
from lightning_verl.rollout.base import Rollouts
from lightning_verl.rollout.native import NativeEngine, NativeOptions
from lightning_verl.rollout.sampling import SamplingParams, support_logprobs
from lightning_verl.rollout.transformers import TransformersEngine
from lightning_verl.testing import tiny_model
from lightning_verl.testing.tiny import Family

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(300)]

FAMILIES: tuple[Family, ...] = get_args(Family)
PAD, EOS, VOCABULARY = 0, 2, 128
ENDS = {"pad_token_id": PAD, "eos_token_ids": [EOS]}
LENGTHS = (1, 3, 17, 64, 100, 63, 130, 65)
"""Of the prompts: below, at and above one block of 64 tokens and two of them, and the sliding windows of 8 and 20."""
GENERATOR = torch.Generator().manual_seed(0)
PROMPTS = [torch.randint(3, VOCABULARY, (length,), generator=GENERATOR).tolist() for length in LENGTHS]
HEAD = 64
SEEDS = {"qwen3": 3, "qwen3_moe": 7, "gemma2": 5, "gemma3": 3}
"""Of weights with which no two best logits of the greedy responses are within 0.001; 0 for the others."""


@cache
def model_of(family: Family, device: str) -> Any:
    """Heads of 64 numbers and scores as large as those of the usual tiny model.

    With a head of its own: tied to the embedding, it would repeat the last token whatever attention says.
    """
    width = 4 * HEAD
    sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": 2 * width, "max_position_embeddings": 256}
    if family == "gpt2":
        sizes = {"n_embd": width, "n_inner": 2 * width, "n_positions": 256}
    else:
        sizes["tie_word_embeddings"] = False
    sizes |= {"initializer_range": 0.05, "attn_implementation": "eager"}
    return tiny_model(family, seed=SEEDS.get(family, 0), **sizes).to(device)


def native(model: Any, *, tokens: int | None = None, **options: Any) -> NativeEngine:
    """An engine whose cache has room for at most so many tokens in fp32."""
    if tokens is not None:
        config = model.config
        heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
        options["kv_cache_bytes"] = tokens * 2 * config.num_hidden_layers * heads * HEAD * 4
    return NativeEngine(model, **ENDS, options=NativeOptions(**options))


def responses(rollouts: Rollouts) -> list[list[int]]:
    rows = zip(rollouts.response_ids.tolist(), rollouts.lengths.tolist(), strict=True)
    return [row[:length] for row, length in rows]


def assert_same(rollouts: Rollouts, expected: Rollouts, atol: float = 1e-5) -> None:
    """Equal tokens, and log-probs within 1e-5."""
    assert responses(rollouts) == responses(expected)
    assert rollouts.finish_reasons == expected.finish_reasons
    torch.testing.assert_close(rollouts.logprobs, expected.logprobs, atol=atol, rtol=0)


def plain_logits(model: Any, prompt: Sequence[int], response: Sequence[int]) -> Tensor:
    """What each token of the response is drawn from, by one plain pass; ``[R, V]``, on the CPU."""
    ids = torch.tensor([[*prompt, *response]], device=model.device)
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.cpu()


def errors(model: Any, prompts: list[list[int]], rollouts: Rollouts, sampling: SamplingParams) -> Tensor:
    """How far the log-prob of each token is from what the options of sampling make of plain logits on the CPU."""
    adjuster = LogitAdjuster(sampling, [EOS], VOCABULARY, torch.device("cpu"))
    found = []
    for row, response in enumerate(responses(rollouts)):
        prompt = prompts[int(rollouts.prompt_rows[row])]
        logits = plain_logits(model, prompt, response)
        seen = torch.zeros(len(response), VOCABULARY, dtype=torch.bool)
        for place in range(len(response)):
            seen[place, [*prompt, *response[:place]]] = True
        logits = adjuster(logits, torch.arange(len(response)), seen)
        greedy = sampling.temperature == 0
        logprobs = logits.log_softmax(-1) if greedy else support_logprobs(logits, sampling)
        own = logprobs.gather(-1, torch.tensor(response)[:, None])[:, 0]
        found.append((rollouts.logprobs[row, : len(response)].cpu() - own).abs())
    return torch.cat(found)


# ---- every family ----------------------------------------------------------------------------------------------------

GREEDY = SamplingParams(temperature=0, max_new_tokens=24)
SAMPLED = SamplingParams(n=2, temperature=0.7, max_new_tokens=24)


def generated(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """What ``generate`` of transformers makes of prompts, greedily; each up to its end token."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts], device=model.device)
    made = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=24, eos_token_id=EOS, pad_token_id=PAD
    )
    rows = made[:, width:].tolist()
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]


def check_family(family: Family, device: str) -> None:
    """Greedy and sampled tokens, in a batch of unequal lengths and alone, with the options that are the default."""
    model = model_of(family, device)
    engine, expected = native(model), generated(model, PROMPTS)
    for prompt, response in zip(PROMPTS, expected, strict=True):
        best, second = plain_logits(model, prompt, response).topk(2).values.unbind(-1)
        assert (best - second).min() > 5e-4, "the case must not hang on the last bits of two logits"
    greedy = engine.generate(PROMPTS, GREEDY)
    assert responses(greedy) == expected
    assert errors(model, PROMPTS, greedy, GREEDY).max() < 1e-5
    sampled = engine.generate(PROMPTS, SAMPLED)
    assert_same(sampled, TransformersEngine(model, **ENDS).generate(PROMPTS, SAMPLED))
    assert errors(model, PROMPTS, sampled, SAMPLED).max() < 1e-5
    # A single token at a time is compiled on its own, which takes as long again: once is enough.
    rows, count = ((0, 2, 6), 1) if family == "llama" else ((2, 6), 2)
    for row in rows:
        alone = engine.generate([PROMPTS[row]], replace(GREEDY, n=count), prompt_indices=[row])
        assert responses(alone) == [expected[row]] * count
        alone = engine.generate([PROMPTS[row]], SAMPLED, prompt_indices=[row])
        assert responses(alone) == responses(sampled)[2 * row : 2 * row + 2]
    if device == "cuda":
        assert engine._runner is not None
        assert engine._runner._replays, "nothing was decoded by graphs"
        if family != "qwen3_moe":  # whose experts may be what no graph can hold
            assert engine._runner._captures


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_samples_what_generate_samples(family: Family) -> None:
    torch._dynamo.reset()  # one process compiles a function for so many kinds of layers only
    counters.clear()
    check_family(family, "cuda")
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["graph_break"] or family == "qwen3_moe"


LONG = SamplingParams(n=3, temperature=0.7, min_new_tokens=100, max_new_tokens=100)
LONG_PROMPTS = [PROMPTS[row] for row in (0, 3, 5, 6)]
"""Samples that need up to two more blocks of 64: one more is held free for each, and nobody would have to step back."""
ROOM = 8 * 64


def check_memory(family: Family, device: str) -> None:
    """Whether samples step back, to the host or to be computed again, and whether graphs decode, changes nothing."""
    model = model_of(family, device)
    engine = native(model, compile_layers=False)
    whole = engine.generate(LONG_PROMPTS, LONG)
    assert errors(model, LONG_PROMPTS, whole, LONG).max() < 1e-5
    assert engine.report is not None
    assert engine.report.preemptions == 0
    for offload in (False, True):
        small = native(model, tokens=ROOM, offload_kvcache=offload, compile_layers=False)
        assert_same(small.generate(LONG_PROMPTS, LONG), whole)
        report = small.report
        assert report is not None
        assert report.preemptions > 0
        assert (report.swapped_bytes > 0) is (report.host_bytes > 0) is offload
        assert offload or report.computed_tokens > engine.report.computed_tokens
    launched = native(model, cuda_graphs=False)
    assert_same(launched.generate(LONG_PROMPTS, LONG), whole)
    assert launched._runner is None


@pytest.mark.parametrize("family", FAMILIES)
def test_memory_and_graphs_change_nothing(family: Family) -> None:
    check_memory(family, "cuda")


def test_graphs_serve_later_rollouts() -> None:
    """Their caches are elsewhere in memory, their weights changed; more rows than there were take new graphs."""
    torch._dynamo.reset()
    model = copy.deepcopy(model_of("llama", "cuda"))
    engine, sampling = native(model), SamplingParams(n=2, temperature=0.7, max_new_tokens=40)
    runners, caches, occupied = [], [], []
    for turn, lengths in enumerate(((3, 5), (3, 5), (40, 200), (130, 8), (130, 8, 90, 77))):
        prompts = [PROMPTS[4][:1] * length for length in lengths]
        expected = TransformersEngine(model, **ENDS).generate(prompts, sampling)
        assert_same(engine.generate(prompts, sampling), expected)
        assert engine._cache is not None
        assert engine._runner is not None
        assert engine._runner._captures
        runners.append(engine._runner)
        caches.append(engine._cache.data.data_ptr())
        assert list(engine._runner._replays) == [8 if turn == 4 else 4]
        engine.release()
        assert engine._cache is None
        occupied.append(torch.full((5_000_000,), torch.nan, device="cuda"))  # where the cache was
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
    assert runners[0] is not runners[1], "weights are known to stay where they are from the second rollout on"
    assert runners[1] is runners[2] is runners[3] is not runners[4]
    assert len(set(caches[1:4])) > 1
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    expected = TransformersEngine(model, **ENDS).generate(PROMPTS[:4], sampling)
    assert_same(engine.generate(PROMPTS[:4], sampling), expected)
    assert engine._runner is not runners[4]
    engine.release()
    assert engine._runner is None, "weights that move leave graphs of no use"


def test_batches_shrink_through_several_graphs() -> None:
    """In bf16, few samples first: what that compiled must serve no size of a larger batch unseen."""
    torch._dynamo.reset()
    model = copy.deepcopy(model_of("qwen2", "cuda")).bfloat16()
    model.config.max_position_embeddings = 512
    engine = native(model)
    sampling = SamplingParams(n=4, max_new_tokens=300, stop_token_ids=(7,))
    few = engine.generate(PROMPTS[:1], sampling)
    engine.release()
    many = engine.generate(PROMPTS, sampling)
    assert engine._runner is not None
    assert engine._runner._captures
    assert len(engine._runner._replays) >= 2, "samples must end at unequal times"
    assert len(set(many.lengths.tolist())) > 10
    for rollouts, prompts in ((few, PROMPTS[:1]), (many, PROMPTS)):
        found = errors(model, prompts, rollouts, sampling)
        assert found.mean() < 0.03  # bf16 keeps 8 bits
        assert found.max() < 0.2


# ---- sampling options ------------------------------------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {"top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.1},
    {"repetition_penalty": 1.8},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3},
]


def check_option(option: dict[str, Any], device: str) -> None:
    """The tokens of the reference engine, and log-probs by the definition of the options."""
    model = model_of("qwen2", device)
    sampling = SamplingParams(n=3, temperature=0.7, max_new_tokens=24, **option)
    made = native(model, compile_layers=False).generate(PROMPTS, sampling, step=5)
    assert errors(model, PROMPTS, made, sampling).max() < 1e-5
    assert errors(model, PROMPTS, made, SamplingParams(temperature=0.7)).max() > 0.1, "the options must matter"
    assert_same(made, TransformersEngine(model, **ENDS).generate(PROMPTS, sampling, step=5))


@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_log_probs_are_those_of_the_sampling_options(option: dict[str, Any]) -> None:
    check_option(option, "cuda")


# ---- smaller caches --------------------------------------------------------------------------------------------------


def check_dtype(family: Family, kind: Any, bounds: tuple[float, float], device: str) -> Tensor:
    """Mean and largest error of log-probs, which the cache's rounding bounds; returns all errors."""
    model = model_of(family, device)
    sampling = SamplingParams(n=2, max_new_tokens=24)
    engine = native(model, kv_cache_dtype=kind, compile_layers=False)
    found = errors(model, PROMPTS, engine.generate(PROMPTS, sampling), sampling)
    assert engine._cache is not None
    assert engine._cache.data.dtype is {"bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[kind]
    mean, largest = bounds
    assert 1e-4 < found.mean() < mean
    assert found.max() < largest
    return found


@pytest.mark.parametrize(("kind", "bounds"), [("bfloat16", (0.003, 0.015)), ("fp8", (0.05, 0.2))])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_a_smaller_cache_dtype_stays_close(family: Family, kind: Any, bounds: tuple[float, float]) -> None:
    """e4m3 has 3 bits behind the first: keys and values are up to 1/16 off, and scores and outputs with them.

    Measured on a CPU: means of 0.0008 to 0.0017 and 0.012 to 0.025, largest 0.006 and 0.097.
    """
    check_dtype(family, kind, bounds, "cuda")


# ---- errors ----------------------------------------------------------------------------------------------------------


class FailingWatch:
    """Fails at the first sample that has ended, or when it gets the host for the third time."""

    def __init__(self, where: str) -> None:
        self.where, self.turns = where, 0

    def finished(self, row: int, response: Sequence[int]) -> None:
        if self.where == "finished":
            raise RuntimeError("stop here")

    def meanwhile(self, busy: Any) -> None:
        self.turns += 1
        if self.where == "meanwhile" and self.turns == 3:
            raise RuntimeError("stop here")


def check_watch(where: str, device: str) -> None:
    """An error while others go on; the same engine, its cache and its graphs serve the next rollout."""
    model = model_of("llama", device)
    sampling = SamplingParams(n=3, max_new_tokens=60, stop_token_ids=tuple(range(5, 11)))
    expected = native(model, compile_layers=False).generate(PROMPTS, sampling)
    assert len(set(expected.lengths.tolist())) > 5, "samples must end at unequal times"
    engine = native(model, compile_layers=False)
    for warm in (False, True):  # before and after its graphs are there
        if warm:
            assert_same(engine.generate(PROMPTS, sampling), expected)
        before, watch = model.config._attn_implementation, FailingWatch(where)
        with pytest.raises(RuntimeError, match="stop here"):
            engine.generate(PROMPTS, sampling, watch=watch)
        assert watch.turns < max(expected.lengths.tolist())
        assert model.config._attn_implementation == before
        after = engine.generate(PROMPTS, sampling)
        assert_same(after, expected)
        assert errors(model, PROMPTS, after, sampling).max() < 1e-5


@pytest.mark.parametrize("where", ["finished", "meanwhile"])
def test_after_an_error_of_a_watch_the_engine_goes_on(where: str) -> None:
    check_watch(where, "cuda")
