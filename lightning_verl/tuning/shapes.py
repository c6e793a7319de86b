"""Shapes of Qwen2.5, for measurements with random weights."""

from __future__ import annotations

from transformers import Qwen2Config

SHAPES: dict[str, tuple[int, int, int, int, int, int, bool]] = {
    "tiny": (64, 2, 4, 2, 128, 512, True),
    "0.5B": (896, 24, 14, 2, 4864, 151936, True),
    "1.5B": (1536, 28, 12, 2, 8960, 151936, True),
    "3B": (2048, 36, 16, 2, 11008, 151936, True),
    "7B": (3584, 28, 28, 4, 18944, 152064, False),
    "14B": (5120, 48, 40, 8, 13824, 152064, False),
    "32B": (5120, 64, 40, 8, 27648, 152064, False),
}
"""Hidden size, layers, heads, key-value heads, intermediate size, vocabulary, tied ends."""


def model_config(shape: str, eos: int | None = None) -> Qwen2Config:
    """The config of a model that begins no text, and ends one with ``eos`` if at all.

    Args:
        shape: One of ``SHAPES``.
        eos: The end token.
    """
    hidden, layers, heads, kv_heads, inner, vocabulary, tied = SHAPES[shape]
    return Qwen2Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=16384,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=0,
    )
