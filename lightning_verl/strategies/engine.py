"""The 3D hybrid engine: one actor, trained in its update layout, generating in its rollout layout.

The training shards are what counts. For a rollout they are moved to where the rollout layout wants them, cast to the
compute dtype before they travel, and put into a skeleton of the model; at the end the skeleton is emptied, so that
there is no second copy that could drift. What a rank already holds does not move.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from lightning_verl.models.quantize import expanded, is_quantized
from lightning_verl.parallel.expert import check_experts, dispatch_experts, expert_modules
from lightning_verl.parallel.rollout import RolloutCut, cut_forwards, rollout_cuts
from lightning_verl.parallel.tensor import check_tensor_parallel
from lightning_verl.resharding.buckets import Move
from lightning_verl.resharding.executor import Resharder, ReshardReport
from lightning_verl.resharding.layouts import local_part
from lightning_verl.resharding.planner import Cut, TensorLayout, plan_tensor
from lightning_verl.resharding.sinks import RolloutModule, merge, plain_name
from lightning_verl.strategies.layout import EXPERT_CUTS
from lightning_verl.strategies.sources import Source, join_stages, source_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lightning_verl.strategies.hybrid import HybridStrategy

RolloutWeights = Literal["shared", "merged", "adapter"]
"""How a rollout engine gets weights: it shares the rollout module's; or it has its own and is handed whole tensors for
each version, with LoRA adapters merged in or beside them."""


class HybridEngine:
    """Holds the rollout module of one actor and fills it.

    Args:
        strategy: Knows the layouts and groups.
        model: The actor's model, on its device and not yet cut.
        bucket_bytes: Most bytes that one bucket of a resharding takes through buffers on a rank.
        weights: How the rollout engine gets them. ``"shared"``: it generates with the rollout module. Else it has its
            own and takes whole tensors, which every rank then holds until they are handed over: ``"merged"`` with
            LoRA adapters added to them, ``"adapter"`` with adapters beside them.

    Raises:
        ValueError: The model cannot be cut over the rollout's tensor ranks, or has adapters that cannot be merged.
    """

    def __init__(
        self, strategy: HybridStrategy, model: PreTrainedModel, bucket_bytes: int, weights: RolloutWeights = "shared"
    ) -> None:
        self._strategy = strategy
        self._bucket_bytes = bucket_bytes
        self._trained: nn.Module = model
        self._rollout = strategy.layout("rollout")
        if self._rollout.tensor > 1:
            check_tensor_parallel(model, self._rollout.tensor)
        self._view = RolloutModule(model)
        self._cuts: dict[str, RolloutCut] = {}
        self._experts: set[str] = set()
        self._merges = weights != "adapter"
        self._adapters: dict[str, Tensor] = {}
        if weights == "shared":
            self._cut_module(model)
        self._resharder: Resharder | None = None  # both are made on first use: only then is the model sharded
        self._sources: dict[str, nn.Parameter] = {}
        self.report: ReshardReport | None = None
        """What the last resharding cost."""

    def _cut_module(self, model: PreTrainedModel) -> None:
        """Let each rank of the rollout layout generate with its part of the weights."""
        strategy = self._strategy
        check_experts(model, self._rollout.expert, self._rollout.tensor, shards=1)
        self._cuts = rollout_cuts(self._view.module) if self._rollout.tensor > 1 else {}
        group = strategy.group("rollout", "tensor")
        if group is not None and self._rollout.tensor > 1:
            ranks = torch.distributed.get_process_group_ranks(group)
            cut_forwards(self._view.module, group, tuple(map(self._rollout.tensor_rank, ranks)))
        self._experts = self._divide_experts()

    def _divide_experts(self) -> set[str]:
        """Let the experts of the rollout module dispatch, where they are divided; the names of their parameters."""
        layout, strategy = self._rollout, self._strategy
        if layout.expert * layout.tensor == 1:
            return set()
        expert = strategy.group("rollout", "expert") if layout.expert > 1 else None
        tensor = strategy.group("rollout", "tensor") if layout.tensor > 1 else None
        divided = set()
        for experts in expert_modules(self._view.module):
            dispatch_experts(experts, expert, tensor, layout.tensor_rank(strategy.global_rank))
            divided |= {id(parameter) for parameter in experts.parameters()}
        return {name for name, parameter in self._view.module.named_parameters() if id(parameter) in divided}

    @property
    def module(self) -> PreTrainedModel:
        """The model that generates. Without weights outside of ``weights``."""
        return self._view.module  # type: ignore[no-any-return]

    def aligned_dims(self) -> dict[str, int]:
        """The dim for FSDP2 to cut, by name in the actor, so that update shards lie inside rollout shards.

        Only where the rollout is cut finer than the update layout, and only dims other than 0, which is the default.
        """
        if self._rollout.tensor <= self._strategy.layout("actor").tensor:
            return {}
        cuts = {f"model.{name}": self._cuts.get(plain_name(name)) for name, _ in self._trained.named_parameters()}
        return {name: cut.dim for name, cut in cuts.items() if cut is not None and cut.dim}

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Hold the weights as they are now in the rollout module (a collective call of the actor's ranks).

        The actor is in its update layout, with nothing gathered.
        """
        self._sources = self._sources or {plain_name(n): p for n, p in self._trained.named_parameters()}
        with self._strategy.phase("actor", "reshard"), torch.no_grad():
            resharder = self._resharder = self._resharder or self._plan()
            device = self._strategy.root_device
            tensors = resharder.run({name: self._held(parameter, device) for name, parameter in self._sources.items()})
            for adapter in self._view.adapters:
                a, b = tensors.pop(adapter.a), tensors.pop(adapter.b)
                if self._merges:
                    merge(tensors[adapter.weight], a, b, adapter)
                else:
                    self._adapters |= {adapter.a: a, adapter.b: adapter.scale * b}
            self._view.fill(tensors)
            del tensors
            self.report = resharder.report()
            if self._strategy.offload_parameters:
                resharder.forget()
        try:
            yield
        finally:
            self._view.drop()
            self._adapters = {}

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights for an engine that has its own, while ``weights`` is open: name and tensor, tied ones once.

        Adapters that are not merged follow, B times their scale.
        """
        yield from self._view.module.named_parameters()
        yield from self._adapters.items()

    def _plan(self) -> Resharder:
        """How every parameter gets from the update layout to where the rollout wants it."""
        adapters = self._view.adapters
        wanted = {name: self._target(self._cuts.get(name)) for name in self._view.shapes}
        experts = TensorLayout(self._rollout.grid(experts=True), EXPERT_CUTS)
        wanted.update(dict.fromkeys(self._experts, experts))
        for adapter in adapters:  # the halves are cut as the weight is, so that each rank merges its part
            cut = self._cuts.get(adapter.weight)
            wanted[adapter.a] = self._target(cut if cut and cut.dim == 1 else None)
            wanted[adapter.b] = self._target(cut if cut and cut.dim == 0 else None)
        adapted = {adapter.weight for adapter in adapters}
        dtype = self._strategy.hybrid_precision.compute_dtype
        moves = {}
        for name, source in self._all_sources().items():
            if name in wanted:
                plan = plan_tensor(source.shape, source.layout, wanted[name])
                cast = dtype if name in self._view.shapes else source.dtype
                # Codes are expanded for the rollout alone, in the dtype that it wants.
                is_cast = not source.in_codes and cast != source.dtype
                moves[name] = Move(plan, cast, is_cast=is_cast, may_alias=source.in_codes or name not in adapted)
        return Resharder(moves, self._strategy.group("actor", "reshard"), self._bucket_bytes)

    def _held(self, parameter: Tensor, device: torch.device) -> Tensor:
        """What this rank holds of a parameter, on the device unless shards live in host memory; codes expanded."""
        if is_quantized(parameter):
            return expanded(parameter, self._strategy.hybrid_precision.compute_dtype)
        return local_part(parameter).to(device)

    def _all_sources(self) -> dict[str, Source]:
        """How all parameters lie, also those of stages that are not here (a collective call of the stages)."""
        layout = self._strategy.layout("actor")
        stage = layout.stage(self._strategy.global_rank)
        own = {name: source_of(parameter, layout, (stage,)) for name, parameter in self._sources.items()}
        return own if layout.pipeline == 1 else join_stages(own, layout, self._strategy.group("actor", "pipeline"))

    def _target(self, cut: RolloutCut | None) -> TensorLayout:
        return TensorLayout(self._rollout.grid(), () if cut is None else (Cut("tensor", cut.dim),))
