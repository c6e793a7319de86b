"""Rollout engines by name. Each is imported only when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities import rank_zero_info, rank_zero_warn

from lightning_verl.rollout.base import RolloutEngine
from lightning_verl.rollout.native.options import NativeOptions
from lightning_verl.rollout.native.support import untested
from lightning_verl.strategies.layout import check_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lightning_verl.rollout.stopping import Decoder
    from lightning_verl.strategies.engine import RolloutWeights

ENGINES = ("auto", "native", "transformers", "vllm")
"""Names of engines; "auto" is "native" for the families that it is tested with, and "transformers" for others."""


def check_engine_options(owner: str, name: str, options: Mapping[str, Any]) -> None:
    """Refuse an engine or options that do not exist; nothing is imported that an engine needs.

    Args:
        owner: The class that was given them, for messages.
        name: One of ``ENGINES``.
        options: The engine's own options.

    Raises:
        ValueError: There is no such engine, or it has no such options.
    """
    check_names(owner, [name], ENGINES, "engine")
    if name == "vllm":
        from lightning_verl.rollout.vllm.options import VLLMOptions

        VLLMOptions.of(options)
    elif name in ("auto", "native"):
        NativeOptions.of(options)
    elif options:
        raise ValueError(
            f"{owner}: engine={name!r} has no options, got engine_options={dict(options)}; leave them out."
        )


def check_native_options(owner: str, name: str, options: Mapping[str, Any]) -> None:
    """Refuse what a strategy says of the native engine's cache where another engine generates.

    Args:
        owner: The class that has the engine, for messages.
        name: One of ``ENGINES``; "auto" is let pass, since the family decides.
        options: Options of the native engine.

    Raises:
        ValueError: There are options, and the engine is another one.
    """
    if options and name not in ("auto", "native"):
        given = ", ".join(f"{option}={value!r}" for option, value in options.items())
        own = " vLLM's own go into engine_options={'engine_args': {...}}." if name == "vllm" else ""
        raise ValueError(
            f"HybridStrategy({given}) speaks to the native engine, but {owner} has engine={name!r}, which has no such "
            f"options; leave them out, or choose engine='native'.{own}"
        )


def check_engine(owner: str, name: str, options: Mapping[str, Any]) -> None:
    """Refuse an engine that cannot be built, before anything is.

    Args:
        owner: The class that was given them, for messages.
        name: One of ``ENGINES``.
        options: The engine's own options.

    Raises:
        ValueError: There is no such engine, or it has no such options.
        ImportError: "vllm", but vLLM is missing or too old.
    """
    check_engine_options(owner, name, options)
    if name == "vllm":
        from lightning_verl.rollout.vllm.process import check_vllm

        check_vllm()


def rollout_weights(name: str, options: Mapping[str, Any]) -> RolloutWeights:
    """How an engine gets its weights.

    Args:
        name: One of ``ENGINES``.
        options: The engine's own options.
    """
    if name != "vllm":
        return "shared"
    from lightning_verl.rollout.vllm.options import VLLMOptions

    return VLLMOptions.of(options).lora


def build_engine(
    name: str,
    model: PreTrainedModel,
    *,
    pad_token_id: int,
    eos_token_ids: Sequence[int],
    tokenizer: Decoder | None,
    options: Mapping[str, Any] | None = None,
) -> RolloutEngine:
    """Build a rollout engine.

    Args:
        name: One of ``ENGINES``.
        model: The model that generates; "vllm" reads its config and class only.
        pad_token_id: Fills the right of short responses.
        eos_token_ids: The model's end tokens.
        tokenizer: Decodes responses, for stop strings.
        options: The engine's own options.
    """
    if name == "vllm":
        from lightning_verl.rollout.vllm import VLLMEngine

        return VLLMEngine(
            model, pad_token_id=pad_token_id, eos_token_ids=eos_token_ids, tokenizer=tokenizer, options=options
        )
    if name == "native" or (name == "auto" and _takes_native(model, options or {})):
        from lightning_verl.rollout.native import NativeEngine

        return NativeEngine(
            model,
            pad_token_id=pad_token_id,
            eos_token_ids=eos_token_ids,
            tokenizer=tokenizer,
            options=NativeOptions.of(options or {}),
        )
    from lightning_verl.rollout.transformers import TransformersEngine

    return TransformersEngine(model, pad_token_id=pad_token_id, eos_token_ids=eos_token_ids, tokenizer=tokenizer)


def _takes_native(model: PreTrainedModel, options: Mapping[str, Any]) -> bool:
    """Whether "auto" takes the native engine; rank 0 says in the log where and why it does not."""
    problem = untested(model)
    if problem is not None:
        rank_zero_info(f"{type(model).__name__} is rolled out with engine='transformers': {problem}.")
        if options:
            rank_zero_warn(f"engine='transformers' has no options, so nothing comes of {dict(options)}.")
    return problem is None
