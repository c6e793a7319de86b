"""Builds a model with memory for the stages of this rank only; its other modules stay on torch's meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from lightning_verl.pipeline.cut import cut_layers, stages_of
from lightning_verl.pipeline.stages import Place, Stage, find_places, model_problems, stage_costs


@dataclass(frozen=True)
class Share:
    """A rank's part of a pipeline."""

    rank: int
    """Its place."""
    ranks: int
    """Ranks of the pipeline."""
    chunks: int
    """Stages a rank."""


_share_of: ContextVar[Callable[[str], Share | None]] = ContextVar("share_of", default=lambda role: None)


@contextmanager
def stages_only(share_of: Callable[[str], Share | None]) -> Iterator[None]:
    """Let roles that are built while the context is open have memory for this rank's stages only.

    Args:
        share_of: This rank's part, by role; None: all of the model.
    """
    token = _share_of.set(share_of)
    try:
        yield
    finally:
        _share_of.reset(token)


def share_of(role: str) -> Share | None:
    """What of a role to build now; None: all of its model."""
    return _share_of.get()(role)


def read_stages(model_class: type[PreTrainedModel], source: str, share: Share, **options: Any) -> PreTrainedModel:
    """Read the weights of some stages from a folder or a hub name; the others are on the meta device, without memory.

    transformers reads what a model has a place for. So the other stages are put away before it reads, and put back.

    Args:
        model_class: The class of the model.
        source: Where the weights are.
        share: Which stages.
        options: Of ``from_pretrained``.
    """
    away: list[Place] = []

    class Staged(model_class):  # type: ignore[misc, valid-type]
        _keys_to_ignore_on_load_unexpected = (r".",)

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            away.extend(_put_away(self, share))

    Staged.__name__ = model_class.__name__  # for messages
    model: PreTrainedModel = Staged.from_pretrained(source, **options)
    model.__class__ = model_class
    _put_back(away)
    return model


def draw_stages(make: Callable[[PretrainedConfig], PreTrainedModel], config: Any, share: Share) -> PreTrainedModel:
    """Draw random weights for some stages; the others are on the meta device, without memory.

    Args:
        make: Builds the model.
        config: Its config.
        share: Which stages.
    """
    device = torch.get_default_device()
    with torch.device("meta"):
        model = make(config)
    away = _put_away(model, share)
    model.to_empty(device=device)
    model.init_weights()
    _put_back(away)
    return model


def _put_away(model: PreTrainedModel, share: Share) -> list[Place]:
    """Put stand-ins in place of the modules of other stages; nothing where the model cannot be cut."""
    count = share.ranks * share.chunks
    if model_problems(model, count):
        return []  # set-up will say so
    parts = cut_layers(stage_costs(model), count)
    stages = [Stage(index, count, parts[index]) for index in stages_of(share.rank, share.ranks, share.chunks)]
    is_tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
    ends = (model.get_input_embeddings(), model.get_output_embeddings()) if is_tied else ()
    away = []
    for place in find_places(model):
        is_end = any(place.held is end for end in ends)  # of tied ones reading wants both
        if not is_end and not any(place.runs_in(stage) for stage in stages):
            away.append(place)
            place.put(place.stand_in)
    return away


def _put_back(away: list[Place]) -> None:
    for place in away:
        if place.held is not None:
            place.put(place.held)
