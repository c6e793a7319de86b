"""NCCLGroupIsolation: which groups there are, and which of them the collectives of a real role run on."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from traffic import Traffic

from lightning_verl import (
    PPO,
    Actor,
    AsyncRolloutDataset,
    Critic,
    HybridDataFlow,
    HybridStrategy,
    NCCLGroupManager,
    RewardFunction,
    RLTrainer,
    SamplingParams,
)
from lightning_verl.callbacks import NCCLGroupIsolation
from lightning_verl.callbacks.nccl_group_isolation import IsolatedGroup, _check_distinct
from lightning_verl.data.experience import RolloutBatch
from lightning_verl.testing import char_tokenizer, run_ranks, tiny_model

LOSSES: dict[str, Callable[[nn.Module, RolloutBatch], Tensor]] = {
    "actor": lambda actor, batch: actor(batch)[0].sum(),
    "critic": lambda critic, batch: critic(batch).square().sum(),
}
DATA = {"dp": 2}
DATA_AND_TENSOR = {"dp": 2, "tp": 2}
REPLICAS = {"dp": 2, "replicate": True}


def make_roles() -> dict[str, nn.Module]:
    critic = Critic(tiny_model("qwen3", seed=1))
    with torch.no_grad():  # from a head of zeros no gradient would reach the model
        critic.value_head.weight.copy_(torch.linspace(-1, 1, 64)[None])
    return {"actor": Actor(tiny_model("qwen3"), tokenizer=char_tokenizer()), "critic": critic}


def make_batch() -> RolloutBatch:
    """Four sequences of two prompt tokens and one to four response tokens."""
    responses = torch.tensor([1, 2, 3, 4])
    ids = torch.arange(24).view(4, 6) + 4
    return RolloutBatch(
        input_ids=ids.masked_fill(torch.arange(6) >= 2 + responses[:, None], 0),
        prompt_lengths=torch.full((4,), 2),
        response_lengths=responses,
        rollout_logprobs=torch.zeros(4, 4),
        group_ids=torch.arange(4),
        truncated=torch.zeros(4, dtype=torch.bool),
        prompt_texts=[""] * 4,
        response_texts=[""] * 4,
        fields=[{}] * 4,
    )


def _train_both(world_size: int, config: dict[str, Any], isolate: bool) -> dict[str, Any]:
    """One pass of each role over a data rank's share of the batch: the traffic and the whole gradients."""
    callback = NCCLGroupIsolation()
    strategy = HybridStrategy(parallelism_config={"actor": config, "critic": config})
    callbacks = [callback] if isolate else []
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, callbacks=callbacks)
    fabric.launch()
    roles = make_roles()
    HybridDataFlow(**roles).setup(fabric)
    traffic, gradients = {}, {}
    for role, module in roles.items():
        rows = make_batch().select(torch.arange(4).chunk(strategy.layout(role).data_size)[strategy.data_rank(role)])
        with Traffic() as seen:
            # gradients are averaged over data ranks
            (LOSSES[role](module, rows) * strategy.layout(role).data_size).backward()
        traffic[role] = seen.seen
        gradients[role] = {name: whole(p.grad) for name, p in module.named_parameters() if p.grad is not None}
    meshes = {role: strategy.role_mesh(role).mesh_dim_names for role in roles}
    return {"traffic": traffic, "gradients": gradients, "meshes": meshes, "report": callback.report}


def whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


@functools.cache
def trained(world_size: int, sizes: tuple[tuple[str, Any], ...], isolate: bool = True) -> list[dict[str, Any]]:
    return run_ranks(_train_both, world_size, world_size, dict(sizes), isolate)


def used(result: dict[str, Any], role: str) -> dict[str, list[str]]:
    """What a role's collectives ran on, by kind: ``"role/operation"``, or torch's name of any other group."""
    names = {group.name: f"{group.role}/{group.operation}" for group in result["report"]}
    kinds: dict[str, list[str]] = {}
    for kind, name in sorted(result["traffic"][role]):
        kinds.setdefault(kind, []).append(names.get(name, name))
    return kinds


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_gathers_and_gradients_run_on_groups_of_the_role(role):
    for result in trained(2, tuple(DATA.items())):
        assert used(result, role) == {"all-gather": [f"{role}/gather"], "reduce-scatter": [f"{role}/reduce"]}


def test_without_the_callback_all_share_one_group():
    for result in trained(2, tuple(DATA.items()), isolate=False):
        assert len({name for role in ("actor", "critic") for _, name in result["traffic"][role]}) == 1
        assert result["report"] == []


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_cut_matrices_reduce_on_the_groups_of_the_role(role):
    # torch takes meshes of equal ranks and names for one: with shared names, the second role would use the first's
    for result in trained(4, tuple(DATA_AND_TENSOR.items())):
        assert used(result, role) == {
            "all-gather": [f"{role}/gather"],
            "all-reduce": [f"{role}/tensor"],
            "reduce-scatter": [f"{role}/reduce"],
        }
        assert result["meshes"][role] == (f"{role}_replicate", f"{role}_shard", f"{role}_tensor")


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_replicas_reduce_on_a_group_of_the_role(role):
    for result in trained(4, tuple(REPLICAS.items())):
        assert used(result, role) == {
            "all-gather": [f"{role}/gather"],
            "all-reduce": [f"{role}/replicate"],
            "reduce-scatter": [f"{role}/reduce"],
        }


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize(("ranks", "sizes"), [(2, DATA), (4, DATA_AND_TENSOR), (4, REPLICAS)])
def test_gradients_equal_those_of_one_process(role, ranks, sizes):
    module = make_roles()[role]
    LOSSES[role](module, make_batch()).backward()
    expected = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    for result in trained(ranks, tuple(sizes.items())):
        assert result["gradients"][role].keys() == expected.keys()
        for name, gradient in result["gradients"][role].items():
            largest = expected[name].abs().max().item()  # sums in another order are off by a part of the largest term
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-5 * largest)


# Two shards of two tensor ranks, [[0, 1], [2, 3]]; rank 2 is the first tensor rank of the second shard.
OF_RANK_2 = {"gather": (0, 2), "reduce": (0, 2), "tensor": (2, 3), "scores": (0, 2), "rows": (0, 1, 2, 3)}


def test_report_names_the_groups_of_this_rank():
    first, second, third, _ = (result["report"] for result in trained(4, tuple(DATA_AND_TENSOR.items())))
    ranks = {(group.role, group.operation): group.ranks for group in third}
    assert ranks == {
        (role, operation): line for role in ("actor", "critic") for operation, line in OF_RANK_2.items()
    } | {
        # these take the mesh's own numbers, four data ranks
        (role, operation): (0, 1, 2, 3)
        for role in ("reference", "reward")
        for operation in ("gather", "reduce", "scores", "rows")
    } | {("actor", "reshard"): (0, 1, 2, 3)}
    for report in (first, second, third):
        names = [group.name for group in report]
        assert len(set(names)) == len(names) == 19


def _record_calls() -> tuple[list[tuple[list[int], dict[str, Any]]], float]:
    calls = []
    create = NCCLGroupManager.create_group

    def recorded(ranks: list[int], **options: Any) -> dist.ProcessGroup | None:
        calls.append((ranks, options))
        return create(ranks, **options)

    strategy = HybridStrategy(parallelism_config={"actor": {"dp": 1, "tp": 2}})
    callback = NCCLGroupIsolation(timeout=timedelta(seconds=77), high_priority=True)
    Fabric(accelerator="cpu", devices=2, strategy=strategy).launch()
    NCCLGroupManager.create_group = recorded
    try:
        callback.on_groups_setup(strategy)
        callback.on_groups_setup(strategy)  # a second data flow with the same strategy
    finally:
        NCCLGroupManager.create_group = staticmethod(create)
    group = strategy.group("actor", "tensor")
    return calls, group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_every_rank_creates_the_same_groups_once_in_the_same_order():
    (calls, timeout), (other, _) = run_ranks(_record_calls, 2)
    assert calls == other
    # the actor has a tensor axis of two only, so its rows stay where they are; the other roles have a data axis of two
    assert [options["description"] for _, options in calls] == ["actor/tensor:[0, 1]", "actor/reshard:[0, 1]"] + [
        f"{role}/{operation}:[0, 1]"
        for role in ("critic", "reference", "reward")
        for operation in ("gather", "reduce", "scores", "rows")
    ]
    assert all(options["high_priority"] for _, options in calls)
    assert timeout == 77


def _give_the_world() -> None:
    strategy = HybridStrategy()
    Fabric(accelerator="cpu", devices=2, strategy=strategy).launch()
    NCCLGroupManager.create_group = staticmethod(lambda ranks, **options: dist.group.WORLD)
    NCCLGroupIsolation().on_groups_setup(strategy)


def test_the_worlds_own_group_is_refused():
    with pytest.raises(RuntimeError, match=r"NCCLGroupIsolation: actor/gather and the world ended up on one communic"):
        run_ranks(_give_the_world, 2)


def test_one_group_under_two_names_is_refused():
    groups = {
        ("actor", "gather"): SimpleNamespace(group_name="3"),
        ("actor", "reduce"): SimpleNamespace(group_name="4"),
        ("critic", "gather"): SimpleNamespace(group_name="3"),
    }
    with pytest.raises(RuntimeError, match=r"critic/gather and actor/gather ended up on one communicator \('3'\)"):
        _check_distinct(groups)


def test_one_process_needs_no_groups(caplog):
    callback, strategy = NCCLGroupIsolation(), HybridStrategy()
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy, callbacks=[callback])
    fabric.launch()
    HybridDataFlow(**make_roles()).setup(fabric)
    with caplog.at_level(logging.INFO, logger="lightning_verl"):
        callback.on_run_start(SimpleNamespace(fabric=fabric))
    assert callback.report == []
    assert caplog.messages == []


@pytest.mark.parametrize(("first_rank", "lines"), [(True, 1), (False, 0)])
def test_report_is_logged_once_by_rank_0(caplog, first_rank, lines):
    callback = NCCLGroupIsolation()
    callback.report = [IsolatedGroup("actor", "gather", (0, 2), "7")]
    trainer = SimpleNamespace(fabric=SimpleNamespace(is_global_zero=first_rank))
    with caplog.at_level(logging.INFO, logger="lightning_verl"):
        callback.on_run_start(trainer)
        callback.on_run_start(trainer)
    assert len(caplog.messages) == lines
    assert all("actor     gather    ranks [0, 2]  7" in message for message in caplog.messages)


def test_timeout_out_of_range():
    with pytest.raises(
        ValueError, match=r"NCCLGroupIsolation got timeout=0:00:00 for 'actor/gather'; it must be above"
    ):
        NCCLGroupIsolation(timeout=timedelta(0))
    with pytest.raises(ValueError, match=r"unknown group 'critic/reshard'; known are 'actor/gather'"):
        NCCLGroupIsolation(timeout={"critic/reshard": timedelta(1)})


def _own_timeouts() -> dict[str, tuple[str, float]]:
    """torch's name and the timeout in seconds of the groups that the kinds of traffic run on."""
    limits = {"critic/reduce": timedelta(seconds=11), "actor/gather": timedelta(seconds=12)}
    limits |= {"actor/scores": timedelta(seconds=13), "reward/rows": timedelta(seconds=14)}
    strategy = HybridStrategy(timeout=timedelta(seconds=99))
    Fabric(accelerator="cpu", devices=2, strategy=strategy).launch()
    NCCLGroupIsolation(timeout=limits).on_groups_setup(strategy)
    found = {}
    for name in [*limits, "actor/reshard", "critic/rows"]:
        group = strategy.group(*name.split("/"))
        found[name] = group.group_name, group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return found


def test_critic_gradients_actor_gathers_scores_rows_and_resharding_have_groups_and_timeouts_of_their_own():
    for found in run_ranks(_own_timeouts, 2):
        assert len({name for name, _ in found.values()}) == 6
        timeouts = {key: seconds for key, (_, seconds) in found.items()}
        # what is not named keeps 1800 s, whatever the strategy's own timeout
        assert timeouts == {
            "critic/reduce": 11,
            "actor/gather": 12,
            "actor/scores": 13,
            "reward/rows": 14,
            "actor/reshard": 1800,
            "critic/rows": 1800,
        }


def own_reduce_group() -> tuple[bool, bool, float, int]:
    """A user's own group for the critic's gradients is kept, and used: how many collectives ran on it."""
    fabric = Fabric(accelerator="cpu", strategy=HybridStrategy(), callbacks=[NCCLGroupIsolation()])
    fabric.launch()
    own = NCCLGroupManager.create_group([0, 1], timeout=timedelta(seconds=30), description="mine")
    tokenizer = char_tokenizer()
    size = {"vocab_size": len(tokenizer)}
    flow = HybridDataFlow(
        Actor(tiny_model(**size), tokenizer=tokenizer),
        Critic(tiny_model(seed=1, **size)),
        RewardFunction(lambda response: float(len(response))),
    )
    trainer = RLTrainer(
        fabric,
        flow,
        PPO(),
        AsyncRolloutDataset([{"prompt": str(number)} for number in range(8)], tokenizer=tokenizer),
        rollout_batch_size=4,
        update_batch_size=1,
        sampling=SamplingParams(max_new_tokens=3),
        grad_sync_groups={"critic": own},
    )
    kept = fabric.strategy.group("critic", "reduce") is own
    isolated = fabric.strategy.group("actor", "reduce") is not fabric.strategy.group("actor", "gather")
    norm = trainer.fit(1)["critic/grad_norm"]
    return kept, isolated, norm, own._get_sequence_number_for_group()


def test_a_users_own_group_for_gradients_stays_in_place() -> None:
    first, second = run_ranks(own_reduce_group, 2)
    assert first == second
    assert first[:2] == (True, True)
    assert first[2] > 0
    # 4 mini-batches (4 prompts, update_batch_size 1), one reduce-scatter for each unit of FSDP2: two decoder layers and
    # the critic around them
    assert first[3] == 4 * 3
