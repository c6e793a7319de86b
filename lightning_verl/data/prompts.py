"""The data set of prompts: any source of rows in, batches of token ids out, tokenised ahead of the training loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import torch
from lightning.fabric.utilities import rank_zero_warn

from lightning_verl.data.loader import BatchBuilder, EncodePool, PromptLoader, PromptStream
from lightning_verl.data.rows import EncodedPrompt, PromptEncoder, PromptRows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Overlong = Literal["error", "filter", "left", "right"]
"""What happens to a prompt over the limit: it is an error, it is left out, or it is cut on its left or right side."""
OnBadRow = Literal["error", "skip"]
"""What happens to a row without a usable prompt."""

_ENCODE_BLOCK = 1024
"""Rows that each worker gets at a time when all rows are tokenised up front; bounds what lies in the queues."""
_WORKERS_PER_DEVICE = 2
"""Tokenising workers a CUDA device that keep up with it as a rule; fewer give a warning."""


class IndexedRows(Protocol):
    """Rows that are fetched by number, such as one split of a Hugging Face dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


class AsyncRolloutDataset:
    """Prompts for rollouts, tokenised beside the training loop.

    A prompt is a text or a list of chat messages, which go through the tokenizer's chat template with the generation
    prompt added. Either way the token ids have exactly one BOS where the tokenizer uses one (see `PromptEncoder`). The
    other keys of a row reach the reward as ``PromptBatch.fields``, untouched.

    Every row is checked in the constructor, in the main process. With ``max_prompt_length`` and ``overlong="error"`` or
    ``"filter"``, all rows are also tokenised there, once, by ``num_workers`` processes, and their token ids are kept in
    memory (4 bytes a token); otherwise rows are tokenised when the loader comes to them.

    Args:
        source: Path of a JSONL file, an iterable of mappings with an end, or an object with ``__len__`` and
            ``__getitem__`` that gives mappings, such as a split of a Hugging Face dataset (its rows stay on disk).
        tokenizer: A transformers tokenizer with a pad and an EOS token.
        max_prompt_length: Most tokens of a prompt, after the chat template and with BOS; a prompt of exactly this many
            is kept. None (the default) sets no limit.
        overlong: What happens to longer prompts. "error" (the default) raises and names the row; "filter" leaves them
            out and warns with their number; "left" and "right" cut tokens off that side (BOS stays in front; ``texts``
            keep the whole prompt).
        prompt_field: The key of the prompt in a row.
        shuffle: Whether each epoch has an order of its own, the same on all ranks.
        seed: Seed of these orders.
        epochs: Passes over the rows; None (the default) never ends.
        prefetch_factor: Tokenised batches that a loader keeps ready in host memory, in total, across epochs.
        num_workers: Processes that tokenise; 0 (the default) tokenises in the loader's background thread.
        on_bad_row: "error" (the default) raises at the first row without a usable prompt (broken JSON, not UTF-8, no
            ``prompt_field``, null, empty); "skip" leaves such rows out and warns with their number.
        pin_memory: Must stay False: a loader pins its batches by itself where CUDA is available.

    Raises:
        FileNotFoundError: There is no file at the path.
        TypeError: The source is of an unknown kind.
        ValueError: A setting is out of its range, the tokenizer lacks a pad or EOS token, a row is bad, a prompt is too
            long, or no prompt is left.
    """

    def __init__(
        self,
        source: str | Path | Iterable[Mapping[str, Any]] | IndexedRows,
        *,
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_length: int | None = None,
        overlong: Overlong = "error",
        prompt_field: str = "prompt",
        shuffle: bool = True,
        seed: int = 0,
        epochs: int | None = None,
        prefetch_factor: int = 4,
        num_workers: int = 0,
        on_bad_row: OnBadRow = "error",
        pin_memory: bool = False,
    ) -> None:
        _check_choice("overlong", overlong, get_args(Overlong))
        _check_choice("on_bad_row", on_bad_row, get_args(OnBadRow))
        _check_least("max_prompt_length", max_prompt_length, 1)
        _check_least("epochs", epochs, 1)
        _check_least("prefetch_factor", prefetch_factor, 0)
        _check_least("num_workers", num_workers, 0)
        if pin_memory:
            raise ValueError(
                "AsyncRolloutDataset: pin_memory=True is refused: the loader pins its batches by itself where CUDA is "
                "available, and pinned memory is of no use elsewhere; leave the argument out."
            )
        self._pad_token_id = _check_tokenizer(tokenizer)
        self.max_prompt_length = max_prompt_length
        self.prefetch_factor = prefetch_factor
        self.num_workers = num_workers
        self.seed = seed
        self.shuffle = shuffle
        self.epochs = epochs
        self._rows = PromptRows(source, prompt_field, on_bad_row)
        self.skipped = self._rows.skipped
        """Bad rows that were left out."""
        self.filtered = 0
        """Overlong prompts that were left out."""
        self._encoded: list[EncodedPrompt] | None = None
        first, place = self._rows.prompt(0), self._rows.place(0)
        if overlong == "left" or overlong == "right":
            self._encoder = PromptEncoder.create(tokenizer, first, place, limit=max_prompt_length, cut_side=overlong)
        else:
            self._encoder = PromptEncoder.create(tokenizer, first, place)
            if max_prompt_length is not None:
                self._encoded = self._encode_within(max_prompt_length, overlong)

    def __len__(self) -> int:
        """Rows of an epoch: those of the source, less the bad and the overlong ones that were left out."""
        return len(self._rows)

    def loader(self, batch_size: int, rows: Sequence[int] | None = None, *, device_count: int = 1) -> PromptLoader:
        """Make a loader over the stream of prompts, from its start.

        Args:
            batch_size: Prompts of a global batch, over all ranks.
            rows: The positions of each global batch that this rank holds, as from `rollout_rows`, in the order that
                they are wanted; may be empty. None takes all.
            device_count: Devices that this process feeds; where CUDA is available, fewer than two workers a device give
                a warning.

        Raises:
            ValueError: ``batch_size`` or ``device_count`` is below 1, ``rows`` has positions outside the batch or
                twice, or the whole stream fills no batch.
        """
        _check_least("batch_size", batch_size, 1)
        _check_least("device_count", device_count, 1)
        positions = list(range(batch_size)) if rows is None else [int(row) for row in rows]
        outside = [position for position in positions if not 0 <= position < batch_size]
        if outside or len(set(positions)) < len(positions):
            raise ValueError(
                f"AsyncRolloutDataset: rows={positions} must be different positions in [0, {batch_size}), the global "
                "batch; take them from rollout_rows(batch_size, ...)."
            )
        least = _WORKERS_PER_DEVICE * device_count
        if torch.cuda.is_available() and self.num_workers < least:
            rank_zero_warn(
                f"AsyncRolloutDataset: num_workers={self.num_workers} is below {_WORKERS_PER_DEVICE} a device "
                f"({least} for device_count={device_count}), so devices may wait for tokenised prompts; raise "
                "num_workers, and see PromptLoader.wait_seconds."
            )
        builder = BatchBuilder(
            rows=self._rows,
            encoded=self._encoded,
            encoder=self._encoder,
            stream=PromptStream(len(self), seed=self.seed, shuffle=self.shuffle, epochs=self.epochs),
            batch_size=batch_size,
            positions=positions,
            pad_token_id=self._pad_token_id,
        )
        num_workers = self.num_workers if self._encoded is None else 0
        return PromptLoader(builder, prefetch_factor=self.prefetch_factor, num_workers=num_workers)

    def _encode_within(self, limit: int, overlong: Literal["error", "filter"]) -> list[EncodedPrompt]:
        """Tokenise all rows and deal with those over the limit."""
        encoded = self._encode_all()
        lengths = [len(prompt.ids) for prompt in encoded]
        kept = [row for row, length in enumerate(lengths) if length <= limit]
        self.filtered = len(lengths) - len(kept)
        if not self.filtered:
            return encoded
        found = f"{self.filtered} of {len(lengths)} prompts are longer than max_prompt_length={limit} tokens"
        if overlong == "error":
            first = next(row for row, length in enumerate(lengths) if length > limit)
            raise ValueError(
                f"AsyncRolloutDataset: the prompt at {self._rows.place(first)} is too long, {lengths[first]} > {limit} "
                f"tokens ({found}, the longest {max(lengths)}). Raise max_prompt_length, or pass overlong='filter', "
                "'left' or 'right'."
            )
        if not kept:
            raise ValueError(
                f"AsyncRolloutDataset: overlong='filter' leaves no prompt: {found}, the shortest {min(lengths)}. Raise "
                "max_prompt_length, or cut prompts with overlong='left' or 'right'."
            )
        rank_zero_warn(
            f"AsyncRolloutDataset: overlong='filter' left out {self.filtered} rows: {found}, the longest "
            f"{max(lengths)}."
        )
        self._rows.keep(kept)
        return [encoded[row] for row in kept]

    def _encode_all(self) -> list[EncodedPrompt]:
        encoded: list[EncodedPrompt] = []
        block = _ENCODE_BLOCK * max(self.num_workers, 1)
        with EncodePool(self._encoder, min(self.num_workers, len(self))) as pool:
            for start in range(0, len(self), block):
                rows = range(start, min(start + block, len(self)))
                encoded += pool.encode(
                    [self._rows.prompt(row) for row in rows], [self._rows.place(row) for row in rows]
                )
        return encoded


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"AsyncRolloutDataset: {name}={value!r} is unknown; choose one of {', '.join(choices)}.")


def _check_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ValueError(f"AsyncRolloutDataset: {name}={value}, but it must be at least {least}.")


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the pad id of a tokenizer that has what rollouts need."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"AsyncRolloutDataset: the {type(tokenizer).__name__} has no EOS token, so no response could end; set "
            "tokenizer.eos_token to the token that ends an answer."
        )
    if tokenizer.pad_token_id is None:
        raise ValueError(
            f"AsyncRolloutDataset: the {type(tokenizer).__name__} has no pad token; set tokenizer.pad_token = "
            "tokenizer.eos_token (lengths are kept beside the ids, so the pad id only fills space)."
        )
    return int(tokenizer.pad_token_id)
