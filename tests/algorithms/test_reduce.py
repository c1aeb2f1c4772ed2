"""Reductions: exact coefficients from the final mask, and the same ones when ranks hold parts of the batch."""

import numpy as np
import pytest
from algorithm_batches import make_batch, random_case

from verl.algorithms.reduce import REDUCTIONS, Counts, coefficients, count
from verl.core.errors import ConfigError, DataError


def reduced(reduction, losses, keep=None, group=None, constant=None):
    """The reduced value of ragged per-token losses."""
    batch = make_batch([len(row) for row in losses], group=group)
    weights_T, _ = coefficients(reduction, batch, None if keep is None else np.array(keep), constant)
    return float(np.concatenate([np.array(row, float) for row in losses]) @ weights_T)


def test_the_denominator_counts_the_final_mask():
    """Field case D007: 8 tokens, not the 10 from before the overlong filter."""
    assert reduced("token_mean", [[1.0] * 4, [1.0] * 4, [1.0] * 2], keep=[True, True, False]) == 1.0


@pytest.mark.parametrize("reduction, expected", [
    ("token_mean", (2 * 1 + 8 * 3 + 2 * 5) / 12), ("sequence_mean", (1 + 3 + 5) / 3),
    ("prompt_mean", ((2 * 1 + 8 * 3) / 10 + 5) / 2), ("constant", (2 * 1 + 8 * 3 + 2 * 5) / (3 * 8))])
def test_each_reduction_is_what_its_name_says(reduction, expected):
    losses = [[1.0] * 2, [3.0] * 8, [5.0] * 2]
    assert reduced(reduction, losses, group=[4, 4, 9], constant=8) == pytest.approx(expected, abs=1e-12)


def test_token_mean_is_not_a_mean_of_means():
    """Field case D070: 2.6 under every layout (the layouts: test_properties)."""
    assert reduced("token_mean", [[1.0] * 2, [3.0] * 8]) == pytest.approx(2.6, abs=1e-12)


def test_parts_on_ranks_divide_by_the_global_counts():
    """Field case D051: 3 tokens of loss 1 and one of loss 5 over two ranks are 2.0."""
    parts = [(make_batch([3]), np.ones(3)), (make_batch([1]), np.array([5.0]))]
    counts = sum((count(batch) for batch, _ in parts), Counts())
    local = [float(loss @ coefficients("token_mean", batch, counts=counts)[0]) for batch, loss in parts]
    assert sum(local) == 2.0
    averaging = [len(parts) * value for value in local]  # a collective that averages needs the world size back
    assert np.mean(averaging) == 2.0


def test_a_rank_without_rows_takes_part_with_nothing():
    """Field case D047: five rows over two ranks mean 4.0, a short last batch divides by its own rows."""
    rows = [1.0, 2.0, 3.0, 4.0, 10.0]
    parts = [make_batch([1] * 3), make_batch([1] * 2), make_batch([])]
    counts = sum((count(part) for part in parts), Counts())
    weights = np.concatenate([coefficients("sequence_mean", part, counts=counts)[1] for part in parts])
    assert np.array(rows) @ weights == pytest.approx(4.0, abs=1e-12)
    weights_T, weights_S = coefficients("token_mean", parts[2])
    assert weights_T.shape == weights_S.shape == (0,)
    assert [coefficients("sequence_mean", make_batch([1] * n))[1][0] for n in (4, 4, 2)] == [0.25, 0.25, 0.5]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("seed", range(4))
def test_any_rank_layout_gives_the_same_coefficients(reduction, seed):
    rng = np.random.default_rng(seed)
    batch, _ = random_case(rng, groups=5)
    keep_S = rng.random(len(batch)) < 0.8
    whole_T, whole_S = coefficients(reduction, batch, keep_S, 7)
    order = rng.permutation(5)
    ranks = [np.concatenate([[2 * g, 2 * g + 1] for g in order[a:b]]).astype(int) for a, b in ((0, 1), (1, 5))]
    if reduction != "pair_mean":  # pairs stay together; groups of the others may be torn apart
        ranks = [np.arange(0, 10, 2), np.arange(1, 10, 2)]
    counts = sum((count(batch.select(rows), keep_S[rows]) for rows in ranks), Counts())
    for rows in ranks:
        part = batch.select(rows)
        weights_T, weights_S = coefficients(reduction, part, keep_S[rows], 7, counts)
        np.testing.assert_array_equal(weights_T, whole_T[part.ids_T])
        np.testing.assert_array_equal(weights_S, whole_S[rows])


def test_pairs_stand_on_their_chosen_row_and_cut_ones_do_not_count():
    """Field case D062: of three pairs one lost its rejected completion."""
    label_S = np.array([1, -1, -1, 1, 1, -1], np.int8)
    batch = make_batch([2, 3, 1, 2, 4, 0], group=[0, 0, 1, 1, 2, 2], label_S=label_S)
    weights_T, weights_S = coefficients("pair_mean", batch)
    assert weights_S.tolist() == [0.5, 0, 0, 0.5, 0, 0]
    assert np.bincount(batch.sequence_T, weights_T, 6).tolist() == [0.5, 0, 0, 0.5, 0, 0]
    assert count(batch).pairs == 2


def test_rows_with_label_zero_never_count():
    batch = make_batch([2, 2, 2], group=[0, 1, 2], label_S=np.array([1, -1, 0], np.int8))
    assert coefficients("sequence_mean", batch)[1].tolist() == [0.5, 0.5, 0.0]


def test_what_cannot_be_reduced_is_refused():
    with pytest.raises(ConfigError, match="did you mean 'token_mean'"):
        coefficients("token_means", make_batch([1]))
    with pytest.raises(ConfigError, match="response limit in tokens, got None"):
        coefficients("constant", make_batch([1]))
    with pytest.raises(DataError, match="label_S"):
        coefficients("pair_mean", make_batch([1]))
    with pytest.raises(DataError, match="group 3 holds 2 chosen and 1 rejected"):
        coefficients("pair_mean", make_batch([1] * 3, group=[3] * 3, label_S=np.array([1, 1, -1])))
