"""Batch arithmetic of a run: prompts and rows of a data rank, mini-batches and micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_verl.data.sharding import local_minibatch_sizes


@dataclass(frozen=True)
class BatchSizes:
    """What a config says about batches, and the lengths that are planned for."""

    rollout_batch_size: int
    """Prompts of a step, over all ranks."""
    update_batch_size: int
    """Prompts of a mini-batch, over all ranks."""
    samples_per_prompt: int
    """Rows that a prompt becomes."""
    epochs: int
    """Passes over the rows of a step."""
    max_tokens_per_micro_batch: int
    """Positions that one forward pass may hold on a rank."""
    prompt_tokens: int
    """Tokens of the longest prompt."""
    response_tokens: int
    """Tokens of the longest response."""

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest row."""
        return self.prompt_tokens + self.response_tokens

    @property
    def ratio(self) -> float:
        """Mini-batches that a rollout batch feeds in one pass."""
        return self.rollout_batch_size / self.update_batch_size

    @property
    def rows_per_micro_batch(self) -> int:
        """Rows of the greatest length in one forward pass; a row over the limit has one for itself."""
        return max(1, self.max_tokens_per_micro_batch // self.row_tokens)


@dataclass(frozen=True)
class RoleBatch:
    """The part of the rows that a data rank of one role works on; of several numbers the largest over its ranks."""

    rows: tuple[int, int]
    """Rows of a step, on the data rank with the fewest and on the one with the most."""
    minibatch_rows: tuple[int, int]
    """Rows of a mini-batch, likewise."""
    minibatches: int
    """Mini-batches of one pass over the rows."""
    micro_batches: int
    """Micro-batches of a mini-batch, if every row has the greatest length."""
    micro_batch_tokens: int
    """Positions of a micro-batch then."""
    micro_batch_responses: int
    """Tokens of responses among them, the only ones with logits."""
    scoring_tokens: int
    """Positions of one forward pass in scoring then."""
    scoring_responses: int
    """Tokens of responses among them."""

    @classmethod
    def of(cls, sizes: BatchSizes, data_size: int, as_the_actor: bool = True) -> RoleBatch:
        """The part of a data rank.

        Args:
            sizes: The batches.
            data_size: Data ranks of the role.
            as_the_actor: Whether rows lie as in the actor's layout, the samples of a prompt together. For a role with
                another grid they are divided one by one.
        """
        each = sizes.samples_per_prompt
        prompts = (sizes.rollout_batch_size, sizes.update_batch_size)
        if as_the_actor:
            shares = [local_minibatch_sizes(*prompts, data_size, rank) for rank in range(data_size)]
            totals = [sum(share) * each for share in shares]
            parts = [size * each for share in shares for size in share]
            rows, minibatch_rows = (min(totals), max(totals)), (min(parts), max(parts))
        else:
            rows = _shares(sizes.rollout_batch_size * each, data_size)
            minibatch_rows = _shares(sizes.update_batch_size * each, data_size)
        together, scored = (min(sizes.rows_per_micro_batch, most) for most in (minibatch_rows[1], rows[1]))
        return cls(
            rows=rows,
            minibatch_rows=minibatch_rows,
            minibatches=-(-sizes.rollout_batch_size // sizes.update_batch_size),
            micro_batches=-(-minibatch_rows[1] // together),
            micro_batch_tokens=together * sizes.row_tokens,
            micro_batch_responses=together * sizes.response_tokens,
            scoring_tokens=scored * sizes.row_tokens,
            scoring_responses=scored * sizes.response_tokens,
        )


def _shares(count: int, parts: int) -> tuple[int, int]:
    """The smallest and the largest of equal parts."""
    return count // parts, -(-count // parts)
