"""What must hold for every algorithm of the table; no member is named here."""

from dataclasses import fields, is_dataclass, replace
from itertools import combinations

import numpy as np
import pytest
import reference
from algorithm_batches import (
    MAX_TOKENS,
    NAN,
    context_of,
    credited,
    random_case,
    random_settings,
    total_loss,
    weighted,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms import ALGORITHMS

SEEDS = st.integers(0, 2**32 - 1)
FEW = settings(max_examples=5, deadline=None, derandomize=True)
every_algorithm = pytest.mark.parametrize("name", list(ALGORITHMS))


def evaluate(algo, batch, leaves):
    """(loss, gradients, credited batch, keep_S) from the entry points, the batch in one piece."""
    batch, keep_S = credited(algo, batch)
    batch = weighted(algo, batch, keep_S)
    loss, grads = total_loss(algo, [batch], leaves, context_of(algo, batch, leaves))
    return loss, grads, batch, keep_S


@every_algorithm
@FEW
@given(seed=SEEDS)
def test_no_cut_order_or_packing_changes_the_gradient(name, seed):
    """Field cases D007, D047, D070: micro-batches, row order and packing."""
    rng = np.random.default_rng(seed)
    algo, (batch, leaves) = random_settings(name, rng), random_case(rng)
    loss, grads, batch, _ = evaluate(algo, batch, leaves)
    context = context_of(algo, batch, leaves)
    shuffled = batch.select(rng.permutation(len(batch)))
    for whole in (batch, shuffled):
        for pieces in ([whole], whole.micro_batches(1, algo.unit), whole.micro_batches(11, algo.unit),
                       whole.split(2, algo.unit)):
            other_loss, other = total_loss(algo, pieces, leaves, context)
            np.testing.assert_allclose(other_loss, loss, rtol=0, atol=1e-12)
            for leaf in grads:
                np.testing.assert_allclose(other[leaf], grads[leaf], rtol=0, atol=1e-12, err_msg=leaf)


@every_algorithm
@FEW
@given(seed=SEEDS, junk=st.sampled_from([NAN, 1e30, -1e30, float("inf")]))
def test_masked_slots_change_nothing(name, seed, junk):
    rng = np.random.default_rng(seed)
    algo, (batch, leaves) = random_settings(name, rng), random_case(rng)
    loss, grads, whole, keep_S = evaluate(algo, batch, leaves)

    def spoil(column):
        return np.where(batch.mask_T, column, junk)

    spoilt = replace(batch, **{f.name: spoil(getattr(batch, f.name)) for f in fields(batch)
                               if f.name.endswith("_T") and f.name not in ("ids_T", "mask_T")
                               and getattr(batch, f.name) is not None})
    credit, keep_again_S = credited(algo, spoilt)
    if algo.online:
        np.testing.assert_array_equal(credit.advantages_T, whole.advantages_T)
        np.testing.assert_array_equal(keep_again_S, keep_S)
        assert not credit.advantages_T[~batch.mask_T].any()
        credit = replace(credit, advantages_T=spoil(credit.advantages_T),
                         returns_T=None if credit.returns_T is None else spoil(credit.returns_T))
    spoilt_leaves = {n: spoil(v) if n.endswith("_T") else v for n, v in leaves.items()}
    again = weighted(algo, credit, keep_S)
    other_loss, other = total_loss(algo, [again], spoilt_leaves, context_of(algo, again, leaves))
    assert other_loss == loss
    for leaf in grads:
        np.testing.assert_array_equal(other[leaf], grads[leaf], err_msg=leaf)
        if leaf.endswith("_T"):
            assert not other[leaf][~batch.mask_T].any()


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if ALGORITHMS[name].online])
@FEW
@given(seed=SEEDS)
def test_credit_follows_the_rows_wherever_they_stand(name, seed):
    rng = np.random.default_rng(seed)
    algo, (batch, _) = random_settings(name, rng), random_case(rng)
    order = rng.permutation(len(batch))
    straight, keep_S = credited(algo, batch)
    moved, moved_keep_S = credited(algo, batch.select(order))
    np.testing.assert_array_equal(moved_keep_S, keep_S[order])
    np.testing.assert_allclose(moved.advantages_T, straight.advantages_T[moved.ids_T], atol=1e-6)
    if straight.returns_T is not None:
        np.testing.assert_allclose(moved.returns_T, straight.returns_T[moved.ids_T], atol=1e-6)


def rows_of(batch, leaves):
    """The batch as scalar rows with only their trained tokens."""
    def own(column, s):
        a, b = batch.offsets[s:s + 2]
        return None if column is None else [float(v) for v, m in zip(column[a:b], batch.mask_T[a:b]) if m]

    return [reference.Row(
        int(batch.group_S[s]), float(batch.rewards_S[s]), int(batch.lengths_S[s]), bool(batch.truncated_S[s]),
        float(batch.baselines_S[s]), int(batch.label_S[s]), float(batch.margin_S[s]), float(leaves["scores_S"][s]),
        own(leaves["logprobs_T"], s), own(leaves["logprobs_T"], s), own(batch.old_logprobs_T, s),
        own(batch.rollout_logprobs_T, s), own(batch.ref_logprobs_T, s), own(leaves["entropy_T"], s),
        own(leaves["values_T"], s), own(batch.values_T, s)) for s in range(len(batch))]


@every_algorithm
@settings(max_examples=10, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_the_scalar_reference_agrees(name, seed):
    rng = np.random.default_rng(seed)
    algo, (batch, leaves) = random_settings(name, rng), random_case(rng)
    loss, grads, batch, keep_S = evaluate(algo, batch, leaves)
    rows = rows_of(batch, leaves)
    if algo.online:
        advantages, returns = reference.credit(algo, rows)
        for s, row in enumerate(rows):
            a, b = batch.offsets[s:s + 2]
            trained = batch.mask_T[a:b]
            assert keep_S[s] == (advantages[s] is not None)
            if advantages[s] is None:
                assert not batch.advantages_T[a:b].any()
                continue
            np.testing.assert_allclose(batch.advantages_T[a:b][trained], advantages[s], rtol=1e-6, atol=1e-6)
            row.advantage = [float(v) for v in batch.advantages_T[a:b][trained]]  # float32, as the loss sees it
            if returns[s] is not None:
                np.testing.assert_allclose(batch.returns_T[a:b][trained], returns[s], rtol=1e-6, atol=1e-6)
                row.returns = [float(v) for v in batch.returns_T[a:b][trained]]
    expected = reference.loss(algo, rows, MAX_TOKENS)
    np.testing.assert_allclose(loss, expected, rtol=1e-10, atol=1e-12)
    check_gradient(algo, batch, rows, grads, rng)


def check_gradient(algo, batch, rows, grads, rng, step=1e-6):
    """Central differences of the reference at a few trained tokens and scores."""
    places = [(s, t) for s, row in enumerate(rows) for t in range(len(row.logp))]
    for i in rng.permutation(len(places))[:3]:
        s, t = places[i]
        index = np.flatnonzero(batch.mask_T & (batch.sequence_T == s))[t]
        for field, leaf in (("logp", "logprobs_T"), ("value", "values_T"), ("entropy", "entropy_T")):
            numbers, kept = getattr(rows[s], field), getattr(rows[s], field)[t]
            sides = []
            for shift in (step, -step):
                numbers[t] = kept + shift
                sides.append(reference.loss(algo, rows, MAX_TOKENS))
            numbers[t] = kept
            slope = (sides[0] - sides[1]) / (2 * step)
            np.testing.assert_allclose(grads[leaf][index], slope, rtol=1e-4, atol=1e-7, err_msg=leaf)


@every_algorithm
def test_small_and_degenerate_batches_are_defined(name):
    """One pair of rows: equal, missing and single rewards; empty and one-token responses (field cases D062, D064)."""
    case, leaves = random_case(np.random.default_rng(0), groups=1, lengths=[4, 4])
    algo = ALGORITHMS[name]()
    for trained in ([0, 0], [1, 1], [1, 0], [4, 1]):
        for rewards in ([1, 0], [1, 1], [NAN, NAN], [NAN, 1]):
            mask_T = np.concatenate([np.arange(4) < n for n in trained])
            batch = replace(case, rewards_S=np.array(rewards, float), mask_T=mask_T)
            loss, grads, *_ = evaluate(algo, batch, leaves)
            assert np.isfinite(loss) and all(np.isfinite(g).all() for g in grads.values())
            if sum(trained) == 0 or (algo.unit == "group" and min(trained) == 0):
                assert loss == 0.0 and not any(g.any() for g in grads.values()), "a loss over nothing"
            if algo.unit == "row":
                only = {n: v[:4] if n.endswith("_T") else v[:1] for n, v in leaves.items()}
                loss, grads, *_ = evaluate(algo, batch.select([0]), only)
                assert np.isfinite(loss) and all(np.isfinite(g).all() for g in grads.values())


def test_every_algorithm_gives_its_own_number():
    cases = [random_case(np.random.default_rng(seed), groups=6, scored=1.0) for seed in range(4)]
    losses = {name: np.array([evaluate(ALGORITHMS[name](), *case)[0] for case in cases]) for name in ALGORITHMS}
    for (a, x), (b, y) in combinations(losses.items(), 2):
        assert abs(x - y).max() > 1e-4, (a, b)


@every_algorithm
def test_every_setting_is_a_documented_field_with_a_default(name):
    cls = ALGORITHMS[name]
    assert is_dataclass(cls) and cls.__dataclass_params__.frozen and cls.name == name
    algo = cls()
    with pytest.raises(AttributeError):
        algo.name = "other"
    assert len(fields(cls)) <= 20
