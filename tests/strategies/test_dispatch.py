"""Rows on their way between the layouts of roles, on several ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from traffic import Traffic

from lightning_verl import GRPO, Actor, HybridDataFlow, HybridStrategy
from lightning_verl.callbacks import NCCLGroupIsolation
from lightning_verl.data.experience import Experience, Figures, PromptBatch, RolloutBatch, Scored
from lightning_verl.data.packing import RowSize, group_cost
from lightning_verl.strategies import dispatch
from lightning_verl.strategies.dispatch import RowExchange, exchange_objects
from lightning_verl.strategies.layout import ROLES
from lightning_verl.testing import run_ranks, tiny_model

ACTOR_ROWS = [[5, 6, 7], [8, 9]]
"""Tokens of the rows on each data rank of the actor."""
ALL_ROWS = [5, 6, 7, 8, 9]


def make_rollout(lengths: list[int]) -> RolloutBatch:
    """Rows that can be told apart: all that a row has says how long it is."""
    count, width, tokens = len(lengths), max([*lengths, 2]), torch.tensor(lengths, dtype=torch.int64)
    return RolloutBatch(
        input_ids=tokens[:, None].repeat(1, width),
        prompt_lengths=torch.ones(count, dtype=torch.int64),
        response_lengths=tokens - 1,
        rollout_logprobs=tokens[:, None].repeat(1, width - 1).float(),
        group_ids=tokens,
        truncated=tokens % 2 == 0,
        prompt_texts=[f"p{length}" for length in lengths],
        response_texts=[f"r{length}" for length in lengths],
        fields=[{"answer": length} for length in lengths],
        temperature=0.7,
        weight_version=4,
    )


def make_experience(lengths: list[int]) -> Experience:
    rollout = make_rollout(lengths)
    return Experience(rollout, rollout.lengths.float(), rollout.truncated, values=rollout.rollout_logprobs.bfloat16())


def describe(batch: RolloutBatch) -> list[tuple[Any, ...]]:
    """Every row with all that it carries, so that rows whose parts were mixed up show."""
    columns = [batch.lengths, batch.group_ids, batch.truncated, batch.input_ids[:, 0], batch.rollout_logprobs[:, 0]]
    rows = zip(
        *[column.tolist() for column in columns], batch.prompt_texts, batch.response_texts, batch.fields, strict=True
    )
    return list(rows)


def launched(mesh: Any, config: dict[str, Any], *, isolate: bool = False) -> HybridStrategy:
    strategy = HybridStrategy(mesh, config)
    Fabric(accelerator="cpu", strategy=strategy).launch()
    if isolate:
        NCCLGroupIsolation(timeout=timedelta(seconds=77)).on_groups_setup(strategy)
    for role in ROLES:
        strategy.group(role, "rows")  # made at the set-up of roles, by all ranks
    return strategy


def exchange(mesh: Any, config: dict[str, Any], target: str, held: list[list[int]]) -> dict[str, Any]:
    """Every kind of batch there, and results of every kind back."""
    strategy = launched(mesh, config)
    actor = strategy.layout("actor")
    own = held[strategy.data_rank("actor")] if actor.holds(strategy.global_rank) else []
    rows = RowExchange(strategy)
    there, receipt = rows.there(make_rollout(own), target)
    experience, _ = rows.there(make_experience(own), target)
    figures = rows.back(Figures(there.rollout_logprobs), receipt, target).values
    scored = rows.back(Scored(there.lengths.float() / 2, there.truncated), receipt, target)
    prompts = PromptBatch(
        torch.tensor(own, dtype=torch.int64)[:, None].repeat(1, 3),
        torch.tensor(own, dtype=torch.int64),
        torch.tensor(own, dtype=torch.int64),
        [str(length) for length in own],
        [{}] * len(own),
    )
    asked, receipt = rows.there(prompts, target)
    answered = rows.back(make_rollout([length + 100 for length in asked.lengths.tolist()]), receipt, target)
    assert describe(there) == describe(make_rollout(there.lengths.tolist())), "rows stay whole"
    assert experience.lengths.tolist() == there.lengths.tolist() == experience.need("values")[:, 0].tolist()
    assert experience.values is not None
    assert (experience.values.dtype, there.temperature, there.weight_version) == (torch.bfloat16, 0.7, 4)
    return {
        "there": there.lengths.tolist(),
        "figures": figures[:, 0].tolist(),
        "scored": [scored.values.tolist(), scored.valid.tolist()],
        "answered": answered.lengths.tolist(),
    }


@pytest.mark.parametrize(
    ("mesh", "config", "target", "held", "wanted"),
    [
        # Longest first, 9 8 7 6, and 5 joins the 6 (tests/strategies/test_rows.py).
        ((2, 2, 1, 1), {"critic": {"dp": 4}}, "critic", ACTOR_ROWS, [[9], [8], [7], [5, 6]]),
        # Three actor ranks, of which one has no row, and a role on a rank of its own.
        ((3, 1, 1, 1), {"reward": {"dp": 1, "ranks": [3]}}, "reward", [[5, 6], [], [7]], [[], [], [], [5, 6, 7]]),
        # Fewer rows than data ranks: 9 and 4 leave two ranks without one.
        ((2, 2, 1, 1), {"critic": {"dp": 4}}, "critic", [[], [4, 9]], [[], [4], [], [9]]),
        # Each of two tensor ranks gets all rows.
        ((2, 1, 1, 1), {"reward": {"tp": 2, "ranks": [2, 3]}}, "reward", ACTOR_ROWS, [[], [], ALL_ROWS, ALL_ROWS]),
    ],
    ids=["data4", "own-rank", "ranks-without-rows", "own-tensor2"],
)
def test_rows_go_to_another_role_and_results_come_back(
    mesh: Any, config: Any, target: str, held: list[list[int]], wanted: list[list[int]]
) -> None:
    for rank, result in enumerate(run_ranks(exchange, 4, mesh, config, target, held)):
        data, tensor = mesh[:2]
        own = held[rank // tensor] if rank < data * tensor else []
        assert result == {
            "there": wanted[rank],
            "figures": own,
            "scored": [[length / 2 for length in own], [length % 2 == 0 for length in own]],
            "answered": [length + 100 for length in own],
        }


def bystander() -> tuple[int, int]:
    """Rank 2 has no part of actor and critic, so it does not enter their exchange."""
    strategy = launched((1, 2, 1, 1), {"critic": {"dp": 2}, "reward": {"dp": 1, "ranks": [2]}})
    rows = RowExchange(strategy)
    batch, valued = make_rollout([3, 4] if strategy.global_rank < 2 else []), 0
    if strategy.global_rank < 2:
        there, receipt = rows.there(batch, "critic")
        valued = len(there)
        batch = rows.back(there, receipt, "critic")
    return valued, len(rows.there(batch, "reward")[0])


def test_ranks_of_neither_role_need_not_come() -> None:
    # Two rows, on both tensor ranks of the actor: one each for the two data ranks of the critic.
    assert run_ranks(bystander, 3) == [(1, 0), (1, 0), (0, 2)]


def test_nothing_moves_between_roles_on_the_same_ranks() -> None:
    strategy = launched(None, {})
    batch = make_rollout([5, 6])
    there, receipt = RowExchange(strategy).there(batch, "critic")
    assert there is batch
    assert RowExchange(strategy).back(there, receipt, "critic") is batch


# ---- groups ----------------------------------------------------------------------------------------------------------

APART = {"critic": {"dp": 1, "replicate": True}, "reward": {"dp": 1, "ranks": [2]}}


def exchange_recorded(config: dict[str, Any], isolate: bool) -> dict[str, tuple[set[Any], tuple[str, Any]]]:
    """For each target, what an exchange ran on, with the group that it should; and how often WORLD was used."""
    strategy = launched((2, 1, 1, 1), config, isolate=isolate)
    rows, world, found = RowExchange(strategy), dist.group.WORLD, {}
    own = [[2, 3, 12, 11], [4], []][strategy.global_rank]
    assert world is not None
    before = world._get_sequence_number_for_group()
    for target in ("actor", "rollout", "critic", "reward"):
        with Traffic() as traffic:
            there, receipt = rows.there(make_rollout(own), target, balance=target != "rollout")
            back = rows.back(Figures(there.rollout_logprobs), receipt, target)
        assert back.values[:, 0].tolist() == own
        group = strategy.group("actor" if target == "rollout" else target, "rows")
        place = None if group is None else (group.group_name, dist.get_process_group_ranks(group))
        limit = None if group is None else group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        found[target] = traffic.seen, place, limit
    found["world"] = world.group_name, world._get_sequence_number_for_group() - before, 0
    return found


@pytest.mark.parametrize("isolate", [False, True], ids=["shared", "isolated"])
@pytest.mark.parametrize(("ranks", "config"), [(2, {}), (3, APART)], ids=["one-layout", "own-rank"])
def test_rows_go_over_groups_of_their_role_and_never_over_the_worlds(ranks: int, config: Any, isolate: bool) -> None:
    for rank, found in enumerate(run_ranks(exchange_recorded, ranks, config, isolate)):
        world, used, _ = found.pop("world")
        assert used == 0
        everybody = [0, 1] if ranks == 2 else [0, 1, 2]  # as many as WORLD has, in a group that is not WORLD
        groups = {}
        for target, (seen, place, limit) in found.items():
            if rank == 2 and target != "reward":
                assert (seen, place) == (set(), None)
                continue
            name, members = groups[target] = place
            assert members == (everybody if target == "reward" else [0, 1])
            assert name != world
            assert limit == (77 if isolate else 1800)
            # Rows that a rollout could take stay where they are: no role has another layout for it.
            assert seen == (set() if target == "rollout" else {("all-gather", name), ("all-to-all", name)})
        if isolate and rank < 2:
            assert len({name for name, _ in groups.values()}) == 3, "the rollout's are the actor's"


def test_without_a_process_group_rows_need_none() -> None:
    strategy = launched(None, {}, isolate=True)
    assert not dist.is_initialized()
    assert [strategy.layout(role).exchange for role in ROLES] == [()] * 4


# ---- within one layout -----------------------------------------------------------------------------------------------

MINIBATCH = [[(0, 6, 5), (0, 6, 3), (1, 5, 3), (1, 5, 2), (2, 2, 2), (2, 2, 0)], [(3, 2, 3), (3, 2, 1)]]
"""Group, prompt and response tokens of the rows on two data ranks. The groups cost 6 + 8 = 14, 5 + 5 = 10, 2 + 2 = 4
and 2 + 4 = 6: 28 on one rank and 6 on the other."""
ALL_OF_MINIBATCH = [*MINIBATCH[0], *MINIBATCH[1]]


def make_minibatch(rows: list[tuple[int, int, int]]) -> Experience:
    """Prompts that are the group's, tokens and advantages that are the row's own, on whatever rank it is made."""
    groups, prompts, responses = torch.tensor(rows, dtype=torch.int64).unbind(1)
    columns, places = torch.arange(11), torch.arange(5)
    own = responses[:, None] * (columns >= prompts[:, None])
    ids = 3 + (7 * groups[:, None] + 3 * columns + own) % 50
    advantages = torch.sin(1.0 + groups[:, None] + 2 * responses[:, None] + places)
    rollout = RolloutBatch(
        input_ids=ids * (columns < (prompts + responses)[:, None]),
        prompt_lengths=prompts,
        response_lengths=responses,
        rollout_logprobs=torch.zeros(len(rows), 5),
        group_ids=groups,
        truncated=torch.zeros(len(rows), dtype=torch.bool),
        prompt_texts=[""] * len(rows),
        response_texts=[""] * len(rows),
        fields=[{}] * len(rows),
    )
    advantages = advantages * (places < responses[:, None])
    return Experience(rollout, torch.ones(len(rows)), torch.ones(len(rows), dtype=torch.bool), advantages=advantages)


class SGDActor(Actor):
    """An actor whose step is its gradient."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def train_within(mesh: Any, held: list[list[tuple[int, int, int]]]) -> dict[str, Any]:
    """One pass without gradients and one step; what each rank ran the model on."""
    strategy = HybridStrategy(mesh)
    fabric = Fabric(accelerator="cpu", strategy=strategy)
    fabric.launch()
    flow = HybridDataFlow(SGDActor(tiny_model()), max_tokens_per_micro_batch=20, max_grad_norm=1e9)
    flow.setup(fabric)
    flow.setup_optimizers()
    experience = make_minibatch(held[strategy.data_rank("actor")])
    plan, planned = flow._plan, []

    def note(role: str, rows: Experience) -> Any:
        groups = rows.rollout.group_ids.tolist()
        planned.append(sorted((g, s.prompt, s.response) for g, s in zip(groups, rows.sizes(), strict=True)))
        return plan(role, rows)

    flow._plan = note  # type: ignore[method-assign]
    logprobs = flow.logprobs(experience.rollout)
    GRPO().update(flow, experience)
    state = get_model_state_dict(flow.modules["actor"], options=StateDictOptions(full_state_dict=True))
    return {
        "planned": planned,
        "cost": group_cost(RowSize(prompt, response, group) for group, prompt, response in planned[-1]),
        "logprobs": logprobs,
        "norm": flow.metrics.compute()["actor/grad_norm"],
        "weights": {name: value.clone() for name, value in state.items()},
    }


@pytest.mark.parametrize("mesh", [(2, 1, 1, 1), (2, 2, 1, 1)], ids=["data2", "data2xtensor2"])
def test_a_minibatch_is_balanced_within_one_layout_and_trains_alike(mesh: Any) -> None:
    whole = train_within(None, [ALL_OF_MINIBATCH])
    start = tiny_model().state_dict()
    assert whole["norm"] > 1e-2, "the case must move weights to show anything"
    assert any(
        (value - start[name.removeprefix("model.")]).abs().max() > 1e-3 for name, value in whole["weights"].items()
    )
    results = run_ranks(train_within, mesh[0] * mesh[1], mesh, MINIBATCH)
    for rank, result in enumerate(results):
        data = rank // mesh[1]
        # Halves of four rows would cost 24 and 10. Whole groups: 14 here, 10 there, 6 there, 4 here.
        assert result["cost"] == (18, 16)[data]
        assert result["planned"] == [sorted(row for row in ALL_OF_MINIBATCH if row[0] in ((0, 2), (1, 3))[data])] * 2
        # The log-probs have come back to the rows that asked: the first six, or the last two.
        own = whole["logprobs"][slice(0, 6) if data == 0 else slice(6, 8)]
        torch.testing.assert_close(result["logprobs"], own, atol=1e-5, rtol=1e-5)
        assert result["norm"] == pytest.approx(whole["norm"], abs=1e-5, rel=1e-5)
        for name, value in whole["weights"].items():
            torch.testing.assert_close(result["weights"][name], value, atol=1e-5, rtol=1e-5)


def stay_within() -> list[Any]:
    """Rows that need not move, rows that must not, and none at all; rank 2 has no part of it."""
    strategy = launched((2, 1, 1, 1), {"reward": {"dp": 1, "ranks": [2]}})
    rows = RowExchange(strategy)
    rank = strategy.global_rank
    even, uneven = make_rollout([[12, 10], [9, 8], []][rank]), make_rollout([[12, 11], [9, 8], []][rank])
    stays, receipt = rows.there(even, "actor", balance=True)
    seen: list[Any] = [stays is even, receipt, rows.back(stays, receipt, "actor") is even]
    asked, receipt = rows.there(uneven, "rollout")
    seen += [asked is uneven, receipt, rows.back(asked, receipt, "rollout") is uneven]
    moved, receipt = rows.there(uneven, "critic", balance=True)
    back = rows.back(moved, receipt, "critic")
    assert describe(back) == describe(uneven)
    nothing, _ = rows.there(make_rollout([]), "actor", balance=True)
    return [*seen, moved.lengths.tolist(), len(nothing)]


def test_rows_stay_within_a_layout_where_it_does_not_pay() -> None:
    # 12 + 10 = 22 against 12 + 8 = 20 is 10% more: they stay. 12 + 11 = 23 is above that, so 12 8 and 11 9; but not for
    # a rollout.
    same = [True, None, True]
    shares: list[list[int]] = [[12, 8], [11, 9], []]
    assert run_ranks(stay_within, 3) == [[*same, *same, share, 0] for share in shares]


def count_collectives() -> list[int]:
    """How many counts are gathered on the tensor ranks of one data rank, and on two data ranks."""
    gathered: list[int] = []
    gather = dispatch.gather_counts

    def note(values: list[int], group: Any) -> torch.Tensor:
        gathered.append(group.size())
        return gather(values, group)

    dispatch.gather_counts = note
    made = []
    for mesh in ((1, 2, 1, 1), (2, 1, 1, 1)):
        there, receipt = RowExchange(launched(mesh, {})).there(make_rollout([5]), "critic", balance=True)
        assert (there.lengths.tolist(), receipt) == ([5], None)
        made.append(len(gathered))
    return made


def test_no_collective_is_made_with_one_data_rank() -> None:
    assert run_ranks(count_collectives, 2) == [[0, 2]] * 2


def pass_objects() -> dict[int, Any]:
    strategy = launched((1, 2, 1, 1), {})
    group = strategy.group("actor", "tensor")
    assert group is not None
    assert exchange_objects({}, group) == {}
    return exchange_objects({1 - strategy.global_rank: "x" * (1 + strategy.global_rank)}, group)


def test_objects_go_to_their_receiver_only() -> None:
    assert run_ranks(pass_objects, 2) == [{1: "xx"}, {0: "x"}]
