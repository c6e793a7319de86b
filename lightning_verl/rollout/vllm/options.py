"""What a user may set on the vLLM engine, and the arguments that vLLM starts with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_BLOCK_TOKENS = 128
"""A sequence's share of the key-value cache is rounded up to this many tokens: the largest default block of vLLM."""
_LARGEST_DEFAULT_CACHE = 4 << 30
"""Bytes that the default key-value cache does not exceed, unless one sequence alone needs more."""
_OURS = (
    *("model", "tokenizer", "skip_tokenizer_init", "load_format", "dtype", "generation_config", "logprobs_mode"),
    *("max_model_len", "max_num_seqs", "kv_cache_memory_bytes", "gpu_memory_utilization", "enable_sleep_mode"),
    *("tensor_parallel_size", "distributed_executor_backend", "weight_transfer_config", "enable_lora", "max_lora_rank"),
    *("seed", "disable_log_stats", "max_loras"),
)
"""vLLM's arguments that the engine sets itself."""


@dataclass(frozen=True)
class VLLMOptions:
    """Options of ``VLLMEngine``, given as ``Actor(..., engine="vllm", engine_options={...})``.

    Raises:
        ValueError: A value is out of its range, or an argument of vLLM is one that the engine sets itself.
    """

    max_model_len: int | None = None
    """Longest prompt and response together, in tokens; None takes the model's ``max_position_embeddings``."""
    max_num_seqs: int = 256
    """Sequences that are decoded at a time."""
    kv_cache_bytes: int | None = None
    """Size of the key-value cache on a rank, in bytes. None takes what ``max_num_seqs`` sequences of the full length
    need, at most 4 GiB, at least what one needs; never a share of the free memory, as vLLM does by itself."""
    sleep_level: int = 2
    """What becomes of vLLM's memory between rollouts on CUDA: 2 frees cache and weights, 1 frees the cache and keeps
    the weights in host memory, 0 keeps everything. On the CPU vLLM cannot sleep, and everything is kept. With
    ``lora="adapter"`` 2 is 1."""
    lora: Literal["merged", "adapter"] = "merged"
    """How a LoRA adapter gets to vLLM: added to the weights it belongs to, or beside weights that are sent once."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of vLLM's ``EngineArgs``, such as ``{"enforce_eager": True}``."""

    def __post_init__(self) -> None:
        for name, least in (("max_model_len", 2), ("max_num_seqs", 1), ("kv_cache_bytes", 1)):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and not isinstance(value, bool) and value >= least):
                raise ValueError(f"VLLMOptions: {name} is {value!r}; it must be an integer of at least {least}.")
        if self.max_num_seqs is None:
            raise ValueError("VLLMOptions: max_num_seqs is None; it must be an integer of at least 1.")
        if self.sleep_level not in (0, 1, 2):
            raise ValueError(f"VLLMOptions: sleep_level is {self.sleep_level!r}; it must be 0, 1 or 2.")
        if self.lora not in ("merged", "adapter"):
            raise ValueError(f"VLLMOptions: lora is {self.lora!r}; it must be 'merged' or 'adapter'.")
        if self.lora == "adapter" and self.sleep_level == 2:
            object.__setattr__(self, "sleep_level", 1)  # the weights below the adapter are read once
        taken = sorted(set(self.engine_args) & set(_OURS))
        if taken:
            raise ValueError(
                f"VLLMOptions: engine_args has {taken}, which the engine sets itself; use its own options "
                f"({', '.join(option.name for option in fields(self))}), or leave them out."
            )

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> VLLMOptions:
        """Options from a mapping, as a config file gives them.

        Raises:
            ValueError: There is no such option.
        """
        known = [option.name for option in fields(cls)]
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise ValueError(
                f"VLLMEngine has no options {unknown}; it has {', '.join(known)}. Arguments of vLLM itself go into "
                "engine_args."
            )
        return cls(**given)


def longest_sequence(config: PreTrainedConfig, options: VLLMOptions) -> int:
    """Tokens that a prompt and its response may have together.

    Raises:
        ValueError: The model has fewer positions than the options ask for, or does not say how many it has.
    """
    positions: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    if options.max_model_len is None:
        if positions is None:
            raise ValueError(
                f"VLLMEngine: {type(config).__name__} has no max_position_embeddings; say with "
                "engine_options={'max_model_len': ...} how long prompt and response may be."
            )
        return positions
    if positions is not None and options.max_model_len > positions:
        raise ValueError(
            f"VLLMEngine: max_model_len is {options.max_model_len}, but the model has "
            f"max_position_embeddings={positions}; lower it."
        )
    return options.max_model_len


def cache_bytes(config: PreTrainedConfig, options: VLLMOptions, dtype: torch.dtype, tensor_ranks: int) -> int:
    """Size of a rank's key-value cache: what was asked for, or the default that ``VLLMOptions`` describes."""
    if options.kv_cache_bytes is not None:
        return options.kv_cache_bytes
    text: Any = config.get_text_config()
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = max(1, (getattr(text, "num_key_value_heads", None) or heads) // tensor_ranks)
    token: int = 2 * text.num_hidden_layers * kv_heads * head_dim * dtype.itemsize
    blocks = -(-longest_sequence(config, options) // _BLOCK_TOKENS) + 1  # one more: vLLM keeps an empty block
    sequence = blocks * _BLOCK_TOKENS * token
    return max(sequence, min(sequence * options.max_num_seqs, _LARGEST_DEFAULT_CACHE))


def engine_arguments(
    folder: str, config: PreTrainedConfig, options: VLLMOptions, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Arguments of vLLM's ``EngineArgs`` that depend on neither ranks nor vLLM's version.

    Args:
        folder: Holds the model's ``config.json``.
        config: The model's config.
        options: What the user set.
        dtype: Of the weights, and of what vLLM computes in.
        device: Where it runs.
    """
    on_cpu = device.type == "cpu"
    return {
        "enforce_eager": on_cpu,  # compiling takes longer there than what it saves in a run
        "enable_prefix_caching": True,  # the samples of a prompt are requests of their own and share its cache
        **options.engine_args,
        "model": folder,
        "skip_tokenizer_init": True,
        "load_format": "dummy" if options.lora == "merged" else "auto",
        "dtype": str(dtype).removeprefix("torch."),
        "generation_config": "vllm",  # no default of the model takes part in sampling
        "logprobs_mode": "processed_logprobs",
        "max_model_len": longest_sequence(config, options),
        "max_num_seqs": options.max_num_seqs,
        # The cache's size is given; the share is only what must be free at the start, beside what training holds.
        "gpu_memory_utilization": 0.01,
        "enable_sleep_mode": not on_cpu and options.sleep_level > 0,
        "seed": 0,
        "disable_log_stats": True,
    }
