"""Training over 1, 2 and 4 real processes gives what one process gives: see fsdp_ranks.py, which runs the checks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.fsdp_ranks import CASES, IN_FOUR, IN_ONE
from tests.models.small_lms import ragged
from verl.engine.fsdp import STRATEGIES, even_pieces

pytestmark = pytest.mark.timeout(900)  # the fixture runs every check: a minute of CPU time


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """ranks -> check -> what each rank returned."""
    folder = tmp_path_factory.mktemp("fsdp")
    done = subprocess.run([sys.executable, "-m", "tests.engine.fsdp_ranks", str(folder)], capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=Path(__file__).parents[2], timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return {ranks: json.loads((folder / f"{ranks}.json").read_text()) for ranks in (1, 2, 4)}


def test_every_strategy_is_checked():
    assert {CASES[c]["strategy"] for c in CASES if "strategy" in CASES[c]} | {"FULL_SHARD"} == set(STRATEGIES)


@pytest.mark.parametrize("ranks,case", [*((1, c) for c in IN_ONE), *((2, c) for c in CASES), *((4, c) for c in IN_FOUR)])
def test_three_updates_equal_one_process(worlds, ranks, case):
    """Metrics, gradient norm, scores, weights and moments; gradients are clipped in all of them."""
    within = 1e-12 if case == "exact" else 1e-6
    for found in worlds[ranks][case]:
        assert found["state"] < within and found["metrics"] < 3 * within and found["scores"] < 3 * within  # sums of many terms
        assert found["norm"] > 0.5  # else nothing was clipped


@pytest.mark.parametrize("ranks,check", [(1, "resumed from two"), (2, "resumed from one"), (4, "resumed from two"),
                                         (2, "lean resumed")])
def test_a_checkpoint_goes_on_with_other_ranks(worlds, ranks, check):
    within = 1e-6 if "lean" in check else 1e-12
    for found in worlds[ranks][check]:
        assert found["again"] == 0 and found["metrics"] < within and found["state"] < within


@pytest.mark.parametrize("check", ["skips", "skips no_shard"])
def test_a_bad_gradient_on_one_rank_is_skipped_by_all(worlds, check):
    assert worlds[2][check] == [{"skipped": ["non-finite", "no signal", "no signal"], "numbers": [0, 3, 1], "same": True}] * 2


def test_the_starting_policy_answers_with_adapters_off(worlds):
    for found in worlds[2]["starting policy"]:
        assert found["start"] < 3e-6 and found["stays"] and found["moved"] > 1e-3 and found["trained"] < 3e-6


@pytest.mark.parametrize("check", ["half", "half no_shard"])
def test_bfloat16_layers_over_float32_shards(worlds, check):
    """Sums over micro-batches round differently, and AdamW's first steps are the rate's size whatever the gradient's."""
    for found in worlds[2][check]:
        assert found["norm"] < 2e-3 and found["logp"] < 0.1 and found["masters"] < 6.1e-4 and found["equal"]


@pytest.mark.parametrize("ranks,check", [(2, "delivery"), (4, "delivery hybrid"), (2, "delivery no_shard")])
def test_weights_come_and_go(worlds, ranks, check):
    assert worlds[ranks][check] == [{"faults": 3, "receipt": True, "version": 2, "pieces": True, "exported": 0.0}] * ranks


def test_a_reward_model_learns_alike(worlds):
    assert max(max(found) for found in worlds[2]["rewards"]) < 1e-5


def test_what_cannot_be_sharded_is_refused_by_name(worlds):
    for words in worlds[2]["refusals"]:
        assert "'HALF_SHARD' is not known; allowed: FULL_SHARD" in words[0]
        assert "lfm2 does not (layers of type conv); set model.actor.fsdp_config.sharding_strategy to NO_SHARD" in words[1]
        assert "shards over 3 ranks, but 2 ranks on 1 hosts" in words[2]


@given(st.integers(0, 100), st.integers(1, 7), st.integers(1, 60), st.sampled_from(["row", "group"]))
def test_pieces_are_whole_units_of_even_size(seed, ranks, budget, unit):
    """Field case D023: seven ranks and groups of eight need no rule of divisibility; a step has whole groups by construction."""
    rng = np.random.default_rng(seed)
    answers = tuple(tuple(rng.integers(0, 12, rng.integers(1, 4)).tolist()) for _ in range(rng.integers(1, 6)))
    batch = ragged(seed, prompts=tuple(rng.integers(1, 7, len(answers)).tolist()), answers=answers)
    pieces, plain = even_pieces(batch, ranks, budget, unit), batch.pieces(budget, unit)
    assert sorted(r for p in pieces for r in p) == list(range(len(batch)))
    assert -(-len(pieces) // ranks) == -(-len(plain) // ranks)  # no more rounds than the budget asks for
    biggest = max(batch.select(p).tokens for p in pieces)
    assert biggest <= max(budget, max(batch.select(p).tokens for p in batch.pieces(1, unit)))
    for piece in pieces if unit == "group" else ():
        assert all(set(np.flatnonzero(batch.group_S == g)) <= set(piece) for g in batch.group_S[piece])
