"""exact, format and gsm8k: the whole response is searched, numbers are compared exactly, golds are checked at load."""

import pytest
from reward_samples import group

from verl.core.errors import DataError
from verl.rewards import RewardSource, Scorer, build_rewards
from verl.rewards.verifiers import last_number


def score(response, gold, **fields):
    g = group([response], answer=gold)
    rewards = build_rewards([RewardSource(**{"verifier": "gsm8k", **fields})])
    rewards.check([g.task])
    Scorer(rewards).score([g])
    return g.samples[0].score


CHATTER = "6*7=42\n#### 42\n" + "and this agrees with the steps above. " * 12


@pytest.mark.parametrize("response, gold, expected", [
    (CHATTER, "42", 1), ("#### 41\nI made a slip.\n#### 42", "42", 1), ("#### 42\nI made a slip.\n#### 41", "42", 0),
])
def test_the_last_marker_of_the_whole_response_wins(response, gold, expected):
    """Field case D009."""
    assert score(response, gold) == expected


@pytest.mark.parametrize("gold, right, wrong", [
    ("It falls from 2 to 5 below.\n#### -3", "-3", "3"), ("#### -1,234.50", "-1234.5", "1234.5"),
    ("#### +7", "7", "-7"), ("#### 1.0", "1", "10"),
])
def test_signed_golds(gold, right, wrong):
    """Field case D055."""
    assert score(f"so\n#### {right}", gold) == 1 and score(f"so\n#### {wrong}", gold) == 0
    assert score(f"it is {right}.", gold, mode="flexible") == 1 and score(f"it is {wrong}.", gold, mode="flexible") == 0


@pytest.mark.parametrize("response, gold, strict, flexible", [
    ("The total is $1,234.00.", "1234", 0, 1), ("It costs 5 dollars in 2024.", "5", 0, 0),
    ("It costs 5 dollars in 2024.", "2024", 0, 1), ("no number", "5", 0, 0), ("5\n#### ", "5", 0, 0),
    ("5\n#### five", "5", 0, 0), ("#### **5**", "5", 1, 1), ("#### $5", "5", 1, 1), ("#### 5 apples", "5", 1, 1),
    ("#### 1,23", "123", 0, 0), ("#### 1,23", "1", 0, 0), ("It is 3/2.", "2", 0, 0), ("#### \u22125", "-5", 1, 1),
    ("x2 is 7", "7", 0, 1), ("7 = 10-3", "3", 0, 1), ("#### .5", "0.5", 1, 1), ("#### 0.10", ".1", 1, 1),
    ("#### 100000000000000000001", "100000000000000000000", 0, 0), ("ok \ufffd 5", "5", 0, 1),
])
def test_strict_needs_the_marker_and_flexible_takes_the_last_number(response, gold, strict, flexible):
    """Field case D056; no float stands between the digits and the comparison."""
    assert score(response, gold, mode="strict") == strict
    assert score(response, gold, mode="flexible") == flexible


@pytest.mark.parametrize("gold", ["", "no number", "12 apples", "1,23", "#### "])
def test_a_gold_without_a_number_is_a_load_error(gold):
    with pytest.raises(DataError, match="every answer to it would score 0"):
        score("#### 1", gold)


def test_last_number_reads_none_from_words():
    assert last_number("none here, x1 v1.2.3") is None


def test_exact_ignores_only_the_white_space_around():
    assert score(" a b\n", "a b", verifier="exact") == 1 and score("a  b", "a b", verifier="exact") == 0
    assert score("7", 7, verifier="exact") == 1


def test_text_cut_inside_a_character_is_scored_and_never_raises():
    """Field case D036: a response cut inside an emoji ends with U+FFFD."""
    assert score("ok \ufffd", "ok", verifier="exact") == 0 and score("ok \ufffd", "ok \ufffd", verifier="exact") == 1
    assert score("ok \ufffd", "1", verifier="gsm8k") == 0


def test_format_matches_the_whole_response_over_lines():
    pattern = r"<think>.*</think>\s*<answer>.*</answer>"
    for text, expected in [("<think>\na\n</think>\n<answer>1</answer>", 1), ("x<think></think><answer></answer>", 0)]:
        assert score(text, None, verifier="format", pattern=pattern) == expected
