"""Reward functions: TRL's contract, validation of what comes back, failures that keep their name."""

import threading
import time

import numpy as np
import pytest
import torch
from reward_samples import group

from verl.core.errors import ConfigError, DataError, RewardError
from verl.core.types import Abstained, Failed, Message, Scored
from verl.rewards import RewardSource, Scorer, build_rewards, openrlhf
from verl.rewards.function import FunctionSource


def scores(groups):
    return [s.score for g in groups for s in g.samples]


def test_the_trl_contract_is_keywords_with_every_column_aligned():
    seen = {}

    def reward(*, prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns):
        seen.update(prompts=prompts, completions=completions, ids=completion_ids, state=trainer_state, columns=columns)
        log_extra("length", [len(c) for c in completions])
        log_metric("seen", 2)
        log_metric("seen", 4)
        return [1, None]

    g = group(["ab", "c"], level="easy", tags=[1, 2])
    scorer = Scorer(build_rewards(reward), trainer_state="step 3")
    metrics = scorer.score([g])
    assert seen["prompts"] == ["question"] * 2 and seen["completions"] == ["ab", "c"]
    assert seen["ids"] == [[97, 98], [99]] and seen["state"] == "step 3"
    assert seen["columns"] == {"level": ["easy"] * 2, "tags": [[1, 2]] * 2}
    assert [s.log["length"] for s in g.samples] == [2, 1] and metrics["seen"] == 3
    assert scores([g]) == [1.0, None]
    assert g.samples[0].rewards == {"reward": Scored(1.0)} and g.samples[1].rewards == {"reward": Abstained()}
    assert metrics["rewards/reward/mean"] == 1.0 and metrics["rewards/unscored"] == 1


def test_conversations_arrive_as_message_lists():
    seen: list[list[Message]] = []

    def reward(completions, **_):
        seen.extend(completions)
        return [0.0] * len(completions)

    Scorer(build_rewards(reward)).score([group(["hi"], prompt=[{"role": "user", "content": "q"}])])
    assert seen == [[{"role": "assistant", "content": "hi"}]]


def test_a_function_without_kwargs_gets_only_what_it_names():
    g = group(["abc"], answer="abc", other=1)
    Scorer(build_rewards(lambda completions, answer: [float(c == a) for c, a in zip(completions, answer)])).score([g])
    assert scores([g]) == [1.0]


def test_a_column_that_a_function_asks_for_is_checked_before_anything_runs():
    def reward(completions, solution):
        return [0.0]

    with pytest.raises(DataError, match="'reward' asks for 'solution'.*did you mean 'solutions'"):
        build_rewards(reward).check([group(["x"], solutions=1).task])


def test_async_functions_run_side_by_side():
    """Each waits for the other: run one after the other they would never finish."""
    import asyncio
    first, second = threading.Event(), threading.Event()

    async def meet(mine, other):
        mine.set()
        while not other.is_set():
            await asyncio.sleep(0.001)
        return [1.0]

    async def a(completions, **_):
        return await meet(first, second)

    async def b(completions, **_):
        return await meet(second, first)

    g = group(["x"])
    Scorer(build_rewards([a, b])).score([g])
    assert scores([g]) == [2.0]


@pytest.mark.parametrize("returned, came", [
    ([1.0], "returned 1 rewards, expected 6"), ([1.0] * 5, "returned 5 rewards, expected 6"),
    ([1.0] * 7, "returned 7 rewards, expected 6"), ("101010", "'101010' of type str"),
    (dict.fromkeys("abcdef", 1), "of type dict"), (np.ones((6, 1)), r"shape \(6, 1\)"),
    (None, "None of type NoneType"), (1.0, "of type float"),
    ([1.0, "1.0", 0, 0, 0, 0], "sample 1, returned '1.0' of type str"),
    ([1.0, 0, float("nan"), 0, 0, 0], "sample 2, returned nan; a reward must be finite, return None to abstain"),
    ([float("inf")] + [0] * 5, "sample 0, returned inf"), ([1j] * 6, "of type complex"),
    (torch.ones(6, 6), r"shape \(6, 6\)"),
])
def test_what_is_not_six_numbers_stops_before_any_advantage(returned, came):
    """Field case D003."""
    def my_reward(completions, **_):
        return returned

    g = group(["x"] * 6)
    with pytest.raises(RewardError, match=came) as error:
        Scorer(build_rewards(my_reward)).score([g])
    assert "my_reward" in str(error.value) and scores([g]) == [None] * 6


@pytest.mark.parametrize("returned", [np.arange(3, dtype=np.float32), torch.arange(3.0), [np.float64(0), 1, True + 1],
                                      (0, torch.tensor(1.0), 2.0)])
def test_arrays_and_scalars_of_the_usual_libraries_are_numbers(returned):
    g = group(["x"] * 3)
    Scorer(build_rewards(lambda completions, **_: returned)).score([g])
    assert scores([g]) == [0.0, 1.0, 2.0]


def broken_on(bad):
    def divides(completions, **_):
        return [1 / (c not in bad) for c in completions]
    return divides


def test_one_failing_sample_stops_the_run_with_its_name_and_traceback():
    """Field case D016, first run, default budget."""
    with pytest.raises(RewardError) as error:
        Scorer(build_rewards(broken_on(["c"]))).score([group(["a", "b", "c", "d"], id="row7")])
    text = str(error.value)
    assert "'divides' failed on 1 of 4" in text and "sample 2 of task 'row7'" in text
    assert "ZeroDivisionError" in text and "return [1 / (c not in bad)" in text


def test_a_configured_budget_leaves_the_failed_sample_out():
    """Field case D016, first run: excluded and counted, never 0.0."""
    g = group(["a", "b", "c", "d"])
    rewards = build_rewards(FunctionSource(broken_on(["c"])))
    rewards.entries[0] = type(rewards.entries[0])(rewards.entries[0].source, failure_budget=0.25)
    metrics = Scorer(rewards).score([g])
    assert scores([g]) == [1.0, 1.0, None, 1.0] and isinstance(g.samples[2].rewards["divides"], Failed)
    assert metrics["rewards/divides/failure_rate"] == 0.25 and metrics["rewards/divides/mean"] == 1.0


def test_failing_on_everything_always_stops(tmp_path):
    """Field case D016, second run; the budget of 1 does not excuse it."""
    (tmp_path / "my.py").write_text("def broken(completions, **_):\n    raise KeyError('set-up')\n")
    rewards = build_rewards([RewardSource(function="my.py:broken", failure_budget=1.0)], base_dir=tmp_path)
    with pytest.raises(RewardError, match="(?s)all of them failed.*KeyError: 'set-up'.*my.py"):
        Scorer(rewards).score([group(["a", "b"])])


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_sleeping_sample_costs_itself_and_not_the_others(kind):
    """Field case D016, third run, with 0.6 s in place of 5 s."""
    import asyncio

    def plain(completions, **_):
        return [time.sleep(60) if c == "slow" else 1.0 for c in completions]

    async def coroutine(completions, **_):
        return [await asyncio.sleep(60) if c == "slow" else 1.0 for c in completions]

    source = FunctionSource(plain if kind == "plain" else coroutine, "sleeper", timeout_s=0.6)
    g = group(["a", "slow", "b", "c"])
    rewards = build_rewards(source)
    rewards.entries[0] = type(rewards.entries[0])(source, failure_budget=0.5)
    start = time.monotonic()
    Scorer(rewards).score([g])
    assert time.monotonic() - start < 20  # not the 60 s of the sleeper
    assert scores([g]) == [1.0, None, 1.0, 1.0]
    assert "timeout_s 0.6" in g.samples[1].rewards["sleeper"].reason


def test_openrlhf_functions_through_the_adapter():
    seen = []

    def reward_func(queries, prompts, labels):
        seen.append((queries, prompts, labels))
        return {"rewards": torch.tensor([0.5, 1.0]), "scores": torch.tensor([5.0, 10.0]),
                "extra_logs": {"raw": torch.tensor([1.0, 3.0])}}

    g = group([" x", " y"], label="L")
    metrics = Scorer(build_rewards(openrlhf(reward_func))).score([g])
    assert seen == [(["question x", "question y"], ["question"] * 2, ["L", "L"])]
    assert scores([g]) == [0.5, 1.0] and metrics["raw"] == 2.0
    assert [float(s.log["reward_func_score"]) for s in g.samples] == [5.0, 10.0]


def test_user_files_are_found_beside_the_config_and_errors_name_the_near_miss(tmp_path):
    (tmp_path / "mine.py").write_text("def length_penalty(completions, **_):\n    return [-len(c) for c in completions]\n")
    g = group(["abc"])
    Scorer(build_rewards([{"function": "mine.py:length_penalty", "weight": 2.0}], base_dir=tmp_path)).score([g])
    assert scores([g]) == [-6.0] and list(g.samples[0].rewards) == ["length_penalty"]
    with pytest.raises(ConfigError, match="did you mean 'length_penalty'"):
        build_rewards([{"function": "mine.py:length_penalti"}], base_dir=tmp_path)
    with pytest.raises(ConfigError, match="no file .*other.py"):
        build_rewards([{"function": "other.py:f"}], base_dir=tmp_path)
