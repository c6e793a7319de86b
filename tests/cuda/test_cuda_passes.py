"""Passes of training on a GPU: attention kernels, compiled layers, activations in host memory, compiled log-probs."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from lightning_verl import Actor
from lightning_verl.data.experience import RolloutBatch
from lightning_verl.data.microbatches import MicroBatches, Packing
from lightning_verl.models import fused_logprobs
from lightning_verl.models.fused_logprobs import TokenFigures, _figures, _gradient, _largest, _sums
from lightning_verl.parallel import offloading
from lightning_verl.parallel.layers import prepare_layers
from lightning_verl.testing import char_tokenizer, tiny_model, tiny_rollouts

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(300)]

DEVICE = torch.device("cuda")
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 768,
    "max_position_embeddings": 1024,
}


def make_actor(family: Any, dtype: torch.dtype) -> Actor:
    """In bf16 and back, so that both dtypes have the same weights."""
    model = tiny_model(family, **SIZES).bfloat16()
    return Actor(model, tokenizer=char_tokenizer()).to(DEVICE, dtype).eval()


def make_batch(seed: int, rows: int = 12) -> RolloutBatch:
    """Groups of three with a prompt in common, one row without a response."""
    generator = torch.Generator().manual_seed(seed)
    groups = torch.arange(rows) // 3
    prompts = torch.randint(8, 100, (rows,), generator=generator)[groups]
    responses = torch.randint(1, 300, (rows,), generator=generator)
    responses[4] = 0
    ids = torch.randint(3, 128, (rows, 400), generator=generator)
    ids = torch.where(torch.arange(400) < prompts[:, None], ids[groups], ids)
    return replace(
        tiny_rollouts(rows),
        input_ids=ids,
        prompt_lengths=prompts,
        response_lengths=responses,
        rollout_logprobs=torch.zeros(rows, 300),
        group_ids=groups,
    ).to(DEVICE)


def run(actor: Actor, packing: Packing, seeds: range = range(1)) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies, and the gradient of a sum of both, over micro-batches of many lengths."""
    figures: list[Tensor] = []
    actor.zero_grad()
    for seed in seeds:
        batch = make_batch(seed)
        cut = MicroBatches.cut(batch.sizes(), 900 + 200 * seed, packing)
        found = torch.zeros(2, len(batch), 300, device=DEVICE)
        with nullcontext() if packing == "padded" else actor.without_padding():
            for number, part in enumerate(cut.bins):
                logprobs, entropy = actor(cut.take(batch, number), 0.7, True)
                (logprobs.sum() - 0.3 * entropy.sum()).backward()
                found[:, part, : logprobs.shape[1]] = torch.stack([logprobs, entropy]).detach()
        figures.append(found.flatten())
    gradients = [parameter.grad.float().flatten() for parameter in actor.parameters() if parameter.grad is not None]
    return torch.cat(figures), torch.cat(gradients)


def error(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> list[float]:
    """Relative errors of figures and gradients."""
    pairs = zip(actual, expected, strict=True)
    return [float((one.double() - other.double()).norm() / other.double().norm()) for one, other in pairs]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3"])
@pytest.mark.parametrize("packing", ["rows", "shared"])
def test_rows_side_by_side_are_as_exact_as_padded_ones(family: Any, packing: Packing) -> None:
    exact = run(make_actor(family, torch.float32), "padded")
    assert max(error(run(make_actor(family, torch.float32), packing), exact)) < 1e-5
    padded = error(run(make_actor(family, torch.bfloat16), "padded"), exact)
    packed = error(run(make_actor(family, torch.bfloat16), packing), exact)
    assert all(one < 1.2 * other < 0.1 for one, other in zip(packed, padded, strict=True))


@pytest.mark.parametrize("mode", [None, "selective", "full", ["o_proj", "down_proj"]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("offload", [False, True], ids=["kept", "offloaded"])
def test_compiled_layers_change_nothing(
    monkeypatch: pytest.MonkeyPatch, mode: Any, dtype: torch.dtype, offload: bool
) -> None:
    monkeypatch.setattr(offloading, "LEAST_BYTES", 4096)
    seeds = range(3)
    exact = run(make_actor("qwen2", torch.float32), "shared", seeds)
    plain = error(run(make_actor("qwen2", dtype), "shared", seeds), exact)
    for compiled in (False, True):
        torch._dynamo.reset()
        counters.clear()
        actor = make_actor("qwen2", dtype)
        prepare_layers(actor, mode, compiled, offload)
        found = error(run(actor, "shared", seeds), exact)
        if dtype == torch.float32:
            assert max(found) < 1e-5
        else:  # bf16 rounds elsewhere in compiled layers, and no more
            assert all(one < 1.2 * other < 0.1 for one, other in zip(found, plain, strict=True))
        assert counters["stats"].get("unique_graphs", 0) <= 8
        assert not counters["graph_break"]


VOCABULARY = 151_936


@dataclass(frozen=True)
class Exact:
    """Logits of so many tokens, and what a softmax in double precision makes of them."""

    logits: Tensor
    targets: Tensor
    mix: Tensor
    """What log-probs and entropies are multiplied by, ``[2, rows]``, before all of it is added up."""
    figures: Tensor
    """Log-probs and entropies, ``[2, rows]``."""
    gradient: Tensor
    """That of the sum."""

    @classmethod
    def of(cls, rows: int, dtype: torch.dtype) -> Exact:
        """Random logits at temperature 0.7."""
        generator = torch.Generator(DEVICE).manual_seed(rows)
        logits = (4 * torch.randn(rows, VOCABULARY, device=DEVICE, generator=generator)).to(dtype)
        targets = torch.randint(0, VOCABULARY, (rows,), device=DEVICE, generator=generator)
        mix = torch.randn(2, rows, device=DEVICE, generator=generator)
        exact = logits.double().requires_grad_()
        log_probs = torch.log_softmax(exact / 0.7, -1)
        figures = torch.stack([log_probs.gather(1, targets[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)])
        (gradient,) = torch.autograd.grad((figures * mix).sum(), exact)
        return cls(logits, targets, mix, figures.detach(), gradient)

    def assert_close(self, figures: Tensor, gradient: Tensor) -> None:
        """Hold results against it."""
        torch.testing.assert_close(figures.double(), self.figures, atol=1e-5, rtol=1e-5)
        # In fp32 exponents of up to 50 are rounded by 2^-24 of themselves, 3e-6.
        bound = 4e-6 if self.logits.dtype == torch.float32 else 4e-3
        assert gradient.dtype == self.logits.dtype
        assert float((gradient.double() - self.gradient).norm() / self.gradient.norm()) < bound
        assert (figures[0] <= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows", [1, 37, 1024])
def test_compiled_logprobs_and_their_gradients(dtype: torch.dtype, rows: int) -> None:
    exact = Exact.of(rows, dtype)
    logits = exact.logits.requires_grad_()
    figures = torch.stack(TokenFigures.apply(logits, exact.targets, 1 / 0.7))
    exact.assert_close(figures, *torch.autograd.grad((figures * exact.mix).sum(), logits))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_compiled_parts_of_the_vocabulary(dtype: torch.dtype) -> None:
    """Two uneven parts as on two ranks; maxima and sums, which these would reduce, are put together here."""
    exact, scale, cut = Exact.of(37, dtype), 1 / 0.7, 80_000
    parts = []
    for logits, start in ((exact.logits[:, :cut].contiguous(), 0), (exact.logits[:, cut:].contiguous(), cut)):
        places = exact.targets - start
        here = (places >= 0) & (places < logits.shape[1])
        parts.append((logits, places.masked_fill(~here, 0), here))
    assert all(here.any() for *_, here in parts)
    kernels = {
        function: fused_logprobs._kernel(function, "cuda") for function in (_largest, _sums, _figures, _gradient)
    }
    largest = torch.maximum(*(kernels[_largest](logits, scale) for logits, *_ in parts))
    sums = [torch.stack(kernels[_sums](logits, places, scale, largest, here)) for logits, places, here in parts]
    logprobs, entropy, log_sum = kernels[_figures](*(sums[0] + sums[1]).unbind())
    gradients = [
        kernels[_gradient](logits, places, scale, here, largest, log_sum, entropy, *exact.mix)
        for logits, places, here in parts
    ]
    exact.assert_close(torch.stack([logprobs, entropy]), torch.cat(gradients, -1))
