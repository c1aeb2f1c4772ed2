"""Objects in other processes: real Ray actors on a cluster of this machine."""

import os
import signal
import time
from functools import partial

import pytest

pytest.importorskip("ray", reason="ray is not installed")

from verl.core.errors import CapacityError, ConfigError, WorkerError  # noqa: E402
from verl.flow.actors import Actor, Cluster, broadcast, gather, wait_any  # noqa: E402
from verl.flow.devices import device_group  # noqa: E402


class Box:
    """What the processes hold."""

    def __init__(self, name="box"):
        if name == "broken":
            raise ZeroDivisionError("a bug in the making")
        self.name = name

    def pid(self):
        return os.getpid(), os.environ["OMP_NUM_THREADS"], os.environ["CUDA_VISIBLE_DEVICES"]

    def add(self, a, b):
        return a + b

    def fail(self, kind):
        raise (ConfigError("x: 3 is too many") if kind == "own" else KeyError("nothing here"))

    def sleep(self, seconds):
        time.sleep(seconds)

    def count(self, n, pause, emit):
        for i in range(n):
            emit(i)
            time.sleep(pause)
        if n == 3:
            raise ValueError("no more")
        return n


@pytest.fixture(scope="module")
def cluster():
    cluster = Cluster()
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def slots(cluster):
    return cluster.place({"box": device_group("cpu*3", "box")})["box"]


@pytest.fixture(scope="module")
def pair(slots):
    return [Actor(slots[i], "box", i, Box).ready(60) for i in range(2)]


def everything(stream, limit_s=20):
    got, until = [], time.monotonic() + limit_s
    while not stream.ended:
        assert time.monotonic() < until
        wait_any([stream], 0.2)
        got += stream.take()
    return got


def test_each_object_has_a_process_of_its_own(pair):
    seen = [a.call("pid") for a in pair]
    assert [s[0] for s in seen] == [a.pid for a in pair] and len({os.getpid(), *(a.pid for a in pair)}) == 3
    assert all(int(s[1]) >= 1 and s[2] == "" for s in seen)
    assert gather(broadcast(pair, "add", 2, 3)) == [5, 5]


def test_two_objects_share_a_process(pair, slots):
    guest = Actor(slots[0], "guest", 0, partial(Box, "other"), within=pair[0]).ready(20)
    assert guest.pid == pair[0].pid and guest.call("add", 1, 2) == 3
    with pytest.raises(WorkerError, match="guest rank 0"):
        guest.call("fail", "other")


def test_errors_keep_their_type_or_name_the_process(pair):
    with pytest.raises(ConfigError, match="3 is too many") as caught:
        pair[1].call("fail", "own")
    assert f"In box rank 1 (pid {pair[1].pid}" in caught.value.__notes__[0]
    with pytest.raises(WorkerError, match=rf"box rank 0 \(pid {pair[0].pid} on .*\): KeyError: 'nothing here'"):
        pair[0].call("fail", "other")
    assert pair[0].call("add", 1, 1) == 2


def test_an_error_of_one_is_raised_while_others_are_at_work(pair):
    started = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1"):
        gather([pair[0].start("sleep", 3.0), pair[1].start("fail", "other")])
    assert time.monotonic() - started < 2.5
    pair[0].call("add", 1, 1)


def test_a_missed_deadline_is_named_and_the_process_goes_on(pair):
    with pytest.raises(WorkerError, match="box rank 0 .* did not answer 'sleep' within 0.3 s"):
        pair[0].call("sleep", 1.0, deadline_s=0.3)
    assert pair[0].call("add", "a", "b", beside=True) == "ab"  # while it still sleeps
    assert pair[0].call("add", 1, 2) == 3


def test_partial_results_arrive_one_by_one_and_then_the_result(pair):
    stream = pair[0].stream("count", 5, 0.05)
    wait_any([stream], 5)
    first = stream.take()
    assert 0 < len(first) < 5
    assert first + everything(stream) == [0, 1, 2, 3, 4] and stream.result == 5
    stream, got = pair[0].stream("count", 3, 0.0), []
    with pytest.raises(WorkerError, match="ValueError: no more"):
        got += everything(stream)
    assert stream.ended


def test_a_broken_object_is_an_error_of_ready(slots):
    actor = Actor(slots[2], "box", 2, partial(Box, "broken"))
    with pytest.raises(WorkerError, match="box rank 2 .*: ZeroDivisionError: a bug in the making"):
        actor.ready(60)
    actor.kill()


def test_a_killed_process_is_named_and_its_room_is_used_again(slots):
    actor = Actor(slots[2], "box", 7, Box).ready(60)
    stream = actor.stream("count", 100, 0.1)
    wait_any([stream], 5)
    os.kill(actor.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=rf"box rank 7 \(pid {actor.pid} on .*\) died: .*worker process has died"):
        everything(stream)
    assert actor.dead is not None
    with pytest.raises(WorkerError, match="died"):
        gather([actor.start("add", 1, 2)])
    again = Actor(slots[2], "box", 8, Box).ready(60)
    assert again.call("add", 1, 2) == 3
    again.kill()


def test_room_is_counted(cluster):
    with pytest.raises(CapacityError, match=r"need 250 CPU \(the cluster has"):
        cluster.place({"box": device_group("cpu*1000", "box")})
    with pytest.raises(ConfigError, match="no host 'nowhere' in the cluster; its hosts are"):
        cluster.place({"box": device_group("nowhere/cpu*2", "box")})


def test_a_full_cluster_is_waited_for_and_then_named(cluster):
    import ray
    free = int(ray.available_resources()["CPU"] / 0.25)
    other = cluster.place({"box": device_group(f"cpu*{free}", "box")}, 10)
    with pytest.raises(CapacityError, match="became free within 1 s: other runs hold the rest"):
        cluster.place({"box": device_group("cpu*2", "box")}, 1)
    assert len(other["box"]) == free
