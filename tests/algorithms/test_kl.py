"""KL estimators and the coefficients that weigh them."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from lightning_verl.algorithms.kl import (
    MAX_LOG_DIFFERENCE,
    AdaptiveKL,
    FixedKL,
    capped_fraction,
    kl_estimate,
    max_log_ratio,
)

NAN, INF = float("nan"), float("inf")


def estimate(difference, estimator="k3", dtype=torch.float32):
    """Return the estimate for d = ref - logp."""
    ref_logp = torch.tensor([difference], dtype=dtype)
    return kl_estimate(torch.zeros_like(ref_logp), ref_logp, estimator).item()


@pytest.mark.parametrize(
    ("difference", "expected"),
    [
        (0.5, 0.1487213),  # e^0.5 - 1.5
        (-0.5, 0.1065307),  # e^-0.5 - 0.5
        (20.0, 4.8516517e8),
        (-90.0, 89.0),
        (-200.0, 199.0),
    ],
)
def test_k3(difference, expected):
    assert estimate(difference) == pytest.approx(expected, rel=1e-6)


def test_k3_of_equal_logprobs_is_exactly_0():
    assert estimate(0.0) == 0.0


def test_k3_keeps_small_values():
    # d^2 / 2 + d^3 / 6; exp(d) - 1 - d in float32 would give 0 or rounding residue.
    assert estimate(1e-3) == pytest.approx(5.001667e-7, rel=1e-3)


def test_k3_is_capped_where_its_dtype_says():
    assert max_log_ratio(torch.float32) == pytest.approx(22.18, abs=0.01)
    assert max_log_ratio(torch.float64) == pytest.approx(177.4, abs=0.1)
    assert estimate(90.0, dtype=torch.float64) == pytest.approx(1.22e39, rel=1e-3)
    cap = max_log_ratio(torch.float32)
    assert estimate(90.0) == pytest.approx(math.exp(cap) - 1 - cap, rel=1e-5)


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.5), ("k2", 0.125), ("abs", 0.5)])
def test_other_estimators_where_the_reference_is_less_likely(estimator, expected):
    assert estimate(-0.5, estimator) == expected


@pytest.mark.parametrize(("estimator", "expected"), [("k1", -0.5), ("k2", 0.125), ("abs", 0.5)])
def test_other_estimators_where_the_reference_is_likelier(estimator, expected):
    assert estimate(0.5, estimator) == expected


def test_estimators_have_the_kl_of_two_distributions_as_their_mean():
    policy, reference = torch.tensor([0.75, 0.25]), torch.tensor([0.5, 0.5])
    k1 = kl_estimate(policy.log(), reference.log(), "k1")
    k3 = kl_estimate(policy.log(), reference.log(), "k3")
    torch.testing.assert_close(k1, torch.tensor([0.405465, -0.693147]), atol=1e-6, rtol=0)
    torch.testing.assert_close(k3, torch.tensor([0.0721318, 0.3068528]), atol=1e-6, rtol=0)
    assert (policy * k1).sum().item() == pytest.approx(0.130812, abs=1e-6)
    assert (policy * k3).sum().item() == pytest.approx(0.130812, abs=1e-6)


def test_k3_is_never_negative():
    differences = torch.cat(
        [torch.linspace(-30, 30, 4001), torch.logspace(-12, 0, 4000), -torch.logspace(-12, 0, 4000)]
    )
    assert (kl_estimate(torch.zeros_like(differences), differences) >= 0).all()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("difference", [200.0, -200.0, 3e38, -3e38])
def test_value_gradient_and_step_stay_finite(estimator, dtype, difference):
    logp = torch.nn.Parameter(torch.tensor([-max(difference, 0.0), -1.0], dtype=dtype))
    ref_logp = torch.tensor([min(difference, 0.0), -1.5], dtype=dtype)
    loss = kl_estimate(logp, ref_logp, estimator).sum()
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.isfinite()
    assert logp.grad.isfinite().all()
    optimizer = torch.optim.Adam([logp], lr=0.1)
    optimizer.step()
    assert logp.isfinite().all()
    assert optimizer.state[logp]["exp_avg_sq"].isfinite().all()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("poison", [NAN, INF, -INF, 200.0])
def test_masked_positions_are_0_and_have_no_gradient(estimator, poison):
    logp = torch.tensor([[-1.0, poison, -1.0]], requires_grad=True)
    ref_logp = torch.tensor([[-1.5, -1.0, poison]], requires_grad=True)
    kl = kl_estimate(logp, ref_logp, estimator, torch.tensor([[1, 0, 0]]))
    assert kl[0, 1:].tolist() == [0.0, 0.0]
    kl.sum().backward()
    assert logp.grad[0, 1:].tolist() == [0.0, 0.0]
    assert ref_logp.grad[0, 1:].tolist() == [0.0, 0.0]
    assert logp.grad[0, 0] != 0


def test_capped_fraction_counts_masked_tokens_alone():
    logp = torch.zeros(2, 3)
    ref_logp = torch.tensor([[30.0, 1.0, 30.0], [-30.0, -2e4, NAN]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    # k3 caps at 22.18 above and 1e4 below: 30, 30 and -2e4 of five tokens.
    assert capped_fraction(logp, ref_logp, "k3", mask).item() == pytest.approx(3 / 5)
    assert capped_fraction(logp, ref_logp, "k1", mask).item() == pytest.approx(1 / 5)
    assert capped_fraction(logp, ref_logp, "k3", mask, tokens=10).item() == pytest.approx(3 / 10)
    assert capped_fraction(logp[0], ref_logp[0]).item() == pytest.approx(2 / 3)


def test_capped_fraction_of_no_tokens_is_0():
    logp = torch.zeros(1, 2, requires_grad=True)
    fraction = capped_fraction(logp, logp, "k3", torch.zeros(1, 2))
    assert fraction.item() == 0.0
    assert not fraction.requires_grad
    assert capped_fraction(logp, logp, "k3", torch.zeros(1, 2), tokens=0).item() == 0.0
    assert capped_fraction(torch.zeros(0), torch.zeros(0)).item() == 0.0


def test_values_below_the_caps_are_not_capped():
    edge = torch.tensor([MAX_LOG_DIFFERENCE, -MAX_LOG_DIFFERENCE])
    assert capped_fraction(torch.zeros(2), edge, "k1").item() == 0.0


def test_estimators_refuse_bad_input():
    with pytest.raises(ValueError, match=r"kl_estimate: estimator='k4' is unknown; use one of k1, k2, k3, abs"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")
    with pytest.raises(ValueError, match=r"capped_fraction: estimator='' is unknown"):
        capped_fraction(torch.zeros(1), torch.zeros(1), "")
    with pytest.raises(ValueError, match=r"kl_estimate: got logp \(2, 3\), ref_logp \(3,\)"):
        kl_estimate(torch.zeros(2, 3), torch.zeros(3))


def test_fixed_kl_stays():
    controller = FixedKL(0.05)
    controller.update(100.0, 256)
    controller.load_state_dict({"value": 7.0})
    assert controller.value == 0.05
    assert controller.state_dict() == {}
    assert FixedKL(0).value == 0.0


@pytest.mark.parametrize("coef", [-0.1, NAN, INF])
def test_fixed_kl_refuses_bad_coefficients(coef):
    with pytest.raises(ValueError, match="FixedKL: coef=.*finite and at least 0"):
        FixedKL(coef)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (12.0, 0.201024),  # error 1.0, clipped to 0.2: 0.2 * (1 + 0.2 * 256 / 10000)
        (3.0, 0.198976),  # error -0.5, clipped to -0.2
        (6.6, 0.200512),  # error 0.1
        (6.0, 0.2),
    ],
)
def test_adaptive_kl_moves_towards_its_target(kl, expected):
    controller = AdaptiveKL(0.2, target=6, horizon=10000)
    controller.update(torch.tensor(kl), 256)
    assert controller.value == pytest.approx(expected, abs=1e-9)


def test_adaptive_kl_goes_on_where_the_checkpoint_stopped():
    first = AdaptiveKL(0.2, target=6, horizon=10000)
    first.update(12.0, 256)
    first.update(12.0, 256)
    second = AdaptiveKL(0.2, target=6, horizon=10000)
    second.load_state_dict(first.state_dict())
    second.update(3.0, 256)
    # 0.2 * 1.00512^2 * 0.99488; a coefficient set back to 0.2 would give 0.198976.
    assert second.value == pytest.approx(0.2010187, abs=1e-7)


def test_adaptive_kl_warns_once_of_a_state_without_a_coefficient():
    controller = AdaptiveKL(0.2, target=6, horizon=10000)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        controller.load_state_dict({})
    assert [str(warning.message) for warning in caught] == [
        "AdaptiveKL: the checkpoint holds no coefficient (its keys: []); going on from 0.2."
    ]
    assert controller.value == 0.2


@pytest.mark.parametrize("value", [0.0, -0.2, NAN, INF])
def test_adaptive_kl_refuses_a_broken_state(value):
    controller = AdaptiveKL(0.2, target=6, horizon=10000)
    with pytest.raises(ValueError, match="AdaptiveKL: the checkpoint's value=.*finite and above 0"):
        controller.load_state_dict({"value": value})
    assert controller.value == 0.2


@pytest.mark.parametrize("name", ["coef", "target", "horizon"])
@pytest.mark.parametrize("given", [0.0, -1.0, NAN, INF])
def test_adaptive_kl_refuses_bad_settings(name, given):
    settings = {"coef": 0.2, "target": 6.0, "horizon": 10000.0} | {name: given}
    with pytest.raises(ValueError, match=f"AdaptiveKL: {name}=.*finite and above 0.*FixedKL"):
        AdaptiveKL(**settings)


def test_adaptive_kl_refuses_updates_that_would_break_it():
    controller = AdaptiveKL(0.2, target=6, horizon=50)
    with pytest.raises(ValueError, match="AdaptiveKL: kl=nan would make the coefficient NaN"):
        controller.update(NAN, 1)
    with pytest.raises(ValueError, match=r"n=256 sequences with horizon=50 could turn .* Raise horizon above 51.2"):
        controller.update(3.0, 256)
    with pytest.raises(ValueError, match="n=-1 sequences"):
        controller.update(3.0, -1)
    controller.update(INF, 0)
    assert controller.value == 0.2
