"""The board of phases and the monitor; real runs in which a rank hangs, is late or fails."""

from __future__ import annotations

import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric

from lightning_verl import (
    PPO,
    Actor,
    AsyncRolloutDataset,
    Critic,
    HybridDataFlow,
    HybridStrategy,
    Reward,
    RewardFunction,
    RLTrainer,
    SamplingParams,
)
from lightning_verl.callbacks import NCCLGroupIsolation
from lightning_verl.strategies import recorder, watchdog
from lightning_verl.strategies.diagnosis import CollectiveTimeoutError, LayoutMismatchError
from lightning_verl.strategies.layout import RoleLayout
from lightning_verl.strategies.recorder import Collective
from lightning_verl.strategies.watchdog import NCCLMonitor, PhaseBoard, watched
from lightning_verl.testing import char_tokenizer, run_ranks, tiny_config, tiny_model

TIMEOUT = timedelta(seconds=3)


def wait_for_the_others(bad_rank: int) -> None:
    """Hang until all other ranks have given up."""
    store = dist.distributed_c10d._get_default_store()
    others = [rank for rank in range(dist.get_world_size()) if rank != bad_rank]
    store.wait([f"gave up/{rank}" for rank in others], timedelta(seconds=30))


class LateLoss(PPO):
    """One rank hangs, or fails, in the middle of the actor's update."""

    def __init__(self, bad_rank: int, how: str) -> None:
        super().__init__()
        self.bad_rank, self.how = bad_rank, how

    def actor_loss(self, *args: Any) -> Any:
        if not dist.is_initialized() or dist.get_rank() == self.bad_rank:
            if self.how == "fails":
                raise ValueError("no luck")
            if self.how == "misplaces":
                return torch.ones(2, device="meta") @ args[0][0, :2], {}
            wait_for_the_others(self.bad_rank)
        return super().actor_loss(*args)


class LateReward(Reward):
    """A sharded reward model whose last rank never enters the pass."""

    def score(self, rows: Any) -> Any:
        if dist.get_rank() == dist.get_world_size() - 1:
            wait_for_the_others(dist.get_rank())
        return super().score(rows)


def run(algorithm: PPO, reward: Any, strategy: HybridStrategy, callbacks: list[Any]) -> tuple[float, str, str]:
    """One step; the seconds from its start to its error, and the error."""
    fabric = Fabric(accelerator="cpu", strategy=strategy, callbacks=callbacks)
    fabric.launch()
    tokenizer = char_tokenizer()
    size = {"vocab_size": len(tokenizer)}
    flow = HybridDataFlow(
        Actor(tiny_model(**size), tokenizer=tokenizer), Critic(tiny_model(seed=1, **size)), reward=reward
    )
    trainer = RLTrainer(
        fabric,
        flow,
        algorithm,
        AsyncRolloutDataset([{"prompt": str(number)} for number in range(8)], tokenizer=tokenizer),
        rollout_batch_size=4,
        update_batch_size=1,
        sampling=SamplingParams(max_new_tokens=2),
    )
    entered = []

    def call(hook: str, **arguments: Any) -> None:
        entered.append(time.monotonic())  # the last hook is just before what hangs
        fabric.call(hook, **arguments)

    flow.call = call  # type: ignore[method-assign]
    try:
        trainer.fit(1)
    except (CollectiveTimeoutError, ValueError) as error:
        result = time.monotonic() - entered[-1], type(error).__name__, str(error)
        dist.distributed_c10d._get_default_store().set(f"gave up/{fabric.global_rank}", "")
        return result
    return 0.0, "", ""


class LateCallback:
    """A rank that never enters the actor's update."""

    def on_actor_update_start(self) -> None:
        if dist.get_rank() == 1:
            wait_for_the_others(1)


def run_update(how: str) -> tuple[float, str, str]:
    length = RewardFunction(lambda response: float(len(response)))
    isolation = NCCLGroupIsolation(timeout=TIMEOUT)
    algorithm, callbacks = (PPO(), [LateCallback(), isolation]) if how == "stays away" else (LateLoss(1, how), [])
    return run(algorithm, length, HybridStrategy(timeout=TIMEOUT), callbacks)


def run_reward() -> tuple[float, str, str]:
    """Only the role's own groups are short: the strategy's timeout would be 30 minutes."""
    reward = LateReward(tiny_config("llama", vocab_size=len(char_tokenizer()), pad_token_id=0))
    return run(PPO(), reward, HybridStrategy((2, 2, 1, 1)), [NCCLGroupIsolation(timeout=TIMEOUT)])


@pytest.mark.parametrize(
    ("how", "group", "where"),
    [
        ("hangs", "shared:[0, 1]", "Rank 1 is in the same phase"),
        # An update begins by counting rows, which may have to move.
        ("stays away", "actor/rows:[0, 1]", "Rank 1 was last seen in critic 'update' (its phase "),
    ],
)
def test_a_rank_that_does_not_come_to_an_update_is_named_in_time(how: str, group: str, where: str) -> None:
    (seconds, kind, text), _ = run_ranks(run_update, 2, how)
    assert kind == "CollectiveTimeoutError"
    assert seconds < 2 * TIMEOUT.total_seconds()
    assert text.startswith("actor 'update': a collective did not finish within 3 s (gloo:")
    assert f"of group '{group}'). Missing ranks: [1]. {where}" in text
    assert "NCCL_IB_DISABLE=unset" in text
    assert "NCCL ignores NCCL_SOCKET_TIMEOUT" in text


def test_a_rank_that_fails_is_named_with_its_error() -> None:
    (seconds, kind, text), (_, own_kind, own_text) = run_ranks(run_update, 2, "fails")
    assert (own_kind, own_text) == ("ValueError", "no luck")
    assert kind == "CollectiveTimeoutError"
    assert seconds < 2 * TIMEOUT.total_seconds()
    assert text.startswith("actor 'update': a collective broke off, because a rank of it ended or gave up")
    assert "Missing ranks: [1]. Rank 1 failed in actor 'update': ValueError: no luck." in text


def test_a_rank_that_hangs_in_a_sharded_reward_is_named_by_all_three_others() -> None:
    for seconds, kind, text in run_ranks(run_reward, 4)[:3]:
        assert kind == "CollectiveTimeoutError"
        assert seconds < 2 * TIMEOUT.total_seconds()
        assert text.startswith("reward 'score': a collective ")
        assert "Missing ranks: [3]." in text


def test_a_tensor_on_another_device_names_role_and_layout() -> None:
    with pytest.raises(LayoutMismatchError, match=r"actor 'update': the layout does not match.*ranks \[0\].*on cpu"):
        run_update("misplaces")


# ---- the board ------------------------------------------------------------------------------------------------------


def make_board(rank: int = 0, store: Any = None, world_size: int = 2) -> PhaseBoard:
    strategy = SimpleNamespace(
        global_rank=rank,
        world_size=world_size,
        mesh=None,
        timeout=timedelta(seconds=0.4),
        root_device=torch.device("cpu"),  # for messages
        layout=lambda role: RoleLayout(role, 1, 2, 1, (0, 1)),
    )
    board = PhaseBoard(strategy)  # type: ignore[arg-type]
    board._name, board._clone = "board", store
    return board


def test_a_board_needs_no_store() -> None:
    board = make_board(world_size=1)
    with board.phase("actor", "update"):
        assert str(board.report(None)) == "actor 'update'"
    assert str(board.report(None)) == "between 'phases'"
    assert not board.alarmed()


def test_a_phase_inside_another_gives_the_place_back() -> None:
    store = dist.HashStore()
    board, other = make_board(0, store), make_board(1, store)
    with board.phase("actor", "rollout"):
        with board.phase("actor", "reshard"):
            assert str(other._read(0)) == "actor 'reshard'"
        note = other._read(0)
        assert note is not None
        assert (note.number, note.role, note.phase, note.state) == (1, "actor", "rollout", "in")


def test_the_innermost_phase_names_the_error() -> None:
    board = make_board(0, dist.HashStore())
    with (
        pytest.raises(
            CollectiveTimeoutError, match=r"^actor 'reshard': a collective did not.*Missing ranks: \[1\]"
        ) as e,
        board.phase("actor", "rollout"),
        board.phase("actor", "reshard"),
    ):
        raise RuntimeError("[gloo/transport/tcp/x.cc:78] Timed out waiting 10ms for recv operation to complete")
    assert "Timed out waiting" in str(e.value.__cause__)
    assert board.alarmed()


def test_another_error_stays_what_it_is_and_is_told_to_the_others() -> None:
    store = dist.HashStore()
    board = make_board(0, store)
    with pytest.raises(KeyError, match="x"), board.phase("critic", "values"):
        raise KeyError("x")
    note = make_board(1, store)._read(0)
    assert note is not None
    assert (note.state, note.detail) == ("failed", "KeyError: 'x'")
    assert not board.alarmed()


def test_a_store_that_is_gone_does_not_hide_the_error() -> None:
    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise dist.DistNetworkError("Broken pipe")

    with (
        pytest.raises(CollectiveTimeoutError, match=r"Missing ranks: \[1\]. Rank 1 has not entered any phase"),
        make_board(0, Gone()).phase("actor", "update"),
    ):
        raise dist.DistNetworkError("Broken pipe")


def test_tensors_on_two_devices_name_the_layout() -> None:
    with (
        pytest.raises(LayoutMismatchError, match=r"critic 'values': the layout does not match.*ranks \[0, 1\]"),
        make_board(0, dist.HashStore()).phase("critic", "values"),
    ):
        raise RuntimeError("Expected all tensors to be on the same device, but found cuda:0 and cpu!")


def test_a_watched_method_takes_its_role_from_the_first_argument() -> None:
    phases: list[tuple[str, str]] = []
    board = make_board(world_size=1)

    def phase(role: str, name: str) -> Any:
        phases.append((role, name))
        return board.phase(role, name)

    class Flow:
        strategy = SimpleNamespace(phase=phase)

        @watched("update")
        def train(self, role: str) -> str:
            return role

        @watched("score", "reward")
        def score(self) -> None: ...

    assert Flow().train("critic") == Flow().train(role="critic") == "critic"
    Flow().score()
    assert phases == [("critic", "update"), ("critic", "update"), ("reward", "score")]


# ---- the monitor of NCCL ---------------------------------------------------------------------------------------------


class FakeRecorder:
    """One NCCL group of timeout ``TIMEOUT`` whose seventh collective was issued ``age`` seconds ago."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, age: float, comes_at: float = 1e9) -> None:
        self.started = time.monotonic() - age
        self.comes_at = comes_at
        monkeypatch.setattr(recorder, "backlog", lambda: {"1": 6} if self.pending() else {})
        monkeypatch.setattr(recorder, "pending_collectives", self.pending)
        monkeypatch.setattr(recorder, "last_collective", lambda nccl: self.pending()[0])
        monkeypatch.setattr(watchdog, "_shortest_timeout", lambda: 0.0)
        monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)

    def pending(self) -> list[Collective]:
        age = time.monotonic() - self.started
        return [Collective("nccl:all_reduce", "1", "critic/reduce:[0, 1]", 7, age, 0.4)] if age < self.comes_at else []


def watch(board: PhaseBoard, seconds: float) -> list[int]:
    """Let a monitor look every 10 ms for a while; with which codes it would have ended the process."""
    ends: list[int] = []
    monitor = NCCLMonitor(board, period=0.01, end=ends.append)
    monitor.start()
    time.sleep(seconds)
    monitor.stop()
    return ends


def test_the_monitor_explains_before_the_timeout_and_ends_the_process_after_it(monkeypatch, capsys) -> None:
    FakeRecorder(monkeypatch, age=0.3)  # a quarter of 0.4 s before its timeout
    store = dist.HashStore()
    board = make_board(0, store)
    with make_board(1, store).phase("reward", "score"), board.phase("critic", "update"):
        ends = watch(board, seconds=0.6)
    text = capsys.readouterr().err
    assert text.startswith(
        "CollectiveTimeoutError: critic 'update': a collective has not finished after 0 of the 0.4 s"
    )
    assert "nccl:all_reduce, number 7 of group 'critic/reduce:[0, 1]'). Missing ranks: [1]" in text
    assert "Rank 1 was last seen in reward 'score' (its phase 1" in text
    assert ends[:1] == [1]


def test_the_monitor_keeps_quiet_while_nothing_is_late(monkeypatch, capsys) -> None:
    FakeRecorder(monkeypatch, age=0.0, comes_at=0.2)
    assert watch(make_board(0, dist.HashStore()), seconds=0.5) == []
    assert capsys.readouterr().err == ""


def test_the_monitor_takes_nothing_back_from_a_collective_that_comes_at_the_last_moment(monkeypatch, capsys) -> None:
    FakeRecorder(monkeypatch, age=0.3, comes_at=0.32)
    assert watch(make_board(0, dist.HashStore()), seconds=0.3) == []
    assert capsys.readouterr().err == ""


def test_the_monitor_leaves_the_process_alone_where_torch_does(monkeypatch, capsys) -> None:
    FakeRecorder(monkeypatch, age=0.3)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    assert watch(make_board(0, dist.HashStore()), seconds=0.5) == []
    assert "CollectiveTimeoutError" in capsys.readouterr().err


def test_the_monitor_tells_a_rank_that_asks_that_it_waits_too(monkeypatch) -> None:
    FakeRecorder(monkeypatch, age=0.0)
    monkeypatch.setattr(watchdog, "_shortest_timeout", lambda: 1800.0)
    store = dist.HashStore()
    asking, board = make_board(1, store), make_board(0, store)
    with board.phase("critic", "update"):
        asking.report(None)
        watch(board, seconds=0.1)
    note = asking._read(0)
    assert note is not None
    assert (note.state, note.detail) == ("waiting", "nccl:all_reduce, number 7 of group 'critic/reduce:[0, 1]'")
