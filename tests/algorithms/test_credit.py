"""Advantages: exact values, groups by id, rows nobody scored, group sizes."""

import numpy as np
import pytest
from algorithm_batches import make_batch

from verl.algorithms import ALGORITHMS
from verl.algorithms.dapo import DAPO, overlong_penalty
from verl.algorithms.gae import discounted_returns, gae, place_scores, whiten
from verl.algorithms.grpo import EPSILON
from verl.core.errors import ConfigError, DataError

NAN = float("nan")


def credit(name, rewards, group=None, lengths=None, algo=None, **columns):
    """Advantages of the first token of each row, the whole Credit, and the batch."""
    batch = make_batch(lengths or [1] * len(rewards), group=group, rewards_S=np.array(rewards, float), **columns)
    result = (algo or ALGORITHMS[name](kl_coef=0)).credit(batch)
    return result.advantages_T[batch.offsets[:-1]], result, batch


@pytest.mark.parametrize("name, expected", [
    ("grpo", [1.49970, -0.49990, -0.49990, -0.49990]), ("dapo", [1.49970, -0.49990, -0.49990, -0.49990]),
    ("rloo", [1, -1 / 3, -1 / 3, -1 / 3]), ("dr_grpo", [0.75, -0.25, -0.25, -0.25])])
def test_exact_values_for_one_winner_of_four(name, expected):
    np.testing.assert_allclose(credit(name, [1, 0, 0, 0])[0], expected, atol=1e-5)


@pytest.mark.parametrize("name, winner, loser", [
    ("grpo", 1.290992, -0.645496), ("dr_grpo", 0.666667, -0.333333), ("rloo", 0.8, -0.4)])
def test_three_estimators_are_not_swapped(name, winner, loser):
    """Field case D049 (its GRPO epsilon is 1e-6, ours 1e-4)."""
    advantages = credit(name, [1, 1, 0, 0, 0, 0])[0]
    np.testing.assert_allclose(advantages, [winner] * 2 + [loser] * 4, atol=4e-4)
    assert abs(advantages.astype(float).sum()) < 1e-6


def test_leave_one_out_has_no_std_to_explode():
    """Field case D059."""
    np.testing.assert_allclose(credit("rloo", [1.0, 0, 0, 0])[0], [1.0, -1 / 3, -1 / 3, -1 / 3], atol=1e-5)
    with pytest.raises(TypeError, match="scale"):
        ALGORITHMS["rloo"](scale="group")


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"])
def test_a_group_of_one_is_refused_before_anything_runs(name):
    """Field case D066: a config error that names the group size."""
    with pytest.raises(ConfigError, match=f"trainer.group_size: 1 leaves {name} nothing to compare.*at least 2"):
        ALGORITHMS[name]().check_group(1)
    ALGORITHMS[name]().check_group(2)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo", "cispo"])
def test_a_group_left_with_one_scored_sample_is_zero(name):
    advantages, result, _ = credit(name, [1.0, NAN, 1.0, 0.0], group=[0, 0, 1, 1])
    assert advantages[0] == 0.0 and advantages[1] == 0.0 and advantages[2] > 0 > advantages[3]
    assert result.keep_S.tolist() == [True, False, True, True]


def test_rloo_does_not_train_on_a_group_left_with_one_scored_sample():
    _, result, _ = credit("rloo", [1.0, NAN, 1.0, 0.0], group=[0, 0, 1, 1])
    assert result.keep_S.tolist() == [False, False, True, True]


def test_reinforce_pp_baseline_learns_from_groups_of_one():
    """Field case D066: baseline 0 for 1-sample groups, then whitening over the batch."""
    advantages = credit("reinforce_pp_baseline", [1, 0, 1, 1], group=[0, 1, 2, 3])[0]
    np.testing.assert_allclose(advantages, [0.5, -1.5, 0.5, 0.5], atol=1e-5)


def test_reinforce_pp_baseline_subtracts_the_group_mean():
    advantages = credit("reinforce_pp_baseline", [1, 0, 3, 3], group=[0, 0, 1, 1])[0]
    np.testing.assert_allclose(advantages, np.array([0.5, -0.5, 0, 0]) / np.sqrt(0.5 / 3), atol=1e-5)


def test_equal_rewards_are_decided_by_max_equals_min():
    """0.1 + 0.2 style rounding of a mean must not turn a constant group into signal."""
    rewards = [0.1 + 0.2] * 7
    for name in ("grpo", "dr_grpo", "rloo", "reinforce_pp"):
        advantages, result, _ = credit(name, rewards)
        assert not advantages.any(), name
        assert result.metrics["frac_reward_zero_std"] == 1.0
    assert not DAPO().usable(make_batch([1] * 7, rewards_S=np.array(rewards))).any()


def test_groups_are_formed_by_id_not_by_position():
    rewards, group = np.array([1.0, 0, 0, 5, 7, 9, 2, 2]), np.array([7, 7, 7, 3, 3, 3, 9, 9])
    order = np.array([3, 0, 6, 4, 1, 7, 2, 5])
    for name in ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"):
        straight = credit(name, rewards, group)[0]
        np.testing.assert_allclose(credit(name, rewards[order], group[order])[0], straight[order], atol=1e-6)


def test_rows_nobody_scored_leave_the_statistics():
    for name in ("grpo", "dr_grpo", "rloo", "reinforce", "reinforce_pp", "reinforce_pp_baseline"):
        full = credit(name, [1, 0, 0, 3], group=[0, 0, 0, 0])
        holes = credit(name, [1, NAN, 0, 0, NAN, 3], group=[0] * 6)
        np.testing.assert_allclose(holes[0][[0, 2, 3, 5]], full[0], atol=1e-6)
        assert holes[1].keep_S.tolist() == [True, False, True, True, False, True]
        assert holes[1].metrics == full[1].metrics
        nobody = credit(name, [NAN, NAN])
        assert not nobody[0].any() and not nobody[1].keep_S.any() and nobody[1].metrics == {}


def test_a_one_token_response_is_trained_on():
    """Field case D064: an immediate end of text is one trained token, and its signal is kept."""
    advantages, result, batch = credit("dr_grpo", [0.0, 1.0], group=[0, 0], lengths=[1, 3])
    np.testing.assert_allclose(result.advantages_T, [-0.5, 0.5, 0.5, 0.5])
    assert batch.mask_T.sum() == 4 and result.keep_S.all()


def test_truncated_rows_can_leave_the_loss_but_stay_in_the_statistics():
    """Field case D031: 3 + 8 trained tokens; the cut row still takes part in the group's mean."""
    algo = ALGORITHMS["dr_grpo"](mask_truncated=True)
    _, result, batch = credit("", [1.0, 0.0, 0.5], lengths=[3, 8, 8], algo=algo,
                              truncated_S=np.array([False, True, False]))
    assert result.keep_S.tolist() == [True, False, True]
    assert np.bincount(batch.sequence_T, batch.mask_T & result.keep_S[batch.sequence_T]).tolist() == [3, 0, 8]
    np.testing.assert_allclose(result.advantages_T[batch.offsets[:-1]], [0.5, 0.0, 0.0])
    assert credit("dr_grpo", [1.0, 0.0, 0.5], lengths=[3, 8, 8],
                  truncated_S=np.array([False, True, False]))[1].keep_S.all()


def test_dynamic_sampling_keeps_groups_with_a_difference():
    """Field case D072: 3 usable groups of 5, then 4 of 5; the predicate counts, the trainer refills."""
    rounds = [[[1, 0], [1, 1], [0, 1], [0, 0], [1, 0]], [[1, 0], [0, 1], [1, 1], [1, 0], [0, 1]]]
    usable = []
    for rewards in rounds:
        batch = make_batch([2] * 10, group=np.repeat(np.arange(5), 2), rewards_S=np.array(rewards, float).ravel())
        usable.append(len(set(batch.group_S[DAPO().usable(batch)].tolist())))
    assert usable == [3, 4]
    assert ALGORITHMS["grpo"]().usable(batch) is None
    alone = make_batch([1] * 3, group=[0, 1, 1], rewards_S=np.array([1, NAN, 0.0]))
    assert not DAPO().usable(alone).any()


def test_overlong_penalty_grows_over_the_buffer():
    lengths = np.array([10, 16384, 16384 + 1024, 16384 + 4096, 30000])
    np.testing.assert_allclose(overlong_penalty(lengths, 16384, 4096), [0, 0, 0.25, 1, 1])
    algo = DAPO(overlong_free=2, overlong_buffer=2)
    advantages = credit("", [1.0, 1.0], group=[0, 0], lengths=[2, 4], algo=algo)[0]
    np.testing.assert_allclose(advantages, np.array([0.5, -0.5]) / (np.sqrt(0.5) + EPSILON), atol=1e-6)


@pytest.mark.parametrize("name", ["rloo", "grpo", "dr_grpo"])
def test_kl_in_the_reward_is_the_sum_over_trained_tokens(name):
    algo = ALGORITHMS[name](kl_coef=0.5, kl_in="reward", kl_estimator="k1")
    rollout = np.array([-1.0, -1.0, NAN, -2.0], np.float32)
    ref = np.array([-1.5, -2.0, 1e30, -2.0], np.float32)
    penalised = credit("", [1.0, 0.0], group=[0, 0], lengths=[3, 1], algo=algo, rollout_logprobs_T=rollout,
                       ref_logprobs_T=ref, mask_T=np.array([1, 1, 0, 1], bool))[0]
    np.testing.assert_allclose(penalised, credit(name, [1.0 - 0.5 * 1.5, 0.0], group=[0, 0])[0], atol=1e-6)
    with pytest.raises(ConfigError, match="needs the reference log-probs"):
        credit("", [1.0, 0.0], algo=algo, rollout_logprobs_T=np.zeros(2, np.float32))


def test_remax_subtracts_the_greedy_reward():
    advantages, result, _ = credit("remax", [1.0, 0.0, 1.0], baselines_S=np.array([0.25, 0.25, NAN]))
    np.testing.assert_allclose(advantages, [0.75, -0.25, 0.0])
    assert result.keep_S.tolist() == [True, True, False]
    with pytest.raises(DataError, match="greedy"):
        credit("remax", [1.0])


def test_reinforce_baselines_and_discount():
    plain = ALGORITHMS["reinforce"](baseline="none", gamma=0.5)
    result = credit("", [1.0, 2.0], lengths=[3, 1], algo=plain)[1]
    np.testing.assert_allclose(result.advantages_T, [0.25, 0.5, 1.0, 2.0])
    result = credit("reinforce", [1.0, 3.0], lengths=[3, 1])[1]
    np.testing.assert_allclose(result.advantages_T, [-0.5, -0.5, -0.5, 1.5])


# --- returns and advantages over tokens

def columns(mask, values=None):
    mask_T = np.array(mask, bool)
    values_T = None if values is None else np.where(mask_T, np.array(values, float), NAN)
    return mask_T, np.zeros(len(mask), int), values_T


@pytest.mark.parametrize("mask, values, gamma, lam, expected", [
    ([1, 1, 0, 0, 1, 1], [.2, .4, 0, 0, .5, .7], 1.0, .95, [.7327, .5608, 0, 0, .4850, .3000]),
    ([1, 1, 0, 0, 1], [.1, .2, 9, 9, .3], 1.0, .9, [.757, .73, 0, 0, .7]),  # field case D043
    ([1, 1, 0, 0, 1], [.1, .2, 9, 9, .3], 0.5, .9, [.11925, .265, 0, 0, .7]),  # field case D043
    ([1, 1, 0], [0, 0, 0], 0.0, .95, [0, 1, 0])])  # field case D043: the reward lands on index 1
def test_gae_skips_tool_output(mask, values, gamma, lam, expected):
    mask_T, sequence_T, values_T = columns(mask, values)
    rewards_T = place_scores(np.array([1.0]), mask_T, sequence_T)
    advantages_T, returns_T = gae(rewards_T, values_T, mask_T, sequence_T, gamma, lam)
    np.testing.assert_allclose(advantages_T, expected, atol=6e-5 if lam == .95 else 1e-6)
    np.testing.assert_allclose(returns_T, np.where(mask_T, advantages_T + np.nan_to_num(values_T), 0))


@pytest.mark.parametrize("mask, gamma, expected", [
    ([1, 1, 0, 0, 1, 1], .9, [.729, .81, 0, 0, .9, 1]), ([1, 0, 1], .5, [.5, 0, 1])])
def test_discounted_return_skips_tool_output(mask, gamma, expected):
    mask_T, sequence_T, _ = columns(mask)
    rewards_T = place_scores(np.array([1.0]), mask_T, sequence_T)
    np.testing.assert_allclose(discounted_returns(rewards_T, mask_T, sequence_T, gamma), expected)


def test_scores_land_on_the_last_trained_token():
    """Field case D046: a response that ends early and one that fills the limit."""
    sequence_T = np.array([0, 0, 0, 1, 1, 1, 1, 1])
    rewards_T = place_scores(np.array([2.0, 3.0]), np.ones(8, bool), sequence_T)
    assert rewards_T.tolist() == [0, 0, 2.0, 0, 0, 0, 0, 3.0]


def test_whitening_uses_the_sample_std_and_survives_one_value():
    """Field case D014 (sample std): masked values are never seen, one token stays as it is."""
    np.testing.assert_allclose(whiten(np.array([1.0, 3.0])), [-0.707107, 0.707107], atol=1e-6)
    assert whiten(np.array([5.0])).tolist() == [5.0] and whiten(np.array([])).tolist() == []
    assert whiten(np.array([0.1] * 3)).tolist() == [0, 0, 0]
    for junk in (100.0, 1e9, NAN):
        algo = ALGORITHMS["ppo"](kl_coef=0, gamma=0, lam=0)
        result = credit("", [3.0], lengths=[3], algo=algo, values_T=np.array([-1.0, 0.0, junk], np.float32),
                        mask_T=np.array([1, 1, 0], bool))[1]
        np.testing.assert_allclose(result.advantages_T, [-0.707107, 0.707107, 0.0], atol=1e-4)
        np.testing.assert_allclose(result.returns_T, [0.0, 3.0, 0.0])


def test_ppo_with_and_without_a_critic():
    values = np.array([0.2, 0.4, 0.1], np.float32)
    with_critic = ALGORITHMS["ppo"](kl_coef=0, lam=1.0)
    result = credit("", [1.0, 0.0], lengths=[2, 1], algo=with_critic, values_T=values)[1]
    np.testing.assert_allclose(result.advantages_T, whiten(np.array([0.8, 0.6, -0.1])), atol=1e-6)
    np.testing.assert_allclose(result.returns_T, [1, 1, 0], atol=1e-6)
    without = ALGORITHMS["ppo"](kl_coef=0, vf_coef=0)
    assert not without.needs_critic and with_critic.needs_critic
    result = credit("", [1.0, 0.0], lengths=[2, 1], algo=without)[1]
    np.testing.assert_allclose(result.advantages_T, whiten(np.array([1.0, 1.0, 0.0])), atol=1e-6)
    with pytest.raises(DataError, match="values_T"):
        credit("", [1.0], algo=with_critic)


def test_ppo_puts_the_kl_on_every_token():
    algo = ALGORITHMS["ppo"](vf_coef=0, kl_coef=0.1)
    result = credit("", [1.0], lengths=[2], algo=algo, rollout_logprobs_T=np.array([-1, -1], np.float32),
                    ref_logprobs_T=np.array([-1.5, -3], np.float32))[1]
    np.testing.assert_allclose(result.returns_T, [0.75, 0.8], atol=1e-6)
