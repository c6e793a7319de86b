"""``HybridDataFlow``: which roles there are, what each makes of what, and how rows get from one to the next.

=================  ===================================================  ==================================
role               takes                                                makes
=================  ===================================================  ==================================
actor              ``PromptBatch``                                      ``RolloutBatch``, old log-probs
reward             ids, texts and data fields of a ``RolloutBatch``     scores
reference          ``RolloutBatch``                                     reference log-probs
critic             ``RolloutBatch``                                     values
critic, actor      a mini-batch of ``Experience``                       new weights
=================  ===================================================  ==================================

Rows lie with the data ranks of the actor. A role with another layout gets its share of them and gives its results back;
so does one with the same layout where the shares are too unequal.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast, get_args

import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from lightning_verl.algorithms.base import Loss
from lightning_verl.algorithms.losses import Normalizer
from lightning_verl.data.experience import Experience, Figures, PromptBatch, RolloutBatch, Scored
from lightning_verl.data.microbatches import MicroBatches, Packing, tokens_of
from lightning_verl.metrics import StepMetrics
from lightning_verl.models.modes import deterministic
from lightning_verl.passes import Passes, make_passes
from lightning_verl.pipeline.gather import whole_state
from lightning_verl.planning.budget import MicroBatchBudget
from lightning_verl.rewards.functions import Scores
from lightning_verl.rewards.scores import join_scores
from lightning_verl.roles.adapter import AdapterReference
from lightning_verl.rollout.batch import AnsweredPrompts, demonstrations, join_rollouts, no_rollouts
from lightning_verl.rollout.sampling import SamplingParams
from lightning_verl.scoring import EarlyScoring, Scoring
from lightning_verl.strategies.diagnosis import is_collective_failure
from lightning_verl.strategies.dispatch import (
    Gate,
    RowExchange,
    gather_counts,
    share_from_speaker,
)
from lightning_verl.strategies.hybrid import HybridStrategy
from lightning_verl.strategies.layout import ROLES, is_trainable
from lightning_verl.strategies.watchdog import watched


class HybridDataFlow:
    """The roles of a run, and the passes over them.

    Args:
        actor: The policy.
        critic: The value model, for algorithms that need one.
        reward: A reward model, functions or an ensemble.
        reference: The policy that a KL penalty measures from. None with a LoRA actor: the actor as it was at step 0.
        max_tokens_per_micro_batch: Tokens that one forward pass may hold on a rank, padding included where there is
            any and a shared prompt once; results do not depend on it. None: 16,384, on CUDA as many of them as an
            update has memory for (``MicroBatchBudget``).
        packing: "shared": rows run side by side, without padding, and the prompt that samples have in common runs once;
            "rows": each with its own prompt; "padded": each to the length of the longest. Results do not depend on it.
            Models that cannot run side by side are padded, and a line of the log says why.
        max_grad_norm: Gradients are scaled down to this norm.
        skip_special_tokens: Whether the text that rewards see is without special tokens; padding never is in it.

    Raises:
        TypeError: A module is not a LightningModule with the ``role`` that its place wants.
        ValueError: A limit is not positive, or there is no such packing.
    """

    def __init__(
        self,
        actor: nn.Module,
        critic: nn.Module | None = None,
        reward: nn.Module | None = None,
        reference: nn.Module | None = None,
        *,
        max_tokens_per_micro_batch: int | None = None,
        packing: Packing = "shared",
        max_grad_norm: float = 1.0,
        skip_special_tokens: bool = True,
    ) -> None:
        given = {"actor": actor, "critic": critic, "reference": reference, "reward": reward}
        self.modules: dict[str, nn.Module] = {name: module for name, module in given.items() if module is not None}
        for name, module in self.modules.items():
            if getattr(module, "role", None) != name:
                raise TypeError(
                    f"HybridDataFlow({name}=...) got {type(module).__name__} with role "
                    f"{getattr(module, 'role', None)!r}; it takes "
                    f"a LightningModule whose class attribute role is {name!r}."
                )
        for key, value in (
            ("max_tokens_per_micro_batch", max_tokens_per_micro_batch),
            ("max_grad_norm", max_grad_norm),
        ):
            if value is not None and not value > 0:
                raise ValueError(f"HybridDataFlow got {key}={value}; it must be above 0.")
        if packing not in get_args(Packing):
            raise ValueError(f"HybridDataFlow got packing={packing!r}; it takes {', '.join(get_args(Packing))}.")
        self.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self.packing: Packing = packing
        self.max_grad_norm = max_grad_norm
        self.skip_special_tokens = skip_special_tokens
        self.optimizers: dict[str, Optimizer] = {}
        self.adapter_reference: AdapterReference | None = None
        self._wrapped: dict[str, nn.Module] = {}
        self._passes: dict[str, Passes] = {}
        self._fabric: Fabric | None = None
        self._max_response_length: int | None = None
        self._padded: set[str] = set()

    # ---- set-up ------------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The actor's tokenizer."""
        return self.modules["actor"].require_tokenizer()  # type: ignore[operator,no-any-return]

    @property
    def fabric(self) -> Fabric:
        """The Fabric that the roles were set up with; RuntimeError before ``setup``."""
        if self._fabric is None:
            raise RuntimeError("HybridDataFlow is not set up; call dataflow.setup(fabric) after fabric.launch().")
        return self._fabric

    @property
    def strategy(self) -> HybridStrategy:
        """The strategy that owns the layouts."""
        return self.fabric.strategy  # type: ignore[return-value]

    def setup(self, fabric: Fabric) -> None:
        """Create groups and set up every role; the second call with the same Fabric does nothing.

        Raises:
            TypeError: The Fabric has another strategy.
        """
        if self._fabric is fabric:
            return
        if not isinstance(fabric.strategy, HybridStrategy):
            raise TypeError(
                "HybridDataFlow needs Fabric(strategy=HybridStrategy(...)) or strategy='hybrid', got "
                f"{type(fabric.strategy).__name__}."
            )
        fabric.call("on_groups_setup", strategy=fabric.strategy)
        for role in ROLES:
            if role in self.modules:
                self._wrapped[role] = fabric.setup_module(self.modules[role], move_to_device=False)
                self._passes[role] = make_passes(fabric, role, self._wrapped[role])
        self.metrics = StepMetrics(fabric.device)
        self.gate = Gate(fabric.strategy)
        self._early = EarlyScoring(fabric.strategy, self.modules)
        self.budget = MicroBatchBudget(fabric.strategy, self.modules, self.optimizers)
        self._exchange = RowExchange(fabric.strategy)
        actor = self.modules["actor"]
        if "reference" not in self.modules and getattr(actor, "has_adapter", False):
            self.adapter_reference = AdapterReference(actor)
        self._fabric = fabric  # last: a role that was refused leaves the data flow as it was

    def setup_optimizers(self, learning_rates: Mapping[str, float] | None = None) -> None:
        """Make a new optimizer for each trainable role, from its ``configure_optimizers``.

        Args:
            learning_rates: Learning rates by role that take the place of the roles' own.

        Raises:
            TypeError: ``configure_optimizers`` gave something else than one optimizer.
        """
        for role, module in self.modules.items():
            if not is_trainable(module, role) or not self._holds(role):
                continue
            optimizer = module.configure_optimizers()  # type: ignore[operator]
            if not isinstance(optimizer, Optimizer):
                raise TypeError(
                    f"{type(module).__name__}.configure_optimizers returned {type(optimizer).__name__}; return one "
                    "optimizer (RLTrainer(warmup_steps=...) is the schedule)."
                )
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] = (learning_rates or {}).get(role, group["lr"])
            self.optimizers[role] = cast(Optimizer, self.fabric.setup_optimizers(optimizer))

    def get_actor_for_rollout(self, tp_size: int | None = None) -> AbstractContextManager[Any]:
        """The actor in its rollout layout: a context manager that yields its engine.

        Raises:
            ValueError: The strategy's layout has another number of tensor ranks.
        """
        configured = self.strategy.layout("rollout").tensor
        _check_layout(
            "get_actor_for_rollout", "tp_size", tp_size, configured, 'hybrid_engine_config={"rollout_tp": %d}'
        )
        return self.strategy.rollout(self.modules["actor"])

    def get_actor_for_update(self, dp_size: int | None = None) -> AbstractContextManager[nn.Module]:
        """The actor in its update layout: a context manager that yields it.

        Raises:
            ValueError: The strategy's layout has another number of shards.
        """
        configured = self.strategy.layout("actor").shards
        _check_layout(
            "get_actor_for_update", "dp_size", dp_size, configured, 'parallelism_config={"actor": {"dp": %d}}'
        )
        return self.strategy.update(self._wrapped["actor"])

    def call(self, hook: str, **arguments: Any) -> None:
        """Call a hook of Fabric's callbacks."""
        self.fabric.call(hook, **arguments)

    @watched("save", "actor")
    def save_pretrained(self, folder: str | Path) -> None:
        """Write the actor as a Hugging Face folder with its tokenizer; with LoRA, the adapter (a collective call)."""
        actor: Any = self.modules["actor"]
        state = whole_state(actor.model, self.strategy.group("actor", "pipeline")) if self._holds("actor") else {}
        if self.strategy.is_global_zero:
            actor.save_pretrained(folder, state)
        self.strategy.barrier()

    # ---- passes ------------------------------------------------------------------------------------------------------

    @watched("rollout", "actor")
    def rollout(self, prompts: PromptBatch, sampling: SamplingParams, step: int) -> RolloutBatch:
        """Sample responses from the actor (a collective call).

        Args:
            prompts: This rank's prompts; the ranks of one tensor axis have the same.
            sampling: How to sample.
            step: The training step, for the seeds.
        """
        self._max_response_length = sampling.max_new_tokens
        if not self._holds("actor"):
            return no_rollouts(prompts, sampling.temperature).to(self.fabric.device)
        rows, receipt = self._exchange.there(prompts, "rollout")
        with self.strategy.rollout(self.modules["actor"]) as engine:
            self._record_resharding()
            watch = self._early.watch(engine, rows, sampling.n, self.tokenizer, self.skip_special_tokens)
            options = {} if watch is None else {"watch": watch}
            answered = AnsweredPrompts.of(engine.generate(rows, sampling, step=step, **options), sampling)
        rollouts = self._exchange.back(answered, receipt, "rollout").rollouts(sampling)
        texts = None if watch is None else watch.texts
        return join_rollouts(prompts, rollouts, self.tokenizer, sampling, self.skip_special_tokens, texts)

    def scoring_meanwhile(self) -> AbstractContextManager[None]:
        """Let reward functions run on samples that have ended while the rollouts in this context go on.

        For rollouts that are scored afterwards. Where the engine reports samples (the native one), on ranks that score
        the rows that they sample; ``RewardFunction(during_rollout=False)`` does not take part. Rewards are the same.
        """
        return self._early.open()

    def demonstrations(self, prompts: PromptBatch, field: str) -> RolloutBatch:
        """Take responses from a field of the data instead of sampling them."""
        return demonstrations(prompts, field, self.tokenizer).to(self.fabric.device)

    def score(self, batch: RolloutBatch) -> Experience:
        """Let the reward role score a batch and wait for it (a collective call).

        A model scores on its own layout. Functions run once for each row, on the first rank of its tensor axis, in the
        actor's layout, or on the ranks that the reward claims.

        Raises:
            AgreedError: A reward failed on some rank; raised on every rank, before any weight changes.
        """
        return self.finish_scoring(self.start_scoring(batch))

    @property
    def reward_is_apart(self) -> bool:
        """Whether the reward has ranks of its own, and scores there while the others go on."""
        return self.strategy.layout("reward").apart_from(self.strategy.layout("actor"))

    @watched("score", "reward")
    def start_scoring(self, batch: RolloutBatch) -> Scoring:
        """Hand the rows to the reward role and score where it lies; ranks without it go on (a collective call)."""
        reward = self.modules["reward"]
        has_weights = next(reward.parameters(), None) is not None
        role = "reward" if has_weights or self.reward_is_apart else "actor"
        rows, receipt = self._exchange.there(batch, role)
        scoring = Scoring(batch, role, receipt)
        started = time.perf_counter()
        try:
            if has_weights and self._holds(role):
                scoring.scores = self._score_in_micro_batches(rows)
            elif self._speaks(role):
                scoring.scores = join_scores([reward.score(rows)])  # type: ignore[operator]
            if self.fabric.device.type == "cuda":
                torch.cuda.synchronize(self.fabric.device)  # the seconds are those of the work, not of its launch
        except Exception as problem:  # raised again by the gate, on every rank, so that none waits for this one
            scoring.error = problem
        scoring.seconds = time.perf_counter() - started
        return scoring

    @watched("score", "reward")
    def finish_scoring(self, scoring: Scoring) -> Experience:
        """Wait for the scores and bring them to their rows (a collective call).

        Raises:
            AgreedError: A reward failed on some rank; raised on every rank.
        """
        role, device = scoring.role, self.fabric.device
        waited = self.gate.meet("the reward phase", scoring.error)
        self.metrics.mean("time/reward_wait", torch.tensor([waited]), self._holds("actor"))
        self.metrics.mean("time/reward_score", torch.tensor([scoring.seconds]), self._speaks(role))
        figures = Scored(torch.zeros(0, device=device), torch.zeros(0, dtype=torch.bool, device=device))
        if self._holds(role):
            scores = share_from_speaker(scoring.scores, self.strategy, role)
            self._record_scores(scores, self._speaks(role))
            figures = Scored(scores.values.to(device), scores.valid.to(device))
        back = self._exchange.back(figures, scoring.receipt, role)
        return Experience(scoring.batch, back.values, back.valid)

    @watched("log-probs", "actor")
    def logprobs(self, batch: RolloutBatch) -> Tensor:
        """The actor's log-probs of the responses at its weights now, ``[N, R]`` (a collective call)."""
        return self._forward("actor", batch, lambda actor, rows: actor(rows, rows.temperature)[0])

    @watched("log-probs", "reference")
    def reference_logprobs(self, batch: RolloutBatch) -> Tensor:
        """The reference's log-probs of the responses, ``[N, R]`` (a collective call)."""
        if "reference" in self.modules:
            return self._forward("reference", batch, lambda model, rows: model(rows, rows.temperature)[0])
        if self.adapter_reference is None:
            raise RuntimeError(
                "HybridDataFlow has no reference; pass reference=Reference(...) or give the actor a LoRA adapter."
            )
        with self.adapter_reference.in_place():
            return self.logprobs(batch)

    @watched("values", "critic")
    def values(self, batch: RolloutBatch) -> Tensor:
        """The critic's values, ``[N, R]`` (a collective call)."""
        return self._forward("critic", batch, lambda critic, rows: critic(rows))

    @watched("update")
    def train(self, role: str, experience: Experience, loss: Loss) -> None:
        """Take one optimizer step of a role on a mini-batch (a collective call).

        Rows move between data ranks where some have much more to do than others (``RowExchange``). The mini-batch is
        then cut into micro-batches of at most ``max_tokens_per_micro_batch`` positions, the same number on every data
        rank; ranks that run out of rows run the model on none. Without a single token to train on, or with gradients
        that are not finite, no step is taken: a warning says so and ``<role>/skipped_updates`` counts it.

        Args:
            role: ``"actor"`` or ``"critic"``.
            experience: The rows that this rank holds in the actor's layout.
            loss: The loss of a micro-batch.
        """
        rows, _ = self._exchange.there(experience, role, balance=True)
        if not self._holds(role):
            return
        counts = self._speaks(role)
        batches, normalizer = self._plan(role, rows)
        module, optimizer, passes = self._wrapped[role], self.optimizers[role], self._passes[role]
        if normalizer.tokens == 0:
            self._skip(role, "no row of the mini-batch has a token to train on")
            return
        with self._ready(role):
            found = passes.train(lambda number: batches.take(rows, number), len(batches), loss, normalizer)
        for metrics in found:
            for name, figure in metrics.items():
                self.metrics.share(f"{role}/{name}", figure, counts)
        self.metrics.finish_minibatch(f"{role}/")
        norm = self.fabric.clip_gradients(module, optimizer, max_norm=self.max_grad_norm, error_if_nonfinite=False)
        if norm is not None and torch.isfinite(norm):
            optimizer.step()
            self.metrics.mean(f"{role}/grad_norm", norm)
            self.metrics.total(f"{role}/skipped_updates", 0.0)
        else:
            self._skip(role, f"the gradient norm is {norm}")
        optimizer.zero_grad()
        if (idle := passes.idle_share()) is not None:
            self.metrics.mean(f"{role}/bubble", idle)

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _forward(self, role: str, batch: RolloutBatch, run: Callable[[Any, RolloutBatch], Tensor]) -> Tensor:
        """A pass without gradients over all rows of a batch, on the role's layout."""
        rows, receipt = self._exchange.there(batch, role, balance=True)
        result = torch.zeros_like(rows.rollout_logprobs)
        if self._holds(role):
            batches, _ = self._plan(role, Experience(rows, rows.prompt_lengths, rows.prompt_lengths > 0))
            with self._ready(role):
                found = self._passes[role].forward(lambda number: batches.take(rows, number), len(batches), run)
            for part, figures in zip(batches.bins, found, strict=False):
                result[part, : figures.shape[1]] = figures
            self._passes[role].share(result)
        values = self._exchange.back(Figures(result), receipt, role).values
        return values[:, : batch.response_width]

    def _plan(self, role: str, rows: Experience) -> tuple[MicroBatches, Normalizer]:
        """Cut rows into micro-batches, equally many on all data ranks, and count the tokens of all of them."""
        mask, sizes, packing, passes = rows.mask, rows.sizes(), self._packing_of(role), self._passes[role]
        limit = passes.limit(tokens_of(sizes, packing), self.max_tokens_per_micro_batch or self.budget.of(role))
        batches = MicroBatches.cut(sizes, limit, packing)
        own = [*torch.stack([mask.sum(), mask.any(1).sum()]).tolist(), len(batches)]
        counts = gather_counts(own, self.strategy.group(role, "scores"))
        normalizer = Normalizer(
            tokens=int(counts[:, 0].sum()),
            sequences=int(counts[:, 1].sum()),
            data_parallel_size=self.strategy.layout(role).data_size,
            max_length=self._max_response_length,
        )
        return batches.filled_up(passes.count(int(counts[:, 2].max()))), normalizer

    def _packing_of(self, role: str) -> Packing:
        """How the rows of a role run together: as asked, or padded where its model can do no better."""
        problem = getattr(self.modules[role], "packing_problem", "its class is not one of lightning_verl.roles")
        if self.packing == "padded" or problem is None:
            return self.packing
        if role not in self._padded:
            self._padded.add(role)
            rank_zero_info(f"HybridDataFlow: rows of the {role} are padded, {problem}.")
        return "padded"

    @contextmanager
    def _ready(self, role: str) -> Iterator[None]:
        """Passes of a role and their backward passes: without dropout, and without padding where it can."""
        module: Any = self.modules[role]
        with deterministic(module), nullcontext() if self._packing_of(role) == "padded" else module.without_padding():
            yield

    def _score_in_micro_batches(self, rows: RolloutBatch) -> Scores | None:
        batches, _ = self._plan("reward", Experience(rows, rows.prompt_lengths, rows.prompt_lengths > 0))
        parts: list[Scores] = []
        error: Exception | None = None

        def run(module: Any, part: RolloutBatch) -> Tensor:
            nonlocal error
            try:
                parts.append(module.score(part))
            except Exception as problem:  # the other ranks' passes wait for all of this rank's
                if is_collective_failure(problem):
                    raise
                error = error or problem
            return part.rollout_logprobs

        with self._ready("reward"):
            self._passes["reward"].forward(lambda number: batches.take(rows, number), len(batches), run)
        if error is not None:
            raise error
        # Only the last stage of a pipeline has scores; ``finish_scoring`` shares them.
        return join_scores(parts, order=[row for part in batches.bins for row in part]) if parts else None

    def _record_resharding(self) -> None:
        report = self.strategy.reshard_report
        if report is not None:
            self.metrics.mean("time/reshard", torch.tensor([report.seconds]))
            self.metrics.largest("reshard/received_bytes", report.received_bytes)
            self.metrics.largest("reshard/buffer_bytes", report.buffer_bytes)
            if report.link_share is not None:
                self.metrics.mean("reshard/link_share", torch.tensor([report.link_share]))
            self.call("on_weights_resharded", report=report)

    def step_metrics(self) -> dict[str, float]:
        """The figures of a step over all ranks, and an empty slate for the next (a collective call)."""
        report = self.strategy.offload_report
        if report is not None:
            self.metrics.mean("time/offload_out", torch.tensor([report.out_seconds]))
            self.metrics.mean("time/offload_back", torch.tensor([report.back_seconds]))
            self.metrics.largest("offload/moved_bytes", report.moved_bytes)
        return self.metrics.compute()

    def _record_scores(self, scores: Scores, counts: bool) -> None:
        self.metrics.mean("reward/mean", scores.values[scores.valid], counts)
        self.metrics.mean("reward/valid", scores.valid.float(), counts)
        self.metrics.total("reward/fallbacks", float(scores.fallbacks), counts)
        for name, values in scores.components.items():
            self.metrics.mean(f"reward/{name}", values[~values.isnan()], counts)
        if scores.disagreement is not None:
            self.metrics.mean("reward/disagreement", scores.disagreement[scores.valid], counts)

    def _holds(self, role: str) -> bool:
        return self.strategy.layout(role).holds(self.strategy.global_rank)

    def _speaks(self, role: str) -> bool:
        return self.strategy.layout(role).speaks(self.strategy.global_rank)

    def _skip(self, role: str, reason: str) -> None:
        first = self.strategy.global_rank == self.strategy.layout(role).ranks[0]
        self.metrics.total(f"{role}/skipped_updates", 1.0, counts=first)
        if first:
            warnings.warn(f"HybridDataFlow: an update of the {role} was skipped, {reason}.", stacklevel=4)


def _check_layout(method: str, name: str, given: int | None, configured: int, option: str) -> None:
    if given is not None and given != configured:
        raise ValueError(
            f"HybridDataFlow.{method} got {name}={given}, but the strategy has {option % configured}, as configured or "
            f"by default, and one such layout only. Use HybridStrategy({option % given}), or leave {name} out."
        )
