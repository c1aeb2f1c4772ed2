"""Workers are real processes: killed at their limit from any thread, replaced, and gone when the parent is."""

import os
import subprocess
import sys
import threading
import time

import psutil
import pytest

from verl.core.errors import WorkerError
from verl.rewards.workers import TimedOut, WorkerPool


@pytest.fixture
def pool():
    pool = WorkerPool("time", 1)  # the standard module: its sleep(seconds) is the work
    yield pool
    pool.close()


def workers():
    return [p for p in psutil.Process().children() if "verl.rewards.worker_main" in p.cmdline()]


def test_nothing_starts_before_the_first_call(pool):
    assert workers() == []
    assert pool.call("sleep", 0, 10) is None and len(workers()) == 1


def test_a_call_past_its_limit_is_killed_from_a_thread_and_the_pool_refilled(pool):
    caught = []

    def hang():
        try:
            pool.call("sleep", 600, 0.2)
        except TimedOut as error:
            caught.append(error)

    pool.call("sleep", 0, 10)
    (before,) = workers()
    thread = threading.Thread(target=hang)
    thread.start()
    thread.join(30)
    assert len(caught) == 1 and "longer than 0.2 s" in str(caught[0])
    assert not before.is_running() and workers() == []
    assert pool.call("sleep", 0, 10) is None and len(workers()) == 1


def test_errors_inside_a_worker_and_its_death_have_names(pool):
    with pytest.raises(ValueError, match="sleep length must be non-negative"):
        pool.call("sleep", -1, 10)
    assert pool.map("sleep", [0, -1, 0], 10)[::2] == [None, None]
    with pytest.raises(WorkerError, match="did not start"):
        WorkerPool("no_such_module_anywhere", 1).call("f", {}, 1)
    dying = WorkerPool("os", 1)
    with pytest.raises(WorkerError, match="died in _exit with exit code 3"):
        dying.call("_exit", 3, 10)


def test_a_busy_worker_dies_with_its_parent():
    code = ("from verl.rewards.workers import WorkerPool; import threading, time\n"
            "pool = WorkerPool('time', 1); pool.call('sleep', 0, 30)\n"
            "threading.Thread(target=pool.call, args=('sleep', 600, 600), daemon=True).start(); time.sleep(0.2)\n"
            "print(pool._free.qsize(), flush=True); time.sleep(600)")
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ})
    assert parent.stdout.readline() == b"0\n"
    (worker,) = psutil.Process(parent.pid).children()
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
