"""What every algorithm is: how experience is collected, what advantage it gives, and the losses of one update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_verl.algorithms.kl import AdaptiveKL, FixedKL
from lightning_verl.algorithms.losses import Normalizer, metric_mean
from lightning_verl.data.experience import Experience, PromptBatch, RolloutBatch
from lightning_verl.data.masks import masked_float

if TYPE_CHECKING:
    from lightning_verl.rollout.sampling import SamplingParams

Metrics = dict[str, Tensor]
Loss = Callable[[Any, Experience, Normalizer], tuple[Tensor, Metrics]]
"""From a role's module, a micro-batch and the counts of its mini-batch to the loss and its metrics."""


class DataFlow(Protocol):
    """What an algorithm needs of ``HybridDataFlow``."""

    def rollout(self, prompts: PromptBatch, sampling: SamplingParams, step: int) -> RolloutBatch:
        """Sample responses."""
        ...

    def demonstrations(self, prompts: PromptBatch, field: str) -> RolloutBatch:
        """Take the responses from a field of the data."""
        ...

    def train(self, role: str, experience: Experience, loss: Loss) -> None:
        """Take one optimizer step of a role on a mini-batch."""
        ...

    def call(self, hook: str, **arguments: Any) -> None:
        """Call a hook of the callbacks."""
        ...


class Algorithm(ABC):
    """An RL algorithm: small enough to read in one go, with no state but its KL controller.

    Attributes:
        needs_critic: Whether values are computed and a critic is trained.
        needs_reward: Whether rollouts are scored.
        samples_per_prompt: Samples a prompt where the trainer is not told.
        kl: The controller of the KL penalty's coefficient.
    """

    needs_critic = False
    needs_reward = True
    samples_per_prompt = 1

    def __init__(self, kl: float | FixedKL | AdaptiveKL = 0.0) -> None:
        self.kl = FixedKL(kl) if isinstance(kl, int | float) else kl

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs of the reference are needed: a KL penalty is on."""
        return self.kl.value > 0

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether old log-probs are needed even where one update follows one rollout."""
        return False

    def collect(self, flow: DataFlow, prompts: PromptBatch, sampling: SamplingParams, step: int) -> RolloutBatch:
        """Get the sequences of one step; by default by sampling from the actor."""
        return flow.rollout(prompts, sampling, step)

    @abstractmethod
    def compute_advantages(self, experience: Experience, group: dist.ProcessGroup | None) -> Metrics:
        """Fill in ``advantages`` (and ``returns``) of the experience, in place.

        Args:
            experience: With scores, and the log-probs and values that the algorithm needs.
            group: The actor's data axis, for statistics over all ranks.

        Returns:
            Figures of each row or token for the log, as tensors whose mean over ranks is taken.
        """

    @abstractmethod
    def actor_loss(
        self, logprobs: Tensor, entropy: Tensor, experience: Experience, normalizer: Normalizer
    ) -> tuple[Tensor, Metrics]:
        """The actor's loss on a micro-batch.

        Args:
            logprobs: The policy's log-probs of the response tokens, ``[N, R]``.
            entropy: Its entropy there, ``[N, R]``.
            experience: The micro-batch.
            normalizer: The counts of the whole mini-batch.

        Returns:
            The loss, and metrics as ``algorithms.losses`` defines them.
        """

    def critic_loss(self, values: Tensor, experience: Experience, normalizer: Normalizer) -> tuple[Tensor, Metrics]:
        """The critic's loss on a micro-batch, from its values ``[N, R]``."""
        raise TypeError(f"{type(self).__name__} has no critic.")

    def update(
        self, flow: DataFlow, experience: Experience, rows: Sequence[Sequence[int]] | None = None, epochs: int = 1
    ) -> None:
        """Train on a rollout batch: first the critic, then the actor.

        Args:
            flow: The data flow.
            experience: This rank's rows, with advantages.
            rows: This rank's rows of each mini-batch; None: one mini-batch of everything.
            epochs: Passes over the batch.
        """
        minibatches = [experience.select(part) for part in rows] if rows is not None else [experience]
        if self.needs_critic:
            flow.call("on_critic_update_start")
            for _ in range(epochs):
                for minibatch in minibatches:
                    flow.train("critic", minibatch, self._critic_pass)
            flow.call("on_critic_update_end")
        flow.call("on_actor_update_start")
        for epoch in range(epochs):
            for number, minibatch in enumerate(minibatches):
                first = epoch == number == 0 and self.needs_reward
                flow.train("actor", minibatch, self._first_actor_pass if first else self._actor_pass)
        flow.call("on_actor_update_end")

    def _critic_pass(self, critic: Any, experience: Experience, normalizer: Normalizer) -> tuple[Tensor, Metrics]:
        return self.critic_loss(critic(experience.rollout), experience, normalizer)

    def _actor_pass(self, actor: Any, experience: Experience, normalizer: Normalizer) -> tuple[Tensor, Metrics]:
        loss, metrics, _ = self._run_actor(actor, experience, normalizer)
        return loss, metrics

    def _first_actor_pass(self, actor: Any, experience: Experience, normalizer: Normalizer) -> tuple[Tensor, Metrics]:
        """The pass before any weight has changed; it also tells how far the engine's log-probs are off."""
        loss, metrics, logprobs = self._run_actor(actor, experience, normalizer)
        return loss, {**metrics, **rollout_gap(logprobs, experience, normalizer)}

    def _run_actor(self, actor: Any, experience: Experience, normalizer: Normalizer) -> tuple[Tensor, Metrics, Tensor]:
        logprobs, entropy = actor(experience.rollout, experience.rollout.temperature, True)
        loss, metrics = self.actor_loss(logprobs, entropy, experience, normalizer)
        metrics = {"loss": loss.detach() / normalizer.data_parallel_size, **metrics}
        metrics["entropy"] = metric_mean(entropy, experience.mask, normalizer=normalizer)
        return loss, metrics, logprobs

    def after_step(self, metrics: Mapping[str, float]) -> None:
        """Let the KL controller answer to what was measured, over all ranks."""
        measured = metrics.get("rollout/kl", metrics.get("actor/kl"))
        if measured is not None:
            self.kl.update(measured, int(metrics["rollout/sequences"]))

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {"kl": self.kl.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where ``state_dict`` was called."""
        self.kl.load_state_dict(state.get("kl", {}))


def rollout_gap(logprobs: Tensor, experience: Experience, normalizer: Normalizer) -> Metrics:
    """How far the rollout engine's log-probs are from training's at the same weights: largest and mean difference."""
    gap = (logprobs.detach() - experience.rollout.rollout_logprobs).abs()
    mask = experience.mask
    kept = masked_float(gap, mask)  # without looking at the mask, which the host would have to wait for
    largest = kept.max() if kept.numel() else gap.new_zeros(())
    return {"rollout_gap_max": largest, "rollout_gap": metric_mean(gap, mask, normalizer=normalizer)}


def last_token(mask: Tensor) -> Tensor:
    """True at the last masked token of each row, bool ``[N, R]``."""
    behind = torch.nn.functional.pad(mask[:, 1:], (0, 1))
    return mask & ~behind
