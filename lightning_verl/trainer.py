"""``RLTrainer``: one step reads as the algorithm."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Container, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric import Fabric

from lightning_verl.algorithms.base import Algorithm
from lightning_verl.data.experience import Experience, PromptBatch, RolloutBatch
from lightning_verl.data.prompts import AsyncRolloutDataset
from lightning_verl.data.sharding import local_minibatch_sizes, rollout_rows
from lightning_verl.dataflow import HybridDataFlow
from lightning_verl.heap import LongLived
from lightning_verl.pipeline.order import chunks_of, rows_problem
from lightning_verl.rollout.sampling import SamplingParams
from lightning_verl.schedule import check_schedule, learning_rate_scale
from lightning_verl.scoring import Scoring
from lightning_verl.strategies.diagnosis import IDLE_WINDOW, StepTimes, advise_ratio
from lightning_verl.strategies.hybrid import HybridStrategy

OldLogprobs = Literal["auto", "recompute", "rollout"]

ROLLOUT_GAP_BOUND = 1e-3
"""Largest difference between the engine's log-probs and training's up to which "auto" takes the engine's: at a clip of
0.2 a ratio that is off by 0.1% decides nothing."""


class RLTrainer:
    """Runs the loop: prompts, rollouts, scores, advantages, updates, logs.

    Args:
        fabric: A launched Fabric with ``HybridStrategy``; its callbacks and loggers are used.
        dataflow: The roles.
        algorithm: ``PPO``, ``GRPO``, ``SFT`` or one of your own.
        data: The prompts.
        rollout_batch_size: Prompts of one step, over all ranks.
        update_batch_size: Prompts of one mini-batch, over all ranks; None: the whole rollout batch.
        samples_per_prompt: Samples a prompt; None: the algorithm's.
        epochs: Passes over a rollout batch.
        sampling: How to sample; its ``n`` is replaced by ``samples_per_prompt``.
        old_logprobs: ``"recompute"`` them with the actor before the update; take the engine's (``"rollout"``); or
            ``"auto"``: no pass where one update follows one rollout, the engine's where they were at most
            ``ROLLOUT_GAP_BOUND`` from training's in the step before, and a pass otherwise.
        learning_rates: Learning rates by role, in place of the roles' own.
        warmup_steps: Steps over which learning rates rise linearly from 0.
        decay_steps: Steps, those of the warm-up included, after which learning rates have fallen linearly to 0; None
            keeps them.
        grad_sync_groups: Process groups for the gradient reduction of roles, put in place before they are set up.
        first_step: The number of the first step in the logs, where an earlier trainer ran on the same loggers.

    Raises:
        ValueError: Sizes or schedules that do not fit together, or a role that the algorithm needs and the data flow
            lacks.
    """

    def __init__(
        self,
        fabric: Fabric,
        dataflow: HybridDataFlow,
        algorithm: Algorithm,
        data: AsyncRolloutDataset,
        *,
        rollout_batch_size: int,
        update_batch_size: int | None = None,
        samples_per_prompt: int | None = None,
        epochs: int = 1,
        sampling: SamplingParams | None = None,
        old_logprobs: OldLogprobs = "auto",
        learning_rates: Mapping[str, float] | None = None,
        warmup_steps: int = 0,
        decay_steps: int | None = None,
        grad_sync_groups: Mapping[str, dist.ProcessGroup] | None = None,
        first_step: int = 0,
    ) -> None:
        self.fabric, self.dataflow, self.algorithm, self.data = fabric, dataflow, algorithm, data
        self.rollout_batch_size = rollout_batch_size
        self.update_batch_size = rollout_batch_size if update_batch_size is None else update_batch_size
        samples = algorithm.samples_per_prompt if samples_per_prompt is None else samples_per_prompt
        self.epochs, self.warmup_steps, self.decay_steps = epochs, warmup_steps, decay_steps
        self.old_logprobs: OldLogprobs = old_logprobs
        self.first_step = first_step
        self.completed_steps = 0
        self.max_steps = 0
        self._rollout_gap: float | None = None
        self._step_times: list[StepTimes] = []
        self._advised = False
        self._check_sizes(samples)
        _check_stages(fabric, dataflow.modules, self.update_batch_size, samples)
        check_schedule(type(self).__name__, warmup_steps, decay_steps)
        self._check_roles()
        self._check_lengths(sampling or SamplingParams())
        self.sampling = replace(sampling or SamplingParams(), n=samples)
        _put_gradient_groups(fabric, grad_sync_groups or {})
        dataflow.setup(fabric)
        dataflow.setup_optimizers(learning_rates)
        if algorithm.needs_reference and dataflow.adapter_reference is not None:
            dataflow.adapter_reference.freeze()
        layout = dataflow.strategy.layout("actor")
        self._holds_actor = layout.holds(fabric.global_rank)
        self._speaks = layout.speaks(fabric.global_rank)  # whether this rank's rows count
        place = layout.data_rank(fabric.global_rank) if self._holds_actor else 0
        sizes = (self.rollout_batch_size, self.update_batch_size, layout.data_size, place)
        prompts = local_minibatch_sizes(*sizes)
        # A rank without the actor has no prompts, in as many mini-batches as the others.
        self._rows = rollout_rows(*sizes) if self._holds_actor else []
        self._minibatch_rows = _rows_of(prompts if self._holds_actor else [0] * len(prompts), samples)
        with data.loader(rollout_batch_size, self._rows) as loader:
            self._loader_state = loader.state_dict()
        self._advise_ratio(layout.data_size)

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def fit(self, max_steps: int, resume_from: str | Path | None = None) -> dict[str, float]:
        """Train until ``max_steps`` steps are done in all.

        Args:
            max_steps: Steps, those before a resume included.
            resume_from: A checkpoint directory to take up from.

        Returns:
            The metrics of the last step.
        """
        self.max_steps = max_steps
        if resume_from is not None:
            self.load(resume_from)
        loader = self.data.loader(self.rollout_batch_size, self._rows)
        loader.load_state_dict(self._loader_state)
        loaders: dict[str, Any] = {"train": loader}
        metrics: dict[str, float] = {}
        heap = LongLived()
        try:
            self.fabric.call("on_loader_setup", loaders=loaders, device=self.fabric.device)
            self.fabric.call("on_run_start", trainer=self)
            batches = iter(loaders["train"])
            while self.completed_steps < max_steps:
                heap.on_step_start()
                self.fabric.call("on_step_start", trainer=self, step=self.global_step)
                started = time.perf_counter()
                prompts = next(batches, None)
                if prompts is None:
                    done = f"{self.completed_steps} of {max_steps} steps"
                    warnings.warn(f"RLTrainer: the data ended after {done}.", stacklevel=2)
                    break
                waited = time.perf_counter() - started
                metrics = self.step(prompts.to(self.fabric.device, non_blocking=True))
                self._finish_step(metrics, waited, time.perf_counter() - started, loaders["train"])
        except BaseException as error:
            self.fabric.call("on_run_exception", trainer=self, exception=error)
            raise
        finally:
            heap.release()
            loaders["train"].close()
            for logger in self.fabric.loggers:
                logger.save()  # CSVLogger would leave the last rows of a short run unwritten
        self.fabric.call("on_run_end", trainer=self)
        return metrics

    def step(self, prompts: PromptBatch) -> dict[str, float]:
        """One step of the algorithm, on this rank's prompts; returns its metrics over all ranks."""
        flow, algorithm = self.dataflow, self.algorithm
        self._set_learning_rates()

        flow.call("on_rollout_start", trainer=self, step=self.global_step)
        batch = self._collect(prompts)
        flow.call("on_rollout_end", trainer=self, batch=batch)

        experience = _unscored(batch)
        scoring = flow.start_scoring(batch) if algorithm.needs_reward else None
        if not flow.reward_is_apart:
            self._take_scores(experience, scoring)
        experience.old_logprobs = self._old_logprobs(batch)
        experience.ref_logprobs = flow.reference_logprobs(batch) if algorithm.needs_reference else None
        experience.values = flow.values(batch) if algorithm.needs_critic else None
        if flow.reward_is_apart:  # it has scored meanwhile
            self._take_scores(experience, scoring)
        with flow.strategy.phase("actor", "advantages"):
            figures = algorithm.compute_advantages(experience, flow.strategy.group("actor", "scores"))
        flow.call("on_advantages_computed", trainer=self, experience=experience)

        algorithm.update(flow, experience, self._minibatch_rows, self.epochs)

        for name, values in figures.items():
            flow.metrics.mean(f"rollout/{name}", values, self._speaks)
        with flow.strategy.phase("all roles", "metrics"):
            metrics = flow.step_metrics()
        algorithm.after_step(metrics)
        self._rollout_gap = metrics.get("actor/rollout_gap_max", self._rollout_gap)
        return metrics

    @property
    def global_step(self) -> int:
        """The step in the logs and in the seeds: steps done, counted on from ``first_step``."""
        return self.first_step + self.completed_steps

    def _finish_step(self, metrics: dict[str, float], waited: float, seconds: float, loader: Any) -> None:
        step = self.global_step
        metrics["time/data_wait"] = waited
        metrics["time/step"] = seconds
        times = StepTimes(seconds, waited, metrics["time/rollout_wait"])
        metrics["time/idle_share"] = times.idle
        self._warn_once_of_idling(times)
        if self._holds_actor:
            metrics["learning_rate"] = self.dataflow.optimizers["actor"].param_groups[0]["lr"]
        self.completed_steps += 1
        self._loader_state = loader.state_dict()
        self.fabric.call("on_step_end", trainer=self, step=step, metrics=metrics)
        self.fabric.log_dict(metrics, step=step)

    def _warn_once_of_idling(self, times: StepTimes) -> None:
        self._step_times = [*self._step_times[1 - IDLE_WINDOW :], times]
        advice = advise_ratio(self._step_times, self.rollout_batch_size, self.update_batch_size)
        if advice is not None and not self._advised:
            self._advised = True
            if self.fabric.is_global_zero:
                warnings.warn(f"RLTrainer: {advice}", stacklevel=4)

    # ---- parts of a step ---------------------------------------------------------------------------------------------

    def _take_scores(self, experience: Experience, scoring: Scoring | None) -> None:
        """Wait for the scores, where there is a reward, and fill them in."""
        if scoring is not None:
            scored = self.dataflow.finish_scoring(scoring)
            experience.scores, experience.valid = scored.scores, scored.valid
        self.dataflow.call("on_rewards_computed", trainer=self, experience=experience)

    def _old_logprobs(self, batch: RolloutBatch) -> torch.Tensor | None:
        """The log-probs that ratios are taken against; None lets the update take its own."""
        single_update = self.epochs == 1 and len(self._minibatch_rows) == 1
        if not self.algorithm.needs_reward or (
            self.old_logprobs == "auto" and single_update and not self.algorithm.needs_old_logprobs
        ):
            return None
        close = self._rollout_gap is not None and self._rollout_gap <= ROLLOUT_GAP_BOUND
        if self.old_logprobs == "rollout" or (self.old_logprobs == "auto" and close):
            return batch.rollout_logprobs
        return self.dataflow.logprobs(batch)

    def _collect(self, prompts: PromptBatch) -> RolloutBatch:
        """Let the algorithm collect sequences; a rank that cannot tells the others, so that none waits for it."""
        batch, error = None, None
        try:
            with self.dataflow.scoring_meanwhile():
                batch = self.algorithm.collect(self.dataflow, prompts, self.sampling, self.global_step)
        except Exception as problem:  # raised again by the gate, on every rank
            error = problem
        waited = self.dataflow.gate.meet("the rollout phase", error)
        if batch is None:
            raise RuntimeError(f"{type(self.algorithm).__name__}.collect returned nothing")
        self._record_rollout(batch, waited)
        return batch

    def _record_rollout(self, batch: RolloutBatch, waited: float) -> None:
        metrics, lengths = self.dataflow.metrics, batch.response_lengths.double()
        metrics.mean("rollout/response_length", lengths, self._speaks)
        metrics.mean("rollout/truncated", batch.truncated.double(), self._speaks)
        metrics.total("rollout/sequences", len(batch), self._speaks)
        metrics.total("rollout/prompt_tokens", batch.prompt_lengths.sum(), self._speaks)
        metrics.total("rollout/response_tokens", batch.response_lengths.sum(), self._speaks)
        metrics.mean("time/rollout_wait", torch.tensor([waited]), self._holds_actor)

    def _set_learning_rates(self) -> None:
        scale = learning_rate_scale(self.completed_steps, self.warmup_steps, self.decay_steps)
        for optimizer in self.dataflow.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * scale

    # ---- state -------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write everything that a resumed run needs to one directory (a collective call)."""
        self.fabric.save(path, self._state())
        self.fabric.call("on_checkpoint_saved", trainer=self, path=Path(path))

    def load(self, path: str | Path) -> None:
        """Take up from a directory that ``save`` wrote, on this or another layout (a collective call)."""
        state = self._state()
        self.fabric.load(path, state)
        progress = state["trainer"]
        self.completed_steps = progress["completed_steps"]
        self.first_step = progress["first_step"]
        self._rollout_gap = progress["rollout_gap"]
        self.algorithm.load_state_dict(progress["algorithm"])
        self._loader_state = progress["data"]
        states = progress["random"]
        _restore_random_state(states[min(self.fabric.global_rank, len(states) - 1)])
        for name, callback in self._stateful_callbacks().items():
            if name in progress["callbacks"]:
                callback.load_state_dict(progress["callbacks"][name])
        self.fabric.call("on_checkpoint_loaded", trainer=self, path=Path(path))

    def _state(self) -> dict[str, Any]:
        flow = self.dataflow
        state: dict[str, Any] = {f"{role}_optimizer": optimizer for role, optimizer in flow.optimizers.items()}
        state.update(
            {role: module for role, module in flow.modules.items() if next(module.parameters(), None) is not None}
        )
        if flow.adapter_reference is not None:
            state["adapter_reference"] = flow.adapter_reference
        state["trainer"] = {
            "completed_steps": self.completed_steps,
            "first_step": self.first_step,
            "rollout_gap": self._rollout_gap,
            "algorithm": self.algorithm.state_dict(),
            "data": self._loader_state,
            "random": _of_every_rank(_random_state()),
            "callbacks": {name: callback.state_dict() for name, callback in self._stateful_callbacks().items()},
        }
        return state

    def _stateful_callbacks(self) -> dict[str, Any]:
        """Callbacks with a state, by class name. Roles are callbacks of Fabric too, and are saved as roles."""
        callbacks = [callback for callback in self.fabric._callbacks if not isinstance(callback, torch.nn.Module)]
        return {type(callback).__name__: callback for callback in callbacks if hasattr(callback, "state_dict")}

    # ---- checks ------------------------------------------------------------------------------------------------------

    def _check_sizes(self, samples: int) -> None:
        sizes = {
            "rollout_batch_size": self.rollout_batch_size,
            "update_batch_size": self.update_batch_size,
            "samples_per_prompt": samples,
            "epochs": self.epochs,
        }
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"RLTrainer got {name}={value}; it takes a whole number of at least 1.")
        if samples > 1 and not self.algorithm.needs_reward:
            raise ValueError(
                f"RLTrainer got samples_per_prompt={samples}, but {type(self.algorithm).__name__} samples nothing: "
                "its data has one response for a prompt. Leave samples_per_prompt out."
            )
        if self.update_batch_size > self.rollout_batch_size:
            raise ValueError(
                f"RLTrainer got update_batch_size={self.update_batch_size} > "
                f"rollout_batch_size={self.rollout_batch_size}; a "
                "mini-batch is a part of the rollout batch. Lower update_batch_size."
            )

    def _check_roles(self) -> None:
        algorithm, roles = self.algorithm, self.dataflow.modules
        adapter = getattr(roles["actor"], "has_adapter", False)
        wanted = {
            "critic": algorithm.needs_critic,
            "reward": algorithm.needs_reward,
            "reference": algorithm.needs_reference and not adapter,
        }
        for role, needed in wanted.items():
            if needed and role not in roles:
                raise ValueError(
                    f"{type(algorithm).__name__} needs a {role}, but the HybridDataFlow has only {sorted(roles)}; pass "
                    f"HybridDataFlow({role}=...)."
                )

    def _check_lengths(self, sampling: SamplingParams) -> None:
        model = getattr(self.dataflow.modules["actor"], "model", None)
        limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        prompt = self.data.max_prompt_length
        if self.algorithm.needs_reward and limit and prompt and prompt + sampling.max_new_tokens > limit:
            raise ValueError(
                f"RLTrainer: max_prompt_length + max_new_tokens = {prompt} + {sampling.max_new_tokens} = "
                f"{prompt + sampling.max_new_tokens} tokens exceed the actor's max_position_embeddings={limit}; lower "
                "one of them."
            )

    def _advise_ratio(self, data_ranks: int) -> None:
        ratio = self.rollout_batch_size / self.update_batch_size
        if self.algorithm.needs_reward and ratio not in (4, data_ranks) and self.fabric.is_global_zero:
            warnings.warn(
                f"RLTrainer: one rollout batch feeds {ratio:g} update batches ({self.rollout_batch_size} / "
                f"{self.update_batch_size}). 4, or the actor's data ranks ({data_ranks}), usually keeps both phases "
                "busy; time/idle_share in the log is what this run loses by waiting.",
                stacklevel=3,
            )


def _check_stages(fabric: Fabric, roles: Container[str], update_batch_size: int, samples: int) -> None:
    """Refuse mini-batches from which a pipeline gets fewer micro-batches than it has stages."""
    if not isinstance(fabric.strategy, HybridStrategy):
        return  # ``HybridDataFlow.setup`` refuses it
    for role in ("actor", "critic") if "critic" in roles else ("actor",):
        layout = fabric.strategy.layout(role)
        stages = layout.pipeline * (chunks_of(fabric.strategy.pipeline_schedule) if layout.pipeline > 1 else 1)
        if problem := rows_problem(role, update_batch_size, samples, layout.data_size, stages):
            raise ValueError(f"RLTrainer: {problem}")


def _rows_of(prompts_of_minibatches: list[int], samples: int) -> list[list[int]]:
    """This rank's row numbers of each mini-batch; the samples of a prompt are adjacent."""
    rows, start = [], 0
    for prompts in prompts_of_minibatches:
        rows.append(list(range(start, start + prompts * samples)))
        start += prompts * samples
    return rows


def _put_gradient_groups(fabric: Fabric, groups: Mapping[str, dist.ProcessGroup]) -> None:
    for role, group in groups.items():
        layout = fabric.strategy.layout(role)  # type: ignore[attr-defined]
        operation = "reduce" if len(layout.lines("shard")[0]) > 1 else "replicate"
        fabric.strategy.set_group(role, operation, group)  # type: ignore[attr-defined]


def _unscored(batch: RolloutBatch) -> Experience:
    device = batch.input_ids.device
    return Experience(
        batch, torch.zeros(len(batch), device=device), torch.ones(len(batch), dtype=torch.bool, device=device)
    )


def _of_every_rank(state: dict[str, Any]) -> list[dict[str, Any]]:
    if not dist.is_initialized():
        return [state]
    states: list[dict[str, Any]] = [state] * dist.get_world_size()
    dist.all_gather_object(states, state)
    return states


def _random_state() -> dict[str, Any]:
    version, keys, gauss = random.getstate()
    name, numpy_keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": [version, list(keys), gauss],
        "numpy": [name, torch.from_numpy(np.asarray(numpy_keys, dtype=np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(state: Mapping[str, Any]) -> None:
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, numpy_keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, numpy_keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
