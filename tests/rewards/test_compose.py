"""Composition: aggregation, abstaining, names, A/B arms, metrics as valid JSON; scoring that overlaps generation."""

import json
import threading

import numpy as np
import pytest
from reward_samples import group, sample

from verl.core.batch import from_groups
from verl.core.errors import ConfigError, DataError, RewardError
from verl.core.types import Finish
from verl.rewards import RewardSource, Scorer, build_rewards
from verl.rewards.base import Source
from verl.rewards.compose import normalised_sum, weighted_sum

nan = np.nan
A, B = [1, nan, 0, 1], [0.5, 0.5, nan, 0.5]


def from_column(name):
    def reward(completions, **columns):
        return [values[i % len(values)] for i, values in enumerate(columns[name])]
    reward.__name__ = name
    return reward


def test_none_abstains_and_nobody_scoring_is_not_zero():
    """Field case D013: totals 2, 1, 0, 2; in the second group row 1 has no reward at all."""
    one = group(list("abcd"), fn_a=[1, None, 0, 1], fn_b=[0.5, 0.5, None, 0.5])
    two = group(list("abcd"), id="u", fn_a=[1, None, 0, 0], fn_b=[0.5, None, 0.5, 0.5])
    metrics = Scorer(build_rewards([from_column("fn_a"), from_column("fn_b")], weights=[1.0, 2.0])).score([one, two])
    assert [s.score for s in one.samples] == [2.0, 1.0, 0.0, 2.0]
    assert [s.score for s in two.samples] == [2.0, None, 1.0, 1.0]
    assert metrics["rewards/unscored"] == 1 and metrics["reward"] == pytest.approx(9 / 7)
    rewards_S = from_groups([two]).rewards_S
    assert np.isnan(rewards_S[1])
    seen = rewards_S[~np.isnan(rewards_S)]
    assert np.allclose(seen - seen.mean(), [0.666667, -0.333333, -0.333333], atol=1e-6)


def test_normalise_each_function_then_sum_has_no_nan_where_anybody_scored():
    """Field case D013, second mode: a std of 3 values, of equal values, of one value, of none."""
    totals = normalised_sum(np.array([A, B]), np.array([1.0, 2.0]))
    std = np.std([1, 0, 1], ddof=1) + 1e-4
    assert np.allclose(totals, [(1 / 3) / std, 0.0, (-2 / 3) / std, (1 / 3) / std])
    assert np.allclose(normalised_sum(np.array([[nan, 5.0, nan]]), np.ones(1)), [nan, 0, nan], equal_nan=True)
    assert np.isnan(weighted_sum(np.array([[nan], [nan]]), np.ones(2))).all()


def test_equal_values_that_look_unequal_in_floating_point_are_constant():
    assert normalised_sum(np.full((1, 3), 0.1), np.ones(1)).tolist() == [0.0] * 3


def test_a_user_function_aggregates_and_is_checked():
    def lowest(rewards, weights):
        assert weights == {"fn_a": 1.0, "fn_b": 1.0}
        return [min((v for v in pair if v is not None), default=None) for pair in zip(*rewards.values())]

    g = group(list("abcd"), fn_a=[1, None, 0, None], fn_b=[0.5, 0.5, None, None])
    sources = [from_column("fn_a"), from_column("fn_b")]
    Scorer(build_rewards(sources, aggregate=lowest)).score([g])
    assert [s.score for s in g.samples] == [0.5, 0.5, 0.0, None]
    with pytest.raises(RewardError, match="aggregate function 'short' returned 1 rewards, expected 4"):
        def short(rewards, weights):
            return [1.0]
        Scorer(build_rewards(sources, aggregate=short)).score([g])


def test_metrics_are_absent_and_never_nan_so_that_the_log_is_json():
    """Field case D071: one value in the window, or none."""
    g = group(list("abcd"), some=[0.5, None, 0.8, 0.6], nobody=[None] * 4)
    metrics = Scorer(build_rewards([from_column("some"), from_column("nobody")])).score([g])
    assert metrics["rewards/some/mean"] == pytest.approx(0.633333, abs=1e-6)
    assert "rewards/nobody/mean" not in metrics and metrics["rewards/nobody/abstain_rate"] == 1.0
    assert json.loads(json.dumps(metrics, allow_nan=False)) == metrics
    assert metrics["rewards/some/latency_s"] >= 0


def test_arms_split_tasks_by_id_and_report_apart():
    sources = [RewardSource(verifier="exact"),
               RewardSource(verifier="exact", name="bonus", weight=10.0, arms=["bonus"]),
               RewardSource(verifier="exact", name="quiet", weight=0.0, arms=["control"])]
    rewards = build_rewards(sources)
    groups = [group(["x", "y"], id=f"task{i}", answer="x") for i in range(60)]
    metrics = Scorer(rewards).score(groups)
    arms = [rewards.arm(g.task) for g in groups]
    assert set(arms) == {"bonus", "control"} and 15 < arms.count("bonus") < 45
    assert arms == [build_rewards(sources).arm(g.task) for g in groups]
    assert all(g.samples[0].score == (11.0 if arm == "bonus" else 1.0) for g, arm in zip(groups, arms))
    assert metrics["arms/bonus/reward"] == 5.5 and metrics["arms/control/reward"] == 0.5
    assert metrics["arms/bonus/samples"] + metrics["arms/control/samples"] == 120


def test_doubled_names_get_a_number_or_are_refused():
    rewards = build_rewards([RewardSource(verifier="gsm8k", mode="strict"), RewardSource(verifier="gsm8k")])
    assert [e.source.name for e in rewards.entries] == ["gsm8k", "gsm8k_2"]
    with pytest.raises(ConfigError, match="occur twice: same"):
        build_rewards([RewardSource(verifier="exact", name="same"), RewardSource(verifier="gsm8k", name="same")])


def test_a_line_at_start_says_what_scores_and_how():
    """Field case D056: the extraction mode is reachable from the config and visible."""
    rewards = build_rewards([{"verifier": "gsm8k", "mode": "flexible"}, {"verifier": "exact", "weight": 0.5, "arms": ["a"]}])
    assert rewards.describe() == "rewards: gsm8k (weight 1, mode flexible); exact (weight 0.5, arms a)"


@pytest.mark.parametrize("fields, message", [
    ({}, "exactly one of function, verifier"), ({"verifier": "math", "http": "http://x"}, "sets verifier and http"),
    ({"verifier": "maths"}, "did you mean 'math'"), ({"verifier": "exact", "timeout_s": 0.0}, "above 0 seconds"),
    ({"verifier": "exact", "failure_budget": 2.0}, "share from 0 to 1"), ({"verifier": "format"}, "needs a `pattern`"),
    ({"verifier": "format", "pattern": "("}, "not a regular expression"),
    ({"verifier": "gsm8k", "mode": "loose"}, "strict, flexible"),
])
def test_settings_that_cannot_mean_anything_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        build_rewards([fields])
    with pytest.raises(ConfigError, match="is empty"):
        build_rewards([])


def test_a_source_is_two_lines_of_yaml(tmp_path):
    from dataclasses import dataclass

    from verl.core.config import load, option

    @dataclass
    class Section:
        rewards: list[RewardSource] = option([])

    (tmp_path / "run.yaml").write_text(
        "rewards:\n  - verifier: exact\n    weight: 2\n  - function: mine.py:bonus\n    weight: 1e-1\n"
        "  - judge: {url: 'http://127.0.0.1:9/v1', maximum: 5}\n    weight: 0\n")
    (tmp_path / "mine.py").write_text("def bonus(completions, **_):\n    return [1.0] * len(completions)\n")
    config = load(Section, tmp_path / "run.yaml").config
    rewards = build_rewards(config.rewards, base_dir=tmp_path)
    assert [(e.source.name, e.weight, e.failure_budget) for e in rewards.entries] == [
        ("exact", 2.0, 0.1), ("bonus", 0.1, 0.0), ("judge", 0.0, 0.1)]
    rewards.close()
    (tmp_path / "run.yaml").write_text("rewards:\n  - verifer: exact\n")
    with pytest.raises(ConfigError, match="verifier"):
        load(Section, tmp_path / "run.yaml")


def test_empty_or_missing_gold_is_refused_at_load():
    rewards = build_rewards([{"verifier": "exact"}])
    with pytest.raises(DataError, match="it is empty"):
        rewards.check([group(["x"], answer=" ").task])
    with pytest.raises(DataError, match="no column 'answer'; did you mean 'answers'"):
        rewards.check([group(["x"], answers="x").task])
    rewards.check([group(["x"], answer=None).task])  # left empty on purpose: abstains


class Slow(Source):
    """Answers when told to."""

    def __init__(self):
        super().__init__("slow", 60.0)
        self.go, self.batches = threading.Event(), []

    def score(self, items):
        from verl.core.types import Scored
        self.batches.append([i.sample.text for i in items])
        assert self.go.wait(30)
        return [Scored(float(len(i.sample.text))) for i in items]


def test_scoring_starts_before_the_group_is_complete_and_grows_its_batches():
    source = Slow()
    scorer = Scorer(build_rewards(source))
    g = group(["a", "bb", "ccc"])
    scorer.submit_sample(g.task, g.samples[0])
    while not source.batches:
        pass
    assert source.batches == [["a"]]  # generation of the others still goes on
    scorer.submit_sample(g.task, g.samples[1])
    scorer.submit(g)
    source.go.set()
    scorer.collect()
    assert source.batches == [["a"], ["bb", "ccc"]] and [s.score for s in g.samples] == [1.0, 2.0, 3.0]


def test_collecting_one_step_leaves_the_next_in_flight():
    source = Slow()
    source.go.set()
    scorer = Scorer(build_rewards([source, RewardSource(verifier="exact")]))
    now, ahead = group(["a"], answer="a"), group(["b"], id="u", answer="c")
    scorer.submit(now)
    scorer.submit(ahead)
    assert scorer.collect([now])["reward"] == 2.0
    assert scorer.collect()["reward"] == 1.0
    scorer.close()


def test_aborted_samples_are_never_scored():
    g = group(["a", "a"], answer="a")
    g.samples[1] = sample("a", Finish.ABORT)
    Scorer(build_rewards([{"verifier": "exact"}])).score([g])
    assert [s.score for s in g.samples] == [1.0, None] and not g.samples[1].rewards


def test_a_hung_source_is_named():
    source = Slow()
    source.limit_s = lambda n: 0.3
    with pytest.raises(RewardError, match="'slow' has not answered"):
        Scorer(build_rewards(source)).score([group(["a"])])
    source.go.set()
