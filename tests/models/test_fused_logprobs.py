"""The compiled form of log-probs and entropies: its formulas, run here as they are, against autograd's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_verl.models.fused_logprobs import TokenFigures
from lightning_verl.models.logprobs import entropy_from_logits, logprobs_from_logits

INF = float("inf")


def plain(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    return logprobs_from_logits(logits, targets, temperature), entropy_from_logits(logits, temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_figures_and_gradients_are_those_of_the_plain_form(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(7, 13, generator=generator)).requires_grad_()
    targets = torch.randint(0, 13, (7,), generator=generator)
    mix = torch.linspace(-1, 1, 7)
    expected = plain(logits, targets, temperature)
    actual = TokenFigures.apply(logits, targets, 1 / temperature)
    for weights in [(mix, mix.square()), (mix, 0 * mix), (0 * mix, mix)]:
        gradients = [
            torch.autograd.grad((one * weights[0] + other * weights[1]).sum(), logits, retain_graph=True)[0]
            for one, other in (expected, actual)
        ]
        torch.testing.assert_close(gradients[1], gradients[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("figure", [0, 1])
def test_one_figure_alone_has_its_gradient(figure: int) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]], requires_grad=True)
    targets = torch.tensor([1])
    TokenFigures.apply(logits, targets, 1.0)[figure].sum().backward()
    # p = (0.665241, 0.244728, 0.090031), log p = (-0.407606, -1.407606, -2.407606), entropy 0.832396;
    # onehot - p, and -p (log p + entropy)
    by_hand = [[-0.665241, 0.755272, -0.090031], [-0.282586, 0.140770, 0.141816]][figure]
    torch.testing.assert_close(logits.grad, torch.tensor([by_hand]), atol=2e-6, rtol=0)


def test_gradients_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 4, 2])
    assert torch.autograd.gradcheck(lambda logits: TokenFigures.apply(logits, targets, 0.7), [logits])


def test_tokens_that_cannot_be_drawn_have_no_gradient() -> None:
    logits = torch.tensor([[0.0, 0.0, -INF], [1.0, -INF, -INF]], requires_grad=True)
    logprobs, entropy = TokenFigures.apply(logits, torch.tensor([0, 0]), 1.0)
    torch.testing.assert_close(logprobs, torch.tensor([-0.693147, 0.0]), atol=1e-6, rtol=0)
    torch.testing.assert_close(entropy, torch.tensor([0.693147, 0.0]), atol=1e-6, rtol=0)
    (logprobs + entropy).sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[0.5, -0.5, 0.0], [0.0, 0.0, 0.0]]), atol=1e-6, rtol=0)


def test_logprobs_are_never_above_0() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2000, 50, generator=generator) * torch.logspace(-3, 4, 2000)[:, None]
    for scale in (0.3, 1.0, 3.0):
        assert (TokenFigures.apply(logits, logits.argmax(-1), scale)[0] <= 0).all()


def test_figures_of_bfloat16_are_float32_and_gradients_bfloat16() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 9, generator=generator).bfloat16().requires_grad_()
    targets = torch.tensor([0, 8, 3, 3])
    logprobs, entropy = TokenFigures.apply(logits, targets, 1 / 0.7)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close((logprobs, entropy), plain(logits, targets, 0.7), atol=1e-6, rtol=1e-6)
    logprobs.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16
