"""A role cut by layers: which modules of it a rank keeps, and how the model's own forward runs on them alone.

Modules of other stages give way to stand-ins without parameters. The model runs as it is written: its embedding makes
nothing, the layer before the first one of the stage hands in the hidden states that the stage before has sent, layers
and norm of other stages pass on what they get. Names, masks and rotary embeddings stay the model's own, so that every
family works whose model is embeddings, layers and a norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_verl.parallel.structure import decoder_layers
from lightning_verl.pipeline.cut import Costs, cut_layers, describe, stages_of


@dataclass(frozen=True)
class Stage:
    """Consecutive layers of a model."""

    index: int
    """Which stage it is."""
    count: int
    """Stages of the model."""
    layers: range
    """Its layers."""

    @property
    def is_first(self) -> bool:
        """Whether it has the embeddings."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the final norm and all heads."""
        return self.index == self.count - 1


class Received:
    """What the stage before has sent, for the stand-ins of one model."""

    states: Tensor | None = None
    is_running: bool = False
    """Whether a stage runs; at any other time the model would leave out layers without a word."""


class _NoEmbedding(nn.Module):
    """Stands in for an embedding whose result no layer will see."""

    def __init__(self, received: Received, width: int) -> None:
        super().__init__()
        self._received, self._width = received, width

    def forward(self, ids: Tensor) -> Tensor:
        """Zeros ``[..., H]``, without memory of that size."""
        states = self._received.states
        dtype = torch.float32 if states is None else states.dtype
        return torch.zeros((), dtype=dtype, device=ids.device).expand(*ids.shape, self._width)


class _OtherLayer(nn.Module):
    """Stands in for a decoder layer of another stage: passes on what it gets, or hands in what was received."""

    def __init__(self, layer: nn.Module, received: Received) -> None:
        super().__init__()
        self._received, self.hands_in = received, False
        plain = {key: value for key, value in vars(layer).items() if isinstance(value, bool | int | float | str)}
        self.__dict__.update({key: value for key, value in plain.items() if key != "training"})  # models read them

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``[..., H]`` as it came, or what was received in its shape."""
        if not self._received.is_running:
            raise RuntimeError(
                "This rank has some layers of the model only, those of its pipeline stage, and it was called as a "
                "whole. Let HybridDataFlow run it (train, logprobs, values, rollout), or set its role's pp to 1."
            )
        states = self._received.states
        return hidden if states is None or not self.hands_in else states.view(hidden.shape)


class _Nothing(nn.Module):
    """Stands in for a norm of another stage, or a head that only the last one has."""

    def forward(self, hidden: Tensor) -> Tensor:
        """``hidden`` as it came."""
        return hidden


@dataclass
class Place:
    """A module that some stages have and others not."""

    owner: nn.Module
    name: str
    stand_in: nn.Module
    layer: int | None = None
    """Its number, of a decoder layer."""
    with_first: bool = False
    """Whether the first stage has it."""
    with_last: bool = False
    """Whether the last stage has it."""
    held: nn.Module | None = field(init=False)
    """The module itself; None where no stage of this rank has it."""

    def __post_init__(self) -> None:
        self.held = self.owner._modules[self.name]

    def runs_in(self, stage: Stage) -> bool:
        """Whether a stage runs it."""
        layer = self.layer is not None and self.layer in stage.layers
        return layer or (self.with_first and stage.is_first) or (self.with_last and stage.is_last)

    def put(self, module: nn.Module) -> None:
        """Let the model run this module in its place."""
        self.owner._modules[self.name] = module


class StagedRole:
    """This rank's stages of a role, whose module is cut in place.

    A stage is to be run inside of ``running``. Outside, the module has all that the rank keeps.

    Args:
        role: The role, a ``Role`` with a transformers model, not yet wrapped.
        rank: This rank's place in the pipeline.
        ranks: Ranks of the pipeline.
        chunks: Stages of each rank.

    Raises:
        ValueError: The role cannot be cut; the message has all reasons.
    """

    def __init__(self, role: nn.Module, rank: int, ranks: int, chunks: int = 1) -> None:
        if problems := staging_problems(role, ranks * chunks):
            raise ValueError(" ".join(problems))
        self._received = Received()
        count = ranks * chunks
        model: Any = role.model
        parts = cut_layers(stage_costs(model), count)
        self.stages = tuple(Stage(index, count, parts[index]) for index in stages_of(rank, ranks, chunks))
        """This rank's."""
        self.cut = describe(parts)
        """The layers of all stages, in words."""
        embedding, head = model.get_input_embeddings(), _head_of(model)
        is_tied = head is not None and head.weight is embedding.weight
        self.tied: nn.Module | None = None
        """The embedding where the head shares its weight, on the ranks of the first and the last stage."""
        self._places = [*find_places(model, self._received), *_role_places(role)]
        has_last = any(stage.is_last for stage in self.stages)
        for place in self._places:
            kept = any(place.runs_in(stage) for stage in self.stages)
            if is_tied and place.held is embedding and (kept or has_last):
                self.tied, kept = embedding, True  # for its weight, under the name that it has everywhere
            if not kept:
                place.held = None
                place.put(place.stand_in)

    @contextmanager
    def running(self, stage: Stage, received: Tensor | None) -> Iterator[None]:
        """Let the role run one of its stages while the context is open.

        Args:
            stage: One of ``stages``.
            received: Hidden states from the stage before, ``[tokens, H]``; None for the first.
        """
        for place in self._places:
            place.put(place.held if place.held is not None and place.runs_in(stage) else place.stand_in)
            if isinstance(place.stand_in, _OtherLayer):
                place.stand_in.hands_in = place.layer == stage.layers[0] - 1
        self._received.states, self._received.is_running = received, True
        try:
            yield
        finally:
            self._received.states, self._received.is_running = None, False
            for place in self._places:
                place.put(place.stand_in if place.held is None else place.held)


def find_places(model: Any, received: Received | None = None) -> Iterator[Place]:
    """The modules of a model that some stages have and others not.

    Args:
        model: A model that ``staging_problems`` has nothing against.
        received: What its stand-ins hand in.
    """
    received = received or Received()
    base = model.base_model
    width = base.config.get_text_config().hidden_size
    layers: Any = _layers_of(base)
    for number, layer in enumerate(layers):
        yield Place(layers, str(number), _OtherLayer(layer, received), layer=number)
    for name, child in base.named_children():
        if child is not layers and _has_parameters(child):
            if isinstance(child, nn.Embedding):
                yield Place(base, name, _NoEmbedding(received, width), with_first=True)
            else:
                yield Place(base, name, _Nothing(), with_last=True)
    for name, child in () if model is base else model.named_children():
        if child is not base and _has_parameters(child):
            yield Place(model, name, _Nothing(), with_last=True)


def _role_places(role: nn.Module) -> Iterator[Place]:
    """Heads that are the role's own."""
    for name, child in role.named_children():
        if child is not role.model and _has_parameters(child):
            yield Place(role, name, _Nothing(), with_last=True)


def staging_problems(role: nn.Module, stages: int) -> list[str]:
    """Every reason why a role cannot be cut into stages; none: it can.

    Args:
        role: The role, whole.
        stages: Stages of the pipeline.
    """
    name, model = type(role).__name__, getattr(role, "model", None)
    if not isinstance(model, PreTrainedModel) or not hasattr(role, "stage_states"):
        return [
            f"{name} cannot be cut into {stages} stages: it is not a role of lightning_verl.roles with a transformers "
            "model. Set its role's pp to 1."
        ]
    return model_problems(model, stages)


def model_problems(model: PreTrainedModel, stages: int) -> list[str]:
    """Every reason why a model cannot be cut into stages, see ``staging_problems``."""
    base: Any = model.base_model
    layers = _layers_of(base)
    if layers is None:
        return [
            f"{type(model).__name__} cannot be cut into {stages} stages: its decoder layers are not one list of "
            f"{type(base).__name__}'s own. Set its role's pp to 1."
        ]
    problems = []
    if len(layers) < stages:
        problems.append(
            f"{type(model).__name__} has {len(layers)} layers, fewer than the {stages} stages of its pipeline; lower "
            f"its role's pp to at most {len(layers)}."
        )
    unknown = [
        key
        for key, child in base.named_children()
        if child is not layers
        and _has_parameters(child)
        and not isinstance(child, nn.Embedding)
        and not _is_norm(child)
    ]
    own = [key for key, _ in (*base.named_parameters(recurse=False), *model.named_parameters(recurse=False))]
    if unknown or own:
        problems.append(
            f"{type(model).__name__} cannot be cut into {stages} stages: besides embeddings, layers and a final norm "
            f"it has {', '.join(dict.fromkeys([*unknown, *own]))}, and where that runs is not known. Set its role's "
            "pp to 1."
        )
    return problems


def stage_costs(model: Any) -> Costs:
    """What the parts of a role's model cost; of packed experts only those that a token is sent to."""
    config = model.config.get_text_config()
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 1

    def cost(module: nn.Module) -> int:
        packed = sum(p.numel() for key, p in module.named_parameters() if ".experts." in f".{key}")
        return sum(p.numel() for p in module.parameters()) - packed + packed * min(chosen, experts) // experts

    head = _head_of(model)
    return Costs(tuple(map(cost, _layers_of(model.base_model) or ())), last=0 if head is None else cost(head))


def _head_of(model: PreTrainedModel) -> Any:
    """The language-model head, None for a model without one."""
    return None if model.base_model is model else model.get_output_embeddings()


def _layers_of(base: nn.Module) -> nn.ModuleList | None:
    """The list of decoder layers, None if they are not one list that is the model's own."""
    found = decoder_layers(base)
    return next(
        (child for child in base.children() if isinstance(child, nn.ModuleList) and found and list(child) == found),
        None,
    )


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.LayerNorm | nn.RMSNorm) or type(module).__name__.endswith("Norm")
