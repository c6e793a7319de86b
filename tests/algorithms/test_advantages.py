"""Advantage estimators."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import lightning_verl
from lightning_verl.algorithms.advantages import (
    gae,
    group_advantages,
    reinforce_plus_plus_advantages,
    remax_advantages,
    rloo_advantages,
    whiten,
)
from lightning_verl.testing import run_ranks

NAN, INF = float("nan"), float("inf")


def assert_values(actual, expected, atol=1e-6):
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=actual.dtype), atol=atol, rtol=0)


def one_group(scores, **options):
    scores = torch.tensor(scores)
    return group_advantages(scores, torch.zeros(len(scores), dtype=torch.long), **options)


# ---- gae


def test_gae_by_hand():
    # gamma 0.5, lam 0.5. Errors: t2 4 - 2 = 2; t1 0 + 0.5 * 2 - 1 = 0; t0 1 + 0.5 * 1 - 3 = -1.5.
    # Advantages: t2 2; t1 0 + 0.25 * 2 = 0.5; t0 -1.5 + 0.25 * 0.5 = -1.375.
    rewards, values = torch.tensor([[1.0, 0.0, 4.0]]), torch.tensor([[3.0, 1.0, 2.0]])
    advantages, returns = gae(rewards, values, torch.ones(1, 3), gamma=0.5, lam=0.5)
    assert_values(advantages, [[-1.375, 0.5, 2.0]])
    assert_values(returns, [[1.625, 1.5, 4.0]])


def test_gae_without_discount_is_reward_to_go_minus_value():
    rewards, values = torch.tensor([[0.0, 0.0, 1.0], [0.5, 2.0, 0.0]]), torch.tensor([[0.2, 0.4, 0.6], [1.0, 1.0, 9.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    advantages, returns = gae(rewards, values, mask)
    assert_values(advantages, [[0.8, 0.6, 0.4], [1.5, 1.0, 0.0]])
    assert_values(returns, [[1.0, 1.0, 1.0], [2.5, 2.0, 0.0]])


@pytest.mark.parametrize("poison", [0.0, 50.0, NAN, INF, -INF])
def test_gae_skips_holes_and_what_they_hold(poison):
    rewards = torch.tensor([[poison, 1.0, poison, poison, 0.0, 4.0, poison]], requires_grad=True)
    values = torch.tensor([[poison, 3.0, poison, poison, 1.0, 2.0, poison]], requires_grad=True)
    mask = torch.tensor([[0, 1, 0, 0, 1, 1, 0]])
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5)
    # The row of test_gae_by_hand with holes.
    assert_values(advantages, [[0.0, -1.375, 0.0, 0.0, 0.5, 2.0, 0.0]])
    assert_values(returns, [[0.0, 1.625, 0.0, 0.0, 1.5, 4.0, 0.0]])
    (advantages.sum() + returns.sum()).backward()
    for tensor in (rewards, values):
        assert tensor.grad.isfinite().all()
        assert (tensor.grad[mask == 0] == 0).all()


def test_gae_of_empty_rows_and_no_columns():
    advantages, returns = gae(torch.full((1, 2), NAN), torch.full((1, 2), NAN), torch.zeros(1, 2))
    assert advantages.tolist() == returns.tolist() == [[0.0, 0.0]]
    advantages, returns = gae(torch.zeros(2, 0), torch.zeros(2, 0), torch.zeros(2, 0))
    assert advantages.shape == returns.shape == (2, 0)


def test_gae_of_bfloat16_sums_in_float32():
    # 256 + 1 is 256 in bfloat16.
    rewards = torch.tensor([[1.0, 256.0]], dtype=torch.bfloat16)
    advantages, _ = gae(rewards, torch.zeros_like(rewards), torch.ones(1, 2))
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == [[257.0, 256.0]]


def test_gae_refuses_wrong_shapes():
    with pytest.raises(ValueError, match=r"gae: got rewards \(2, 3\), values \(2, 2\), mask \(2, 3\)"):
        gae(torch.zeros(2, 3), torch.zeros(2, 2), torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"gae: got tensors of shape \(3,\), but they must be \[B, T\]"):
        gae(torch.zeros(3), torch.zeros(3), torch.zeros(3))


# ---- group_advantages


def test_group_advantages_of_a_constant_group_and_a_group_of_one():
    assert one_group([1.0, 1.0, 1.0, 1.0]).tolist() == [0.0] * 4
    assert one_group([0.7]).tolist() == [0.0]
    assert one_group([0.7], scale="none").tolist() == [0.0]
    assert one_group([INF, INF]).tolist() == [0.0, 0.0]


def test_group_advantages_divide_by_the_sample_standard_deviation():
    assert_values(one_group([0.0, 0.0, 0.0, 1.0]), [-0.499999] * 3 + [1.499997])
    assert_values(one_group([0.35] * 7 + [0.0]), [0.3535505] * 7 + [-2.4748537])


@pytest.mark.parametrize("eps", [0.0, 1e-8, 1e-6, 1e-4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_constant_groups_give_0_whatever_the_eps(eps, dtype):
    sizes = range(2, 17)
    scores = torch.cat([torch.full((size,), cent / 100, dtype=dtype) for cent in range(1, 100) for size in sizes])
    groups = torch.arange(99 * len(sizes)).repeat_interleave(torch.tensor(list(sizes)).repeat(99))
    for scale in ("std", "none"):
        assert (group_advantages(scores, groups, scale=scale, eps=eps) == 0).all()
    assert (rloo_advantages(scores, groups) == 0).all()


def test_group_advantages_without_scale():
    assert_values(one_group([0.0, 0.0, 0.0, 1.0], scale="none"), [-0.25, -0.25, -0.25, 0.75])


def test_groups_may_come_in_any_order():
    scores, groups = torch.tensor([0.0, 5.0, 1.0, 5.0, 3.0]), torch.tensor([70, -3, 70, -3, 9])
    half = 0.5 / (0.5**0.5 + 1e-6)  # scores 0 and 1: deviation sqrt(2 * 0.25 / 1)
    assert_values(group_advantages(scores, groups), [-half, 0.0, half, 0.0, 0.0])


def test_group_advantages_of_scores_summed_over_scorers():
    # f1 [1, 0, None, 0] + f2 [0, 1, 1, 0], summed over the present: [1, 1, 1, 0].
    assert_values(one_group([1, 1, 1, 0]), [0.499999] * 3 + [-1.499997])


@pytest.mark.parametrize("poison", [0.0, 1e6, NAN, INF, -INF])
def test_rows_without_a_score_leave_the_statistics_alone(poison):
    scores = torch.tensor([1.0, 0.0, poison, 0.0], requires_grad=True)
    valid = torch.tensor([True, True, False, True])
    groups = torch.zeros(4, dtype=torch.long)
    # Mean 1/3 and deviation 0.577350 of [1, 0, 0]; a None taken for 0 would give 1.499997 and -0.499999.
    advantages = group_advantages(scores, groups, valid=valid)
    assert_values(advantages, [1.1546985, -0.5773493, 0.0, -0.5773493])
    assert_values(rloo_advantages(scores, groups, valid=valid), [1.0, -0.5, 0.0, -0.5])
    advantages[0].backward()
    assert scores.grad.isfinite().all()
    assert scores.grad[2] == 0


def test_groups_without_any_score_are_0():
    scores, groups = torch.tensor([NAN, NAN, 0.0, 2.0]), torch.tensor([0, 0, 1, 1])
    valid = torch.tensor([False, False, True, True])
    assert group_advantages(scores, groups, valid=valid, scale="none").tolist() == [0.0, 0.0, -1.0, 1.0]
    assert rloo_advantages(scores, groups, valid=valid).tolist() == [0.0, 0.0, -2.0, 2.0]
    nothing = torch.zeros(4, dtype=torch.bool)
    assert group_advantages(scores, groups, valid=nothing).tolist() == [0.0] * 4
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.long)).tolist() == []


def test_one_valid_row_of_a_group_gives_0():
    scores, valid = torch.tensor([3.0, NAN]), torch.tensor([True, False])
    assert one_group([3.0, NAN], valid=valid).tolist() == [0.0, 0.0]
    assert rloo_advantages(scores, torch.zeros(2, dtype=torch.long), valid=valid).tolist() == [0.0, 0.0]


def test_a_nan_in_a_valid_row_is_not_hidden():
    scores, groups = torch.tensor([NAN, 1.0, 0.0, 2.0]), torch.tensor([0, 0, 1, 1])
    for advantages in (group_advantages(scores, groups), rloo_advantages(scores, groups)):
        assert advantages[:2].isnan().all()
        assert advantages[2:].isfinite().all()


def test_gradient_of_a_constant_group_is_finite():
    scores = torch.ones(3, requires_grad=True)
    group_advantages(scores, torch.zeros(3, dtype=torch.long), eps=0.0).sum().backward()
    assert scores.grad.tolist() == [0.0, 0.0, 0.0]


def test_group_functions_refuse_bad_input():
    groups = torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match="group_advantages: scale='var' is unknown; use one of std, none"):
        group_advantages(torch.zeros(2), groups, scale="var")
    with pytest.raises(ValueError, match=r"group_advantages: got scores \(3,\), group_ids \(2,\), valid \(3,\)"):
        group_advantages(torch.zeros(3), groups)
    with pytest.raises(ValueError, match=r"rloo_advantages: got scores \(2,\), group_ids \(2,\), valid \(1,\)"):
        rloo_advantages(torch.zeros(2), groups, valid=torch.ones(1))
    with pytest.raises(ValueError, match=r"rloo_advantages: scores has shape \(1, 2\), but must be \[N\]"):
        rloo_advantages(torch.zeros(1, 2), groups[None])


# ---- rloo, remax


def test_rloo_subtracts_the_mean_of_the_others():
    # 1 - (2 + 6) / 2 = -3; 2 - (1 + 6) / 2 = -1.5; 6 - (1 + 2) / 2 = 4.5; a group of one: 0.
    scores, groups = torch.tensor([1.0, 2.0, 6.0, 5.0]), torch.tensor([0, 0, 0, 1])
    assert_values(rloo_advantages(scores, groups), [-3.0, -1.5, 4.5, 0.0])


def test_remax_subtracts_the_greedy_score():
    assert_values(remax_advantages(torch.tensor([1.0, 0.5]), torch.tensor([0.25, 2.0])), [0.75, -1.5])
    scores, greedy = torch.tensor([1.0, NAN, 3.0]), torch.tensor([0.5, 1.0, INF])
    assert_values(remax_advantages(scores, greedy, valid=torch.tensor([1, 0, 0])), [0.5, 0.0, 0.0])
    with pytest.raises(ValueError, match=r"remax_advantages: got scores \(2,\), greedy_scores \(1,\)"):
        remax_advantages(torch.zeros(2), torch.zeros(1))


# ---- whiten, reinforce_plus_plus


@pytest.mark.parametrize("poison", [99.0, NAN, INF, -INF])
def test_whiten_by_hand(poison):
    values = torch.tensor([[1.0, 2.0, 3.0, poison]], requires_grad=True)
    result = whiten(values, torch.tensor([[1, 1, 1, 0]]))
    assert_values(result, [[-1.0, 0.0, 1.0, 0.0]])  # unbiased variance 1; the biased one would give +-1.2247449
    result.sum().backward()
    assert_values(values.grad, [[1.0, 1.0, 1.0, 0.0]])  # the statistics are constants


def test_whiten_of_one_value_and_of_none_changes_nothing():
    values = torch.tensor([[7.0, NAN, 3.0, 99.0]])
    assert whiten(values, torch.tensor([[1, 0, 0, 0]])).tolist() == [[7.0, 0.0, 0.0, 0.0]]
    assert whiten(values, torch.zeros(1, 4)).tolist() == [[0.0] * 4]
    assert whiten(torch.zeros(0, 3), torch.zeros(0, 3)).shape == (0, 3)


def test_whiten_of_equal_values_is_0():
    for value in (0.35, 0.98, 1234.567):
        assert_values(whiten(torch.full((7,), value), torch.ones(7)), [0.0] * 7, atol=1e-9)


def test_whiten_of_a_small_spread_far_from_0():
    # E[x^2] - E[x]^2 in float32 would be rounding residue here.
    assert_values(whiten(torch.tensor([4096.0, 4096.5, 4097.0]), torch.ones(3)), [-1.0, 0.0, 1.0], atol=1e-6)


def test_whiten_refuses_different_shapes():
    with pytest.raises(ValueError, match=r"whiten: got values \(3,\), mask \(1, 3\)"):
        whiten(torch.zeros(3), torch.zeros(1, 3))


def test_reinforce_plus_plus_whitens_the_rewards_to_go():
    # gamma 0.5: row 0 to go 1 + 0.5 * 2 = 2, then 2; row 1 to go 5. Mean 3, deviation sqrt((1 + 1 + 4) / 2).
    rewards = torch.tensor([[1.0, NAN, 2.0], [5.0, INF, NAN]])
    mask = torch.tensor([[1, 0, 1], [1, 0, 0]])
    deviation = 3**0.5
    expected = [[-1 / deviation, 0.0, -1 / deviation], [2 / deviation, 0.0, 0.0]]
    assert_values(reinforce_plus_plus_advantages(rewards, mask, gamma=0.5), expected)
    with pytest.raises(ValueError, match="reinforce_plus_plus_advantages: got rewards"):
        reinforce_plus_plus_advantages(rewards, mask[:, :2])


def _whiten_on_two_ranks():
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank, everyone = dist.get_rank(), dist.group.WORLD
    # 1 and 2 valid values: the statistics are those of 1, 2, 3 together.
    values, mask, expected = [
        (torch.tensor([1.0, NAN]), torch.tensor([1, 0]), [-1.0, 0.0]),
        (torch.tensor([2.0, 3.0]), torch.tensor([1, 1]), [0.0, 1.0]),
    ][rank]
    assert_values(whiten(values, mask, group=everyone), expected)
    assert_values(reinforce_plus_plus_advantages(values[:, None], mask[:, None], group=everyone)[:, 0], expected)
    # One value over all ranks, then none.
    assert whiten(values, mask * (1 - rank), group=everyone).tolist() == [1.0 - rank, 0.0]
    assert whiten(values, mask * 0, group=everyone).tolist() == [0.0, 0.0]
    # Without a group each rank stands alone: rank 0 has one value, rank 1 has 2 and 3.
    assert_values(whiten(values, mask), [1.0, 0.0] if rank == 0 else [-(0.5**0.5), 0.5**0.5])
    return rank


def test_whiten_takes_all_ranks_of_the_group_together():
    assert run_ranks(_whiten_on_two_ranks, 2) == [0, 1]


def test_pure_modules_import_neither_fabric_nor_transformers():
    # The package registers its strategy with Fabric; an empty stand-in shows what the modules import on their own.
    check = f"""
import importlib, sys, types
package = types.ModuleType("lightning_verl")
package.__path__ = {list(lightning_verl.__path__)!r}
sys.modules["lightning_verl"] = package
for name in ("algorithms.advantages", "algorithms.losses", "algorithms.kl", "data.masks", "data.packing"):
    importlib.import_module("lightning_verl." + name)
loaded = {{"lightning", "lightning_fabric", "transformers"}} & set(sys.modules)
assert not loaded, f"these were imported: {{loaded}}"
"""
    finished = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=50, check=False)
    assert finished.returncode == 0, finished.stderr
