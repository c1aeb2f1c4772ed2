"""KL estimators: exact values, expected gradients over a whole softmax, overflow, and the controller."""

import math

import pytest
import torch

from verl.algorithms import ALGORITHMS, kl
from verl.core.errors import ConfigError


def tensor(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.mark.parametrize("estimator, expected", [
    ("k1", 0.5), ("k2", 0.125), ("k3", 0.106531), ("k3_ratio", 0.130117), ("k1_ratio", 0.5 * math.exp(0.2))])
def test_exact_values_on_one_token(estimator, expected):
    """Field case D033: log p -1.0, reference -1.5, old -1.2 (a swapped sign would give 0.148721)."""
    value = kl.estimate(estimator, tensor(-1.0 + 1.5), tensor(-1.0 + 1.2))
    assert value.item() == pytest.approx(expected, abs=1e-5)
    assert kl.estimate(estimator, tensor(0.0)).item() == 0.0


# estimator -> (is the expected value the KL?, of what is the expected gradient?)
TABLE = {"k1": (True, "nothing"), "k2": (False, "reverse"), "k3": (True, "forward"), "k1_ratio": (True, "reverse"),
         "k3_ratio": (True, "reverse")}


@pytest.mark.parametrize("estimator", kl.ESTIMATORS)
@pytest.mark.parametrize("on_policy", [True, False])
def test_expected_value_and_gradient_over_a_softmax(estimator, on_policy):
    """Every outcome of a 5-way softmax, weighted with its probability under the sampler, against the true KL."""
    theta = tensor(0.3, -0.7, 1.1, 0.0, 0.4).requires_grad_()
    ref = torch.log_softmax(tensor(-0.2, 0.5, 0.3, -1.0, 0.6), 0)
    logp = torch.log_softmax(theta, 0)
    old = logp.detach() if on_policy else torch.log_softmax(tensor(0.1, 0.2, 0.6, 0.5, -0.4), 0)
    exact, at = TABLE[estimator]
    if not on_policy and not estimator.endswith("_ratio"):
        exact = at = None  # without the ratio nothing holds for another sampler's tokens
    expected = (old.exp() * kl.estimate(estimator, logp - ref, logp - old)).sum()
    gradient, = torch.autograd.grad(expected, theta, retain_graph=True)
    reverse = (logp.exp() * (logp - ref)).sum()
    forward = (ref.exp() * (ref - logp)).sum()
    truth = {"reverse": torch.autograd.grad(reverse, theta, retain_graph=True)[0],
             "forward": torch.autograd.grad(forward, theta)[0], "nothing": torch.zeros_like(theta)}
    assert torch.allclose(expected, reverse, atol=1e-12) == bool(exact)
    for name, value in truth.items():
        assert torch.allclose(gradient, value, atol=1e-12) == (name == at), name


@pytest.mark.parametrize("estimator", kl.ESTIMATORS)
def test_a_huge_log_ratio_stays_finite(estimator):
    """Field case D037: log p -120 against -20 in float32; exp(100) would be inf."""
    for logp, ref in ((-120.0, -20.0), (-20.0, -120.0)):
        policy = torch.tensor([logp], requires_grad=True)
        value = kl.estimate(estimator, policy - ref, policy - (-20.0))
        value.backward()
        assert torch.isfinite(value).all() and torch.isfinite(policy.grad).all()
        assert value.item() >= 0 or estimator.startswith("k1")


def test_the_controller_moves_towards_the_target_and_not_without_one():
    assert kl.steer(0.05, 3.0, None, 512) == 0.05
    assert kl.steer(0.05, 3.0, 6.0, 1000) == pytest.approx(0.05 * (1 - 0.2 * 0.1))
    assert kl.steer(0.05, 6.6, 6.0, 1000) == pytest.approx(0.05 * (1 + 0.1 * 0.1))
    assert kl.steer(0.05, 600.0, 6.0, 1000) == pytest.approx(0.05 * (1 + 0.2 * 0.1))
    assert kl.steer(0.05, 0.0, 6.0, 1_000_000) == 0.0
    assert kl.steer(0.05, float("nan"), 6.0, 1000) == 0.05


def test_a_target_steers_with_a_reference_and_stops_without():
    with_reference = ALGORITHMS["ppo"](kl_coef=0.1, kl_target=0.05)
    assert with_reference.steered(0.5, 1000).kl_coef == pytest.approx(0.1 * 1.02)
    assert with_reference.steered(0.05, 1000) is with_reference
    assert not with_reference.should_stop(9.0)
    without = ALGORITHMS["ppo"](kl_coef=0, kl_target=0.05)
    assert without.should_stop(0.06) and not without.should_stop(0.04) and not without.needs_reference
    assert not ALGORITHMS["ppo"](kl_coef=0).should_stop(9.0)


@pytest.mark.parametrize("settings, match", [
    ({"kl_in": "loss", "kl_estimator": "k1"}, "expected gradient of zero"),
    ({"kl_in": "reward", "kl_estimator": "k3_ratio"}, "for kl_in: loss"),
    ({"kl_estimator": "k4"}, "allowed: k1, k1_ratio, k2, k3"), ({"kl_in": "rewards"}, "did you mean 'reward'"),
    ({"kl_coef": -0.1}, "at least 0"), ({"kl_target": 0}, "above 0")])
def test_settings_without_a_meaning_are_refused(settings, match):
    with pytest.raises(ConfigError, match=match):
        ALGORITHMS["grpo"](**settings)
