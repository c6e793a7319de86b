"""Expert parallelism: the packed experts of a mixture divided over ranks, tokens sent to the rank that holds theirs.

Works on every model of transformers whose experts are one module with packed parameters (``gate_up_proj`` is
``[E, 2I, H]``, ``down_proj`` ``[E, H, I]``) and ``forward(hidden, top_k_index, top_k_weights)``: Qwen3-MoE and kin. The
experts are cut along their first dim over the expert axis, and over the tensor axis too. Ranks of the expert axis hold
different rows and exchange them; ranks of the tensor axis hold the same rows, so each computes its own experts' share
of them and the shares are summed. What an expert computes stays the model's own code.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from lightning_verl.parallel.collectives import ExchangeRows, SumGradient, SumOutput
from lightning_verl.parallel.fsdp import use_reduce_group


@dataclass(frozen=True)
class ExpertAxes:
    """Where the experts of a role lie, and the groups they communicate on."""

    cut: DeviceMesh
    """The axes that experts are divided over: (expert), (tensor) or (expert, tensor)."""
    shard: DeviceMesh
    """What FSDP2 cuts each part over: ``(shard,)`` or ``(replicate, shard)``."""
    reduce: dist.ProcessGroup | None
    """The group for their gradient reduce-scatter."""
    expert: dist.ProcessGroup | None
    """Ranks with other rows, which tokens are exchanged with; None: they are not."""
    tensor: dist.ProcessGroup | None
    """Ranks with the same rows, over which results are summed; None: there are no others."""


def expert_modules(module: nn.Module) -> list[nn.Module]:
    """The modules with packed experts inside a model, outermost first; empty for a dense one."""
    return [
        child
        for child in module.modules()
        if hasattr(child, "is_transposed") and hasattr(child, "num_experts") and not isinstance(child, LoraLayer)
    ]


def check_experts(module: nn.Module, expert: int, tensor: int, shards: int) -> None:
    """Refuse experts that cannot be divided over ``expert x tensor`` ranks, before anything is communicated.

    A model without experts passes: for it the expert axis is one more data axis.

    Args:
        module: The role.
        expert: Ranks of the expert axis.
        tensor: Ranks of the tensor axis.
        shards: Ranks that FSDP2 cuts each part over.

    Raises:
        ValueError: A size does not divide, or an adapter sits on the experts.
    """
    parts = expert * tensor
    if parts == 1:
        return
    for experts in expert_modules(module):
        name, number = type(experts).__name__, int(experts.num_experts)  # type: ignore[arg-type]
        if number % parts:
            raise ValueError(
                f"{name} has num_experts={number}, which ep x tp = {expert} x {tensor} = {parts} does not divide; "
                "choose an ep and a tp whose product does."
            )
        for key, parameter in experts.named_parameters():
            if parameter.shape[0] != number:
                raise ValueError(
                    f"{name}.{key} has shape {tuple(parameter.shape)}: its first dim is not the {number} experts, so "
                    "they cannot be divided. Set the role's ep and tp to 1."
                )
            if shard_dim(parameter.shape, parts, shards) is None:
                raise ValueError(
                    f"{name}.{key} has shape {tuple(parameter.shape)}; each of ep x tp = {parts} parts has "
                    f"{number // parts} experts, and dp={shards} divides neither that nor {parameter.shape[1]}. "
                    "Choose another dp, or fill the mesh with copies (replicate=True)."
                )
    for child in module.modules():
        if isinstance(child, LoraLayer) and expert_modules(child):
            raise ValueError(
                f"{type(module).__name__} has a LoRA adapter on packed experts (from target_parameters, or a target "
                f"named like their down_proj), which cannot be divided with them over ep x tp = {expert} x {tensor}. "
                "Target the attention's modules only, such as ['q_proj', 'v_proj'], or set ep and tp to 1."
            )


def cut_experts(module: nn.Module, axes: ExpertAxes | None) -> None:
    """Divide the experts of a role and let them dispatch, in place. Every rank must hold the same weights.

    Args:
        module: The role.
        axes: Where its experts lie; None: they stay whole.
    """
    if axes is None:
        return
    index = 0
    for size, coordinate in zip(axes.cut.shape, axes.cut.get_coordinate() or (), strict=True):
        index = index * size + coordinate
    for experts in expert_modules(module):
        for name, parameter in list(experts.named_parameters()):
            part = parameter.data.chunk(axes.cut.size())[index].clone()
            cut = DTensor.from_local(part, axes.cut, [Shard(0)] * axes.cut.ndim, run_check=False)
            experts.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))
        dispatch_experts(experts, axes.expert, axes.tensor)


def shard_experts(module: nn.Module, axes: ExpertAxes | None, policy: MixedPrecisionPolicy) -> None:
    """Make each module of divided experts an FSDP2 unit of its own, in place; before the layers around it.

    Args:
        module: The role.
        axes: Where its experts lie; None: they stay in the units of their layers.
        policy: The role's mixed-precision policy. Routing weights keep their dtype, as inside an uncut layer.
    """
    if axes is None:
        return
    policy = dataclasses.replace(policy, cast_forward_inputs=False)
    shards = axes.shard.size(axes.shard.ndim - 1)

    def place(parameter: nn.Parameter) -> Shard:
        return Shard(shard_dim(parameter.shape, axes.cut.size(), shards) or 0)

    for experts in expert_modules(module):
        fully_shard(experts, mesh=axes.shard, mp_policy=policy, reshard_after_forward=True, shard_placement_fn=place)
        if axes.reduce is not None:
            use_reduce_group([experts], axes.shard, axes.reduce)  # type: ignore[list-item]


def shard_dim(shape: Sequence[int], parts: int, shards: int) -> int | None:
    """The dim that FSDP2 cuts a part of packed experts on: a checkpoint would misplace unequal shards of a part.

    Args:
        shape: Of the whole parameter.
        parts: Ranks that the experts are divided over.
        shards: Ranks that FSDP2 cuts each part over.
    """
    if (shape[0] // parts) % shards == 0:
        return 0
    return 1 if shape[1] % shards == 0 else None


def dispatch_experts(
    experts: nn.Module,
    expert: dist.ProcessGroup | None,
    tensor: dist.ProcessGroup | None = None,
    tensor_rank: int | None = None,
) -> None:
    """Let a module of packed experts, which holds a part of them, act as the whole: in place, its forward only.

    Its parameters are this rank's experts, as plain tensors or DTensors, and may be replaced later. Experts lie in rank
    order, the tensor axis fastest: rank (e, t) holds numbers ``(e x tp + t) x n`` to ``+ n`` of E = ep x tp x n.
    Gradients of the experts are divided by the ranks of ``expert``, whose tokens all reach them: an average over the
    ranks that hold the same experts then is the average over all data ranks.

    Args:
        experts: The module; its ``num_experts`` is E.
        expert: Ranks with other rows, which all must run the forward together, without rows too; None: this rank alone.
        tensor: Ranks with the same rows; None: this rank alone.
        tensor_rank: This rank's place t among them; None: the one that it has in the group.
    """
    route = _Route(int(experts.num_experts), expert, tensor, tensor_rank)  # type: ignore[arg-type]
    compute = _local_forward(experts, route)

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if tensor is not None:
            hidden_states = SumGradient.apply(hidden_states, tensor)  # type: ignore[no-untyped-call]
            top_k_weights = SumGradient.apply(top_k_weights, tensor)  # type: ignore[no-untyped-call]
        tokens, choices = top_k_index.shape
        order, numbers, sent, received = route.plan(top_k_index)
        rows = route.exchange(hidden_states[order // choices], sent, received)
        if len(rows) == 0:  # a made-up row: every rank must enter the exchange of gradients, and have some for weights
            results = compute(torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), numbers.new_zeros(1))[:0]
        else:
            results = compute(rows, numbers)
        results = route.exchange(results, received, sent)
        placed = results.new_zeros(tokens * choices, results.shape[1]).index_copy(0, order, results)
        mixed = (
            (placed.view(tokens, choices, results.shape[1]) * top_k_weights.unsqueeze(-1))
            .sum(1)
            .to(hidden_states.dtype)
        )
        return mixed if tensor is None else SumOutput.apply(mixed, tensor)  # type: ignore[no-untyped-call]

    experts.forward = forward


class _Route:
    """Which (token, choice) pairs go to which rank, and how many come from each.

    Args:
        number: Experts on all ranks.
        expert: See ``dispatch_experts``.
        tensor: See ``dispatch_experts``.
        tensor_rank: See ``dispatch_experts``.
    """

    def __init__(
        self,
        number: int,
        expert: dist.ProcessGroup | None,
        tensor: dist.ProcessGroup | None,
        tensor_rank: int | None,
    ) -> None:
        self._expert = expert
        self.expert_ranks = 1 if expert is None else expert.size()
        self._tensor_ranks = 1 if tensor is None else tensor.size()
        place = 0 if tensor is None else tensor.rank()
        self._tensor_rank = place if tensor_rank is None else tensor_rank
        self._number = number
        self.own = number // (self.expert_ranks * self._tensor_ranks)
        """Experts on each rank."""

    def plan(self, top_k_index: Tensor) -> tuple[Tensor, Tensor, list[int], list[int]]:
        """Sort this rank's pairs by expert and agree on numbers (a collective call).

        Args:
            top_k_index: Experts of each token, int64 ``[T, k]``.

        Returns:
            The pairs to send, as positions in ``[T x k]``, sorted by expert; the own expert's number ``[R]`` of each
            row that will arrive; rows to send to, and to receive from, each rank of the expert axis.
        """
        pairs = top_k_index.reshape(-1)
        order = pairs.argsort(stable=True)
        if self._tensor_ranks > 1:  # the other experts' pairs are computed by the other tensor ranks
            order = order[(pairs[order] // self.own) % self._tensor_ranks == self._tensor_rank]
        counts = torch.bincount(pairs, minlength=self._number)
        sent = counts.view(self.expert_ranks, self._tensor_ranks, self.own)[:, self._tensor_rank].contiguous()
        received = torch.empty_like(sent)
        if self._expert is None:
            received = sent
        else:
            dist.all_to_all_single(received, sent, group=self._expert)
        out, back = torch.stack([sent.sum(1), received.sum(1)]).tolist()
        numbers = torch.arange(self.own, device=pairs.device).repeat(self.expert_ranks)
        return order, numbers.repeat_interleave(received.view(-1), output_size=sum(back)), out, back

    def exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send rows ``[sum(sent), H]`` and return those that arrive ``[sum(received), H]``."""
        if self._expert is None:
            return rows
        return ExchangeRows.apply(rows, sent, received, self._expert)  # type: ignore[no-any-return,no-untyped-call]


def _local_forward(experts: nn.Module, route: _Route) -> Callable[[Tensor, Tensor], Tensor]:
    """The model's own forward over the experts here: rows ``[R, H]`` and the own expert's number ``[R]`` of each.

    It runs on a stand-in with plain parameters, made anew each time, so that gathered weights are not kept.
    """
    names = [name for name, _ in experts.named_parameters()]
    model_forward: Any = type(experts).forward
    template: Any = copy.copy(experts)
    template._parameters = {}
    template.num_experts = route.own
    # A copy: generate switches the config to kernels that gather weights for each row; training and rollout must agree.
    template.config = copy.copy(experts.config)

    def compute(rows: Tensor, numbers: Tensor) -> Tensor:
        here = copy.copy(template)
        for name in names:
            vars(here)[name] = _plain(getattr(experts, name), route.expert_ranks)
        ones = torch.ones(len(rows), 1, dtype=rows.dtype, device=rows.device)
        return model_forward(here, rows, numbers[:, None], ones)  # type: ignore[no-any-return]

    return compute


def _plain(parameter: Tensor, divisor: int) -> Tensor:
    """The local tensor of a parameter, its gradient divided."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.view_as(parameter)
    if divisor > 1 and local.requires_grad:
        local.register_hook(lambda gradient: gradient / divisor)
    return local
