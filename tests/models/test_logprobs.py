"""Log-probs and entropies, from logits and straight from hidden states."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_verl.models.logprobs import entropy_from_logits, logprobs_from_hidden, logprobs_from_logits

INF = float("inf")
BY_TEMPERATURE = [
    (1.0, [-0.407606, -1.407606, -2.407606], 0.832396),
    (0.5, [-0.142932, -2.142932, -4.142932], 0.441057),  # log-probs of T = 1 divided by T would be -0.815212...
    (2.0, [-0.680270, -1.180270, -1.680270], 1.020191),
    (0.0, [-0.407606, -1.407606, -2.407606], 0.832396),  # greedy counts as 1
]


@pytest.mark.parametrize(("temperature", "logprobs", "entropy"), BY_TEMPERATURE)
def test_logits_are_divided_before_the_softmax(temperature, logprobs, entropy):
    logits = torch.tensor([2.0, 1.0, 0.0]).expand(3, 3)
    actual = logprobs_from_logits(logits, torch.arange(3), temperature)
    torch.testing.assert_close(actual, torch.tensor(logprobs), atol=1e-6, rtol=0)
    torch.testing.assert_close(entropy_from_logits(logits, temperature), torch.full((3,), entropy), atol=1e-6, rtol=0)
    hidden = torch.ones(3, 1)  # with the head's weight it gives the logits
    fused, fused_entropy = logprobs_from_hidden(
        hidden, logits[:1].T.contiguous(), torch.arange(3), temperature, with_entropy=True
    )
    torch.testing.assert_close(fused, torch.tensor(logprobs), atol=1e-6, rtol=0)
    torch.testing.assert_close(fused_entropy, torch.full((3,), entropy), atol=1e-6, rtol=0)


def test_mixed_temperatures_show_as_ratios():
    logits = torch.tensor([2.0, 1.0, 0.0]).expand(3, 3)
    cold, plain = (logprobs_from_logits(logits, torch.arange(3), temperature) for temperature in (0.5, 1.0))
    torch.testing.assert_close((cold - plain).exp(), torch.tensor([1.3030, 0.4793, 0.1763]), atol=1e-4, rtol=0)


def test_bfloat16_logits_are_taken_to_float32_before_the_division():
    logits = torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.bfloat16)
    actual = logprobs_from_logits(logits, torch.tensor([0]), 0.7)
    assert actual.dtype == torch.float32
    assert actual.item() == pytest.approx(torch.log_softmax(logits[0].double() / 0.7, dim=0)[0].item(), abs=1e-6)
    assert logprobs_from_logits(logits.double(), torch.tensor([0])).dtype == torch.float64


def test_logprobs_are_never_above_0():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2000, 50, generator=generator) * torch.logspace(-3, 4, 2000)[:, None]
    for temperature in (0.3, 1.0, 3.0):
        assert (logprobs_from_logits(logits, logits.argmax(-1), temperature) <= 0).all()


def test_filtered_tokens_leave_the_entropy_and_its_gradient_finite():
    logits = torch.tensor([[0.0, 0.0, -INF], [1.0, -INF, -INF]], requires_grad=True)
    entropy = entropy_from_logits(logits)
    torch.testing.assert_close(entropy, torch.tensor([0.693147, 0.0]), atol=1e-6, rtol=0)
    entropy.sum().backward()
    assert logits.grad.isfinite().all()


def fused_inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 5, 8, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(13, 8, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, 13, (2, 5), generator=generator)


@pytest.mark.parametrize("chunk_size", [1, 3, 10, 1024])
@pytest.mark.parametrize("as_callable", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_fused_form_equals_the_plain_one(chunk_size, as_callable, temperature):
    hidden, weight, targets = fused_inputs()
    plain = logprobs_from_logits(hidden @ weight.T, targets, temperature)
    plain_entropy = entropy_from_logits(hidden @ weight.T, temperature)
    mix = torch.linspace(-1, 1, 10).view(2, 5)
    plain_gradients = torch.autograd.grad((plain * mix + plain_entropy * mix.square()).sum(), [hidden, weight])
    head = (lambda states: states @ weight.T) if as_callable else weight
    fused, entropy = logprobs_from_hidden(hidden, head, targets, temperature, chunk_size=chunk_size, with_entropy=True)
    gradients = torch.autograd.grad((fused * mix + entropy * mix.square()).sum(), [hidden, weight])
    torch.testing.assert_close(fused, plain, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(entropy, plain_entropy, atol=1e-6, rtol=1e-6)
    for actual, expected in zip(gradients, plain_gradients, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


def test_fused_form_without_entropy_and_without_gradients():
    hidden, weight, targets = fused_inputs()
    with torch.no_grad():
        fused, entropy = logprobs_from_hidden(hidden, weight, targets, chunk_size=4)
        torch.testing.assert_close(fused, logprobs_from_logits(hidden @ weight.T, targets), atol=1e-6, rtol=1e-6)
    assert entropy is None
    assert not fused.requires_grad


def test_fused_form_of_a_bfloat16_model():
    hidden, weight, targets = fused_inputs(torch.bfloat16)
    fused, _ = logprobs_from_hidden(hidden, weight, targets, 0.7, chunk_size=4)
    assert fused.dtype == torch.float32
    torch.testing.assert_close(fused, logprobs_from_logits(hidden @ weight.T, targets, 0.7), atol=1e-5, rtol=1e-5)
    fused.sum().backward()
    assert weight.grad.dtype == torch.bfloat16


def test_fused_form_of_one_vector_and_of_no_tokens():
    hidden, weight, targets = fused_inputs()
    one, _ = logprobs_from_hidden(hidden[0, 0], weight, targets[0, 0])
    assert one.shape == ()
    none, entropy = logprobs_from_hidden(hidden[:, :0], weight, targets[:, :0], with_entropy=True)
    assert none.shape == entropy.shape == (2, 0)
    none.sum().backward()
    assert (hidden.grad == 0).all()
    assert (weight.grad == 0).all()


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that any operation's result had."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_fused_form_never_makes_the_logits_of_all_tokens():
    hidden = torch.randn(64, 2, requires_grad=True)
    weight = torch.randn(100, 2, requires_grad=True)
    targets = torch.zeros(64, dtype=torch.long)
    with LargestTensor() as largest:
        logprobs, entropy = logprobs_from_hidden(hidden, weight, targets, 0.7, chunk_size=4, with_entropy=True)
        (logprobs + entropy).sum().backward()
    assert largest.elements == 4 * 100


def test_fused_form_keeps_no_logits_for_the_backward_pass():
    hidden = torch.randn(64, 2, requires_grad=True)
    weight = torch.randn(100, 2, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.shape) or tensor, lambda x: x):
        logprobs_from_hidden(hidden, weight, torch.zeros(64, dtype=torch.long), chunk_size=4)
    assert all(100 not in shape or tuple(shape) == (100, 2) for shape in saved)


def test_refuses_bad_input():
    hidden, weight, targets = fused_inputs()
    for temperature in (-0.5, float("nan"), INF):
        with pytest.raises(ValueError, match="temperature=.*, but it must be finite and at least 0; 0 is greedy"):
            logprobs_from_logits(torch.zeros(1, 3), torch.zeros(1, dtype=torch.long), temperature)
        with pytest.raises(ValueError, match="temperature="):
            entropy_from_logits(torch.zeros(1, 3), temperature)
        with pytest.raises(ValueError, match="temperature="):
            logprobs_from_hidden(hidden, weight, targets, temperature)
    with pytest.raises(
        ValueError, match=r"logprobs_from_logits: targets has shape \(2,\), .*\(1, 3\) needs .* \(1,\);"
    ):
        logprobs_from_logits(torch.zeros(1, 3), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match=r"logprobs_from_hidden: targets has shape \(2, 4\), .*\(2, 5, 8\)"):
        logprobs_from_hidden(hidden, weight, targets[:, 1:])
    with pytest.raises(ValueError, match="logprobs_from_hidden: chunk_size=0 tokens, but it must be at least 1"):
        logprobs_from_hidden(hidden, weight, targets, chunk_size=0)
