"""``SamplingParams`` of this package as those of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_verl.rollout.sampling import SamplingParams

_SEED_BITS = 63
"""vLLM takes -1 for no seed, so seeds are made non-negative."""
_TEMPERATURES = (0.01, 2.0)
"""vLLM raises lower temperatures to the first, and newer versions refuse those above the second."""


def check_sampling(sampling: SamplingParams) -> None:
    """Refuse what vLLM would do otherwise than the other engines.

    Raises:
        ValueError: ``top_p`` and ``min_p`` together, or a temperature that vLLM does not take as it is.
    """
    low, high = _TEMPERATURES
    if sampling.temperature > 0 and not low <= sampling.temperature <= high:
        raise ValueError(
            f"VLLMEngine: temperature is {sampling.temperature!r}, but vLLM samples at temperatures from {low:g} to "
            f"{high:g}, or greedily at 0. Choose one of these, or engine='transformers'."
        )
    if sampling.temperature > 0 and sampling.top_p < 1 and sampling.min_p > 0:
        raise ValueError(
            f"VLLMEngine: top_p={sampling.top_p!r} and min_p={sampling.min_p!r} together keep other tokens in vLLM, "
            "which applies min_p first, than in the other engines, which apply top_p first. Use one of them, or "
            "engine='transformers'."
        )


def request_options(sampling: SamplingParams, end_token_ids: Sequence[int], vocabulary: int) -> dict[str, Any]:
    """The arguments of vLLM's ``SamplingParams`` that all requests share; each request adds its seed.

    Each sample is a request of its own with its own seed. End tokens are given as stop tokens and vLLM's own are
    ignored, so that those of the actor count and no others. Greedy sampling gets neither top-k, top-p nor min-p, which
    do not change it, so that its log-probs are those of temperature 1 over the whole vocabulary. Stop strings are not
    vLLM's matter, see ``VLLMEngine``.

    Args:
        sampling: How to sample.
        end_token_ids: The model's own end tokens.
        vocabulary: Tokens that have a logit; end tokens out of it cannot be sampled and are left out.
    """
    ends = {token for token in (*end_token_ids, *sampling.stop_token_ids) if token < vocabulary}
    options: dict[str, Any] = {
        "n": 1,
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens,
        "temperature": float(sampling.temperature),
        "repetition_penalty": float(sampling.repetition_penalty),
        "logit_bias": dict(sampling.logit_bias) or None,
        "stop_token_ids": sorted(ends),
        "ignore_eos": True,
        "detokenize": False,
        "logprobs": 0,  # the sampled token's, no other
    }
    if sampling.temperature > 0:
        options["top_k"] = sampling.top_k or 0
        options["top_p"] = float(sampling.top_p)
        options["min_p"] = float(sampling.min_p)
    return options


def request_seed(seed: int) -> int:
    """The seed of a response as vLLM takes it, from 0 to 2**63 - 1."""
    return seed & ((1 << _SEED_BITS) - 1)
