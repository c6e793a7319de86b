"""Texts of the three classic symptoms: what they name, and the arithmetic of what they advise."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_verl.strategies.diagnosis import (
    CollectiveTimeoutError,
    Note,
    StepTimes,
    advise_ratio,
    how_it_failed,
    is_collective_failure,
    is_misplacement,
    misplacement_text,
    timeout_hints,
    timeout_text,
)
from lightning_verl.strategies.layout import RoleLayout
from lightning_verl.strategies.recorder import Collective

GATHER = Collective("gloo:all_gather", "3", "actor/gather:[0, 2]", 12, 3.2, 3.0)
OWN = Note(8, "actor", "update", "waiting")
GLOO = "[/x/third_party/gloo/gloo/transport/tcp/"


# ---- collectives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError(f"{GLOO}unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete"), True),
        (RuntimeError(f"{GLOO}pair.cc:553] Connection closed by peer [127.0.0.1]:5. Typically a crash."), True),
        (dist.DistBackendError("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, ..."), True),
        (dist.DistBackendError("NCCL communicator was aborted on rank 0."), True),
        (dist.DistStoreError("wait timeout after 3000ms, keys: /default_pg/0//cpu//2/0"), True),
        (CollectiveTimeoutError(""), True),
        (RuntimeError("The judge: Timed out waiting for an answer"), False),
        (ConnectionResetError("Connection reset by peer"), False),
        (TimeoutError("the reward phase: ranks [1] did not finish within 2:00:00."), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
    ],
)
def test_which_errors_are_of_collectives(error: Exception, expected: bool) -> None:
    assert is_collective_failure(error) is expected


def test_how_it_failed() -> None:
    late = RuntimeError("Timed out waiting 3000ms")
    assert how_it_failed(late, GATHER) == "a collective did not finish within 3 s"
    assert how_it_failed(late, None) == "a collective did not finish within its timeout"
    assert "broke off" in how_it_failed(RuntimeError("Connection closed by peer"), GATHER)


def test_missing_ranks_are_those_of_the_group_that_do_not_wait() -> None:
    notes = {1: Note(3, "reward", "score"), 2: Note(5, "reward", "score"), 3: None}
    text = timeout_text("it hangs", 0, OWN, GATHER, notes, members=[0, 2])
    assert text == (
        "actor 'update': it hangs (gloo:all_gather, number 12 of group 'actor/gather:[0, 2]'). Missing ranks: [2]. "
        "Rank 2 was last seen in reward 'score' (its phase 5; rank 0 is in its phase 8)."
    )


def test_a_rank_outside_of_the_group_is_missing_where_all_of_the_group_wait() -> None:
    notes = {1: Note(8, "actor", "update"), 2: OWN, 3: Note(8, "actor", "update", "failed", "ValueError: x")}
    text = timeout_text("it hangs", 0, OWN, GATHER, notes, members=[0, 2])
    assert "Missing ranks: [1, 3]. Rank 1 is in the same phase, but did not come" in text
    assert "Rank 3 failed in actor 'update': ValueError: x." in text


def test_without_a_known_group_all_ranks_may_be_missing() -> None:
    text = timeout_text("it hangs", 0, OWN, None, {1: None}, members=[])
    assert text == "actor 'update': it hangs. Missing ranks: [1]. Rank 1 has not entered any phase."


def test_ranks_that_all_wait_are_in_different_collectives() -> None:
    notes = {1: Note(9, "critic", "update", "waiting", "gloo:broadcast, number 2 of group 'x'")}
    text = timeout_text("it hangs", 0, OWN, GATHER, notes, members=[0, 1])
    assert "they wait in different collectives: rank 1 in gloo:broadcast, number 2 of group 'x'." in text
    late = timeout_text("a collective broke off", 0, OWN, GATHER, notes, members=[0, 1])
    assert late.endswith("No rank is missing: the others gave up before rank 0 came.")


def test_hints_give_values_and_say_what_this_nccl_ignores() -> None:
    environment = {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_TIMEOUT": "60000"}
    text = timeout_hints((2, 2, 1, 1), "nccl", (2, 28, 9), environment)
    assert "NCCL_IB_DISABLE=1, NCCL_IB_TIMEOUT=unset" in text
    assert "NCCL_SOCKET_TIMEOUT=60000" in text
    assert "TORCH_NCCL_BLOCKING_WAIT=unset" in text
    assert "NCCL 2.28.9 ignores NCCL_SOCKET_TIMEOUT, NCCL_TIMEOUT:" in text
    assert "this run uses" not in text
    # NCCL_SOCKET_RETRY_CNT came with 2.24
    older = timeout_hints((2, 2, 1, 1), "nccl", (2, 23, 4), {})
    assert "NCCL 2.23.4 ignores NCCL_SOCKET_RETRY_CNT, NCCL_SOCKET_TIMEOUT" in older
    assert "this run uses gloo, which reads none of them" in timeout_hints((2, 1, 1, 1), "gloo", None, {})


@pytest.mark.parametrize(
    ("shape", "advice"),
    [
        ((2, 2, 1, 1), "Try mesh_shape (4, 1, 1, 1) on as many processes instead of (2, 2, 1, 1)"),
        ((1, 2, 1, 6), "Try mesh_shape (2, 2, 1, 3) on as many processes instead of (1, 2, 1, 6)"),
        ((3, 1, 1, 1), "Try mesh_shape (1, 1, 1, 1) on 1 process(es) instead of (3, 1, 1, 1)"),
        ((8, 1, 1, 1), "Try mesh_shape (4, 1, 1, 1) on 4 process(es) instead of (8, 1, 1, 1)"),
        ((1, 1, 1, 1), "The mesh is of one rank already."),
    ],
)
def test_the_largest_axis_shrinks(shape: tuple[int, ...], advice: str) -> None:
    assert advice in timeout_hints(shape, "nccl", None, {})


# ---- layouts ---------------------------------------------------------------------------------------------------------


def test_torchs_own_errors_of_misplaced_tensors_are_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2, device="meta") @ torch.ones(2)
    assert is_misplacement(caught.value)
    for text in (
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
        "aten.embedding.default got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor",
        "All operands in aten.stack.default must have the same mesh, but got DeviceMesh((dp=2)...) and ...",
    ):
        assert is_misplacement(RuntimeError(text))
    assert not is_misplacement(RuntimeError("size mismatch"))


def test_a_misplaced_tensor_names_role_layout_and_fix() -> None:
    layout = RoleLayout("critic", replicas=1, shards=2, tensor=2, ranks=(0, 1, 2, 3))
    text = misplacement_text(Note(4, "critic", "values"), layout, "cuda:0", RuntimeError("mixed"))
    assert text.startswith("critic 'values': the layout does not match the mesh")
    assert (
        "on ranks [0, 1, 2, 3] as replicas x stages x shards x expert x tensor = 1 x 1 x 2 x 1 x 2, on cuda:0" in text
    )
    assert "dataflow.setup(fabric)" in text
    assert "parallelism_config['critic']" in text


# ---- idle ranks ------------------------------------------------------------------------------------------------------


def steps(*rollout_waits: float, data_wait: float = 0.0) -> list[StepTimes]:
    """Steps of 10 s."""
    return [StepTimes(10.0, data_wait, wait) for wait in rollout_waits]


def test_idle_share() -> None:
    assert StepTimes(10.0, 1.0, 1.5).idle == 0.25


def test_a_high_idle_share_gives_the_ratio_to_use() -> None:
    # h = 0.25: k = 0.25 (1 - 0.1) / (0.1 (1 - 0.25)) = 0.225 / 0.075 = 3; 3 x 64 / 32 = 6
    advice = advise_ratio(steps(*[2.5] * 10), rollout_batch_size=64, update_batch_size=32)
    assert advice is not None
    assert "ranks idled 25% of the time (25% to 25% of a step)" in advice
    assert "rollout_batch_size / update_batch_size is 2; use 6: rollout_batch_size=192 brings" in advice


def test_a_swinging_idle_share_is_judged_by_its_largest() -> None:
    # mean 0.04, swing 0.4; h = 0.4: k = 0.4 x 0.9 / (0.1 x 0.6) = 6
    advice = advise_ratio(steps(4.0, *[0.0] * 9), rollout_batch_size=8, update_batch_size=8)
    assert advice is not None
    assert "ranks idled 4% of the time (0% to 40% of a step)" in advice
    assert "is 1; use 6: rollout_batch_size=48" in advice


def test_the_ratio_is_never_below_4() -> None:
    # h = 0.22: k = 0.22 x 0.9 / (0.1 x 0.78) = 2.5, of a ratio of 1 less than the 4 to start from
    advice = advise_ratio(steps(*[2.2] * 10), rollout_batch_size=8, update_batch_size=8)
    assert advice is not None
    assert "use 4: rollout_batch_size=32" in advice


def test_steady_and_busy_ranks_need_no_advice() -> None:
    assert advise_ratio(steps(*[1.9] * 10), 8, 8) is None
    assert advise_ratio(steps(*[2.5] * 9), 8, 8) is None
    assert advise_ratio(steps(*[9.0] * 5, *[0.5] * 10), 8, 8) is None  # only the last ten count


def test_waiting_for_prompts_is_no_matter_of_the_ratio() -> None:
    advice = advise_ratio(steps(*[1.0] * 10, data_wait=2.0), 8, 8)
    assert advice is not None
    assert "waiting for prompts: raise num_workers and prefetch_factor" in advice
    assert "use" not in advice
