"""Typed batches that travel through one RL step: prompts, then rollouts, then experience.

Shape letters: B prompts, N = B x n sequences (n samples a prompt, the samples of one prompt adjacent), P longest
prompt, T longest prompt + response, R longest response. Rows are right-padded: row ``i`` is ``input_ids[i,
:lengths[i]]``. With causal attention a real token never sees the padding behind it, so no attention mask is needed and
positions are 0, 1, 2...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_verl.data.packed_rows import PackedRows
from lightning_verl.data.packing import RowSize
from lightning_verl.data.transfer import to_device

TBatch = TypeVar("TBatch", bound="RowBatch")


class RowBatch:
    """What every batch can do: be cut by rows and moved to a device. Subclasses are dataclasses."""

    def __len__(self) -> int:
        raise TypeError(f"{type(self).__name__} must define its number of rows")

    def sizes(self) -> list[RowSize]:
        """The tokens of each row, and a number that rows of one prompt share, among these rows alone."""
        raise TypeError(f"{type(self).__name__} must define the sizes of its rows")

    def select(self: TBatch, rows: Sequence[int] | Tensor) -> TBatch:
        """Return the given rows, in the given order, as a new batch.

        Args:
            rows: Row numbers, a list or an int64 tensor ``[K]``.
        """
        index = torch.as_tensor(rows, dtype=torch.long)
        places: dict[torch.device, Tensor] = {}

        def take(value: Tensor | list[Any]) -> Tensor | list[Any]:
            if not isinstance(value, Tensor):
                return [value[row] for row in index.tolist()]
            if value.device not in places:
                places[value.device] = to_device(index, value.device)
            return value[places[value.device]]

        return self._map(take)

    def to(self: TBatch, device: torch.device | str, non_blocking: bool = False) -> TBatch:
        """Return the batch with every tensor on ``device``."""
        return self._map(
            lambda value: value.to(device, non_blocking=non_blocking) if isinstance(value, Tensor) else value
        )

    def pin_memory(self: TBatch) -> TBatch:
        """Return the batch with every tensor in pinned host memory (needs CUDA)."""
        return self._map(lambda value: value.pin_memory() if isinstance(value, Tensor) else value)

    def _map(self: TBatch, function: Any) -> TBatch:
        changed: dict[str, Any] = {}
        for item in fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            if isinstance(value, RowBatch):
                changed[item.name] = value._map(function)
            elif isinstance(value, Tensor | list):
                changed[item.name] = function(value)
        return replace(self, **changed)  # type: ignore[type-var]


def concat_rows(batches: Sequence[TBatch]) -> TBatch:
    """Join batches row after row; tensors of different widths are padded with 0 on the right.

    Fields that are not one entry a row (the temperature) are taken from the first batch.
    """
    first = batches[0]
    joined: dict[str, Any] = {}
    for item in fields(first):  # type: ignore[arg-type]
        values = [getattr(batch, item.name) for batch in batches]
        if isinstance(values[0], RowBatch):
            joined[item.name] = concat_rows(values)
        elif isinstance(values[0], Tensor):
            joined[item.name] = concat_padded(values)
        elif isinstance(values[0], list):
            joined[item.name] = [entry for value in values for entry in value]
    return replace(first, **joined)  # type: ignore[type-var]


def concat_padded(tensors: Sequence[Tensor]) -> Tensor:
    """Join tensors ``[N_i, ...]`` along dim 0; where dim 1 differs, the narrow ones are padded with 0."""
    if tensors[0].ndim < 2:
        return torch.cat(list(tensors))
    width = max(tensor.shape[1] for tensor in tensors)
    return torch.cat([torch.nn.functional.pad(tensor, (0, width - tensor.shape[1])) for tensor in tensors])


@dataclass
class PromptBatch(RowBatch):
    """Tokenised prompts, before any sampling."""

    ids: Tensor
    """Prompt token ids, int64 ``[B, P]``, right-padded."""
    lengths: Tensor
    """Tokens of each prompt, int64 ``[B]``."""
    indices: Tensor
    """Absolute place of each prompt in the data stream, int64 ``[B]``; it counts on over epochs and never repeats."""
    texts: list[str]
    """The prompts as text, after the chat template (B entries)."""
    fields: list[Mapping[str, Any]]
    """The other fields of each data row, for rewards (B entries)."""

    def __len__(self) -> int:
        return int(self.ids.shape[0])

    def sizes(self) -> list[RowSize]:
        """The prompts, each a group of its own; no response yet (waits for the device)."""
        return [RowSize(length, 0, row) for row, length in enumerate(self.lengths.tolist())]

    def token_lists(self) -> list[list[int]]:
        """The prompts as lists of token ids without padding."""
        return [row[:length] for row, length in zip(self.ids.tolist(), self.lengths.tolist(), strict=True)]


@dataclass
class RolloutBatch(RowBatch):
    """Prompts with their sampled responses, ready to be scored."""

    input_ids: Tensor
    """Prompt and response joined, int64 ``[N, T]``, right-padded."""
    prompt_lengths: Tensor
    """Prompt tokens of each row, int64 ``[N]``."""
    response_lengths: Tensor
    """Tokens that the policy produced, the end token included, int64 ``[N]``; 0 for a row with no response."""
    rollout_logprobs: Tensor
    """The engine's log-prob of each response token, at the sampling temperature, float32 ``[N, R]``, 0 at padding."""
    group_ids: Tensor
    """The prompt a row belongs to (``PromptBatch.indices``), int64 ``[N]``."""
    truncated: Tensor
    """True where the response hit its length limit, bool ``[N]``."""
    prompt_texts: list[str]
    """The prompts as text (N entries)."""
    response_texts: list[str]
    """The responses as text (N entries)."""
    fields: list[Mapping[str, Any]]
    """The other fields of each data row (N entries)."""
    temperature: float = 1.0
    """The temperature that log-probs are taken at."""
    weight_version: int = 0
    """The version of the weights that produced the responses."""
    packed: PackedRows | None = None
    """How the rows lie side by side for a pass without padding; what is cut or moved from such a batch has none."""

    def __len__(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def response_width(self) -> int:
        """R, the width of every response-aligned tensor."""
        return int(self.rollout_logprobs.shape[1])

    @property
    def lengths(self) -> Tensor:
        """Prompt and response tokens of each row, int64 ``[N]``."""
        return self.prompt_lengths + self.response_lengths

    @property
    def response_mask(self) -> Tensor:
        """True at the tokens that the policy produced, bool ``[N, R]``."""
        columns = torch.arange(self.response_width, device=self.input_ids.device)
        return columns < self.response_lengths[:, None]

    @property
    def response_ids(self) -> Tensor:
        """Response token ids, int64 ``[N, R]``, 0 at padding."""
        columns = torch.arange(self.response_width, device=self.input_ids.device)
        places = (self.prompt_lengths[:, None] + columns).clamp(max=max(self.input_ids.shape[1] - 1, 0))
        return self.input_ids.gather(1, places).masked_fill(~self.response_mask, 0)

    def sizes(self) -> list[RowSize]:
        """The tokens of each row, and a number that adjacent rows of one prompt share (waits for the device once).

        Prompts are compared token by token: rows of one ``group_ids`` that went on from different texts, as those of a
        dialogue may, are no group.
        """
        columns = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        prompts = self.input_ids.masked_fill(columns >= self.prompt_lengths[:, None], -1)
        differs = (prompts[1:] != prompts[:-1]).any(1) | (self.group_ids[1:] != self.group_ids[:-1])
        groups = torch.nn.functional.pad(differs.cumsum(0), (1, 0))[: len(self)]
        numbers = torch.stack([self.prompt_lengths, self.response_lengths, groups], dim=1).tolist()
        return [RowSize(*row) for row in numbers]

    def _map(self, function: Any) -> RolloutBatch:
        return replace(super()._map(function), packed=None)

    def narrowed(self, length: int, response_width: int) -> RolloutBatch:
        """The batch without columns behind the given ones.

        Args:
            length: Columns of ``input_ids`` to keep.
            response_width: Columns of response-aligned tensors to keep.
        """
        return replace(
            self,
            input_ids=self.input_ids[:, :length],
            rollout_logprobs=self.rollout_logprobs[:, :response_width],
            packed=None,
        )

    def with_packed(self, packed: PackedRows) -> RolloutBatch:
        """The batch with a way to run it without padding."""
        return replace(self, packed=packed)


@dataclass
class Experience(RowBatch):
    """A rollout batch with everything the update needs. Response-aligned tensors are ``[N, R]``, 0 outside the mask."""

    rollout: RolloutBatch
    """The sequences."""
    scores: Tensor
    """Sequence reward, float32 ``[N]``; 0 where ``valid`` is False."""
    valid: Tensor
    """False for rows that no reward scored; they take no part in statistics or losses, bool ``[N]``."""
    old_logprobs: Tensor | None = None
    """Log-probs of the policy before the update, ``[N, R]``; None: the update takes its own, detached."""
    ref_logprobs: Tensor | None = None
    """Log-probs of the reference policy, ``[N, R]``."""
    values: Tensor | None = None
    """The critic's values before the update, ``[N, R]``."""
    advantages: Tensor | None = None
    """``[N, R]``."""
    returns: Tensor | None = None
    """Targets of the critic, ``[N, R]``."""

    def __len__(self) -> int:
        return len(self.rollout)

    @property
    def lengths(self) -> Tensor:
        """Prompt and response tokens of each row, int64 ``[N]``."""
        return self.rollout.lengths

    @property
    def mask(self) -> Tensor:
        """True at the tokens that are trained on: response tokens of valid rows, bool ``[N, R]``."""
        return self.rollout.response_mask & self.valid[:, None]

    def need(self, name: str) -> Tensor:
        """A tensor that must have been filled in by now.

        Raises:
            RuntimeError: It was not.
        """
        tensor: Tensor | None = getattr(self, name)
        if tensor is None:
            raise RuntimeError(
                f"Experience.{name} is missing; compute it before the update (RLTrainer.step shows the order)."
            )
        return tensor

    def sizes(self) -> list[RowSize]:
        """The tokens and the group of each row (waits for the device)."""
        return self.rollout.sizes()

    def narrowed(self, length: int, response_width: int) -> Experience:
        """The experience without columns behind the given ones, see ``RolloutBatch.narrowed``."""
        names = ("old_logprobs", "ref_logprobs", "values", "advantages", "returns")
        present = {name: value for name in names if (value := getattr(self, name)) is not None}
        rollout = self.rollout.narrowed(length, response_width)
        return replace(self, rollout=rollout, **{name: v[:, :response_width] for name, v in present.items()})

    def with_packed(self, packed: PackedRows) -> Experience:
        """The experience with a way to run its rows without padding."""
        return replace(self, rollout=self.rollout.with_packed(packed))


@dataclass
class Figures(RowBatch):
    """One figure of each token, on its way back to the rows it belongs to."""

    values: Tensor
    """``[N, R]``."""

    def __len__(self) -> int:
        return int(self.values.shape[0])


@dataclass
class Scored(Figures):
    """Scores of sequences, on their way back: ``values`` is ``[N]``."""

    valid: Tensor
    """Whether they count, bool ``[N]``."""
