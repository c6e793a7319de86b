"""The reference rollout engine: ``model.generate`` of transformers, driven by our own sampler.

It supports whatever ``generate`` supports and is what the faster engines are tested against. ``generate`` only runs the
model and its cache: a logits processor samples with :mod:`lightning_verl.rollout.sampling` and leaves the sampled token
as the only possible one, a stopping criterion applies :class:`~lightning_verl.rollout.stopping.StopRule`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from lightning_verl.data.experience import PromptBatch
from lightning_verl.models.modes import deterministic
from lightning_verl.rollout.adjust import LogitAdjuster, seen_tokens
from lightning_verl.rollout.base import FinishReason, Rollouts
from lightning_verl.rollout.inputs import (
    check_lengths,
    check_tokens,
    indices_of,
    refuse_weights,
    rollouts_of,
    starting_together,
    token_lists,
)
from lightning_verl.rollout.sampling import SamplingParams, sample_seeds, sample_tokens, uniforms
from lightning_verl.rollout.stopping import Decoder, StopRule

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TransformersEngine:
    """Samples with ``model.generate``; the model is the trainer's own and its parameters are never touched.

    The model runs in eval mode and every module gets its training flag back. Only ``model.generate`` is called, so
    sharded (unsharded for the rollout) and tensor-parallel modules work; all ranks of a tensor axis must be given the
    same prompts. The sampling parameters decide alone: no default of ``model.generation_config`` takes part.

    Args:
        model: A causal language model.
        pad_token_id: Fills the left of short prompts, which the attention mask hides, and the right of short responses.
        eos_token_ids: The model's end tokens; may be empty, and may hold ``pad_token_id``.
        tokenizer: Decodes responses, for stop strings only.
        step_group: Ranks that must take equally many steps, because a step of the model is a collective call of theirs
            (experts divided over ranks). Each must call ``generate`` with prompts of its own, or without any.

    Raises:
        ValueError: The model is not a decoder that can generate.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        pad_token_id: int,
        eos_token_ids: Sequence[int],
        tokenizer: Decoder | None = None,
        step_group: dist.ProcessGroup | None = None,
    ) -> None:
        if model.config.is_encoder_decoder or not model.can_generate():
            raise ValueError(
                f"TransformersEngine needs a causal language model with generate(), got {type(model).__name__}; load "
                "it with AutoModelForCausalLM."
            )
        self.model = model
        self.pad_token_id = pad_token_id
        self.eos_token_ids = tuple(eos_token_ids)
        self.tokenizer = tokenizer
        self.step_group = step_group
        self.weight_version = 0

    def generate(
        self,
        prompts: PromptBatch | Sequence[Sequence[int]],
        sampling: SamplingParams | None = None,
        *,
        step: int = 0,
        prompt_indices: Sequence[int] | None = None,
    ) -> Rollouts:
        """Sample ``sampling.n`` responses for each prompt; see :class:`~lightning_verl.rollout.base.RolloutEngine`.

        Args:
            prompts: A prompt batch, or plain lists of token ids.
            sampling: How to sample; None takes ``SamplingParams()``.
            step: The training step.
            prompt_indices: The index of each prompt; None takes ``PromptBatch.indices``, or 0, 1, 2... for plain lists.

        Returns:
            The responses, on the model's device; at least one column wide.

        Raises:
            ValueError: A prompt is empty, has a token out of the vocabulary or leaves too little room for
                ``max_new_tokens``, the indices do not match the prompts, there are stop strings but no tokenizer, or
                ``logit_bias`` does not fit the vocabulary.
            RuntimeError: Such an error on another rank of ``step_group``.
        """
        sampling = sampling or SamplingParams()
        name, config = type(self).__name__, self.model.config
        device = next(self.model.parameters()).device
        rule = StopRule(sampling, self.eos_token_ids, self.tokenizer)
        with starting_together(name, self.step_group, device):
            rows = token_lists(name, prompts)
            indices = indices_of(name, prompts, prompt_indices).to(device)
            check_lengths(name, config.get_text_config(), rows, sampling)
            check_tokens(name, config, rows)
            adjuster = LogitAdjuster(sampling, self.eos_token_ids, config.get_text_config().vocab_size, device)

        stopper = _Stopper(rule, rows=len(rows) * sampling.n, group=self.step_group)
        if not rows and self.step_group is not None:  # a made-up row, which the stopper does not count
            rows, indices = [[self.pad_token_id]], indices.new_zeros(1)
        lengths = torch.tensor([len(tokens) for tokens in rows], dtype=torch.int64, device=device)
        seeds = sample_seeds(sampling.seed, step, indices, sampling.n)
        sampler = _Sampler(sampling, seeds, adjuster, lengths.repeat_interleave(sampling.n))
        if rows:
            self._run(rows, sampling, sampler, stopper, device)
        return self._collect(sampler, stopper, sampling.n, device)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take the version of the trainer's weights, which this engine shares.

        Args:
            weights: Must be empty.
            version: The version of the weights that the model holds now.

        Raises:
            ValueError: There are weights.
        """
        refuse_weights(type(self).__name__, weights, version)
        self.weight_version = version

    def release(self) -> None:
        """Nothing to give back: the key-value cache lives only inside :meth:`generate`."""

    def _run(
        self,
        token_lists: list[list[int]],
        sampling: SamplingParams,
        sampler: _Sampler,
        stopper: _Stopper,
        device: torch.device,
    ) -> None:
        width = max(map(len, token_lists))
        ids = [[self.pad_token_id] * (width - len(tokens)) + tokens for tokens in token_lists]
        mask = [[0] * (width - len(tokens)) + [1] * len(tokens) for tokens in token_lists]
        # No end tokens here: the stopper alone decides when a row ends.
        config = GenerationConfig(
            max_new_tokens=sampling.max_new_tokens, do_sample=False, use_cache=True, pad_token_id=self.pad_token_id
        )
        # no_grad and not inference_mode: parameters gathered here would stay inference tensors in the update.
        with torch.no_grad(), deterministic(self.model), _only_generation_config(self.model, config):
            cast("Any", self.model).generate(
                input_ids=torch.tensor(ids, device=device).repeat_interleave(sampling.n, dim=0),
                attention_mask=torch.tensor(mask, device=device).repeat_interleave(sampling.n, dim=0),
                generation_config=config,
                logits_processor=LogitsProcessorList([sampler]),
                stopping_criteria=StoppingCriteriaList([stopper]),
                synced_gpus=False,  # the weights are gathered: ranks need not take equally many steps, and do not
            )

    def _collect(self, sampler: _Sampler, stopper: _Stopper, n: int, device: torch.device) -> Rollouts:
        steps = torch.stack(sampler.logprobs, dim=1).tolist() if stopper.responses else []
        return rollouts_of(
            stopper.responses,
            [row[: len(tokens)] for row, tokens in zip(steps, stopper.responses, strict=True)],
            stopper.reasons,
            n,
            pad_token_id=self.pad_token_id,
            weight_version=self.weight_version,
            device=device,
        )


class _Sampler(LogitsProcessor):
    """Samples each row's next token, keeps its log-prob, and leaves the token as the only possible one."""

    def __init__(
        self, sampling: SamplingParams, seeds: Tensor, adjuster: LogitAdjuster, prompt_lengths: Tensor
    ) -> None:
        self._sampling = sampling
        self._seeds = seeds
        self._adjuster = adjuster
        self._prompt_lengths = prompt_lengths
        self.logprobs: list[Tensor] = []
        """float32 ``[N]`` for each step; those of a row that has finished mean nothing."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        produced = len(self.logprobs)
        seen = self._seen(input_ids, produced, scores.shape[-1]) if self._adjuster.needs_seen else None
        adjusted = self._adjuster(scores, produced, seen)
        tokens, logprobs = sample_tokens(adjusted, self._sampling, uniforms(self._seeds, position=produced))
        self.logprobs.append(logprobs)
        return torch.full_like(scores, -torch.inf).scatter(-1, tokens[:, None], 0.0)

    def _seen(self, input_ids: Tensor, produced: int, vocabulary: int) -> Tensor:
        """Tokens of prompt and response; padding stands on the left of both."""
        width = input_ids.shape[1]
        columns = torch.arange(width, device=input_ids.device)
        return seen_tokens(input_ids, columns >= (width - produced - self._prompt_lengths)[:, None], vocabulary)


class _Stopper(StoppingCriteria):
    """Collects the responses and tells which have ended; generate goes on with a finished row, which is ignored.

    With a group no row ends before all rows of all its ranks have.
    """

    def __init__(self, rule: StopRule, rows: int, group: dist.ProcessGroup | None = None) -> None:
        self._rule = rule
        self._group = group
        self._finished = [False] * rows
        self.responses: list[list[int]] = [[] for _ in range(rows)]
        self.reasons = [FinishReason.LENGTH] * rows

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        for row, token in zip(range(len(self._finished)), input_ids[:, -1].tolist(), strict=False):
            if self._finished[row]:
                continue
            self.responses[row].append(token)
            reason = self._rule.reason(self.responses[row])
            if reason is not None:
                self._finished[row] = True
                self.reasons[row] = reason
        if self._group is None:
            return torch.tensor(self._finished, device=input_ids.device)
        running = torch.tensor([self._finished.count(False)], device=input_ids.device)
        dist.all_reduce(running, group=self._group)
        return (running == 0).expand(len(input_ids))


@contextmanager
def _only_generation_config(model: nn.Module, config: GenerationConfig) -> Iterator[None]:
    """Let no default of the model in: generate fills what its argument leaves unset from ``model.generation_config``.

    Adapter wrappers copy theirs to the model inside, so every module that has one is covered.
    """
    holders = [vars(module) for module in model.modules() if "generation_config" in vars(module)]
    originals = [holder["generation_config"] for holder in holders]
    try:
        for holder in holders:
            holder["generation_config"] = config
        yield
    finally:
        for holder, original in zip(holders, originals, strict=True):
            holder["generation_config"] = original
