"""Batch arithmetic of a run: prompts and rows of a data rank, mini-batches and micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_verl.data.microbatches import MicroBatches, Packing
from lightning_verl.data.packing import RowSize
from lightning_verl.data.sharding import local_minibatch_sizes
from lightning_verl.pipeline.order import micro_batch_limit


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
    """Tokens that one forward pass may hold on a rank."""
    prompt_tokens: int
    """Tokens of the longest prompt."""
    response_tokens: int
    """Tokens of the longest response."""
    packing: Packing = "padded"
    """How rows run together."""

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest row."""
        return self.prompt_tokens + self.response_tokens

    @property
    def ratio(self) -> float:
        """Mini-batches that a rollout batch feeds in one pass."""
        return self.rollout_batch_size / self.update_batch_size

    def micro_batches(self, rows: int, together: bool, stages: int = 1) -> tuple[int, int, int]:
        """How rows of the greatest length are cut.

        Args:
            rows: How many.
            together: Whether the samples of a prompt lie together; else each is taken to have a prompt of its own.
            stages: Ranks of the role's pipeline, which wants several micro-batches.

        Returns:
            Micro-batches, and of the one with the most tokens those tokens and the tokens of responses among them.
        """
        shares = self.packing == "shared" and together and self.samples_per_prompt > 1
        groups = [row // self.samples_per_prompt if shares else row for row in range(rows)]
        limit = self.max_tokens_per_micro_batch
        if stages > 1:
            prompts = len(set(groups)) * self.prompt_tokens
            limit = micro_batch_limit(prompts + rows * self.response_tokens, limit, stages)
        if shares:
            sizes = [RowSize(self.prompt_tokens, self.response_tokens, group) for group in groups]
            bins = MicroBatches.cut(sizes, limit, "shared").bins
            tokens = [
                len({groups[row] for row in part}) * self.prompt_tokens + len(part) * self.response_tokens
                for part in bins
            ]
            if not bins:
                return 0, 0, 0
            fullest = max(range(len(bins)), key=tokens.__getitem__)
            return len(bins), tokens[fullest], len(bins[fullest]) * self.response_tokens
        most = min(rows, max(1, limit // self.row_tokens))
        return -(-rows // max(1, most)), most * self.row_tokens, most * self.response_tokens


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
    """Tokens of a micro-batch then."""
    micro_batch_responses: int
    """Tokens of responses among them, the only ones with logits."""
    scoring_tokens: int
    """Tokens of one forward pass in scoring then."""
    scoring_responses: int
    """Tokens of responses among them."""

    @classmethod
    def of(cls, sizes: BatchSizes, data_size: int, as_the_actor: bool = True, stages: int = 1) -> RoleBatch:
        """The part of a data rank.

        Args:
            sizes: The batches.
            data_size: Data ranks of the role.
            as_the_actor: Whether rows lie as in the actor's layout, the samples of a prompt together. For a role with
                another grid they are divided one by one.
            stages: Ranks of the role's pipeline.
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
        micro_batches, tokens, responses = sizes.micro_batches(minibatch_rows[1], as_the_actor, stages)
        _, scoring_tokens, scoring_responses = sizes.micro_batches(rows[1], as_the_actor, stages)
        return cls(
            rows=rows,
            minibatch_rows=minibatch_rows,
            minibatches=-(-sizes.rollout_batch_size // sizes.update_batch_size),
            micro_batches=micro_batches,
            micro_batch_tokens=tokens,
            micro_batch_responses=responses,
            scoring_tokens=scoring_tokens,
            scoring_responses=scoring_responses,
        )


def _shares(count: int, parts: int) -> tuple[int, int]:
    """The smallest and the largest of equal parts."""
    return count // parts, -(-count // parts)
