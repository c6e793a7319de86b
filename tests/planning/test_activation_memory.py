"""Planned activations, logits and sampling against what torch allocates."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_verl import Actor, SamplingParams
from lightning_verl.models.logprobs import logprobs_from_hidden
from lightning_verl.parallel.checkpointing import apply_activation_checkpointing
from lightning_verl.parallel.vocabulary import VocabularyShard
from lightning_verl.planning.memory import (
    LOGIT_CHUNK,
    SAMPLE_BYTES,
    SCORE_LOGIT_BYTES,
    UPDATE_LOGIT_BYTES,
    kept_per_token,
    running_per_token,
    saved_per_token,
    score_logit_bytes,
    update_logit_bytes,
)
from lightning_verl.planning.model import Decoder, RoleModel, describe
from lightning_verl.rollout.adjust import LogitAdjuster, seen_tokens
from lightning_verl.rollout.sampling import sample_tokens
from lightning_verl.strategies.precision import HybridPrecision
from lightning_verl.testing import run_ranks, tiny_config, tiny_model


class Peak(TorchDispatchMode):
    """Counts the bytes of all storages that operations make and that are alive. Views of others count once more."""

    def __init__(self, known: Any = ()) -> None:
        super().__init__()
        self.now = self.most = 0
        self._alive = {tensor.untyped_storage()._cdata: None for tensor in known}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._alive:
                self._count(tensor.untyped_storage())
        self.most = max(self.most, self.now)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def gone(_: Any) -> None:
            self.now -= size
            del self._alive[key]

        self.now += size
        self._alive[key] = weakref.ref(storage, gone)


class Saved:
    """Counts the bytes that autograd keeps, each storage once."""

    def __init__(self, module: nn.Module) -> None:
        self._known = {tensor.untyped_storage()._cdata for tensor in [*module.parameters(), *module.buffers()]}
        self._kept: dict[int, Tensor] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)

    def __enter__(self) -> Saved:
        self._hooks.__enter__()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _keep(self, tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in self._known:
            self._kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    @property
    def bytes(self) -> int:
        """All of it."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._kept.values())


def model_of(precision: str) -> RoleModel:
    """The shapes of a tiny actor."""
    plugin = HybridPrecision(precision)
    return describe(plugin.convert_module(Actor(tiny_config("qwen3"))), plugin)


def saved_by_one_layer(family: Any, dtype: torch.dtype, tokens: Tensor) -> int:
    """Bytes that one more decoder layer keeps."""
    saved = []
    for layers in (1, 2):
        model = tiny_model(family, num_hidden_layers=layers).to(dtype)
        with Saved(model) as kept:
            output = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        assert output.requires_grad
        saved.append(kept.bytes)
    return saved[1] - saved[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_what_a_layer_keeps_is_counted_to_the_byte(family: Any, dtype: torch.dtype) -> None:
    tokens = torch.randint(3, 128, (2, 32))
    expected = saved_per_token(Decoder.of(tiny_model(family)), dtype.itemsize, 1)
    # h 64, q 64, k 32, m 128, 4 heads, in fp32: 24 x 64 + 8 + 4 x 192 + 16 + 16 x 128 = 4376; the norms of Qwen3 add
    # 8 x 96 + 4 x 6 = 792.
    if dtype == torch.float32:
        assert expected == {"llama": 4376, "qwen2": 4376, "qwen3": 5168}[family]
    assert saved_by_one_layer(family, dtype, tokens) == expected * tokens.numel()


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_what_a_checkpointed_layer_keeps(mode: Any) -> None:
    # full: 4 x 64 = 256; selective: 4 x (2 x 64 + 64 + 128) + 16 = 1296
    tokens = torch.randint(3, 128, (2, 32))
    alive = []
    for layers in (2, 3):
        model = tiny_model("llama", num_hidden_layers=layers)
        apply_activation_checkpointing(model, mode)
        with Peak([*model.parameters(), *model.buffers()]) as peak:
            output = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
            alive.append(peak.now)
        assert output.requires_grad
    actor = Actor(tiny_model("llama"), activation_checkpointing=mode)
    expected = kept_per_token(describe(actor, HybridPrecision(), mode), 1)
    assert expected == {"full": 256, "selective": 1296}[mode]
    assert alive[1] - alive[0] == expected * tokens.numel()


def test_a_pass_without_gradients() -> None:
    tokens = torch.randint(3, 128, (2, 32))
    model = tiny_model("llama", num_hidden_layers=4)
    with torch.no_grad(), Peak([*model.parameters(), *model.buffers()]) as peak:
        model.base_model(input_ids=tokens, use_cache=False)
    assert peak.most / tokens.numel() == pytest.approx(running_per_token(Decoder.of(model), 4, 1), rel=0.1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_logits_of_a_chunk(dtype: torch.dtype, temperature: float) -> None:
    vocabulary, chunk = 512, 64
    weight = torch.randn(vocabulary, 4, dtype=dtype, requires_grad=True)
    hidden = torch.randn(2 * chunk, 4, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, vocabulary, (2 * chunk,))
    score = partial(logprobs_from_hidden, hidden, weight, targets, temperature, chunk_size=chunk)
    with torch.no_grad(), Peak() as scoring:
        score()
    model = model_of("32-true" if dtype == torch.float32 else "bf16-mixed")
    planned = score_logit_bytes(model, 1, temperature)
    assert planned == (2 if (dtype, temperature) != (torch.float32, 1.0) else 1) * SCORE_LOGIT_BYTES + dtype.itemsize
    assert scoring.most / (chunk * vocabulary) == pytest.approx(planned, rel=0.05)
    with Peak() as update:
        score(with_entropy=True)[0].sum().backward()
    assert update_logit_bytes(model, 1) == UPDATE_LOGIT_BYTES + dtype.itemsize
    assert update.most / (chunk * vocabulary) == pytest.approx(update_logit_bytes(model, 1), rel=0.05)


def test_logits_of_a_chunk_in_compiled_kernels_by_hand() -> None:
    # The logits alone, 4 bytes each; in the backward pass their gradient beside them. In bf16 half of that.
    for precision, size in (("32-true", 4), ("bf16-mixed", 2)):
        model = replace(model_of(precision), fused=True)
        for tensor in (1, 2):
            assert (score_logit_bytes(model, tensor, 0.7), update_logit_bytes(model, tensor)) == (size, 2 * size)


def logit_bytes_of_a_part(dtype: torch.dtype) -> tuple[float, float]:
    """Bytes for each logit of a rank's part of a chunk: in a pass without gradients, and in a backward pass."""
    dist.init_process_group("gloo")
    tokens, chunk = 1024, 64
    shard = VocabularyShard(dist.group.WORLD, dist.get_rank() * tokens)
    weight = torch.randn(tokens, 2, dtype=dtype, requires_grad=True)
    hidden = torch.randn(2 * chunk, 2, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, 2 * tokens, (2 * chunk,), generator=torch.Generator().manual_seed(0))
    score = partial(logprobs_from_hidden, hidden, weight, targets, chunk_size=chunk, with_entropy=True, shard=shard)
    with torch.no_grad(), Peak() as scoring:
        score()
    with Peak() as update:
        score()[0].sum().backward()
    return scoring.most / (chunk * tokens), update.most / (chunk * tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_logits_of_a_part_of_a_chunk(dtype: torch.dtype) -> None:
    for scoring, update in run_ranks(logit_bytes_of_a_part, 2, dtype):
        model = model_of("32-true" if dtype == torch.float32 else "bf16-mixed")
        assert scoring == pytest.approx(score_logit_bytes(model, 2), rel=0.05)
        assert update == pytest.approx(update_logit_bytes(model, 2), rel=0.05)


def test_the_chunk_is_the_one_of_the_models() -> None:
    assert logprobs_from_hidden.__kwdefaults__["chunk_size"] == LOGIT_CHUNK


ADJUSTED: dict[str, Any] = {"logit_bias": {3: 1.0}, "repetition_penalty": 1.2, "min_new_tokens": 2}


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("greedy", SamplingParams(temperature=0.0)),
        ("sampled", SamplingParams()),
        ("sampled", SamplingParams(top_k=20)),
        ("sampled", SamplingParams(top_k=20, min_p=0.1)),
        ("top_p", SamplingParams(top_p=0.9)),
        ("top_p", SamplingParams(top_p=0.9, min_p=0.1)),
        ("greedy, adjusted", SamplingParams(temperature=0.0, **ADJUSTED)),
        ("sampled, adjusted", SamplingParams(**ADJUSTED)),
        ("top_p, adjusted", SamplingParams(top_p=0.9, **ADJUSTED)),
    ],
)
def test_sampling_a_token(kind: str, params: SamplingParams) -> None:
    logits = torch.randn(32, 1024)
    ids = torch.randint(1024, (32, 16))
    adjuster = LogitAdjuster(params, (2,), 1024, torch.device("cpu"))
    with torch.no_grad(), Peak() as peak:
        scores = logits.to(torch.float32, copy=True)  # generate's copy
        seen = seen_tokens(ids, torch.ones_like(ids, dtype=torch.bool), 1024) if adjuster.needs_seen else None
        adjusted = adjuster(scores, 1, seen)
        tokens, _ = sample_tokens(adjusted, params, torch.rand(32, dtype=torch.float64))
        torch.full_like(scores, -torch.inf).scatter(-1, tokens[:, None], 0.0)
    assert peak.most / logits.numel() == pytest.approx(SAMPLE_BYTES[kind], rel=0.05)
