"""Builds the transformers model of a role from a name, a folder, a config or a module."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lightning_verl.models.compat import model_class_of
from lightning_verl.models.quantize import quantize
from lightning_verl.pipeline.building import draw_stages, read_stages, share_of

ModelSource = str | Path | PretrainedConfig | nn.Module
"""A hub name, a folder, a config (random weights), or a module that is used as it is."""

_CLASSES = {"causal": AutoModelForCausalLM, "base": AutoModel, "score": AutoModelForSequenceClassification}


def load_model(source: ModelSource, kind: Literal["causal", "base", "score"], role: str = "") -> nn.Module:
    """Build a model in fp32 on the CPU; the strategy casts, moves and cuts it later.

    Inside of ``fabric.init_module()`` only the pipeline stages of this rank get memory (``pipeline.building``).

    Args:
        source: A name, a folder, a config (random weights), or a module, which is returned as it is.
        kind: ``"causal"`` with the language-model head, ``"base"`` without any, ``"score"`` with one scalar a sequence.
        role: Whose model it is.
    """
    if isinstance(source, nn.Module):
        return source
    factory: Any = _CLASSES[kind]
    share = share_of(role)
    if isinstance(source, PretrainedConfig):
        if kind == "score":
            source.num_labels = 1

        def make(config: PretrainedConfig) -> PreTrainedModel:
            return factory.from_config(config, dtype=torch.float32, **_attention_of(config))  # type: ignore[no-any-return]

        return make(source) if share is None else draw_stages(make, source, share)
    config = AutoConfig.from_pretrained(str(source))
    options = _attention_of(config)
    if kind == "score":
        options["num_labels"] = 1
    if share is not None and (model_class := model_class_of(factory, config)) is not None:
        return read_stages(model_class, str(source), share, dtype=torch.float32, **options)
    return factory.from_pretrained(str(source), dtype=torch.float32, **options)  # type: ignore[no-any-return]


def _attention_of(config: PretrainedConfig) -> dict[str, Any]:
    """What a model must run attention with: SDPA, the default, leaves out the cap of Gemma 2's scores silently."""
    is_capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return {"attn_implementation": "eager"} if is_capped and config._attn_implementation in (None, "sdpa") else {}


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside a model's weights, or None for a config or a module."""
    if isinstance(source, str | Path):
        return AutoTokenizer.from_pretrained(str(source))
    return None


def add_lora(model: nn.Module, lora_config: dict[str, Any] | LoraConfig, owner: str) -> None:
    """Put LoRA adapters into a model, in place, and freeze everything else.

    Args:
        model: A transformers model.
        lora_config: peft's config, or a dictionary of its fields in which ``alpha`` and ``dropout`` stand for
            ``lora_alpha`` and ``lora_dropout``.
        owner: The role's class name, for messages.

    Raises:
        TypeError: The model is not one of transformers.
        ValueError: The adapter would sit on a head that is tied to the embedding, or the config has an unknown field.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"{owner}(lora_config=...) needs a transformers model, got {type(model).__name__}.")
    if isinstance(lora_config, dict):
        short = {"alpha": "lora_alpha", "dropout": "lora_dropout"}
        try:
            lora_config = LoraConfig(**{short.get(key, key): value for key, value in lora_config.items()})
        except TypeError as error:
            raise ValueError(f"{owner} got lora_config={lora_config}: {error}") from error
    targets = lora_config.target_modules or ()
    tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
    if tied and "lm_head" in ([targets] if isinstance(targets, str) else targets):
        raise ValueError(
            f"{owner} got lora_config with target 'lm_head', but {type(model).__name__} ties its head to the "
            "embedding: the adapter would change the input side too. Leave lm_head out, or untie it "
            "(tie_word_embeddings=False) first."
        )
    model.add_adapter(lora_config)


def prepare(
    owner: str, model: nn.Module, lora_config: dict[str, Any] | LoraConfig | None, quantization: str | None
) -> None:
    """Put frozen layers into 4 bits and adapters on them, as far as asked for, in place.

    Args:
        owner: The role's class name, for messages.
        model: A transformers model.
        lora_config: See ``add_lora``; None for no adapter.
        quantization: One of ``quantize.Quantization``, checked before; None for none.
    """
    if quantization is not None:
        quantize(model)
    if lora_config is not None:
        add_lora(model, lora_config, owner)
