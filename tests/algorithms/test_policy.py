"""Policy and value losses: clipping tables, sequence ratios, off-policy correction, entropy, metrics."""

import numpy as np
import pytest
import torch
from algorithm_batches import loss_inputs, make_batch

from verl.algorithms import ALGORITHMS, policy
from verl.core.errors import ConfigError


def inputs(lengths, ratios=None, advantages=None, mask=None, **columns):
    """One-token-per-entry inputs whose log-prob against old gives `ratios`."""
    mask_T = None if mask is None else np.array(mask, bool)
    tokens = sum(lengths)
    columns = {name: np.array(value, float) for name, value in columns.items()}
    batch = make_batch(lengths, mask_T=mask_T, old_logprobs_T=np.full(tokens, -1.0),
                       advantages_T=np.ones(tokens) if advantages is None else np.array(advantages, float), **columns)
    logp = torch.tensor(np.log(np.ones(tokens) if ratios is None else ratios) - 1.0, requires_grad=True)
    return loss_inputs(batch, {"logprobs_T": logp})


def run(name, x, **settings):
    return ALGORITHMS[name](kl_coef=0, **settings).loss(x)


def mean_metric(outputs, name):
    values, selection = outputs.metrics[name]
    return values[selection].mean().item()


def test_clip_higher_is_in_the_loss_and_in_the_fraction():
    """Field case D002."""
    x = inputs([4], [1.5, 1.25, 0.5, 1.5], [1, 1, -1, -1])
    outputs = run("grpo", x, clip_low=0.2, clip_high=0.28)
    np.testing.assert_allclose(outputs.values.detach(), [-1.28, -1.25, 0.8, 1.5], atol=1e-12)
    assert outputs.values.mean().item() == pytest.approx(-0.0575)
    assert mean_metric(outputs, "clip_ratio/region_mean") == 0.5
    assert mean_metric(outputs, "clip_ratio/low_mean") == mean_metric(outputs, "clip_ratio/high_mean") == 0.25
    outputs.values.sum().backward()
    np.testing.assert_allclose(x.logprobs_T.grad, [0, -1.25, 0, 1.5], atol=1e-12)


def test_the_upper_range_follows_the_lower_one_until_it_is_set():
    assert ALGORITHMS["ppo"](clip_low=0.1).clip_range == (0.9, 1.1)
    assert ALGORITHMS["ppo"](clip_low=0.1, clip_high=0.3).clip_range == (0.9, 1.3)
    assert ALGORITHMS["dapo"]().clip_range == (0.8, 1.28)


def test_the_dual_clip_is_only_for_negative_advantages():
    """Field case D024."""
    outputs = run("ppo", inputs([4], [5, 5, 0.5, 0.5], [2, -2, -2, 2]), dual_clip=3.0)
    np.testing.assert_allclose(outputs.values.detach(), [-2.4, 6.0, 1.6, -1.0], atol=1e-12)
    for c in (1.0, 0.5):
        with pytest.raises(ConfigError, match=rf"trainer.algo.dual_clip: {c} .*above 1"):
            ALGORITHMS["ppo"](dual_clip=c)


def test_sequence_ratios_are_products_or_geometric_means():
    x = inputs([100], np.full(100, np.exp(0.01)))
    gap_T = x.logprobs_T - x.old_logprobs_T
    assert policy.sequence_sum(gap_T, x).exp().item() == pytest.approx(2.718, abs=1e-3)
    assert policy.sequence_mean(gap_T, x).exp().item() == pytest.approx(1.010, abs=1e-3)
    values = run("gspo", x, clip_high=0.005).values.detach()
    np.testing.assert_allclose(values, -1.005, atol=1e-12)
    np.testing.assert_allclose(run("gspo", x, clip_high=0.5).values.detach(), -np.exp(0.01), atol=1e-12)


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    x = inputs([3], [9.0, 1.5, 0.5], [1, 1, -1])
    outputs = run("cispo", x)
    outputs.values.sum().backward()
    np.testing.assert_allclose(x.logprobs_T.grad, [-5.0, -1.5, 0.5], atol=1e-12)
    assert mean_metric(outputs, "clip_ratio/region_mean") == pytest.approx(1 / 3)
    with pytest.raises(ConfigError, match="dual_clip"):
        ALGORITHMS["cispo"](dual_clip=3.0)


@pytest.mark.parametrize("name", [n for n in ALGORITHMS if ALGORITHMS[n].online])
def test_the_first_update_needs_no_old_logprobs(name):
    """Field case D042: log ratio exactly 0, nothing clipped, and the plain policy gradient -A."""
    x = inputs([1, 1, 1], advantages=[1.0, -2.0, 0.5])
    x.old_logprobs_T = None
    outputs = run(name, x)
    outputs.values.sum().backward()
    np.testing.assert_allclose(x.logprobs_T.grad, [-1.0, 2.0, -0.5], atol=1e-12)
    assert mean_metric(outputs, "approx_kl") == 0.0
    assert all(mean_metric(outputs, metric) == 0 for metric in outputs.metrics if metric.startswith("clip_ratio"))


@pytest.mark.parametrize("mode, floor, expected", [
    ("none", 0, [1, 1, 1, 1]), ("token_truncate", 0, [2, 1.5, 0.25, 1]), ("token_truncate", 0.5, [2, 1.5, 0.5, 1]),
    ("token_mask", 0, [0, 1.5, 0.25, 1]), ("token_mask", 0.5, [0, 1.5, 0, 1]),
    ("sequence_truncate", 0, [2, 2, 0.25, 0.25]), ("sequence_mask", 0, [0, 0, 0.25, 0.25]),
    ("sequence_mask", 0.5, [0, 0, 0, 0])])
def test_off_policy_weights_truncate_or_mask(mode, floor, expected):
    """Ratios old / rollout [4, 1.5 | 0.25, 1] (and junk in a masked slot), cap 2."""
    rollout = -1.0 - np.log([4, 1.5, 1e-30, 0.25, 1.0])
    x = inputs([3, 2], mask=[1, 1, 0, 1, 1], rollout_logprobs_T=rollout)
    outputs = run("grpo", x, correction=mode, correction_floor=floor)
    np.testing.assert_allclose(outputs.values.detach()[x.mask_T], -np.array(expected, float), atol=1e-12)
    assert outputs.values[2].item() == 0.0
    difference, selection = outputs.metrics["sampling/sampling_logp_difference/max"]
    assert difference[selection].max().item() == pytest.approx(np.log(4))
    assert {f"sampling/importance_sampling_ratio/{how}" for how in ("min", "mean", "max")} <= set(outputs.metrics)


def test_entropy_is_a_bonus_only_when_asked_for():
    for coefficient, slope in ((0.0, 0.0), (0.3, -0.3)):
        x = inputs([2], mask=[1, 0])
        x.entropy_T = torch.tensor([1.5, float("nan")], dtype=torch.float64, requires_grad=True)
        algo = ALGORITHMS["grpo"](entropy_coef=coefficient)
        outputs = algo.loss(x)
        outputs.values.sum().backward()
        np.testing.assert_allclose(x.entropy_T.grad, [slope, 0.0])
        assert mean_metric(outputs, "entropy") == 1.5
        assert algo.needs_entropy_grad == (coefficient > 0)


def test_kl_in_the_loss_has_the_weight_it_was_given():
    x = inputs([1], [1.0], [0.0], ref_logprobs_T=[-1.5])
    outputs = ALGORITHMS["grpo"](kl_coef=0.2, kl_estimator="k3").loss(x)
    assert outputs.values.item() == pytest.approx(0.2 * 0.106531, abs=1e-6)
    assert mean_metric(outputs, "kl") == pytest.approx(0.106531, abs=1e-6)
    assert ALGORITHMS["grpo"](kl_coef=0.2).needs_reference and not ALGORITHMS["grpo"]().needs_reference


@pytest.mark.parametrize("value, expected, slope", [
    (0.1, 0.5 * 0.9**2, -0.9),  # inside the range
    (0.5, 0.5 * 0.8**2, 0.0),  # moved towards the return further than allowed: the pessimistic value, no gradient
    (-0.5, 0.5 * 1.5**2, -1.5)])  # moved away: the larger loss keeps its gradient
def test_values_are_clipped_around_the_old_value(value, expected, slope):
    """Old value 0, return 1, clip 0.2."""
    x = inputs([1], values_T=[0.0], returns_T=[1.0])
    x.values_T = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    outputs = ALGORITHMS["ppo"]().value_loss(x)
    outputs.values.sum().backward()
    assert outputs.values.item() == pytest.approx(expected) and x.values_T.grad.item() == pytest.approx(slope)
    if slope == 0.0:
        assert mean_metric(outputs, "value_clip_ratio") == 1.0


def test_a_shared_trunk_adds_the_value_loss_and_a_separate_critic_does_not():
    x = inputs([1], values_T=[0.0], returns_T=[1.0])
    assert run("ppo", x).values.item() == pytest.approx(-1.0)
    x.values_T = torch.tensor([0.0], dtype=torch.float64)
    outputs = run("ppo", x, vf_coef=0.3)
    assert outputs.values.item() == pytest.approx(-1.0 + 0.3 * 0.5)
    assert mean_metric(outputs, "policy_loss") == pytest.approx(-1.0) and mean_metric(outputs, "value_loss") == 0.5


@pytest.mark.parametrize("name, settings, match", [
    ("grpo", {"clip_low": -0.1}, "trainer.algo.clip_low: -0.1 with trainer.algorithm: grpo.*default is 0.2"),
    ("grpo", {"clip_low": 1.1}, "at most 1"), ("grpo", {"clip_high": float("nan")}, "clip_high"),
    ("grpo", {"clip_high": "0.2"}, "clip_high: '0.2'"), ("grpo", {"clip_low": True}, "clip_low: True"),
    ("grpo", {"reduction": "token-mean"}, "did you mean 'token_mean'"), ("grpo", {"reduction": "pair_mean"}, "reduction"),
    ("grpo", {"correction": "tis"}, "token_truncate"), ("grpo", {"correction_cap": 0.5}, "at least 1"),
    ("grpo", {"correction_floor": 1.5}, "at most 1"), ("dapo", {"overlong_buffer": 0}, "at least 1"),
    ("ppo", {"lam": 1.5}, "at most 1"), ("ppo", {"gamma": -1}, "at least 0"), ("ppo", {"clip_value": 0}, "above 0"),
    ("ppo", {"vf_coef": float("inf")}, "vf_coef"), ("reinforce", {"baseline": "value"}, "mean, none"),
    ("cispo", {"clip_high": 0}, "above 0"), ("sft", {"reduction": "constant"}, "token_mean")])
def test_impossible_settings_are_refused_with_what_is_allowed(name, settings, match):
    with pytest.raises(ConfigError, match=match):
        ALGORITHMS[name](**settings)
