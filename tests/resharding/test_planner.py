"""Plans between layouts, with no process group: what every rank gets is checked element by element."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch
from torch import Tensor

from lightning_verl.resharding.planner import (
    Cut,
    Grid,
    Region,
    TensorLayout,
    TensorPlan,
    intersect,
    local_shape,
    local_slices,
    plan_tensor,
    split,
    volume,
)
from lightning_verl.strategies.layout import RoleLayout, rollout_layout

AXES = ("replicate", "shard", "tensor", "expert")


def random_layout(draw: random.Random, shape: tuple[int, ...], ranks: list[int]) -> TensorLayout:
    """A grid of all ranks in any order, with any cuts: of one dim or several, one after the other, packed or not."""
    left, sizes = len(ranks), []
    for _ in AXES[:-1]:
        sizes.append(draw.choice([size for size in range(1, left + 1) if left % size == 0]))
        left //= sizes[-1]
    order = ranks[:]
    if draw.random() < 0.5:
        draw.shuffle(order)
    cuts = []
    for axis in draw.sample(AXES, draw.randint(0, len(AXES))):
        dim = draw.randrange(len(shape))
        packed = not any(cut.dim == dim for cut in cuts) and shape[dim] % 2 == 0 and draw.random() < 0.3
        cuts.append(Cut(axis, dim, 2 if packed else 1))
    return TensorLayout(Grid(AXES, (*sizes, left), tuple(order)), tuple(cuts))


def random_case(seed: int) -> TensorPlan:
    """Layouts over the same world; the target may lie on some of the ranks only."""
    draw = random.Random(seed)  # noqa: S311 - no secret
    world = draw.choice([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64])
    shape = tuple(draw.choice([1, 2, 5, 6, 8, 13]) for _ in range(draw.randint(1, 3)))
    some = draw.sample(range(world), draw.randint(1, world)) if draw.random() < 0.2 else list(range(world))
    return TensorPlan(shape, random_layout(draw, shape, list(range(world))), random_layout(draw, shape, some))


def take(whole: Tensor, region: Region) -> Tensor:
    """The elements of a region, by plain indexing with every global index."""
    for dim, intervals in enumerate(region):
        indices = [index for start, stop in intervals for index in range(start, stop)]
        whole = whole.index_select(dim, torch.tensor(indices, dtype=torch.int64))
    return whole


def parts(tensor: Tensor, region: Region, held: Region) -> Tensor:
    """The elements of a region inside the local tensor of a rank that holds ``held``."""
    for dim, intervals in enumerate(local_slices(region, held)):
        tensor = torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in intervals], dim)
    return tensor


@pytest.mark.parametrize("first", range(0, 400, 50))
def test_every_element_arrives_once_and_only_what_is_missing_travels(first: int) -> None:
    for seed in range(first, first + 50):
        plan = random_case(seed)
        whole = torch.arange(math.prod(plan.shape)).view(plan.shape)
        received: Counter[int] = Counter()
        arrived: dict[int, list[int]] = {rank: [] for rank in plan.target.grid.ranks}
        for transfer in plan.transfers():
            held = plan.held(transfer.source)
            sent = parts(take(whole, held), transfer.region, held)
            torch.testing.assert_close(sent, take(whole, transfer.region))
            arrived[transfer.target].extend(sent.flatten().tolist())
            received[transfer.target] += sent.numel() if transfer.source != transfer.target else 0
        for rank, elements in arrived.items():
            wanted = take(whole, plan.needed(rank)).flatten().tolist()
            assert sorted(elements) == sorted(wanted), f"seed {seed}, rank {rank}"
            held_elements = set(take(whole, plan.held(rank)).flatten().tolist())
            assert received[rank] == len(set(wanted) - held_elements) == plan.received(rank), f"seed {seed}"


def test_what_one_rank_sends_is_what_another_expects() -> None:
    for seed in range(150):
        plan = random_case(seed)
        world = range(len(plan.source.grid.ranks))
        sends = {t for rank in world for t in plan.sends(rank)}
        receives = {t for rank in world for t in plan.receives(rank)}
        everything = set(plan.transfers())
        assert {t for t in everything if t.source != t.target} == sends == {t for t in receives if t.source != t.target}
        assert receives == everything
        # A rank holds one region, so that at most one part of a tensor goes from a rank to a rank.
        pairs = Counter((t.source, t.target) for t in everything)
        assert not pairs or max(pairs.values()) == 1


def test_sends_are_balanced_over_the_ranks_that_hold_the_same() -> None:
    for seed in range(150):
        plan = random_case(seed)
        load: Counter[int] = Counter()
        largest: Counter[Region] = Counter()
        for t in plan.transfers():
            if t.source != t.target:
                load[t.source] += volume(t.region)
                held = plan.held(t.source)
                largest[held] = max(largest[held], volume(t.region))
        for held, ranks in plan.source.holders(plan.shape).items():
            loads = [load[rank] for rank in ranks]
            assert max(loads) - min(loads) <= largest[held], f"seed {seed}"


def test_every_rank_plans_the_same() -> None:
    for seed in range(50):
        one, other = random_case(seed), random_case(seed)
        for rank in reversed(range(len(other.source.grid.ranks))):
            other.receives(rank)  # ranks ask for their own part first, each in its own order
        assert list(one.transfers()) == list(other.transfers())


def test_hand_arithmetic_of_a_strided_cut() -> None:
    # 8 rows over tensor 2, then each half over shards 2: rank (shard s, tensor t) holds rows 4t + 2s and 4t + 2s + 1.
    grid = Grid(("shard", "tensor"), (2, 2), (0, 1, 2, 3))
    layout = TensorLayout(grid, (Cut("tensor", 0), Cut("shard", 0)))
    assert [layout.region((8,), rank) for rank in range(4)] == [(((0, 2),),), (((4, 6),),), (((2, 4),),), (((6, 8),),)]


def test_hand_arithmetic_of_packed_weights() -> None:
    # gate (rows 0 to 3) and up (rows 4 to 7) behind each other: tensor rank 1 of 2 holds the second half of both.
    grid = Grid(("tensor",), (2,), (0, 1))
    layout = TensorLayout(grid, (Cut("tensor", 0, blocks=2),))
    assert layout.region((8, 3), 1) == (((2, 4), (6, 8)), ((0, 3),))
    # A later cut of the same dim cuts what is left: 4 rows (2, 3, 6, 7) over 2 shards are (2, 3) and (6, 7).
    grid = Grid(("shard", "tensor"), (2, 2), (0, 1, 2, 3))
    layout = TensorLayout(grid, (Cut("tensor", 0, blocks=2), Cut("shard", 0)))
    assert [layout.region((8,), rank) for rank in (1, 3)] == [(((2, 4),),), (((6, 8),),)]


def test_uneven_sizes_are_cut_as_torch_chunk_does() -> None:
    layout = TensorLayout(Grid(("shard",), (4,), (0, 1, 2, 3)), (Cut("shard", 0),))
    chunks = torch.arange(5).chunk(4)  # 2 + 2 + 1: three chunks, and the fourth rank holds none
    assert [volume(layout.region((5,), rank)) for rank in range(4)] == [*map(len, chunks), 0] == [2, 2, 1, 0]


def test_a_scalar_is_held_whole() -> None:
    layout = TensorLayout(Grid(("shard",), (2,), (0, 1)))
    assert volume(layout.region((), 1)) == 1


def test_a_region_is_split_along_its_longest_dim() -> None:
    region: Region = (((0, 2),), ((4, 6), (8, 11)))
    assert split(region, 2, 0) == (((0, 2),), ((4, 6), (8, 9)))
    assert split(region, 2, 1) == (((0, 2),), ((9, 11),))
    assert split(region, 4, 3) == ()  # 5 in chunks of 2: nothing is left for the fourth
    assert local_shape(region) == (2, 5)
    assert intersect(region, ()) == ()


def test_plans_are_shared() -> None:
    layout = TensorLayout(Grid(("shard",), (2,), (0, 1)), (Cut("shard", 0),))
    whole = TensorLayout(layout.grid)
    assert plan_tensor((4, 2), layout, whole) is plan_tensor((4, 2), layout, whole)


def test_impossible_layouts_are_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"hold 4 ranks, but 3 were given"):
        Grid(("shard", "tensor"), (2, 2), (0, 1, 2))
    with pytest.raises(ValueError, match=r"a rank comes twice in \(0, 0\)"):
        Grid(("shard",), (2,), (0, 0))
    grid = Grid(("shard",), (2,), (0, 1))
    with pytest.raises(ValueError, match=r"no axis 'tensor'; its axes are \('shard',\)"):
        TensorLayout(grid, (Cut("tensor", 0),)).region((4,), 0)
    with pytest.raises(ValueError, match=r"cuts dim 1 of a tensor with shape \(4,\)"):
        TensorLayout(grid, (Cut("shard", 1),)).region((4,), 0)
    with pytest.raises(ValueError, match=r"2 blocks of equal length, but the dim has 5"):
        TensorLayout(grid, (Cut("shard", 0, blocks=2),)).region((5,), 0)


# ---- the traffic of a real model ------------------------------------------------------------------------------------


def qwen3_8b() -> dict[str, tuple[tuple[int, int], str]]:
    """Parameters of Qwen3-8B, one layer of 36: shape (vectors as one row), and how tensor parallelism cuts it."""
    hidden, inner, vocabulary, queries, keys, head = 4096, 12288, 151936, 4096, 1024, 128
    return {
        "embedding": ((vocabulary, hidden), "colwise"),
        "head": ((vocabulary, hidden), "colwise"),
        "norm": ((1, hidden), "whole"),
        **{f"layers.{n}": ((1, hidden), "whole") for n in ("norm1", "norm2")},
        **{f"layers.{n}": ((1, head), "whole") for n in ("q_norm", "k_norm")},
        "layers.q": ((queries, hidden), "colwise"),
        "layers.k": ((keys, hidden), "colwise"),
        "layers.v": ((keys, hidden), "colwise"),
        "layers.o": ((hidden, queries), "rowwise"),
        "layers.gate": ((inner, hidden), "colwise"),
        "layers.up": ((inner, hidden), "colwise"),
        "layers.down": ((hidden, inner), "rowwise"),
    }


def traffic(shards: int, tensor: int, rollout_tensor: int, aligned: bool) -> tuple[float, float]:
    """Bytes in bf16 that the busiest rank receives, and that all ranks hold of the model in the rollout (one copy)."""
    ranks = tuple(range(shards * tensor))
    actor = RoleLayout("actor", 1, shards, tensor, ranks)
    rollout = rollout_layout(actor, rollout_tensor)
    received = dict.fromkeys(ranks, 0)
    for name, (shape, kind) in qwen3_8b().items():
        dim = {"colwise": 0, "rowwise": 1}.get(kind)
        cuts = [Cut("tensor", dim)] if dim is not None else []
        whole_row = shape[0] == 1
        cuts.append(Cut("shard", dim if aligned and dim is not None else 1 if whole_row else 0))
        target = (Cut("tensor", 0 if dim is None else dim),) if kind != "whole" else ()
        plan = TensorPlan(shape, TensorLayout(actor.grid(), tuple(cuts)), TensorLayout(rollout.grid(), target))
        for rank in ranks:
            received[rank] += plan.received(rank) * 2 * (36 if name.startswith("layers") else 1)
    elements = sum(
        math.prod(shape) * (36 if name.startswith("layers") else 1) for name, (shape, _) in qwen3_8b().items()
    )
    return max(received.values()), elements * 2


def test_qwen3_8b_receives_next_to_nothing_where_update_and_rollout_shards_agree() -> None:
    total = traffic(8, 1, 8, aligned=True)[1]
    assert total == pytest.approx(16.38e9, rel=1e-3)
    # Only the norms travel: 36 x (2 x 4096 + 2 x 128) + 4096 numbers, of which a rank holds an eighth.
    norms = (36 * (2 * 4096 + 2 * 128) + 4096) * 2 * 7 / 8
    assert traffic(8, 1, 8, aligned=True)[0] == norms <= 1e6
    # fsdp 4 x tensor 2 holds a quarter of each norm on each rank.
    assert traffic(4, 2, 8, aligned=True)[0] == norms / 7 * 6 <= 1e6
    # Unaligned, o and down are cut by rows and wanted by columns: 7/8 of a rank's eighth of them comes from others.
    crossed = 36 * 4096 * (4096 + 12288) * 2 / 8
    assert traffic(8, 1, 8, aligned=False)[0] == pytest.approx(crossed * 7 / 8 + norms)


def test_qwen3_8b_receives_the_missing_half_where_the_rollout_is_coarser() -> None:
    received, total = traffic(8, 1, 4, aligned=True)
    # A quarter is wanted and an eighth is held, of everything but the norms: 2.05 GB.
    assert received == pytest.approx(total / 4 - total / 8, rel=1e-3)
    assert received == pytest.approx(2.05e9, rel=2e-3)
