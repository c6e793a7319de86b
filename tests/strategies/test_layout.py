"""Rank arithmetic, with no process group."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from lightning_verl.data.sharding import rollout_rows
from lightning_verl.strategies.layout import (
    RoleLayout,
    check_config,
    resolve_layouts,
    rollout_layout,
)
from lightning_verl.strategies.mesh import DeviceMesh

SCRIPT = {"actor": {"tp": 2, "dp": 2}, "critic": {"tp": 1, "dp": 4}, "reward": {"dp": 1}}


def resolve(world: int, mesh: Any = None, config: Any = None, engine: Any = None) -> dict[str, RoleLayout]:
    return resolve_layouts(world, None if mesh is None else DeviceMesh.of(mesh), config or {}, engine or {})


def test_no_shape_puts_the_world_on_the_data_axis() -> None:
    layout = resolve(4)["actor"]
    assert (layout.replicas, layout.shards, layout.tensor, layout.ranks) == (1, 4, 1, (0, 1, 2, 3))


def test_the_four_process_script() -> None:
    layouts = resolve(4, (2, 2, 1, 1), SCRIPT, {"rollout_tp": 2, "offload_to_cpu": False})
    sizes = {role: (layout.replicas, layout.shards, layout.tensor) for role, layout in layouts.items()}
    # The reference is left out and takes the mesh's numbers; reward {"dp": 1} is one whole copy on each rank.
    # Generating, the actor lies as two copies, each cut over two ranks.
    assert sizes == {
        "actor": (1, 2, 2),
        "critic": (1, 4, 1),
        "reference": (1, 2, 2),
        "reward": (4, 1, 1),
        "rollout": (2, 1, 2),
    }


def test_rows_are_exchanged_between_the_actors_ranks_and_the_roles() -> None:
    def exchanges(world: int, *options: Any) -> dict[str, tuple[int, ...]]:
        return {role: layout.exchange for role, layout in resolve(world, *options).items() if layout.exchange}

    assert exchanges(4, (2, 2, 1, 1), SCRIPT) == dict.fromkeys(("actor", "critic", "reference", "reward"), (0, 1, 2, 3))
    # With one data rank rows have one place, but for a rollout in copies, and for a role on ranks of its own.
    assert exchanges(1) == exchanges(2, (1, 2, 1, 1)) == {}
    assert exchanges(2, (1, 2, 1, 1), {}, {"rollout_tp": 1}) == {"actor": (0, 1)}
    assert exchanges(3, (1, 2, 1, 1), {"reward": {"dp": 1, "ranks": [2]}}) == {"reward": (0, 1, 2)}
    assert resolve(4, None, {"critic": {"dp": 1, "ranks": [1]}})["critic"].lines("exchange") == [[0, 1, 2, 3]]
    assert resolve(2, (1, 2, 1, 1))["critic"].lines("exchange") == []


def test_whole_meshes_replicate_along_data() -> None:
    layout = resolve(8, (2, 2, 1, 1))["actor"]
    assert (layout.replicas, layout.shards, layout.tensor, layout.data_size) == (2, 2, 2, 4)


def test_replicate_fills_the_mesh_with_copies() -> None:
    layout = resolve(8, (8, 1, 1, 1), {"actor": {"dp": 2, "replicate": True}})["actor"]
    assert (layout.replicas, layout.shards, layout.tensor) == (4, 2, 1)


def test_lines_and_coordinates_of_a_grid() -> None:
    # replicas x shards x tensor = 2 x 2 x 2, the tensor axis fastest: rank = 4 replica + 2 shard + tensor.
    layout = RoleLayout("actor", 2, 2, 2, tuple(range(8)))
    assert layout.lines("tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.lines("shard") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.lines("replicate") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.lines("data") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert layout.lines("all") == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert [layout.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [layout.tensor_rank(rank) for rank in range(8)] == [0, 1] * 4


def test_roles_that_lie_alike_hold_the_same_rows_on_every_rank() -> None:
    actor = RoleLayout("actor", 1, 2, 2, (0, 1, 2, 3))
    assert actor.lies_like(RoleLayout("critic", 2, 1, 2, (0, 1, 2, 3))), "copies or shards: rows do not care"
    assert actor.lies_like(RoleLayout("critic", 1, 1, 2, (0, 1, 2, 3), expert=2))
    assert not actor.lies_like(RoleLayout("critic", 1, 4, 1, (0, 1, 2, 3)))
    assert not actor.lies_like(RoleLayout("rollout", 2, 1, 2, (0, 2, 1, 3)))


def test_rows_cover_every_mesh_and_are_equal_inside_a_model_copy() -> None:
    """Replicas of the sampler are data ranks, never world ranks: all meshes (data, tensor) of at most 8 ranks."""
    for data, tensor, copies in product(range(1, 9), range(1, 9), range(1, 5)):
        if data * tensor * copies > 8:
            continue
        layout = resolve(data * tensor * copies, (data, tensor, 1, 1))["actor"]
        rows = {rank: rollout_rows(8, 8, layout.data_size, layout.data_rank(rank)) for rank in layout.ranks}
        for line in layout.lines("tensor"):
            assert len({tuple(rows[rank]) for rank in line}) == 1
        for line in layout.lines("data"):
            assert sorted(row for rank in line for row in rows[rank]) == list(range(8))


def test_a_world_that_does_not_fit_prints_the_whole_equation() -> None:
    with pytest.raises(
        ValueError, match=r"6 = k x \(2 x 2 x 1 x 1 = 4\) \+ 0 has no whole k >= 1.*multiple of 4 processes"
    ):
        resolve(6, (2, 2, 1, 1))


def test_a_role_that_does_not_fit_prints_its_equation() -> None:
    with pytest.raises(
        ValueError,
        match=r"'critic'.*dp x tp x pp x ep = 2 x 1 x 1 x 1 = 2 does not equal.*2 x 2 x 1 x 1 = 4.*pp x ep = 4",
    ):
        resolve(4, (2, 2, 1, 1), {"critic": {"dp": 2}})
    with pytest.raises(ValueError, match=r"dp x tp x pp x ep = 3 x 1 x 1 x 1 = 3.*divides 4"):
        resolve(4, (2, 2, 1, 1), {"critic": {"dp": 3, "replicate": True}})


def test_claimed_ranks_lie_outside_the_mesh() -> None:
    layouts = resolve(4, (3, 1, 1, 1), {"reward": {"dp": 1, "ranks": [3]}})
    assert layouts["actor"].ranks == (0, 1, 2)
    assert (layouts["reward"].ranks, layouts["reward"].data_size) == ((3,), 1)
    assert (layouts["reward"].holds(3), layouts["reward"].holds(0)) == (True, False)
    reward = resolve(4, (2, 1, 1, 1), {"reward": {"tp": 2, "ranks": [2, 3]}})["reward"]
    assert (reward.shards, reward.tensor, reward.ranks) == (1, 2, (2, 3))
    assert [reward.speaks(rank) for rank in range(4)] == [False, False, True, False]
    assert reward.apart_from(layouts["actor"]) is False  # (0, 1, 2) and (2, 3) share rank 2
    assert layouts["reward"].apart_from(layouts["actor"])
    with pytest.raises(ValueError, match=r"Rank 0 has no part of the reward, which lies on ranks \[2, 3\]; ask"):
        reward.data_rank(0)
    # Without a shape the data axis takes what no role claims.
    assert resolve(4, None, {"reward": {"dp": 1, "ranks": [1]}})["actor"].ranks == (0, 2, 3)


def test_claimed_ranks_that_do_not_fit_say_so() -> None:
    with pytest.raises(ValueError, match=r"ranks \[4\] are claimed, but a world of 4 processes has ranks 0 to 3"):
        resolve(4, None, {"reward": {"dp": 1, "ranks": [4]}})
    with pytest.raises(ValueError, match=r"4 = k x \(4 x 1 x 1 x 1 = 4\) \+ 1 has no whole k >= 1"):
        resolve(4, (4, 1, 1, 1), {"reward": {"dp": 1, "ranks": [3]}})
    with pytest.raises(ValueError, match=r"dp x tp x pp x ep = 1 x 1 x 1 x 1 = 1 does not equal its ranks \[2, 3\], 2"):
        resolve(4, (2, 1, 1, 1), {"reward": {"dp": 1, "ranks": [2, 3]}})


def test_lines_of_a_grid_with_an_expert_axis() -> None:
    # shards x expert x tensor = 2 x 2 x 2: rank = 4 shard + 2 expert + tensor.
    layout = RoleLayout("actor", 1, 2, 2, tuple(range(8)), expert=2)
    assert layout.lines("tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.lines("expert") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.lines("expert_shard") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    # What is no expert is cut over shards and expert ranks; both hold rows of their own.
    assert layout.lines("shard") == layout.lines("data") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert layout.data_size == 4


def test_the_expert_axis_of_the_mesh_and_of_a_role() -> None:
    layouts = resolve(8, (2, 2, 1, 2), {"critic": {"dp": 4, "tp": 2}, "reward": {"ep": 4, "tp": 2}})
    sizes = {role: (layout.shards, layout.tensor, layout.expert) for role, layout in layouts.items()}
    assert sizes == {
        "actor": (2, 2, 2),
        "critic": (4, 2, 1),
        "reference": (2, 2, 2),
        "reward": (1, 2, 4),
        "rollout": (1, 2, 2),
    }
    with pytest.raises(ValueError, match=r"dp x tp x pp x ep = 2 x 1 x 1 x 3 = 6 does not equal"):
        resolve(4, None, {"actor": {"dp": 2, "ep": 3}})


def test_lines_and_coordinates_of_a_grid_with_stages() -> None:
    # replicas x stages x shards x tensor = 2 x 2 x 2 x 2: rank = 8 replica + 4 stage + 2 shard + tensor.
    layout = RoleLayout("actor", 2, 2, 2, tuple(range(16)), pipeline=2)
    assert layout.lines("pipeline")[:4] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.lines("shard")[:4] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.lines("replicate")[:2] == [[0, 8], [1, 9]]
    assert layout.lines("data") == [[0, 2, 8, 10], [1, 3, 9, 11], [4, 6, 12, 14], [5, 7, 13, 15]]
    # Stages share rows, so both have the same data ranks, and the first tensor rank of the last stage speaks for them.
    assert [layout.data_rank(rank) for rank in range(16)] == [0, 0, 1, 1] * 2 + [2, 2, 3, 3] * 2
    assert [layout.stage(rank) for rank in range(16)] == [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4
    assert layout.speakers == (4, 6, 12, 14)
    assert layout.stage_ranks(1) == (4, 5, 6, 7, 12, 13, 14, 15)
    assert layout.coordinates(14) == (1, 1, 0, 0)
    assert layout.data_size == 4


def test_the_ends_of_a_pipeline_are_its_first_and_last_stage() -> None:
    assert RoleLayout("actor", 1, 2, 1, tuple(range(6)), pipeline=3).lines("ends") == [[0, 4], [1, 5]]
    assert RoleLayout("actor", 1, 2, 1, (0, 1)).lines("ends") == []


def test_grids_of_stages_hold_the_ranks_of_those_stages() -> None:
    layout = RoleLayout("actor", 1, 2, 1, tuple(range(6)), pipeline=3)
    assert layout.grid(stages=(1,)).ranks == (2, 3)
    both = layout.grid(stages=(0, 2))
    assert (both.axes, both.shape, both.ranks) == (
        ("stage", "replicate", "shard", "tensor"),
        (2, 1, 2, 1),
        (0, 1, 4, 5),
    )
    assert layout.grid(experts=True, stages=(1,)).axes[0] == "expert_replicate"


def test_rows_lie_alike_only_where_stages_do() -> None:
    staged = RoleLayout("actor", 1, 2, 1, (0, 1, 2, 3), pipeline=2)
    assert staged.lies_like(RoleLayout("critic", 1, 2, 1, (0, 1, 2, 3), pipeline=2))
    # Two copies of one shard: rank 1 is then the second stage of the first copy.
    assert not staged.lies_like(RoleLayout("critic", 2, 1, 1, (0, 1, 2, 3), pipeline=2))
    assert not staged.lies_like(RoleLayout("critic", 1, 4, 1, (0, 1, 2, 3)))


def test_the_pipeline_axis_of_the_mesh_and_of_a_role() -> None:
    layouts = resolve(8, (2, 2, 2, 1), {"critic": {"dp": 4, "pp": 2}, "reward": {"dp": 1}})
    sizes = {role: (layout.shards, layout.tensor, layout.pipeline) for role, layout in layouts.items()}
    assert sizes == {
        "actor": (2, 2, 2),
        "critic": (4, 1, 2),
        "reference": (2, 2, 2),
        "reward": (1, 1, 1),
        "rollout": (1, 2, 1),
    }


def test_the_rollout_of_a_pipeline_has_a_part_of_each_stage_on_every_rank() -> None:
    # stages 2 x shards 2 -> tensor 2: shard s of both stages has chunk s of what the tensor axis cuts.
    actor = RoleLayout("actor", 1, 2, 1, (0, 1, 2, 3), pipeline=2)
    assert rollout_layout(actor, 2).lines("tensor") == [[0, 1], [2, 3]]
    assert rollout_layout(actor, 1).data_size == 4


def test_the_rollout_layout_keeps_ranks_where_their_shards_are() -> None:
    # fsdp 4 -> tensor 2: chunks 0 and 1 lie in rollout shard 0, chunks 2 and 3 in shard 1; a copy takes one
    # rank of each.
    layout = rollout_layout(RoleLayout("actor", 1, 4, 1, (0, 1, 2, 3)), 2)
    assert (layout.replicas, layout.tensor, layout.lines("tensor")) == (2, 2, [[0, 2], [1, 3]])
    # fsdp 2 x tensor 2 -> tensor 4: rank 2s + t holds chunk 2t + s of what the tensor axis cuts.
    actor = RoleLayout("actor", 1, 2, 2, (0, 1, 2, 3))
    layout = rollout_layout(actor, 4)
    assert layout.ranks == (0, 2, 1, 3)
    # Two replicas of fsdp 2 -> tensor 4: each pair of replicas divides the chunk that both hold.
    assert rollout_layout(RoleLayout("actor", 2, 2, 1, (0, 1, 2, 3)), 4).ranks == (0, 2, 1, 3)


def test_the_tensor_ranks_of_a_rollout_lie_on_one_host() -> None:
    # fsdp 8 on two hosts of 4 -> tensor 2: the first half of the chunks lies on host 0. The order that moves least
    # would pair ranks of both hosts, 0 with 4; on one host 0 is paired with 2.
    actor = RoleLayout("actor", 1, 8, 1, tuple(range(8)))
    assert rollout_layout(actor, 2).lines("tensor") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert rollout_layout(actor, 2, host_ranks=4).lines("tensor") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    # Wider than a host, or where hosts do not divide, the order that moves least is taken.
    assert rollout_layout(actor, 8, host_ranks=4).ranks == tuple(range(8))
    assert rollout_layout(actor, 2, host_ranks=3) == rollout_layout(actor, 2)
    assert resolve_layouts(8, None, {}, {"rollout_tp": 2}, 4)["rollout"].lines("tensor")[0] == [0, 2]


@pytest.mark.parametrize("expert", [1, 2])
def test_a_rollout_as_wide_as_the_update_moves_no_rows(expert: int) -> None:
    for replicas, shards, tensor in product((1, 2, 3), repeat=3):
        size = replicas * shards * tensor * expert
        actor = RoleLayout("actor", replicas, shards, tensor, tuple(range(size)), expert)
        rollout = rollout_layout(actor, tensor)
        assert rollout.ranks == actor.ranks
        assert rollout.data_size == actor.data_size


def test_expert_ranks_of_a_rollout_ascend() -> None:
    """Groups of the rollout are sorted, and tokens go to the expert rank that has the number in the group."""
    for replicas, shards, tensor, rollout_tensor, stages in product((1, 2), (1, 2, 4), (1, 2), (1, 2, 4), (1, 2)):
        ranks = tuple(range(replicas * shards * tensor * 2 * stages))
        if len(ranks) // 2 % rollout_tensor == 0:
            rollout = rollout_layout(RoleLayout("actor", replicas, shards, tensor, ranks, 2, stages), rollout_tensor)
            for line in rollout.lines("expert"):
                assert line == sorted(line)


def test_a_rollout_that_does_not_divide_the_ranks_says_so() -> None:
    with pytest.raises(ValueError, match=r"rollout_tp=3 does not divide the actor's 4 ranks; choose a divisor of 4"):
        rollout_layout(RoleLayout("actor", 1, 4, 1, (0, 1, 2, 3)), 3)


def test_the_engine_agrees_with_the_actor() -> None:
    with pytest.raises(ValueError, match=r"update_dp=4 differs from the actor's dp=2"):
        resolve(4, (2, 2, 1, 1), None, {"update_dp": 4})
    with pytest.raises(ValueError, match=r"rollout_tp=2 with enable_3d_hybrid=False"):
        check_config({}, {"rollout_tp": 2}, enable_3d_hybrid=False)


@pytest.mark.parametrize(
    ("config", "engine", "message"),
    [
        ({"acter": {}}, {}, r"unknown role 'acter'.*Did you mean 'actor'"),
        ({"actor": {"tpp": 2}}, {}, r"parallelism_config\['actor'\].*unknown key 'tpp'.*Did you mean 'tp'"),
        ({"actor": {"dp": 0}}, {}, r"dp=0; it takes a whole number of at least 1"),
        ({"actor": {"pp": 0}}, {}, r"pp=0; it takes a whole number of at least 1"),
        ({"actor": {"ep": 0}}, {}, r"ep=0; it takes a whole number of at least 1"),
        ({"actor": {"ranks": [3]}}, {}, r"ranks=\[3\], but the actor lies on the mesh.*leave its ranks out"),
        ({"reward": {"ranks": []}}, {}, r"\['reward'\]\) got ranks=\[\]; it takes a list of one or more different"),
        ({"reward": {"ranks": [2, 2]}}, {}, r"ranks=\[2, 2\]; it takes a list of one or more different world ranks"),
        ({"reward": {"ranks": [-1]}}, {}, r"ranks=\[-1\]; it takes a list of one or more different world ranks"),
        ({"reward": {"ranks": [True]}}, {}, r"ranks=\[True\]; it takes a list of one or more different world ranks"),
        ({"reward": {"ranks": 3}}, {}, r"ranks=3; it takes a list of one or more different world ranks"),
        ({"reward": {"ranks": [0]}}, {}, r"ranks=\[0\], but rank 0 writes logs and the trained model"),
        ({}, {"rollout_dp": 2}, r"unknown key 'rollout_dp'.*Did you mean 'rollout_tp'"),
        ({}, {"offload_to_cpu": 1}, r"offload_to_cpu=1; it takes True or False"),
    ],
)
def test_names_and_values_are_checked_without_ranks(config: Any, engine: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_config(config, engine)
