"""How large the native engine's cache is, and what it does where memory is short."""

from __future__ import annotations

import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_verl.rollout.adjust import LogitAdjuster
from lightning_verl.rollout.base import Rollouts
from lightning_verl.rollout.native import NativeEngine, NativeOptions
from lightning_verl.rollout.native import engine as engine_module
from lightning_verl.rollout.native import graphs as graphs_module
from lightning_verl.rollout.native.cache import KVCache
from lightning_verl.rollout.native.memory import draw_bytes, graph_bytes, headroom
from lightning_verl.rollout.sampling import SamplingParams, sample_tokens, uniforms
from lightning_verl.testing import run_ranks, tiny_model

PROMPTS = [[5], list(range(20, 50)), [7, 8, 9], list(range(40, 57))]
SAMPLING = SamplingParams(n=3, max_new_tokens=20)
BLOCK = 2 * 2 * 2 * 16 * 16 * 4
"""Bytes: keys and values of two layers with two heads of 16, 16 tokens, float32."""
LEAST = 5
"""Blocks of the longest sample, 50 tokens, and block 0."""
NEED = 30
"""Blocks of all: 1 + 1 full ones of prompts, 2 + 3 + 2 + 2 of their samples' own three times, block 0."""


def native(tensor_group: Any = None, **options: Any) -> NativeEngine:
    model = tiny_model("llama")
    options = {"options": NativeOptions(**options)}
    return NativeEngine(model, pad_token_id=0, eos_token_ids=[2], tensor_group=tensor_group, **options)


def assert_same(rollouts: Rollouts, expected: Rollouts) -> None:
    assert torch.equal(rollouts.response_ids, expected.response_ids)
    torch.testing.assert_close(rollouts.logprobs, expected.logprobs, atol=1e-5, rtol=0)


# ---- the size of the cache -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offload", [False, True])
def test_the_cache_fits_into_what_is_free(offload: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = native(offload_kvcache=offload)
    expected = engine.generate(PROMPTS, SAMPLING)
    assert engine.report is not None
    assert (engine.report.cache_bytes, engine.report.preemptions) == (NEED * BLOCK, 0)
    for free, blocks in ((NEED * BLOCK - 1, NEED - 1), (9 * BLOCK, 9), (LEAST * BLOCK + 7, LEAST)):
        engine.release()
        monkeypatch.setattr(engine_module, "free_bytes", lambda device, free=free: free)
        assert_same(engine.generate(PROMPTS, SAMPLING), expected)
        report = engine.report
        assert report.cache_bytes == blocks * BLOCK <= free
        assert (report.preemptions > 0) is (blocks <= 9)
        assert report.host_bytes == (offload and NEED - blocks + 1) * BLOCK


@pytest.mark.parametrize("asked", [9, LEAST, None, 100])
def test_the_option_and_what_is_free_both_bound_the_cache(asked: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "free_bytes", lambda device: 12 * BLOCK)
    engine = native(kv_cache_bytes=asked and asked * BLOCK)
    engine.generate(PROMPTS, SAMPLING)
    assert engine.report is not None
    assert engine.report.cache_bytes == min(asked or 12, 12) * BLOCK


def test_on_a_gpu_steps_keep_their_room(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, bounds = native(), engine_module._BOUNDS["cuda"]
    monkeypatch.setattr(engine_module, "free_bytes", lambda device: 10**10)
    cuda, config = torch.device("cuda", 0), engine.model.config
    for sampling in (SAMPLING, replace(SAMPLING, top_p=0.9)):
        for samples, rows in ((100, 100), (9999, 512)):
            taken = 10**10 - engine._room(bounds, samples, sampling, cuda)
            assert taken == headroom(config, 8192, rows, sampling, graphs=True) > 0
    engine.step_group = SimpleNamespace()  # type: ignore[assignment]
    assert 10**10 - engine._room(bounds, 9, SAMPLING, cuda) == headroom(config, 8192, 9, SAMPLING, graphs=False)
    monkeypatch.setattr(engine_module, "free_bytes", lambda device: 1000)
    assert engine._room(bounds, 9, SAMPLING, cuda) == 0


# ---- too little ------------------------------------------------------------------------------------------------------


def test_an_option_that_leaves_no_room_for_one_sample_is_named() -> None:
    engine = native(kv_cache_bytes=LEAST * BLOCK - 1)
    message = (
        f"NativeEngine.generate: a sample of 50 tokens takes {LEAST * BLOCK} bytes of the key-value cache, but "
        f"kv_cache_bytes={LEAST * BLOCK - 1} allows {(LEAST - 1) * BLOCK}, in whole blocks. Raise kv_cache_bytes to "
        f"{LEAST * BLOCK} or more, or lower max_new_tokens."
    )
    with pytest.raises(ValueError, match=message):
        engine.generate(PROMPTS, SAMPLING)
    assert engine.generate([[5]], SamplingParams(max_new_tokens=15)).response_ids.shape[0] == 1
    assert native(kv_cache_bytes=LEAST * BLOCK).generate(PROMPTS, SAMPLING).response_ids.shape[0] == 12
    assert native(kv_cache_bytes=1).generate([], SAMPLING).response_ids.shape[0] == 0


@pytest.mark.parametrize("asked", [None, 100 * BLOCK])
def test_memory_that_has_no_room_for_one_sample_is_named(asked: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "free_bytes", lambda device: 2 * BLOCK + 5)
    message = f"takes {LEAST * BLOCK} bytes .* but free memory allows {2 * BLOCK}, in whole blocks. Free memory for the"
    with pytest.raises(ValueError, match=message):
        native(kv_cache_bytes=asked).generate(PROMPTS, SAMPLING)


class Pieces:
    """Memory in pieces: no cache of more than some blocks can be allocated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
        self.asked: list[int] = []

        def allocate(shape: Any, blocks: int, *others: Any) -> KVCache:
            self.asked.append(blocks)
            if blocks > most:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return KVCache(shape, blocks, *others)

        monkeypatch.setattr(engine_module, "KVCache", allocate)


@pytest.mark.parametrize(
    ("most", "asked"), [(29, [30, 15]), (14, [30, 15, 7]), (7, [30, 15, 7]), (LEAST, [30, 15, 7, LEAST])]
)
@pytest.mark.parametrize("offload", [False, True])
def test_a_cache_that_cannot_be_allocated_is_halved(
    most: int, asked: list[int], offload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = native().generate(PROMPTS, SAMPLING)
    pieces, engine = Pieces(monkeypatch, most), native(offload_kvcache=offload)
    engine._runner = SimpleNamespace(let_go=lambda: None)  # type: ignore[assignment]
    assert_same(engine.generate(PROMPTS, SAMPLING), expected)
    assert (pieces.asked, engine._runner) == (asked, None)
    assert engine.report is not None
    assert engine.report.cache_bytes == asked[-1] * BLOCK
    assert engine.report.host_bytes == (offload and NEED - asked[-1] + 1) * BLOCK


def test_it_is_halved_down_to_one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces, engine = Pieces(monkeypatch, LEAST - 1), native()
    with pytest.raises(ValueError, match=f"takes {LEAST * BLOCK} bytes .* but free memory allows 0, in whole blocks"):
        engine.generate(PROMPTS, SAMPLING)
    assert pieces.asked == [30, 15, 7, LEAST]
    Pieces(monkeypatch, 1)
    with pytest.raises(ValueError, match="free memory allows 0"):
        engine.generate([], SAMPLING)


def sizes_over_ranks(short: int) -> tuple[list[int], int]:
    """Two ranks with the same prompts; rank 1 has pieces of some blocks."""
    dist.init_process_group("gloo")
    with pytest.MonkeyPatch.context() as patch:
        pieces = Pieces(patch, short if dist.get_rank() else 1000)
        engine = native(tensor_group=dist.group.WORLD)
        try:
            engine.generate(PROMPTS, SAMPLING)
        except ValueError:
            return pieces.asked, 0
        assert engine.report is not None
        return pieces.asked, engine.report.cache_bytes // BLOCK


def test_tensor_ranks_halve_together() -> None:
    assert run_ranks(sizes_over_ranks, 2, 7) == [([30, 15, 7], 7)] * 2
    assert run_ranks(sizes_over_ranks, 2, 1) == [([30, 15, 7, LEAST], 0)] * 2


# ---- what a step takes besides ---------------------------------------------------------------------------------------


def test_headroom_by_hand() -> None:
    config = SimpleNamespace(hidden_size=100, intermediate_size=300, vocab_size=1000)
    activations = 4 * 50 * (12 * 100 + 4 * 300)
    plain, top_p = SamplingParams(), SamplingParams(top_p=0.9)
    assert headroom(config, 50, 8, plain, graphs=False) == activations + 8 * 1000 * 24
    assert headroom(config, 50, 8, plain, graphs=True) == activations + 8 * 1000 * (24 + 4)
    assert headroom(config, 50, 8, top_p, graphs=True) == activations + 8 * 1000 * (49 - 4 + 45)
    assert headroom(config, 50, 5, plain, graphs=False) == activations + 8 * 1000 * 24  # captured for eight
    assert headroom(config, 50, 0, plain, graphs=False) == activations + 1000 * 24
    del config.intermediate_size
    assert headroom(config, 50, 8, plain, graphs=False) == 4 * 50 * (12 * 100 + 4 * 400) + 8 * 1000 * 24


KINDS: list[tuple[dict[str, Any], int, int]] = [
    ({}, 24, 4),
    ({"top_k": 20}, 24, 24),
    ({"min_p": 0.1}, 24, 24),
    ({"top_p": 0.9}, 45, 45),
    ({"temperature": 0.0}, 12, 12),
    ({"temperature": 0.0, "top_p": 0.9}, 12, 12),
    ({"logit_bias": {5: 1.0}}, 28, 13),
    ({"min_new_tokens": 2}, 28, 13),
    ({"repetition_penalty": 1.2}, 29, 22),
    ({"repetition_penalty": 1.2, "temperature": 0.0}, 22, 22),
    ({"top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2, "logit_bias": {5: 1.0}}, 50, 46),
]


@pytest.mark.parametrize(("options", "draw", "graph"), KINDS, ids=str)
def test_bytes_of_a_logit(options: dict[str, Any], draw: int, graph: int) -> None:
    sampling = SamplingParams(**options)
    assert (draw_bytes(sampling), graph_bytes(sampling)) == (draw, graph)


class Peak(TorchDispatchMode):
    """Most bytes of tensors at once, of those made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        result = function(*arguments, **(named or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self.alive:
                    self.alive[key] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, key, None)
        self.most = max(self.most, sum(self.alive.values()))
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("options", "draw", "graph"), KINDS, ids=str)
def test_drawing_takes_no_more(options: dict[str, Any], draw: int, graph: int, dtype: torch.dtype) -> None:
    """Counted by the tensors that live at once, without what an operator takes inside."""
    rows, vocabulary = 8, 20000
    sampling = SamplingParams(**options)
    adjuster = LogitAdjuster(sampling, [2], vocabulary, torch.device("cpu"))
    produced = torch.zeros(rows, dtype=torch.int64)
    uniform = uniforms(torch.arange(rows), 0)
    source = torch.randn(rows, vocabulary).to(dtype)
    with Peak() as peak:
        logits = source.clone()
        seen = torch.zeros(rows, vocabulary, dtype=torch.bool) if adjuster.needs_seen else None
        adjusted = adjuster(logits, produced, seen)
        sample_tokens(adjusted, sampling, uniform)
    assert 0.8 * draw - 4 < peak.most / (rows * vocabulary) < draw + 0.2


def test_memory_that_torch_keeps_is_given_back_where_a_capture_would_lack_it(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[bool] = []
    monkeypatch.setattr(graphs_module, "unreserved_bytes", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    graphs_module._make_room(1000, torch.device("cuda", 0))
    assert emptied == []
    graphs_module._make_room(1001, torch.device("cuda", 0))
    assert emptied == [True]
