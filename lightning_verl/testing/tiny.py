"""Tiny causal language models of every supported family, small enough to train on a CPU within a test."""

from __future__ import annotations

from typing import Any, Literal

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from lightning_verl.data.experience import RolloutBatch

Family = Literal["llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gemma", "gemma2", "gemma3", "gpt2"]

_ROTARY: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "mistral": MistralConfig,
    "gemma": GemmaConfig,
    "gemma2": Gemma2Config,
    "gemma3": Gemma3TextConfig,
}
_GEMMAS = ("gemma", "gemma2", "gemma3")
_OWN_ENTRIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "mistral": {"sliding_window": 8},
    "gemma2": {
        "sliding_window": 20,
        # A tenth of the usual caps, which the small scores and logits of these models would never feel.
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
        "attn_implementation": "eager",  # the default, sdpa, leaves the first cap out without a word
    },
    "gemma3": {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
}
_COMMON: dict[str, Any] = {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2, "use_cache": True}

# Five times the usual scale: at this width logits would else be all but equal, and greedy choices nearly tied.
_INITIALIZER_RANGE = 0.1


def tiny_config(family: Family = "qwen3", **overrides: Any) -> PreTrainedConfig:
    """Return the config of a tiny model: hidden 64, 2 layers, 4 heads, 2 key-value heads, 128 tokens, 128 positions.

    "llama", "qwen3", "qwen3_moe" and "mistral" have a head of their own, the others tie it to the embedding.
    "qwen3_moe" has 4 experts of width 32 in each layer, 2 for a token. "mistral" sees 8 tokens in each layer, "gemma2"
    and "gemma3" see 20 in the first and all in the second; "gemma2" caps attention scores at 5 and logits at 3 and
    attends eagerly. "gpt2" has learned positions and as many key-value heads as heads. Dropout is 0. Token ids 1 and 2
    begin and end a text, as in :func:`lightning_verl.testing.char_tokenizer`.

    Args:
        family: "llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gemma", "gemma2", "gemma3" or "gpt2".
        **overrides: Entries of the family's own config class, which win over the values above.

    Raises:
        ValueError: There is no such family.
    """
    if family == "gpt2":
        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 128, "n_positions": 128}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        entries = {**_COMMON, **sizes, **dropout, "initializer_range": _INITIALIZER_RANGE, **overrides}
        return GPT2Config(**entries)
    if family not in _ROTARY:
        raise ValueError(f"tiny_config: family must be one of {', '.join([*_ROTARY, 'gpt2'])}, got {family!r}.")
    entries = {
        **_COMMON,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": family == "qwen2" or family in _GEMMAS,
        "initializer_range": _INITIALIZER_RANGE,
        **_OWN_ENTRIES.get(family, {}),
        **overrides,
    }
    if family in ("qwen3", "qwen3_moe", *_GEMMAS):  # their defaults, 128 and 256, do not follow the width
        entries.setdefault("head_dim", entries["hidden_size"] // entries["num_attention_heads"])
    if family in ("gemma2", "gemma3"):  # scores are divided by its root
        entries.setdefault("query_pre_attn_scalar", entries["head_dim"])
    return _ROTARY[family](**entries)


def tiny_model(family: Family = "qwen3", *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Return a tiny float32 model on the CPU, in eval mode, its weights drawn from ``seed`` alone.

    The global random state is the same before and after.

    Args:
        family: One of those of :func:`tiny_config`.
        seed: Equal seeds give equal weights.
        **overrides: Entries of the family's config class, as for :func:`tiny_config`.

    Raises:
        ValueError: There is no such family.
    """
    config = tiny_config(family, **overrides)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed CUDA too
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.eval()
    return model


def tiny_rollouts(count: int = 4, *, vocabulary: int = 128) -> RolloutBatch:
    """Return a batch of rows with a prompt of 3 and a response of 5 tokens each, the same every time.

    Args:
        count: Rows, each a group of its own.
        vocabulary: Token ids are drawn from 3 on, below this.
    """
    generator = torch.Generator().manual_seed(1)
    return RolloutBatch(
        input_ids=torch.randint(3, vocabulary, (count, 8), generator=generator),
        prompt_lengths=torch.full((count,), 3),
        response_lengths=torch.full((count,), 5),
        rollout_logprobs=torch.zeros(count, 5),
        group_ids=torch.arange(count),
        truncated=torch.zeros(count, dtype=torch.bool),
        prompt_texts=[""] * count,
        response_texts=[""] * count,
        fields=[{}] * count,
    )
