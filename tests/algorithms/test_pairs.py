"""Preference losses: exact values, lengths, missing sides, KTO's reference point, reward models."""

import math

import numpy as np
import pytest
import torch
from algorithm_batches import loss_inputs, make_batch

from verl.algorithms import ALGORITHMS
from verl.algorithms.reduce import coefficients
from verl.core.errors import ConfigError, DataError

LN2 = math.log(2)


def pair(chosen=-10.0, rejected=-14.0, ref_chosen=-11.0, ref_rejected=-13.0, lengths=(1, 1), cached=False, order=(0, 1)):
    """A batch with one pair whose summed log-probs are these, and its inputs; `order` places the rows."""
    sums = np.array([[chosen, rejected], [ref_chosen, ref_rejected]])
    lengths, sums, label = np.array(lengths)[list(order)], sums[:, list(order)], np.array([1, -1])[list(order)]
    spread = [np.concatenate([np.full(n, s / n) if n else np.zeros(0) for n, s in zip(lengths, row)]) for row in sums]
    columns = {"ref_sums_S": sums[1]} if cached else {"ref_logprobs_T": spread[1]}
    batch = make_batch(lengths, group=[7, 7], label_S=label.astype(np.int8), **columns)
    return batch, loss_inputs(batch, {"logprobs_T": torch.tensor(spread[0], requires_grad=True)})


def reduced(algo, batch, x):
    outputs = algo.loss(x)
    assert not outputs.per_token
    return (outputs.values * torch.from_numpy(coefficients(algo.reduction, batch)[1])).sum(), outputs


@pytest.mark.parametrize("settings, expected", [
    ({}, 0.598139), ({"variant": "hinge"}, 0.8), ({"variant": "ipo_sum"}, 9.0),
    ({"variant": "cdpo", "label_smoothing": 0.1}, 0.618139), ({"variant": "robust", "label_smoothing": 0.1}, 0.573139)])
def test_exact_values_of_the_dpo_family(settings, expected):
    for order in ((0, 1), (1, 0)):
        loss, outputs = reduced(ALGORITHMS["dpo"](beta=0.1, **settings), *pair(order=order))
        assert loss.item() == pytest.approx(expected, abs=1e-6)
    seen = {name: values[selection].item() for name, (values, selection) in outputs.metrics.items()}
    assert seen == pytest.approx({"rewards/chosen": 0.1, "rewards/rejected": -0.1, "rewards/margins": 0.2,
                                  "rewards/accuracies": 1.0, "logps/chosen": -10.0, "logps/rejected": -14.0})


@pytest.mark.parametrize("cached", [False, True])
def test_ipo_divides_each_side_by_its_own_length(cached):
    """Field case D040: gap 1.1 and loss 0.81; a packed neighbour and cached reference sums change nothing."""
    algo = ALGORITHMS["dpo"](beta=0.25, variant="ipo")
    loss, outputs = reduced(algo, *pair(-9.0, -25.0, -10.5, -22.0, lengths=(3, 5), cached=cached))
    assert loss.item() == pytest.approx(0.81, abs=1e-5)
    assert outputs.metrics["rewards/margins"][0][0].item() == pytest.approx(0.25 * 1.1)
    summed, _ = reduced(ALGORITHMS["dpo"](beta=0.25, variant="ipo_sum"),
                        *pair(-9.0, -25.0, -10.5, -22.0, lengths=(3, 5), cached=cached))
    assert summed.item() == pytest.approx(6.25)


@pytest.mark.parametrize("name", ["dpo", "orpo", "simpo"])
def test_a_pair_without_a_completion_is_no_pair(name):
    """Field case D062: never NaN, never ln 2 counted as a real pair, no place in the metrics."""
    batch, x = pair(rejected=0.0, ref_rejected=0.0, lengths=(5, 0))
    loss, outputs = reduced(ALGORITHMS[name](), batch, x)
    loss.backward()
    assert loss.item() == 0.0 and not x.logprobs_T.grad.any() and not outputs.values.any()
    assert not any(selection.any() for metric, (_, selection) in outputs.metrics.items() if "rewards" in metric)


def test_simpo_and_orpo_compare_means():
    chosen, rejected = -1.0, -2.0  # per token
    batch, x = pair(3 * chosen, 5 * rejected, lengths=(3, 5))
    assert reduced(ALGORITHMS["simpo"](beta=2.0, gamma=0.5), batch, x)[0].item() == pytest.approx(
        math.log1p(math.exp(-(2.0 * 1.0 - 0.5))))
    odds = [p - math.log(1 - math.exp(p)) for p in (chosen, rejected)]
    assert reduced(ALGORITHMS["orpo"](beta=0.1), batch, x)[0].item() == pytest.approx(
        -chosen + 0.1 * math.log1p(math.exp(-(odds[0] - odds[1]))))


def test_orpo_is_finite_when_the_policy_is_certain():
    batch, x = pair(chosen=0.0, rejected=-1e-9)
    loss, _ = reduced(ALGORITHMS["orpo"](), batch, x)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(x.logprobs_T.grad).all()


def test_a_reference_is_required_where_the_loss_compares_with_one():
    batch, x = pair()
    x.ref_logprobs_T = None
    with pytest.raises(ConfigError, match="ref_sums_S"):
        ALGORITHMS["dpo"]().loss(x)
    assert ALGORITHMS["dpo"]().needs_reference and ALGORITHMS["kto"]().needs_reference
    assert not ALGORITHMS["simpo"]().needs_reference and not ALGORITHMS["orpo"]().needs_reference


@pytest.mark.parametrize("settings, match", [
    ({"variant": "cdpo"}, "above 0 and below 0.5"), ({"variant": "robust", "label_smoothing": 0.5}, "below 0.5"),
    ({"label_smoothing": 0.1}, "the others have none"), ({"variant": "sigmoidal"}, "did you mean 'sigmoid'"),
    ({"beta": 0}, "above 0")])
def test_impossible_dpo_settings_are_refused(settings, match):
    with pytest.raises(ConfigError, match=match):
        ALGORITHMS["dpo"](**settings)


# --- KTO

def kto(log_ratios, labels, beta=0.1, z0=None, **settings):
    """(loss, z0) of one-token rows with these log ratios."""
    algo = ALGORITHMS["kto"](beta=beta, **settings)
    ratios = np.array(log_ratios, float)
    batch = make_batch([1] * len(ratios), group=range(len(ratios)), label_S=np.array(labels, np.int8),
                       ref_logprobs_T=np.full(len(ratios), -5.0))
    context = algo.prepare(batch, ratios - 5.0) if z0 is None else {"kl": z0}
    x = loss_inputs(batch, {"logprobs_T": torch.tensor(ratios - 5.0, requires_grad=True)}, context)
    return reduced(algo, batch, x)[0].item(), context["kl"]


def test_exact_values_of_kto():
    assert kto([1.0], [1], z0=0.5)[0] == pytest.approx(0.487503, abs=1e-6)
    assert kto([-1.0], [-1], z0=0.5)[0] == pytest.approx(0.462570, abs=1e-6)


def test_the_reference_point_is_the_clamped_mean_over_mismatched_rows():
    """Field case D012: mean -1 is clamped to 0; the mismatched rows are not trained on."""
    loss, z0 = kto([-3.0, 1.0, 2.0, 1.0], [0, 0, 1, -1])
    assert z0 == 0.0 and loss == pytest.approx((0.450166 + 0.524979) / 2, abs=1e-5)
    assert kto([3.0, 1.0, 2.0], [0, 0, 1])[1] == 2.0


def test_an_empty_side_of_kto_is_defined():
    """Field case D012: no undesirable example, one row, weight 1."""
    loss, _ = kto([-3.0, 1.0, 2.0], [0, 0, 1])
    assert loss == pytest.approx(0.450166, abs=1e-5)
    assert kto([], [])[0] == 0.0


def test_the_reference_point_is_global_and_carries_no_gradient():
    """Field case D012: two ranks read the same z0, which `prepare` computes over the whole optimizer batch."""
    algo = ALGORITHMS["kto"]()
    batch = make_batch([1] * 4, group=range(4), label_S=np.array([0, 1, 0, -1], np.int8), ref_sums_S=np.zeros(4))
    sums = np.array([-1.0, 0.0, 3.0, 0.0])
    context = algo.prepare(batch, sums)
    assert context == {"kl": 1.0} and isinstance(context["kl"], float)
    assert algo.prepare(batch.select([2, 3, 0, 1]), sums[[2, 3, 0, 1]]) == context
    with pytest.raises(DataError, match="log-prob sums"):
        algo.prepare(batch)


def test_without_mismatched_rows_the_mean_over_all_rows_stands_in():
    assert kto([1.0, 3.0], [1, -1])[1] == 2.0


def test_kto_weights_its_sides():
    both = kto([1.0, -1.0], [1, -1], z0=0.5, desirable_weight=2.0, undesirable_weight=0.5)[0]
    assert both == pytest.approx((2 * 0.487503 + 0.5 * 0.462570) / 2, abs=1e-6)


# --- reward models

def scored(scores, labels=(1, -1), margin=None, **settings):
    batch = make_batch([2, 2], group=[0, 0], label_S=np.array(labels, np.int8),
                       margin_S=None if margin is None else np.array(margin))
    leaves = {"logprobs_T": None, "scores_S": torch.tensor(scores, dtype=torch.float64, requires_grad=True)}
    x = loss_inputs(batch, leaves)
    loss, _ = reduced(ALGORITHMS["reward_model"](**settings), batch, x)
    loss.backward()
    return loss.item(), x.scores_S.grad


def test_bradley_terry_with_margin_and_centring():
    assert scored([0.3, 0.3])[0] == pytest.approx(LN2)
    assert scored([2.0, 0.0])[0] == pytest.approx(math.log1p(math.exp(-2.0)))
    assert scored([0.0, 2.0], labels=(-1, 1))[0] == pytest.approx(math.log1p(math.exp(-2.0)))
    loss, gradient = scored([2.0, 0.0], margin=[0.5, float("nan")])
    assert loss == pytest.approx(math.log1p(math.exp(-1.5))) and torch.isfinite(gradient).all()
    assert scored([2.0, 1.0], center_coef=0.01)[0] == pytest.approx(math.log1p(math.exp(-1.0)) + 0.09)
