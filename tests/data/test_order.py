"""The order is a pure function of (seed, epoch); a run stopped anywhere goes on as if it had not been."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.core.errors import CheckpointError, ConfigError
from verl.core.types import Task
from verl.data import DataConfig, RLDataLoader, shard
from verl.data.order import Order, permutation


def loader(n=10, seed=1, **settings):
    return RLDataLoader([Task(str(i), f"prompt {i}") for i in range(n)], seed, DataConfig(**settings))


def ids(tasks):
    return [int(task.id) for task in tasks]


def resumed(old, new):
    """`new` after loading `old`'s state by way of a JSON file."""
    new.load_state(json.loads(json.dumps(old.state())))
    return new


def test_permutation_is_fixed_for_ever():
    assert permutation(8, 0, 0).tolist() == [5, 4, 1, 0, 7, 6, 3, 2]
    assert permutation(8, 0, 1).tolist() == [2, 0, 4, 7, 3, 1, 5, 6]


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(0, 2**63 - 1), st.integers(0, 9))
def test_permutations_hold_every_row_once(size, seed, epoch):
    assert sorted(permutation(size, seed, epoch).tolist()) == list(range(size))


def test_permutations_are_spread_evenly():
    """Each row stands in each place about equally often over 4000 epochs (chi-squared, 81 degrees of freedom)."""
    counts = np.zeros((10, 10))
    for epoch in range(4000):
        counts[np.arange(10), permutation(10, 7, epoch)] += 1
    assert ((counts - 400) ** 2 / 400).sum() < 140


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 12), st.integers(0, 99), st.lists(st.integers(1, 7), min_size=1, max_size=8), st.data())
def test_stopped_anywhere_and_resumed(size, seed, steps, data):
    """Any cut of the run: each step after the resume is the step of the uninterrupted run."""
    whole = loader(size, seed)
    expected = [ids(whole.take(n)) for n in steps]
    stop = data.draw(st.integers(0, len(steps)))
    first = loader(size, seed)
    for n in steps[:stop]:
        first.take(n)
    second = resumed(first, loader(size, seed))
    assert second.position == sum(steps[:stop])
    assert [ids(second.take(n)) for n in steps[stop:]] == expected[stop:]
    third = loader(size, seed)
    third.position = sum(steps[:stop])
    assert [ids(third.take(n)) for n in steps[stop:]] == expected[stop:]


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 4), st.data())
def test_finished_in_any_order_and_resumed(size, data):
    """Slots finish, fail or come back in any order and the run is killed at any point: over all lives every slot of
    three epochs is consumed exactly once, and the union is the uninterrupted order."""
    total, consumed, run, flying = 3 * size, [], loader(size), []
    while len(consumed) < total:
        action = data.draw(st.sampled_from(["issue", "done", "done", "failed", "back", "kill"]))
        if action == "issue" and len(consumed) + len(flying) < total:
            flying += run.issue(1)
        elif action == "kill":
            run, flying = resumed(run, loader(size)), []
        elif flying:
            slot, task = flying.pop(data.draw(st.integers(0, len(flying) - 1)))
            if action == "back":
                run.put_back([slot])
            else:
                run.done([slot], failed=action == "failed")
                consumed.append((slot, task.id))
        assert run.consumed == len(consumed)
    assert [task for _, task in sorted(consumed)] == [task.id for task in loader(size).take(total)]
    assert (run.position, run.state()["done"]) == (total, [])


def test_failures_and_work_in_flight():
    """Field case D004."""
    run = loader(12, sampler="in_order")
    slots = dict((int(task.id), slot) for slot, task in run.issue(7))
    run.done([slots[i] for i in (0, 1, 2, 4)])
    run.done([slots[3]], failed=True)
    run.put_back([slots[5]])
    after = resumed(run, loader(12, sampler="in_order"))
    assert after.failed == [3] and after.task(after.failed[0]).id == "3"
    assert ids(after.take(7)) == [5, 6, 7, 8, 9, 10, 11]
    assert after.state()["failed"] == [3]
    out_of_order = loader(12, sampler="in_order")
    out_of_order.issue(7)
    out_of_order.done([0, 6])
    assert (out_of_order.position, out_of_order.consumed, out_of_order.state()["done"]) == (1, 2, [6])
    assert ids(resumed(out_of_order, loader(12, sampler="in_order")).take(6)) == [1, 2, 3, 4, 5, 7]
    with pytest.raises(KeyError):
        out_of_order.done([0])


@pytest.mark.parametrize("world, accumulation", [(2, 4), (4, 2), (1, 8)])
def test_another_world_size_goes_on_from_global_rows(world, accumulation):
    """Field case D054."""
    first = loader(48)
    seen = [i for _ in range(3) for i in ids(first.take(2 * 4))]
    rest, steps = [], 0
    ranks = [resumed(first, loader(48)) for _ in range(world)]
    assert first.position == 24 and first.epoch == 0
    for step in zip(*(rank.batches(world * accumulation) for rank in ranks)):
        rest += [i for rank, batch in enumerate(step) for i in ids(shard(batch, rank, world))]
        steps += 1
    assert steps == 3 and sorted(seen + rest) == list(range(48))


def test_epochs_over_two_ranks_and_a_resume_inside_the_second():
    """Field case D075."""
    run = loader(10, seed=1)
    epochs = [list(run.batches(2)) for _ in range(2)]
    for epoch in epochs:
        ranks = [[i for batch in epoch for i in ids(shard(batch, rank, 2))] for rank in range(2)]
        assert sorted(ranks[0] + ranks[1]) == list(range(10)) and len(ranks[0]) == len(ranks[1]) == 5
    assert [ids(b) for b in epochs[0]] != [ids(b) for b in epochs[1]]
    stopped = loader(10, seed=1)
    stopped.take(10 + 3 * 2)
    again = resumed(stopped, loader(10, seed=1))
    assert again.epoch == 1
    assert [ids(b) for b in again.batches(2)] == [ids(b) for b in epochs[1][3:]]


def test_uneven_batches_and_idle_ranks():
    """Field case D047: nothing is repeated or dropped to make numbers fit; a rank may have no row."""
    assert [len(b) for b in loader(10).batches(4)] == [4, 4, 2]
    losses = [1, 2, 3, 4, 10]
    shards = [shard(losses, rank, 2) for rank in range(2)]
    assert sorted(map(len, shards)) == [2, 3] and shards[0] + shards[1] == losses
    assert sum(map(sum, shards)) / len(losses) == 4.0
    assert sorted(len(shard([1, 2, 3], rank, 4)) for rank in range(4)) == [0, 1, 1, 1]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.data())
def test_mixtures_keep_their_shares(sizes, data):
    """In every epoch each source has its share of the slots within one, spread evenly, in its own unbroken order."""
    weights = data.draw(st.lists(st.floats(0.05, 10), min_size=len(sizes), max_size=len(sizes)))
    order = Order(tuple(sizes), tuple(weights), 3, True)
    starts = np.cumsum([0, *sizes])
    epochs = [order.order(epoch) for epoch in range(4)]
    assert all(len(epoch) == sum(sizes) for epoch in epochs)
    for source, size in enumerate(sizes):
        mine = [e[(e >= starts[source]) & (e < starts[source + 1])] - starts[source] for e in epochs]
        share = 1 + (sum(sizes) - len(sizes)) * weights[source] / sum(weights)
        assert all(abs(len(m) - share) < 1 for m in mine)
        stream = np.concatenate(mine)
        for start in range(0, len(stream) - size + 1, size):
            assert sorted(stream[start:start + size].tolist()) == list(range(size))
    assert order.order(2).tolist() == epochs[2].tolist()


def test_a_mixture_of_files(tmp_path):
    for name, n in (("maths", 30), ("code", 10)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"prompt": "{name}{i}"}}\n' for i in range(n)))
    config = DataConfig(train={str(tmp_path / "maths.jsonl"): 1, str(tmp_path / "code.jsonl"): 1})
    run = RLDataLoader(config)
    taken = [task.id.split("-")[0] for task in run.take(40)]
    assert Counter(taken) == {"maths": 20, "code": 20}
    assert Counter(taken[:10]) == {"maths": 5, "code": 5}
    rest = run.take(20)
    maths = [t.id for t in RLDataLoader(config).take(60) if t.id.startswith("maths")]
    assert len(rest) == 20 and len(set(maths)) == 30, "the larger source takes a second epoch to show every row"
    joined = RLDataLoader(DataConfig(train=[str(tmp_path / "maths.jsonl"), str(tmp_path / "code.jsonl")]))
    assert len({task.id for task in joined.take(40)}) == 40


class Backwards:
    """A sampler from outside."""

    def __init__(self, tasks, seed):
        self.n, self.seed = len(tasks), seed

    def order(self, epoch):
        return list(range(self.n))[::-1][:5]


class Growing(Backwards):
    def order(self, epoch):
        return list(range(epoch + 1))


class Outside(Backwards):
    def order(self, epoch):
        return [self.n]


def test_samplers_from_outside():
    run = loader(10, sampler="test_order:Backwards")
    assert ids(run.take(7)) == [9, 8, 7, 6, 5, 9, 8] and len(run) == 5
    with pytest.raises(ConfigError, match=r"indexes in 0..9, saw \[10\]"):
        loader(10, sampler="test_order:Outside")
    growing = loader(10, sampler="test_order:Growing")
    with pytest.raises(ConfigError, match="returned 2 indexes, 1 in the first epoch"):
        growing.take(2)
    with pytest.raises(ConfigError, match="data.sampler: .*did you mean 'Backwards'"):
        loader(10, sampler="test_order:Backward")


@pytest.mark.parametrize("other, message", [
    (lambda: loader(9), "data fingerprint .* use the same data"),
    (lambda: loader(10, sampler="in_order"), "data fingerprint"),
    (lambda: loader(10, seed=2), "data seed 1, this run has 2; use trainer.seed: 1"),
    (lambda: loader(10, sampler="test_order:Backwards"), "data fingerprint"),
])
def test_a_state_of_other_data_is_refused(other, message):
    run = loader(10)
    run.take(3)
    with pytest.raises(CheckpointError, match=message):
        resumed(run, other())
