"""Work under leases: who gets what, when it goes to another, which result counts, and what is reported."""

import random

import pytest

from verl.core.errors import WorkerError
from verl.flow.dispatch import Dispatcher


def dispatcher(items=0, cost=10, **kwargs) -> Dispatcher:
    made = Dispatcher(**{"lease_s": 10, "patience_s": 30} | kwargs)
    for key in range(items):
        made.add(key, cost, 0)
    return made


def given(assignments) -> dict[str, tuple]:
    return {a.worker: a.keys for a in assignments}


def test_costs_not_counts_are_balanced():
    d = dispatcher()
    for key, cost in enumerate((90, 10, 20, 30, 30)):
        d.add(key, cost, 0)
    d.join("a", 8, 0)
    d.join("b", 8, 0)
    assert given(d.assign(0)) == {"a": (0,), "b": (1, 2, 3, 4)}


def test_a_worker_with_more_slots_is_given_more():
    d = dispatcher(items=12)
    d.join("small", 2, 0)
    d.join("large", 8, 0)
    assert {w: len(keys) for w, keys in given(d.assign(0)).items()} == {"small": 2, "large": 8}
    assert d.assign(0) == [], "nobody gets more than its slots"


def test_whoever_is_faster_makes_more():
    """A worker of four times the speed makes about four times as much, although nobody told."""
    d, time_of, busy, made = dispatcher(items=100), {"slow": 4.0, "fast": 1.0}, [], {"slow": 0, "fast": 0}
    for name in time_of:
        d.join(name, 2, 0)
    now = 0.0
    while not d.done:
        for worker, keys, lease in d.assign(now):
            busy += [(now + time_of[worker], worker, lease, key) for key in keys]
        busy.sort()
        now, worker, lease, key = busy.pop(0)
        assert d.finished(worker, lease, key, now)
        made[worker] += 1
    assert 3.5 < made["fast"] / made["slow"] < 4.5


def test_late_joiners_find_work():
    d = dispatcher(items=6)
    d.join("a", 2, 0)
    assert given(d.assign(0)) == {"a": (0, 1)}
    d.join("b", 3, 1)
    assert given(d.assign(1)) == {"b": (2, 3, 4)}


def test_a_lost_workers_items_go_out_first_and_in_order():
    d = dispatcher(items=6)
    d.join("a", 2, 0)
    d.join("b", 2, 0)
    held = given(d.assign(0))
    d.lost("a", WorkerError("gone"), 1)
    d.join("c", 2, 1)
    assert given(d.assign(1)) == {"c": held["a"]}
    assert d.outstanding == (0, 1, 2, 3, 4, 5) and d.workers == ("b", "c")


def test_the_first_result_wins_also_when_its_lease_is_over():
    d = dispatcher(items=1)
    d.join("slow", 1, 0)
    d.join("other", 1, 0)
    (slow, _, first), = d.assign(0)
    assert d.expired(9) == [] and d.expired(10) == [0]
    (other, _, second), = d.assign(10)
    assert (slow, other) == ("slow", "other") and first != second
    assert not d.finished("slow", 99, 0, 11), "a lease that never was"
    assert d.finished("slow", first, 0, 11)
    assert not d.finished("other", second, 0, 12) and not d.finished("slow", first, 0, 12)
    assert d.done and d.next_deadline() is None and d.assign(12) == []


def test_a_result_of_an_earlier_life_of_a_key_is_refused():
    d = dispatcher(items=1)
    d.join("a", 2, 0)
    (_, _, old), = d.assign(0)
    assert d.withdraw() == [0] and d.done
    d.add(0, 10, 1)
    (_, _, new), = d.assign(1)
    assert not d.finished("a", old, 0, 2) and d.finished("a", new, 0, 2)


def test_only_new_tokens_extend_a_lease():
    d = dispatcher(items=1)
    d.join("a", 1, 0)
    (_, _, lease), = d.assign(0)
    assert d.next_deadline() == 10
    d.progress("a", lease, 5, 4)
    assert d.next_deadline() == 14
    for worker, number, tokens in (("a", lease, 5), ("a", lease, 3), ("b", lease, 9), ("a", lease + 1, 9)):
        d.progress(worker, number, tokens, 6)
    assert d.next_deadline() == 14 and d.expired(13) == [] and d.expired(14) == [0]


def test_an_item_avoids_the_worker_it_failed_on():
    d = dispatcher(items=1)
    d.join("a", 1, 0)
    (_, _, lease), = d.assign(0)
    d.failed("a", lease, 0, ValueError("no"), 1)
    d.join("b", 1, 1)
    assert given(d.assign(1)) == {"b": (0,)}
    d.lost("b", WorkerError("gone"), 2)
    assert given(d.assign(2)) == {"a": (0,)}, "alone, it is tried again"


def test_attempts_are_bounded_and_the_first_error_is_reported():
    d, errors = dispatcher(items=2, attempts=3), [ValueError(n) for n in range(3)]
    d.join("a", 1, 0)
    for now, error in enumerate(errors):
        (_, keys, lease), = d.assign(now)
        assert keys == (0,)
        d.failed("a", lease, 0, error, now)
        d.failed("a", lease, 0, KeyError("a double"), now)
    assert d.failures == {0: errors[0]} and d.first_error is errors[0] and d.outstanding == (1,)
    (_, keys, lease), = d.assign(3)
    assert d.finished("a", lease, 1, 4) and d.done


def test_a_worker_that_hangs_is_expelled_and_one_that_lost_a_message_is_not():
    d = dispatcher(items=4, attempts=9)
    d.join("hangs", 1, 0)
    d.join("works", 1, 0)
    leases = {w: lease for w, _, lease in d.assign(0)}
    assert d.finished("works", leases["works"], 1, 5)
    d.assign(5)
    assert d.expired(10) == [0] and not d.expelled
    d.assign(10)
    assert d.expired(15) == [2], "works made nothing for its second lease, which may be a lost message"
    leases = {w: lease for w, _, lease in d.assign(15)}
    d.progress("works", leases["works"], 1, 16)
    d.expired(20)
    assert list(d.expelled) == ["hangs"] and "hangs made no progress" in str(d.expelled["hangs"]) and d.workers == ("works",)
    d.join("hangs", 1, 21)
    assert not d.expelled and d.workers == ("works", "hangs")


def test_work_without_workers_waits_only_so_long():
    d = dispatcher(items=1)
    assert d.next_deadline() == 30
    d.join("a", 1, 20)
    assert d.next_deadline() is None, "somebody is there: assign has something to give"
    d.assign(20)
    d.lost("a", WorkerError("a died first"), 25)
    assert d.next_deadline() == 55 and d.expired(54) == []
    with pytest.raises(WorkerError, match="waited 30 s without a worker; the first error: a died first") as caught:
        d.expired(55)
    assert str(caught.value.__cause__) == "a died first"
    d.withdraw()
    assert d.done and d.next_deadline() is None and d.expired(99) == []


def test_misuse_is_refused():
    d = dispatcher(items=1)
    with pytest.raises(ValueError, match="item 0 is outstanding"):
        d.add(0, 1, 0)
    with pytest.raises(ValueError, match="at least 1"):
        d.join("a", 0, 0)


def test_the_books_balance_after_anything():
    """Slots and costs of every worker are those of the items it holds, whatever happened."""
    for seed in range(200):
        r, d, now, leases = random.Random(seed), dispatcher(items=8, attempts=4), 0.0, []
        for step in range(60):
            now += r.random() * 4
            name = r.choice("abc")
            action = r.randrange(7)
            if action == 0:
                d.join(name, r.randint(1, 3), now)
            elif action == 1:
                d.lost(name, WorkerError(name), now)
            elif action == 2 and d.workers:
                d.expired(now)
            elif action == 3:
                d.add(100 + step, r.randint(1, 9), now)
            elif action == 4:
                d.withdraw(r.sample(d.outstanding, min(1, len(d.outstanding))))
            elif leases:
                worker, lease, key = r.choice(leases)
                d.finished(worker, lease, key, now) if action == 5 else d.failed(worker, lease, key, ValueError(), now)
            leases += [(a.worker, a.lease, key) for a in d.assign(now) for key in a.keys]
            for worker in d._workers.values():
                held = [i for lease in d._leases.values() if lease.worker == worker.name for i in lease.items.values()]
                assert (worker.held, worker.cost) == (len(held), sum(i.cost for i in held))
            waiting = [i for i in d._items.values() if i.lease is None]
            assert waiting == d._pending and set(d._items) >= {k for lease in d._leases.values() for k in lease.items}
            assert d.done or d.next_deadline() is not None, "work remains and nothing is waited for"
