"""The vocabulary over a tensor axis: the plain softmax's values and gradients from parts of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_verl.models.fused_logprobs import TokenFigures
from lightning_verl.models.logprobs import entropy_from_logits, logprobs_from_hidden, logprobs_from_logits
from lightning_verl.parallel.tensor import apply_tensor_parallel
from lightning_verl.parallel.vocabulary import VocabularyShard, cut_vocabulary, vocabulary_ends
from lightning_verl.testing import run_ranks, tiny_model

TOKENS = 13
"""Parts of 7 and 6 on two ranks, of 5, 5 and 3 on three."""


def own_shard(size: int = TOKENS) -> tuple[VocabularyShard, slice]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    length = -(-size // dist.get_world_size())
    start = dist.get_rank() * length
    return VocabularyShard(dist.group.WORLD, start), slice(start, start + length)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 5, 8, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(TOKENS, 8, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, TOKENS, (2, 5), generator=generator)


def compare(chunk_size: int, temperature: float) -> list[tuple[Tensor, Tensor]]:
    """What the parts give and what the whole gives: log-probs, entropies, gradients of hidden states and weight."""
    shard, own = own_shard()
    hidden, weight, targets = inputs()
    mix = torch.linspace(-1, 1, 10).view(2, 5)
    logits = hidden @ weight.T
    plain = [logprobs_from_logits(logits, targets, temperature), entropy_from_logits(logits, temperature)]
    expected = torch.autograd.grad((plain[0] * mix + plain[1] * mix.square()).sum(), [hidden, weight])
    part = weight.detach()[own].clone().requires_grad_()
    logprobs, entropy = logprobs_from_hidden(
        hidden, part, targets, temperature, chunk_size=chunk_size, with_entropy=True, shard=shard
    )
    alone, none = logprobs_from_hidden(hidden, part, targets, temperature, chunk_size=chunk_size, shard=shard)
    assert none is None
    torch.testing.assert_close(alone, logprobs, rtol=0, atol=0)
    gradients = torch.autograd.grad((logprobs * mix + entropy * mix.square()).sum(), [hidden, part])
    (without_entropy,) = torch.autograd.grad((alone * mix).sum(), [part])
    (expected_without,) = torch.autograd.grad(
        (logprobs_from_logits(hidden @ weight.T, targets, temperature) * mix).sum(), weight
    )
    pairs = [(logprobs, plain[0]), (entropy, plain[1]), (gradients[0], expected[0]), (gradients[1], expected[1][own])]
    return [(a.detach(), b.detach()) for a, b in [*pairs, (without_entropy, expected_without[own])]]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("chunk_size", "temperature"), [(3, 0.7), (1024, 1.0), (1, 0.0)])
def test_parts_give_what_the_whole_gives(ranks: int, chunk_size: int, temperature: float) -> None:
    results = run_ranks(compare, ranks, chunk_size, temperature)
    for pairs in results:
        for actual, expected in pairs:
            torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)
    for pairs in results[1:]:
        torch.testing.assert_close(pairs[0][0], results[0][0][0], rtol=0, atol=0)  # equal on all ranks


def by_hand() -> tuple[Tensor, Tensor, Tensor]:
    shard, own = own_shard(4)
    logits = torch.tensor([[2.0, 1.0, 0.0, -torch.inf], [2.0, 1.0, 0.0, -torch.inf]])[:, own].clone().requires_grad_()
    logprobs, entropy = TokenFigures.apply(logits, torch.tensor([0, 2]), 0.5, shard)
    (logprobs + entropy).sum().backward()
    return logprobs.detach(), entropy.detach(), logits.grad


def test_a_softmax_over_two_ranks_by_hand() -> None:
    # Logits 2, 1 | 0, -inf at temperature 2 are 1, 0.5, 0: sum of exponentials 5.367003, its log 1.680270.
    for logprobs, entropy, gradient in run_ranks(by_hand, 2):
        torch.testing.assert_close(logprobs, torch.tensor([-0.680270, -1.680270]), atol=1e-6, rtol=0)
        torch.testing.assert_close(entropy, torch.full((2,), 1.020191), atol=1e-6, rtol=0)
        assert gradient.isfinite().all()


def extremes() -> tuple[Tensor, torch.dtype, torch.dtype]:
    shard, own = own_shard(50)
    logits = torch.randn(2000, 50, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 4, 2000)[:, None]
    scored, _ = TokenFigures.apply(logits[:, own], logits.argmax(-1), 1.0, shard)
    hidden, weight, targets = inputs(torch.bfloat16)
    shard, own = own_shard()
    part = weight.detach()[own].clone().requires_grad_()
    logprobs, _ = logprobs_from_hidden(hidden, part, targets, shard=shard)
    logprobs.sum().backward()
    return scored, logprobs.dtype, part.grad.dtype


def test_logprobs_are_float32_and_never_above_0() -> None:
    for scored, dtype, gradient in run_ranks(extremes, 2):
        assert (scored <= 0).all()
        assert (dtype, gradient) == (torch.float32, torch.bfloat16)


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that any operation's result had."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def largest() -> int:
    shard, own = own_shard(100)
    hidden = torch.randn(64, 2, requires_grad=True)
    weight = torch.randn(100, 2)[own].requires_grad_()
    with LargestTensor() as seen:
        logprobs, entropy = logprobs_from_hidden(
            hidden, weight, torch.zeros(64, dtype=torch.long), 0.7, chunk_size=4, with_entropy=True, shard=shard
        )
        (logprobs + entropy).sum().backward()
    return seen.elements


def test_no_rank_makes_more_logits_than_its_part_of_a_chunk() -> None:
    assert run_ranks(largest, 2) == [4 * 50, 4 * 50]


# ---- modules ---------------------------------------------------------------------------------------------------------


def looked_up(padding: int) -> list[Tensor]:
    """Output and gradient of a cut embedding, and of a whole one."""
    dist.init_process_group("gloo")
    model = tiny_model("qwen3", vocab_size=TOKENS, pad_token_id=padding)
    whole = tiny_model("qwen3", vocab_size=TOKENS, pad_token_id=padding).get_input_embeddings()
    cut_vocabulary(model, init_device_mesh("cpu", (2,)))
    ids = torch.arange(2 * TOKENS).view(2, TOKENS) % TOKENS
    outputs = [embedding(ids) for embedding in (model.get_input_embeddings(), whole)]
    for output in outputs:
        output.square().sum().backward()
    gradient = model.get_input_embeddings().weight.grad.full_tensor()
    return [*(output.detach() for output in outputs), gradient, whole.weight.grad]


@pytest.mark.parametrize("padding", [2, 9])
def test_a_cut_embedding_looks_up_and_learns_like_a_whole_one(padding: int) -> None:
    for output, expected, gradient, expected_gradient in run_ranks(looked_up, 2, padding):
        torch.testing.assert_close(output, expected, rtol=0, atol=0)
        torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-6)
        assert (gradient[padding] == 0).all()
        assert (gradient[padding - 1] != 0).any()


def whole_ends() -> list[Any]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    adapted = tiny_model("qwen3")
    inject_adapter_in_model(LoraConfig(r=4, target_modules=["lm_head"]), adapted)
    models = [tiny_model("gemma3"), adapted, tiny_model("qwen3").base_model]
    for model in models:
        apply_tensor_parallel(model, mesh)
    return [
        (tuple(p.to_local().shape) if hasattr(p, "to_local") else "whole", VocabularyShard.of(model) is None)
        for model in models
        for p in [model.get_input_embeddings().weight]
    ]


def test_ends_of_their_own_kind_stay_whole() -> None:
    # Gemma scales its embeddings; an adapter on the head keeps it whole, and the embedding with it; a critic has none.
    for found in run_ranks(whole_ends, 2):
        assert found == [("whole", True), ("whole", True), ((64, 64), True)]
    assert len(vocabulary_ends(tiny_model("qwen2"))) == 2
