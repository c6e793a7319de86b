"""Triton kernels of the native engine in types and sizes of real models; their edges are in tests/rollout/native."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(300)]


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(0)


def draw(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


@pytest.mark.parametrize("rows", [1, 16, 65, 130, 256])
@pytest.mark.parametrize(("inputs", "widths"), [(1536, (1536, 256, 256)), (896, (896, 128, 128)), (896, (1000, 24))])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_joined_layers_are_as_exact_as_single_ones(
    generator: torch.Generator, rows: int, inputs: int, widths: tuple[int, ...], dtype: Any
) -> None:
    """Both round a sum in float32 once, to 8 or 11 bits: at most half of 2**-7 or 2**-10 of it off."""
    from lightning_verl.rollout.native.linears import joined_linear, pays

    hidden = draw(generator, 1, rows, inputs, dtype=dtype)
    weights = [draw(generator, width, inputs, dtype=dtype) for width in widths]
    biases = [draw(generator, width, dtype=dtype) for width in widths]
    assert pays(hidden, weights, biases)
    unit = 2.0**-8 if dtype is torch.bfloat16 else 2.0**-11
    for weight, bias, output in zip(weights, biases, joined_linear(hidden, weights, biases), strict=True):
        exact = hidden.double() @ weight.double().T + bias.double()
        assert output.shape == exact.shape
        assert ((output.double() - exact).abs() <= 1.01 * unit * exact.abs() + 1e-2 * unit * inputs**0.5).all()
    for output, single in zip(
        joined_linear(hidden, weights, [None] * len(widths)), (hidden @ weight.T for weight in weights), strict=True
    ):
        torch.testing.assert_close(output, single, rtol=2.1 * unit, atol=0.05 * unit * inputs**0.5)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_tokens_and_random_numbers_are_those_of_the_sampler(generator: torch.Generator, temperature: float) -> None:
    from lightning_verl.rollout.native.draw import draw_tokens, draw_uniforms
    from lightning_verl.rollout.sampling import SamplingParams, sample_tokens, uniforms

    seeds = torch.randint(-(2**63), 2**63 - 1, (512,), generator=generator, device="cuda")
    places = torch.randint(0, 2**20, (512,), generator=generator, device="cuda")
    uniform = draw_uniforms(seeds, places)
    assert torch.equal(uniform, uniforms(seeds, places))
    logits, params = 3 * draw(generator, 512, 151_936), SamplingParams(temperature=temperature)
    tokens, logprobs = draw_tokens(logits, params, uniform)
    expected, expected_logprobs = sample_tokens(logits, params, uniform)
    # Borders between tokens lie up to a rounding of float32 elsewhere, about 1e-7: 2e-7 x 151,936 of the numbers are so
    # close to one at most, which are 3% or 16, and they give the token beside.
    assert (tokens - expected).abs().max() <= 2
    assert (tokens != expected).sum() <= 16
    same = tokens == expected
    torch.testing.assert_close(logprobs[same], expected_logprobs[same], rtol=0, atol=1e-5)
