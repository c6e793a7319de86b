"""How micro-batches go through a pipeline: how many, how large, and what is waited. Plain arithmetic."""

from __future__ import annotations

from typing import Literal, get_args

PipelineSchedule = Literal["1f1b", "interleaved", "gpipe"]
"""``"1f1b"``: forward and backward passes alternate, with at most as many micro-batches in flight as there are stages.
``"interleaved"``: the same with two stages a rank, half the bubble and twice the messages. ``"gpipe"``: all forward
passes, then all backward passes: most memory."""


def check_schedule(owner: str, schedule: str) -> None:
    """Refuse a schedule that there is none of.

    Raises:
        ValueError: An unknown name.
    """
    if schedule not in get_args(PipelineSchedule):
        raise ValueError(
            f"{owner} got pipeline_schedule={schedule!r}; it takes {', '.join(map(repr, get_args(PipelineSchedule)))}."
        )


def chunks_of(schedule: PipelineSchedule) -> int:
    """Stages a rank under a schedule."""
    return 2 if schedule == "interleaved" else 1


def count_for(schedule: PipelineSchedule, micro_batches: int, ranks: int) -> int:
    """Micro-batches that a schedule takes in place of so many: at least one a rank, for "interleaved" a multiple."""
    if schedule == "interleaved":
        return ranks * -(-micro_batches // ranks)
    return max(micro_batches, ranks)


def bubble_share(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """The share of an update that a rank waits for others while the pipeline fills and drains.

    ``(P - 1) / (V m + P - 1)`` for P ranks with V stages each and m micro-batches of equal cost (Narayanan et al.,
    2021, arXiv:2104.04473).

    Args:
        stages: Ranks of the pipeline, P.
        micro_batches: Micro-batches of an update, m.
        chunks: Stages a rank, V.
    """
    return (stages - 1) / (chunks * micro_batches + stages - 1)


def micro_batches_kept(schedule: str, rank: int, ranks: int, micro_batches: int) -> float:
    """Micro-batches whose activations on a rank wait for their backward pass at once, at most.

    A rank of 1F1B begins with as many forward passes as there are ranks from it to the last. Interleaved, with two
    stages a rank, these are ``2 (P - 1 - r) + P`` passes of one stage each before the first backward pass, and one
    more beside it.

    Args:
        schedule: ``"1f1b"``, ``"interleaved"`` or ``"gpipe"``.
        rank: The rank of the pipeline, r.
        ranks: How many there are, P.
        micro_batches: Those of a mini-batch.
    """
    if schedule == "gpipe":
        return micro_batches
    if schedule == "interleaved":
        return min(micro_batches, (2 * (ranks - 1 - rank) + ranks + 1) / 2)
    return min(micro_batches, ranks - rank)


def micro_batch_limit(total: int, limit: int, stages: int) -> int:
    """Most tokens of a micro-batch, so that a pipeline has enough of them to be filled.

    There are at least as many micro-batches as stages, where rows are short enough, and ``FULL`` times as many as long
    as they have ``LEAST_TOKENS`` tokens.

    Args:
        total: Tokens of a data rank's mini-batch.
        limit: Most tokens for other reasons, such as memory.
        stages: Stages of the pipeline.
    """
    return max(1, min(limit, max(total // (FULL * stages), min(LEAST_TOKENS, total // stages))))


FULL = 4
"""With four micro-batches a stage about a fifth of the time is lost to filling and draining; more cost other time."""
LEAST_TOKENS = 2048
"""Below that many tokens a micro-batch is too small for the matrices of a GPU; a longer bubble costs less."""


def rows_problem(role: str, prompts: int, samples: int, data_ranks: int, stages: int) -> str | None:
    """Why a mini-batch gives a pipeline fewer micro-batches than it has stages; None if it does not.

    Args:
        role: The role.
        prompts: Prompts of a mini-batch.
        samples: Rows of a prompt.
        data_ranks: Data ranks of the role.
        stages: Stages of its pipeline.
    """
    rows = prompts * samples // data_ranks
    if rows >= stages or stages == 1:
        return None
    return (
        f"update_batch_size x samples_per_prompt / data ranks = {prompts} x {samples} / {data_ranks} leaves {rows} "
        f"rows a mini-batch for the {role}, fewer micro-batches than its {stages} pipeline stages. Raise "
        f"update_batch_size, or lower the {role}'s pp."
    )
