"""Where layers are cut, and what a pipeline costs."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from lightning_verl.pipeline.cut import Costs, cut_layers, describe, stages_of
from lightning_verl.pipeline.order import FULL, LEAST_TOKENS, bubble_share, micro_batch_limit


def test_equal_layers_are_cut_evenly() -> None:
    assert cut_layers(Costs((1,) * 8), 4) == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    assert cut_layers(Costs((1,) * 3), 3) == [range(1), range(1, 2), range(2, 3)]


def test_a_head_takes_the_place_of_layers() -> None:
    # Ten layers of 1 and a head of 3: 13 in two stages is at best 6 and 7, six layers before four and the head.
    assert cut_layers(Costs((1,) * 10, last=3), 2) == [range(6), range(6, 10)]
    # A head larger than all layers leaves the last stage the one layer that it must have.
    assert cut_layers(Costs((1,) * 4, last=100), 2) == [range(3), range(3, 4)]


def test_of_equal_cuts_that_one_is_taken_which_keeps_least() -> None:
    # Seven layers in three stages: one has 3 of them, best the last, which keeps one micro-batch: 3 x 1 where the
    # first would keep 3 x 3. The first stage then has at most 2 layers, 2 x 3.
    parts = [len(part) for part in cut_layers(Costs((1,) * 7), 3)]
    assert max(parts) == 3
    assert max(part * kept for part, kept in zip(parts, (3, 2, 1), strict=True)) == 6


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_no_cut_has_a_cheaper_costliest_stage(stages: int) -> None:
    costs = Costs((5, 1, 4, 1, 1, 9, 2, 6), first=3, last=4)

    def worst(ends: tuple[int, ...]) -> int:
        parts = [sum(costs.layers[start:end]) for start, end in pairwise((0, *ends, 8))]
        return max(part + 3 * (k == 0) + 4 * (k == stages - 1) for k, part in enumerate(parts))

    best = min(worst(ends) for ends in combinations(range(1, 8), stages - 1))
    assert worst(tuple(part.stop for part in cut_layers(costs, stages)[:-1])) == best


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="3 stages of 2 layers; each stage takes at least one"):
        cut_layers(Costs((1, 1)), 3)


def test_the_bubble_is_what_filling_and_draining_take() -> None:
    # Two ranks and four micro-batches: each works 4 of 5 turns. Two stages a rank halve a turn: 8 of 9.
    assert bubble_share(2, 4) == pytest.approx(1 / 5)
    assert bubble_share(2, 4, chunks=2) == pytest.approx(1 / 9)
    assert bubble_share(1, 7) == 0


def test_a_pipeline_gets_enough_micro_batches_to_be_filled() -> None:
    # 64k tokens on two stages: 64k / (4 x 2) = 8k a micro-batch.
    assert micro_batch_limit(65_536, 16_384, 2) == 65_536 // (FULL * 2)
    # Small ones would be below LEAST_TOKENS, so there are fewer, but one a stage.
    assert micro_batch_limit(8_192, 16_384, 2) == LEAST_TOKENS
    assert micro_batch_limit(2_000, 16_384, 2) == 1_000
    # The user's limit is never passed, and nothing is below one token.
    assert micro_batch_limit(65_536, 100, 2) == 100
    assert micro_batch_limit(0, 100, 2) == 1


def test_several_stages_of_a_rank_are_apart() -> None:
    assert [stages_of(rank, 2, 2) for rank in range(2)] == [(0, 2), (1, 3)]
    assert describe([range(3), range(3, 4)]) == "0-2, 3"
