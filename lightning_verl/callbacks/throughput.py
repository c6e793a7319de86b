"""``Throughput``: tokens a second, seconds and memory of each phase, and model FLOPs utilisation."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_verl.models.quantize import whole_shape
from lightning_verl.strategies.dispatch import gather_counts

if TYPE_CHECKING:
    from lightning_verl.data.experience import RolloutBatch
    from lightning_verl.trainer import RLTrainer

_HOPPER_SXM_BF16_FLOPS = 989e12
"""Dense bf16 FLOP/s of an H100 or H200 on an SXM board, from NVIDIA's data sheets."""


class Throughput:
    """Adds how fast the step was to the metrics of every step.

    ========================================  =======================================================================
    ``throughput/tokens_per_second_per_gpu``  prompt and response tokens of all ranks / (``time/step`` x ranks)
    ``time/<phase>``                          seconds of a phase, on this rank
    ``memory/<phase>_gib``                    most GiB that PyTorch had allocated in it, on this rank's GPU (CUDA only)
    ``throughput/update_flops``               FLOPs of the actor's update, over all ranks (where the peak is known)
    ``throughput/mfu``                        ``throughput/update_flops`` / (``time/actor_update`` x peak x ranks)
    ========================================  =======================================================================

    Phases: ``rollout``, ``reward``, ``scoring`` (old and reference log-probs, values, advantages), ``critic_update``
    and ``actor_update``. With a reward on ranks of its own these passes run beside it, within ``reward``. On CUDA the
    device is synchronised where one ends and the next begins, and its peak memory statistics are reset at each start.

    Model FLOPs utilisation covers the actor's update alone. It counts what the mathematics asks for on real tokens,
    neither padding nor recomputation (Chowdhery et al., 2022, arXiv:2204.02311, appendix B). A sequence of L tokens
    costs, forward::

        2 x P x L  +  2 x layers x heads x head_dim x L^2

    P: elements of the matrices that multiply activations, the output head included (tied or not), the embedding look-up
    not. The second term is causal attention, half of the 4 x layers x heads x head_dim x L^2 of all pairs. An update
    costs 3 times the forward pass, less 2 x L for each element of a frozen matrix (below a LoRA adapter), whose own
    gradient is not computed; it is done ``epochs`` times. Models with matrices of more than two dims (packed experts,
    of which a token uses a few) get no such number. The peak is bf16's: in fp32 the number is a lower one than the
    device could reach.

    Args:
        peak_flops: The device's FLOP/s. None: 989e12 on an H100 or H200 (SXM), and no utilisation on anything else.

    Raises:
        ValueError: ``peak_flops`` is not positive.
    """

    def __init__(self, peak_flops: float | None = None) -> None:
        if peak_flops is not None and not peak_flops > 0:
            raise ValueError(
                f"Throughput got peak_flops={peak_flops}; it takes the device's FLOP/s, such as 989e12, or None."
            )
        self.peak_flops = peak_flops
        self._device = torch.device("cpu")
        self._cost: UpdateCost | None = None
        self._phase: str | None = None
        self._started = 0.0
        self._seconds: dict[str, float] = defaultdict(float)
        self._peak_bytes: dict[str, int] = {}

    def on_run_start(self, trainer: RLTrainer) -> None:
        """Find the device's peak and the cost of an update."""
        self._device = trainer.fabric.device
        if self.peak_flops is None:
            self.peak_flops = _known_peak(self._device)
        if self.peak_flops is not None:
            stages = trainer.dataflow.strategy.group("actor", "pipeline")
            self._cost = UpdateCost.of(trainer.dataflow.modules["actor"].model, stages)

    def on_step_start(self) -> None:
        """Forget what an interrupted step left."""
        self._phase = None
        self._seconds.clear()
        self._peak_bytes.clear()

    def on_rollout_start(self) -> None:
        """Begin ``rollout``."""
        self._enter("rollout")

    def on_rollout_end(self, trainer: RLTrainer, batch: RolloutBatch) -> None:
        """Count the FLOPs of the update to come, and begin ``reward``."""
        if self._cost is not None:
            flops = trainer.epochs * self._cost.flops(batch.lengths)
            counts = trainer.dataflow.strategy.layout("actor").speaks(trainer.fabric.global_rank)
            trainer.dataflow.metrics.total("throughput/update_flops", flops, counts)
        self._enter("reward")

    def on_rewards_computed(self) -> None:
        """Begin ``scoring``."""
        self._enter("scoring")

    def on_advantages_computed(self) -> None:
        """End ``scoring``."""
        self._enter(None)

    def on_critic_update_start(self) -> None:
        """Begin ``critic_update``."""
        self._enter("critic_update")

    def on_critic_update_end(self) -> None:
        """End ``critic_update``."""
        self._enter(None)

    def on_actor_update_start(self) -> None:
        """Begin ``actor_update``."""
        self._enter("actor_update")

    def on_actor_update_end(self) -> None:
        """End ``actor_update``."""
        self._enter(None)

    def on_step_end(self, trainer: RLTrainer, metrics: dict[str, float]) -> None:
        """Add everything to the log."""
        ranks = trainer.fabric.world_size
        tokens = metrics["rollout/prompt_tokens"] + metrics["rollout/response_tokens"]
        metrics["throughput/tokens_per_second_per_gpu"] = tokens / (metrics["time/step"] * ranks)
        metrics.update({f"time/{phase}": seconds for phase, seconds in self._seconds.items()})
        metrics.update({f"memory/{phase}_gib": peak / 2**30 for phase, peak in self._peak_bytes.items()})
        if self.peak_flops is not None and "throughput/update_flops" in metrics:
            capacity = self._seconds["actor_update"] * self.peak_flops * ranks
            metrics["throughput/mfu"] = metrics["throughput/update_flops"] / capacity

    def _enter(self, phase: str | None) -> None:
        """End the phase that is running and begin another, or none."""
        on_cuda = self._device.type == "cuda"
        if on_cuda:
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        if self._phase is not None:
            self._seconds[self._phase] += now - self._started
            if on_cuda:
                self._peak_bytes[self._phase] = torch.cuda.max_memory_allocated(self._device)
        if on_cuda and phase is not None:
            torch.cuda.reset_peak_memory_stats(self._device)
        self._phase, self._started = phase, now


@dataclass(frozen=True)
class UpdateCost:
    """What one pass of training over a sequence costs, see ``Throughput``."""

    trained: int
    """Elements of matrices that multiply activations and are trained."""
    frozen: int
    """Elements of those that are not."""
    attention: int
    """layers x heads x head_dim."""

    @classmethod
    def of(cls, model: Any, stages: dist.ProcessGroup | None = None) -> Self | None:
        """The cost of a causal transformers model, sharded or not; None with matrices of more than two dims.

        Args:
            model: The model, or this rank's stage of it.
            stages: The ranks that have the others (then a collective call).
        """
        lookups = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Embedding)}
        head = getattr(model.get_output_embeddings(), "weight", None)  # only the last stage has one
        matrices = [p for p in model.parameters() if p.ndim > 1 and (id(p) not in lookups or p is head)]
        parts = gather_counts(
            [
                sum(matrix.numel() for matrix in matrices if matrix.requires_grad),
                sum(math.prod(whole_shape(matrix)) for matrix in matrices if not matrix.requires_grad),
                sum(matrix.ndim > 2 for matrix in matrices),
            ],
            stages,
        )
        trained, frozen, others = parts.sum(0).tolist()
        if others:
            return None
        config = model.config.get_text_config()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            trained=trained,
            frozen=frozen,
            attention=config.num_hidden_layers * config.num_attention_heads * head_dim,
        )

    def flops(self, lengths: Tensor) -> Tensor:
        """FLOPs of one forward and backward pass, float64 without dims.

        Args:
            lengths: Tokens of each sequence, ``[N]``.
        """
        lengths = lengths.double()
        return self.flops_of(lengths.sum(), lengths.square().sum())

    def flops_of(self, tokens: Tensor, squares: Tensor) -> Tensor:
        """The same from the tokens of all sequences, and the sum of the squares of their lengths."""
        forward = 2 * (self.trained + self.frozen) * tokens + 2 * self.attention * squares
        return 3 * forward - 2 * self.frozen * tokens


def _known_peak(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    slower = any(board in name for board in ("PCIe", "NVL"))  # other clocks, so other peaks
    return _HOPPER_SXM_BF16_FLOPS if not slower and ("H100" in name or "H200" in name) else None
