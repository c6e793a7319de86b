"""Which models the native engine runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_verl.models.attention import attention_problem

TESTED = ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gemma", "gemma2", "gemma3_text", "gpt2")
"""Values of ``config.model_type`` for which its tokens were held against those of ``model.generate``."""


def check_native(model: Any) -> None:
    """Check that the native engine can run a model.

    Raises:
        ValueError: It cannot; the message says why.
    """
    problem = native_problem(model)
    if problem is not None:
        raise ValueError(
            f"NativeEngine cannot run {type(model).__name__}: {problem}. Use engine='transformers', which runs "
            "whatever generate() of transformers runs."
        )


def native_problem(model: Any) -> str | None:
    """Why the native engine cannot run a model; None if it can."""
    problem = attention_problem(model)
    if problem is not None:
        return problem
    if not model.can_generate():
        return "it has no generate()"
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        return "its adapter puts tokens of its own in front of the prompts"
    if kinds := _changing_rotary(model.config.get_text_config()):
        return (
            f"its rotary embedding ({', '.join(kinds)}) takes frequencies by the longest sample of a batch, so that a "
            "sample would depend on the others"
        )
    return None


def untested(model: Any) -> str | None:
    """Why the native engine is not chosen by itself: it cannot run a model, or no test holds its family; else None."""
    problem = native_problem(model)
    if problem is not None:
        return problem
    family = model.config.get_text_config().model_type
    return None if family in TESTED else f"the native engine is not tested with the family {family!r}"


def _changing_rotary(config: Any) -> list[str]:
    """Kinds of rotary embeddings whose frequencies depend on the greatest position of a step."""
    given = getattr(config, "rope_parameters", None) or {}
    each = [given, *(entry for entry in given.values() if isinstance(entry, Mapping))]  # some have one by layer type
    kinds = {str(entry.get("rope_type")) for entry in each}
    return sorted(kind for kind in kinds if kind == "longrope" or "dynamic" in kind)
