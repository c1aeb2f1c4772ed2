"""How many prompts may be under way, what is trained next, how old it may be, and what a checkpoint keeps of it."""

import copy
import json
import random

import pytest

from verl.flow.staleness import StalenessQueue


def finish(queue, places, oldest):
    return [queue.finished(p, oldest) for p in places]


def test_lag_zero_takes_turns():
    q = StalenessQueue(3, 0)
    assert q.admit() == [0, 1, 2] and q.admit() == []
    finish(q, [2, 0], 0)
    assert q.take() is None and q.running == (1,)
    finish(q, [1], 0)
    assert q.take() == (0, 1, 2) and q.admit() == [], "the weights they would start under are about to go"
    assert q.trained() == 1 and q.admit() == [3, 4, 5]


def test_lag_one_samples_the_next_batch_while_this_one_trains():
    q = StalenessQueue(3, 1)
    assert q.admit(limit=2) == [0, 1] and q.admit() == [2, 3, 4, 5]
    finish(q, [0, 1, 2], 0)
    assert q.take() == (0, 1, 2) and q.admit() == []
    q.trained()
    assert q.admit() == [6, 7, 8]


def test_the_stream_decides_the_order_not_the_clock():
    q = StalenessQueue(2, 2)
    q.admit()
    finish(q, [5, 4, 3, 2, 1], 0)
    assert q.take() is None
    finish(q, [0], 0)
    assert [q.take(), q.trained(), q.take(), q.trained(), q.take()] == [(0, 1), 1, (2, 3), 2, (4, 5)]


def test_results_count_once():
    q = StalenessQueue(1, 1)
    q.admit()
    assert finish(q, [0, 0, 7], 0) == [True, False, False]
    q.take()
    assert finish(q, [0], 0) == [False]
    q.trained()
    assert finish(q, [0], 1) == [False] and q.take() is None


def test_workers_that_hold_old_weights_start_less():
    q = StalenessQueue(2, 1)
    q.version = 5
    assert q.admit(held=3) == [], "what starts under 3 must be trained at 4"
    assert q.admit(held=4) == [0, 1]
    assert q.admit(held=5) == [2, 3]


def test_samples_older_than_the_limit_are_made_again():
    """Field case D020: at version 5 with staleness 1, samples of versions 5, 4, 3 and one begun at 4 and ended at 5."""
    q = StalenessQueue(4, 1)
    q.version = 5
    places = q.admit(limit=4)
    assert [q.finished(p, min(versions)) for p, versions in zip(places, ([5], [4], [3], [4, 5]))] == [True, True, False, True]
    assert q.refused == 1 and q.take() is None and q.admit(limit=1) == [2]
    assert q.finished(2, 5) and q.take() == (0, 1, 2, 3)


def test_a_resume_repeats_and_skips_nothing():
    """Field case D004: 2 prompts a step; 3 fails for good, 6 is under way when the checkpoint after step 2 is written."""
    q = StalenessQueue(2, 1)
    q.admit()
    finish(q, [0, 1, 2], 0)
    assert q.drop(3) and not q.drop(3)
    assert q.take() == (0, 1)
    q.trained()
    assert q.admit() == [4, 5, 6]
    finish(q, [4, 5], 1)
    assert q.take() == (2, 4)
    q.trained()
    state = json.loads(json.dumps(q.state()))
    after = StalenessQueue(2, 1)
    after.restore(state, groups={5})
    assert after.version == 2 and after.dropped == 1
    assert after.admit() == [6, 7, 8], "6 is made again, 5 is kept, nothing of 0 to 4 comes back"
    finish(after, [6], 2)
    assert after.take() == (5, 6)


def test_a_finished_place_without_its_group_is_made_again():
    q = StalenessQueue(2, 0)
    finish(q, q.admit(), 0)
    after = StalenessQueue(2, 0)
    after.restore(q.state(), groups={1})
    assert after.take() is None and after.admit() == [0] and after.finished(0, 0) and after.take() == (0, 1)


def test_dropped_places_make_room():
    q = StalenessQueue(2, 0)
    q.admit()
    q.drop(0)
    assert q.admit() == [2]
    finish(q, [1, 2], 0)
    assert q.take() == (1, 2) and not q.finished(0, 0)


def test_misuse_is_refused():
    q = StalenessQueue(1, 0)
    with pytest.raises(RuntimeError, match="take\\(\\) comes first"):
        q.trained()
    finish(q, q.admit(), 0)
    q.take()
    for call in (q.take, q.state):
        with pytest.raises(RuntimeError, match="in training"):
            call()
    with pytest.raises(ValueError, match="batch >= 1 and lag >= 0"):
        StalenessQueue(0, 1)


@pytest.mark.parametrize("lag", [0, 1, 2, 5])
def test_nothing_trained_is_older_than_the_lag_whatever_finishes_when(lag):
    """And the queue never comes to rest: something is running, may start, or is ready to be trained."""
    for seed in range(25):
        r = random.Random(seed)
        q, started, trained, dropped = StalenessQueue(r.randint(1, 4), lag, first_place=7), {}, [], set()
        while q.version < 8:
            for place in q.admit(limit=r.choice((None, 1, 3))):
                started[place] = q.version
            action = r.randrange(4)
            if action == 0 and not q.training and (places := q.take()):
                assert all(started[p] >= q.version - lag for p in places)
                trained += places
            elif action == 1 and q.training:
                q.trained()
            elif action == 2 and q.running:
                place = r.choice(q.running)
                assert q.finished(place, started[place])
            elif action == 3 and q.running and r.random() < 0.1:
                dropped.add(place := r.choice(q.running))
                q.drop(place)
            if r.random() < 0.05 and not q.training:
                kept = {p for p in started if p not in q.running and r.random() < 0.5}
                state, q = q.state(), StalenessQueue(q.batch, lag)
                q.restore(state, kept)
            if not q.training and not q.running:
                assert copy.deepcopy(q).take() or copy.deepcopy(q).admit(), "at rest, and not done"
        assert trained == sorted(set(trained)) and set(range(7, max(trained))) - set(trained) <= dropped and q.refused == 0
