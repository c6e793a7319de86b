"""The actor: the policy that is rolled out and trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_verl.data.experience import RolloutBatch
from lightning_verl.models.heads import output_logits
from lightning_verl.models.load import ModelSource, load_model, load_tokenizer, prepare
from lightning_verl.models.logprobs import logprobs_from_hidden
from lightning_verl.models.quantize import Quantization, check_quantization
from lightning_verl.parallel.vocabulary import VocabularyShard
from lightning_verl.roles.base import LoraSource, Role, spread
from lightning_verl.rollout.base import RolloutEngine
from lightning_verl.rollout.engines import build_engine, check_engine, check_native_options, rollout_weights
from lightning_verl.strategies.engine import RolloutWeights


class Actor(Role):
    """The policy.

    Args:
        source: A hub name, a folder, a config (random weights), or a causal model of transformers.
        tokenizer: Its tokenizer; None loads the one beside the weights.
        lora_config: ``{"r": 8, "alpha": 16, "target_modules": [...]}`` or peft's config: train an adapter only.
        quantization: ``"nf4"`` holds the linear layers below the adapter in 4 bits (QLoRA); needs bitsandbytes.
        engine: What generates: "native", "transformers" or "vllm"; "auto" takes the native engine where the model's
            family is one that it is tested with, and transformers elsewhere.
        engine_options: Options of the engine, see ``NativeOptions`` and ``VLLMOptions``; they win over the strategy's
            ``kv_cache_dtype`` and ``offload_kvcache``.
        options: Those of ``Role``.

    Raises:
        ValueError: The tokenizer has no pad or no end token, there is no such engine or option of it, or quantization
            without an adapter.
        ImportError: The library of the engine or of the quantization is missing or too old.
    """

    role = "actor"

    def __init__(
        self,
        source: ModelSource,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        lora_config: LoraSource = None,
        quantization: Quantization | None = None,
        engine: str = "auto",
        engine_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        name = type(self).__name__
        check_engine(name, engine, engine_options or {})
        check_quantization(name, quantization, lora_config is not None)
        model: Any = load_model(source, "causal", self.role)
        prepare(name, model, lora_config, quantization)
        super().__init__(model, **options)
        self.has_adapter = lora_config is not None
        self.tokenizer = tokenizer if tokenizer is not None else load_tokenizer(source)
        self._engine_name, self._engine_options = engine, dict(engine_options or {})
        self._strategy_options: dict[str, Any] = {}
        self._engine: RolloutEngine | None = None
        self._generator: list[Any] = [self.model]  # in a list, so that it is no submodule

    def forward(
        self, batch: RolloutBatch, temperature: float = 1.0, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs of the response tokens, and the policy's entropy there.

        Args:
            batch: The sequences.
            temperature: The logits are divided by it.
            with_entropy: Whether to compute the entropy too.

        Returns:
            Log-probs and entropy (or None), float32 ``[N, R]``, 0 outside the response.
        """
        hidden, targets = self.response_states(batch)
        shard = VocabularyShard.of(self.model)
        head = partial(output_logits, self.model, own_part=shard is not None)
        logprobs, entropy = logprobs_from_hidden(
            hidden, head, targets, temperature, with_entropy=with_entropy, shard=shard
        )
        return spread(logprobs, batch), None if entropy is None else spread(entropy, batch)

    def generate_with(self, model: Any) -> None:
        """Let the engine run on another module than the trained one; the strategy puts the weights into it."""
        self._generator, self._engine = [model], None

    def take_engine_options(self, options: Mapping[str, Any]) -> None:
        """Take a strategy's options for the engine; those that the actor was given win.

        Args:
            options: Options of the native engine.

        Raises:
            ValueError: The actor has an engine that knows none of them.
        """
        check_native_options(type(self).__name__, self._engine_name, options)
        self._strategy_options, self._engine = dict(options), None

    @property
    def engine(self) -> RolloutEngine:
        """The rollout engine, built on first use. Its weights are in place inside ``strategy.rollout(actor)``."""
        if self._engine is None:
            tokenizer = self.require_tokenizer()
            self._engine = build_engine(
                self._engine_name,
                self._generator[0],
                pad_token_id=int(tokenizer.pad_token_id),
                eos_token_ids=self.eos_token_ids,
                tokenizer=cast(Any, tokenizer),
                options={**self._strategy_options, **self._engine_options},
            )
        return self._engine

    @property
    def rollout_weights(self) -> RolloutWeights:
        """How the engine gets its weights from the strategy."""
        return rollout_weights(self._engine_name, self._engine_options)

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """Tokens that end a response: the tokenizer's, and those of the model's generation config."""
        tokenizer = self.require_tokenizer()
        configured = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        more = configured if isinstance(configured, list) else [] if configured is None else [configured]
        return sorted({int(tokenizer.eos_token_id), *map(int, more)})

    def require_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer.

        Raises:
            ValueError: There is none, or it lacks a pad or an end token.
        """
        name = type(self).__name__
        if self.tokenizer is None:
            raise ValueError(
                f"{name} was built from a config or a module and has no tokenizer; pass {name}(..., tokenizer=...)."
            )
        for token in ("pad", "eos"):
            if getattr(self.tokenizer, f"{token}_token_id") is None:
                raise ValueError(
                    f"{name}'s tokenizer {type(self.tokenizer).__name__} has no {token} token; set "
                    f"tokenizer.{token}_token before building the actor."
                )
        return self.tokenizer

    def save_pretrained(self, folder: str | Path, state: dict[str, Tensor]) -> None:
        """Write a Hugging Face folder with the weights in ``state`` and the tokenizer.

        Args:
            folder: Where to.
            state: Whole tensors by the model's own names (see ``HybridDataFlow.save_pretrained``, which gathers them).
        """
        self.model.save_pretrained(folder, state_dict=state)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(str(folder))
