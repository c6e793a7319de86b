"""What steps of the native engine take besides the cache, so that the cache leaves room for it."""

from __future__ import annotations

from typing import Any

from lightning_verl.rollout.sampling import SamplingParams

# Bytes for each logit, by the tensors of [rows, vocabulary] that live at once where most of them do.
_LOGITS = 4
"""The model's own, in float32 at most."""
_SEEN = 1
"""Which tokens a sample has had, bool, for the repetition penalty."""
_BIAS = 9
"""``LogitAdjuster`` without a penalty: logits with the bias (4), what is too early (1), the result (4)."""
_PENALTY = 17
"""With one: logits with the bias (4), their signs (1), products (4), quotients (4), what is taken of both (4)."""
_ADJUSTED = 4
"""Its result, while the step still holds the model's own logits."""
_GREEDY = 8
"""``sample_tokens``: logits in float32 (4) and log-probs (4)."""
_INVERTED = 20
"""``_integer_mass`` of log-probs (4): probabilities in float64 (8) and times 2**53 (8). Top-k and min-p take less."""
_TOP_P = 41
"""``_top_p_mask``: scaled logits (4), sorted ones (4), their order (8), their mass (8), its sums (8), those without the
token itself (8), whether it is kept (1)."""


def draw_bytes(sampling: SamplingParams) -> int:
    """Bytes for each logit that a step with prompts takes to draw, which holds the model's logits meanwhile."""
    adjust = _adjust(sampling)
    return _LOGITS + _seen(sampling) + max(adjust, (_ADJUSTED if adjust else 0) + _draw(sampling))


def graph_bytes(sampling: SamplingParams) -> int:
    """Bytes for each logit that captured steps hold, of which all sizes use the same memory."""
    cuts = sampling.top_k is not None or sampling.top_p < 1 or sampling.min_p > 0
    # Where nothing is cut off, kernels of ours read the logits and keep nothing of their size.
    draw = _draw(sampling) if cuts or sampling.temperature == 0 else 0
    return _LOGITS + _seen(sampling) + max(_adjust(sampling), draw)


def headroom(config: Any, tokens: int, rows: int, sampling: SamplingParams, graphs: bool) -> int:
    """Bytes that steps need besides the cache: activations of their tokens, and what is made of logits.

    Args:
        config: The model's, for text.
        tokens: Most tokens of a step.
        rows: Most samples at once.
        sampling: How they are drawn.
        graphs: Whether decoding is captured: what graphs use stays theirs while steps with prompts run.
    """
    width = 12 * config.hidden_size + 4 * getattr(config, "intermediate_size", 4 * config.hidden_size)
    rows = 1 << max(rows - 1, 0).bit_length()  # at least the size that so many samples are captured in
    logit = draw_bytes(sampling) + (graph_bytes(sampling) if graphs else 0)
    return 4 * tokens * int(width) + logit * rows * int(config.vocab_size)


def _seen(sampling: SamplingParams) -> int:
    return _SEEN if sampling.repetition_penalty != 1 else 0


def _adjust(sampling: SamplingParams) -> int:
    if sampling.repetition_penalty != 1:
        return _PENALTY
    return _BIAS if sampling.logit_bias or sampling.min_new_tokens else 0


def _draw(sampling: SamplingParams) -> int:
    if sampling.temperature == 0:
        return _GREEDY
    return _TOP_P if sampling.top_p < 1 else _INVERTED
