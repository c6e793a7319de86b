"""Losses, their denominators and their metrics."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_verl.algorithms.losses import Normalizer, aggregate, metric_mean, policy_loss, value_loss

NAN, INF = float("nan"), float("inf")
MODES = {
    "token-mean": 2.5,  # 10 / 4
    "seq-mean-token-sum": 5.0,  # (6 + 4) / 2
    "seq-mean-token-mean": 3.0,  # (2 + 4) / 2
    "seq-sum-over-max-length": 10 / 6,  # 10 / (2 * 3)
}


def items(metrics):
    return {name: metric.item() for name, metric in metrics.items()}


# ---- aggregate


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("poison", [0.0, NAN, INF, -INF])
def test_modes(mode, poison):
    # The third sequence has an empty mask and does not count.
    losses = torch.tensor([[1.0, 2.0, 3.0], [4.0, poison, poison], [poison] * 3], requires_grad=True)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    loss = aggregate(losses, mask, mode)
    assert loss.item() == pytest.approx(MODES[mode])
    assert aggregate(losses, mask, mode, normalizer=Normalizer(tokens=4, sequences=2)).item() == pytest.approx(
        MODES[mode]
    )
    loss.backward()
    assert losses.grad.isfinite().all()
    assert ((losses.grad != 0) == mask.bool()).all()


def test_max_length_comes_from_the_normalizer():
    normalizer = Normalizer(tokens=4, sequences=2, max_length=10)
    losses, mask = torch.tensor([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    assert aggregate(losses, mask, "seq-sum-over-max-length", normalizer=normalizer).item() == pytest.approx(10 / 20)


def test_token_mean_over_unequal_micro_batches():
    # 100 tokens of mean 2 and 900 of mean 0.5: (200 + 450) / 1000; the mean of the means would be 1.25.
    normalizer = Normalizer(tokens=1000, sequences=2)
    parts = [torch.full((1, 100), 2.0), torch.full((1, 900), 0.5)]
    total = sum(aggregate(part, torch.ones_like(part), "token-mean", normalizer=normalizer) for part in parts)
    assert total.item() == pytest.approx(0.65)
    # [3, 3, 3] and [1]: 10 / 4; the mean of the means would be 2.
    normalizer = Normalizer(tokens=4, sequences=2)
    parts = [torch.full((1, 3), 3.0), torch.ones(1, 1)]
    total = sum(aggregate(part, torch.ones_like(part), "token-mean", normalizer=normalizer) for part in parts)
    assert total.item() == pytest.approx(2.5)


def test_ranks_return_what_averages_to_the_global_mean():
    # Sums 6 over 3 tokens and 4 over 1: the global mean is 2.5, and 3.0 and 2.0 average to it.
    normalizer = Normalizer(tokens=4, sequences=2, data_parallel_size=2)
    ranks = [torch.full((1, 3), 2.0), torch.full((1, 1), 4.0)]
    losses = [aggregate(rank, torch.ones_like(rank), "token-mean", normalizer=normalizer).item() for rank in ranks]
    assert losses == pytest.approx([3.0, 2.0])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cuts", [(4,), (2, 2), (1, 1, 1, 1), (3, 1), (1, 3)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_do_not_depend_on_the_cut(mode, cuts, ranks):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4, 5, 3, generator=generator)
    mask = torch.arange(5) < torch.tensor([[5], [2], [0], [3]])
    normalizer = Normalizer(tokens=10, sequences=3, data_parallel_size=ranks, max_length=5)

    def gradient(parts):
        weight = torch.tensor([0.3, -0.7, 1.1], requires_grad=True)
        for part, part_mask in parts:
            # Averaging over ranks divides by their number.
            (aggregate((part @ weight).square(), part_mask, mode, normalizer=normalizer) / ranks).backward()
        return weight.grad

    whole = torch.tensor([0.3, -0.7, 1.1], requires_grad=True)
    aggregate((inputs @ whole).square(), mask, mode).backward()
    torch.testing.assert_close(
        gradient(zip(inputs.split(cuts), mask.split(cuts), strict=True)), whole.grad, atol=1e-6, rtol=1e-6
    )


def test_truncated_responses_count_neither_above_nor_below():
    losses = torch.tensor([[1.0, 1.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0]], requires_grad=True)
    kept = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]])
    # 2 / 2; with the truncated tokens below it would be 2 / 6.
    assert aggregate(losses, kept, "token-mean").item() == 1.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("normalizer", [None, Normalizer(tokens=0, sequences=0), Normalizer(tokens=8, sequences=2)])
@pytest.mark.parametrize("width", [4, 0])
def test_no_tokens_give_0_with_a_gradient_of_0(mode, normalizer, width):
    weight = torch.ones(2, width, requires_grad=True)
    loss = aggregate(weight * 2, torch.zeros(2, width), mode, normalizer=normalizer)
    assert loss.item() == 0.0
    loss.backward()
    assert weight.grad.tolist() == [[0.0] * width] * 2


def test_bfloat16_losses_are_summed_in_float32():
    losses = torch.ones(1, 1001, dtype=torch.bfloat16)
    assert aggregate(losses, torch.ones(1, 1001), "seq-mean-token-sum").item() == 1001.0


def test_aggregate_refuses_bad_input():
    with pytest.raises(
        ValueError, match="aggregate: mode='mean' is unknown; use one of token-mean, seq-mean-token-sum"
    ):
        aggregate(torch.ones(1, 2), torch.ones(1, 2), "mean")
    with pytest.raises(ValueError, match=r"aggregate: got per_token \(1, 2\), mask \(1, 3\)"):
        aggregate(torch.ones(1, 2), torch.ones(1, 3), "token-mean")
    with pytest.raises(ValueError, match=r"aggregate: got tensors of shape \(2,\), but they must be \[B, T\]"):
        aggregate(torch.ones(2), torch.ones(2), "token-mean")


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"tokens": -1}, "Normalizer: tokens=-1, but it must be at least 0"),
        ({"sequences": -2}, "Normalizer: sequences=-2, but it must be at least 0"),
        ({"data_parallel_size": 0}, "Normalizer: data_parallel_size=0, but it must be at least 1"),
        ({"max_length": 0}, "Normalizer: max_length=0, but it must be at least 1"),
    ],
)
def test_normalizer_refuses_impossible_counts(counts, message):
    with pytest.raises(ValueError, match=message):
        Normalizer(**({"tokens": 4, "sequences": 2} | counts))


# ---- metrics


def test_metrics_sum_over_micro_batches_and_ranks_to_the_global_mean():
    normalizer = Normalizer(tokens=5, sequences=2, data_parallel_size=2)
    values = torch.tensor([[1.0, 2.0, NAN], [3.0, 4.0, 5.0]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    parts = [metric_mean(values[row : row + 1], mask[row : row + 1], normalizer=normalizer) for row in range(2)]
    assert sum(parts).item() == pytest.approx(3.0)  # 15 / 5, without the data-parallel size
    assert metric_mean(values, mask).item() == pytest.approx(3.0)
    assert not parts[0].requires_grad
    assert metric_mean(values, torch.zeros(2, 3)).item() == 0.0
    with pytest.raises(ValueError, match=r"metric_mean: got per_token \(2, 3\), mask \(3,\)"):
        metric_mean(values, torch.ones(3))


def test_loss_metrics_sum_over_micro_batches():
    normalizer = Normalizer(tokens=3, sequences=2, data_parallel_size=4)
    logp, old_logp = torch.tensor([[0.5, 0.1], [-0.4, 0.0]]), torch.zeros(2, 2)
    advantages, mask = torch.ones(2, 2), torch.tensor([[1, 1], [1, 0]])
    parts = [
        policy_loss(*(tensor[row : row + 1] for tensor in (logp, old_logp, advantages, mask)), normalizer=normalizer)[1]
        for row in range(2)
    ]
    whole = items(policy_loss(logp, old_logp, advantages, mask)[1])
    for name, metric in whole.items():
        combine = max if name.endswith("_max") else sum
        assert combine(part[name].item() for part in parts) == pytest.approx(metric)


# ---- policy_loss


def policy(ratio, advantage, **options):
    """Return loss, slope along the log-prob and metrics of one token."""
    logp = torch.tensor([[math.log(ratio)]], requires_grad=True)
    loss, metrics = policy_loss(logp, torch.zeros(1, 1), torch.tensor([[advantage]]), torch.ones(1, 1), **options)
    loss.backward()
    return loss.item(), logp.grad.item(), items(metrics)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.5, 1.0, -1.2, 0.0, 1.0),  # clipped at 1.2
        (0.5, 1.0, -0.5, -0.5, 0.0),
        (1.5, -1.0, 1.5, 1.5, 0.0),
        (0.5, -1.0, 0.8, 0.0, 1.0),  # clipped at 0.8
        (1.1, 2.0, -2.2, -2.2, 0.0),  # inside the range
    ],
)
def test_clipped_surrogate(ratio, advantage, loss, slope, clipped):
    actual_loss, actual_slope, metrics = policy(ratio, advantage)
    assert actual_loss == pytest.approx(loss)
    assert actual_slope == pytest.approx(slope)
    assert metrics["clip_fraction"] == clipped
    assert metrics["ratio"] == metrics["ratio_max"] == pytest.approx(ratio)
    assert metrics["approx_kl"] == pytest.approx(ratio - 1 - math.log(ratio), abs=1e-6)
    assert metrics["dual_clip_fraction"] == 0.0


def test_clip_has_a_lower_and_an_upper_side():
    assert policy(1.5, 1.0, clip=(0.1, 0.4))[0] == pytest.approx(-1.4)
    assert policy(0.5, -1.0, clip=(0.1, 0.4))[0] == pytest.approx(0.9)


def test_dual_clip_bounds_the_loss_of_bad_tokens():
    loss, slope, metrics = policy(5.0, -2.0)
    assert (loss, slope, metrics["dual_clip_fraction"]) == (pytest.approx(6.0), 0.0, 1.0)  # 3 * 2 instead of 5 * 2
    assert policy(5.0, -2.0, dual_clip=4.0)[0] == pytest.approx(8.0)
    loss, slope, metrics = policy(5.0, -2.0, dual_clip=None)
    assert (loss, slope) == (pytest.approx(10.0), pytest.approx(10.0))
    assert "dual_clip_fraction" not in metrics
    assert policy(5.0, 2.0)[0] == pytest.approx(-2.4)  # good tokens have the clip alone


def test_unchanged_weights_give_a_ratio_of_exactly_1():
    logp = torch.tensor([[-1.3, -0.2, -7.7]], requires_grad=True)
    advantages = torch.tensor([[1.0, -2.0, 0.5]])
    loss, metrics = policy_loss(logp, logp, advantages, torch.ones(1, 3))
    loss.backward()
    assert items(metrics) == {
        "ratio": 1.0, "ratio_max": 1.0, "clip_fraction": 0.0, "approx_kl": 0.0, "dual_clip_fraction": 0.0
    }  # fmt: skip
    # The policy gradient, although old and new are the same tensor.
    torch.testing.assert_close(logp.grad, -advantages / 3)


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_policy_loss_ignores_masked_positions(poison):
    tensors = [torch.tensor([[math.log(0.5), poison]], requires_grad=True) for _ in range(3)]
    logp, old_logp, advantages = tensors
    loss, metrics = policy_loss(logp, old_logp, advantages, torch.tensor([[1, 0]]))
    loss.backward()
    assert loss.item() == pytest.approx(-math.log(0.5))
    assert metrics["ratio_max"].item() == 1.0
    assert all(metric.isfinite() for metric in metrics.values())
    assert logp.grad[0, 0] != 0
    assert logp.grad[0, 1] == 0
    assert old_logp.grad is None
    assert advantages.grad is None


@pytest.mark.parametrize("difference", [200.0, -200.0, 3e38, -3e38])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("dual_clip", [3.0, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_policy_loss_stays_finite(difference, advantage, dual_clip, dtype):
    logp = torch.tensor([[min(difference, 0.0)]], dtype=dtype, requires_grad=True)
    old_logp = torch.tensor([[-max(difference, 0.0)]], dtype=dtype)
    advantages = torch.tensor([[advantage]], dtype=dtype)
    loss, metrics = policy_loss(logp, old_logp, advantages, torch.ones(1, 1), dual_clip=dual_clip)
    loss.backward()
    assert loss.isfinite()
    assert logp.grad.isfinite().all()
    assert all(metric.isfinite() for metric in metrics.values())


@pytest.mark.parametrize("width", [2, 0])
def test_policy_loss_of_no_tokens(width):
    logp = torch.full((1, width), -1.0, requires_grad=True)
    zeros = torch.zeros(1, width)
    loss, metrics = policy_loss(logp, zeros, zeros, zeros)
    loss.backward()
    assert loss.item() == 0.0
    assert logp.grad.tolist() == [[0.0] * width]
    assert items(metrics)["ratio"] == 0.0
    assert all(metric.isfinite() and metric.dim() == 0 and not metric.requires_grad for metric in metrics.values())


def test_policy_loss_reduces_as_told():
    logp, advantages = torch.zeros(2, 3), -torch.tensor([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    for mode, expected in MODES.items():
        assert policy_loss(logp, logp, advantages, mask, aggregation=mode)[0].item() == pytest.approx(expected)
    normalizer = Normalizer(tokens=8, sequences=4, data_parallel_size=2)
    loss, _ = policy_loss(logp, logp, advantages, mask, normalizer=normalizer)
    assert loss.item() == pytest.approx(10 / 8 * 2)


def test_policy_loss_refuses_bad_input():
    ones = torch.ones(1, 2)
    for clip in ((-0.1, 0.2), (0.2, -0.1), (1.1, 0.2)):
        with pytest.raises(ValueError, match=r"policy_loss: clip=\(.*\), but the rule is 0 <= low <= 1 and high >= 0"):
            policy_loss(ones, ones, ones, ones, clip=clip)
    with pytest.raises(ValueError, match=r"policy_loss: dual_clip=1.0, but it must be above 1; use None"):
        policy_loss(ones, ones, ones, ones, dual_clip=1.0)
    with pytest.raises(ValueError, match=r"policy_loss: got logp \(1, 2\), old_logp \(1, 2\), advantages \(1,\)"):
        policy_loss(ones, ones, torch.ones(1), ones)
    with pytest.raises(ValueError, match="aggregate: mode='sum' is unknown"):
        policy_loss(ones, ones, ones, ones, aggregation="sum")


# ---- value_loss


@pytest.mark.parametrize(
    ("value", "clip", "loss", "slope", "clipped"),
    [
        (1.0, 0.5, 2.0, -2.0, 0.0),  # (1 - 3)^2 / 2 inside the clip: old value 1
        (2.0, 0.5, 1.125, 0.0, 1.0),  # moved by 1: 1.5 counts, (1.5 - 3)^2 / 2
        (2.0, None, 0.5, -1.0, 0.0),
        (0.0, 0.5, 4.5, -3.0, 0.0),  # moved away by 1: its own error, (0 - 3)^2 / 2, is the larger one
    ],
)
def test_value_loss(value, clip, loss, slope, clipped):
    values = torch.tensor([[value]], requires_grad=True)
    old_values, returns = torch.tensor([[1.0]], requires_grad=True), torch.tensor([[3.0]], requires_grad=True)
    actual, metrics = value_loss(values, old_values, returns, torch.ones(1, 1), clip=clip)
    actual.backward()
    assert actual.item() == pytest.approx(loss)
    assert values.grad.item() == pytest.approx(slope)
    assert old_values.grad is None
    assert returns.grad is None
    assert items(metrics) == {"value": value, "value_error": 3.0 - value, "clip_fraction": clipped}


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_value_loss_ignores_masked_positions(poison):
    values = torch.tensor([[2.0, poison]], requires_grad=True)
    other = torch.tensor([[1.0, poison]])
    loss, metrics = value_loss(values, other, other, torch.tensor([[1, 0]]))
    loss.backward()
    assert loss.item() == 0.5
    assert values.grad.tolist() == [[1.0, 0.0]]
    assert all(metric.isfinite() for metric in metrics.values())


def test_value_loss_of_no_tokens():
    values = torch.ones(1, 2, requires_grad=True)
    zeros = torch.zeros(1, 2)
    loss, metrics = value_loss(values, zeros, zeros, zeros)
    loss.backward()
    assert loss.item() == 0.0
    assert values.grad.tolist() == [[0.0, 0.0]]
    assert all(metric.item() == 0.0 and not metric.requires_grad for metric in metrics.values())


def test_value_loss_reduces_as_told():
    values, zeros = torch.tensor([[1.0, 1.0], [2.0, 9.0]]), torch.zeros(2, 2)
    mask, normalizer = torch.tensor([[1, 1], [1, 0]]), Normalizer(tokens=6, sequences=4, data_parallel_size=2)
    # Half squares 0.5, 0.5, 2.
    loss, metrics = value_loss(values, zeros, zeros, mask, clip=None, normalizer=normalizer)
    assert loss.item() == pytest.approx(3 / 6 * 2)
    assert metrics["value"].item() == pytest.approx(4 / 6)
    loss, _ = value_loss(values, zeros, zeros, mask, clip=None, aggregation="seq-mean-token-mean")
    assert loss.item() == pytest.approx((0.5 + 2) / 2)


def test_value_loss_refuses_bad_input():
    ones = torch.ones(1, 2)
    with pytest.raises(ValueError, match=r"value_loss: clip=0.0, but it must be above 0; use None"):
        value_loss(ones, ones, ones, ones, clip=0.0)
    with pytest.raises(ValueError, match=r"value_loss: got values \(1, 2\), old_values \(2,\)"):
        value_loss(ones, torch.ones(2), ones, ones)
