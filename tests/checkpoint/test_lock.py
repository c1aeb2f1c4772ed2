"""One run, one directory (field case D015)."""

import json
import os
import socket
import threading
import time

import pytest

from verl.checkpoint import RunLock
from verl.core.errors import LockError


def quiet(line):
    pytest.fail(line)


def hold(tmp_path, seconds):
    def run(say):
        with RunLock(tmp_path, say):
            say("held")
            time.sleep(seconds)

    return run


def test_d015_a_live_holder_is_named_and_a_released_lock_is_free(tmp_path, child):
    process = child(hold(tmp_path, 1))
    assert process.lines.readline() == "held\n"
    with pytest.raises(LockError, match=f"alive .host {socket.gethostname()}, pid {process.pid}."):
        RunLock(tmp_path, quiet).acquire()
    assert process.wait() == (0, [])
    with RunLock(tmp_path, quiet):
        pass


def test_d015_a_dead_holder_is_taken_over_with_a_warning(tmp_path, child):
    process = child(hold(tmp_path, 60))
    assert process.lines.readline() == "held\n"
    process.kill()
    said = []
    with RunLock(tmp_path, said.append):
        assert len(said) == 1 and f"pid {process.pid}" in said[0] and "ended without releasing" in said[0]
        with pytest.raises(LockError, match=f"pid {os.getpid()}"):
            RunLock(tmp_path, quiet).acquire()


def test_a_pid_given_to_another_process_is_not_the_owner(tmp_path):
    (tmp_path / "run.lock").write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": 1.0}))
    said = []
    RunLock(tmp_path, said.append).acquire().release()
    assert len(said) == 1


@pytest.mark.parametrize("text", ['{"host": "x', "[]", "\0\0", "{}"])
def test_a_torn_record_is_taken_over(tmp_path, text):
    (tmp_path / "run.lock").write_text(text)
    with RunLock(tmp_path, lambda line: None, watch_s=0.05):
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()


def test_an_owner_on_another_host_is_judged_by_its_heartbeat(tmp_path):
    path = tmp_path / "run.lock"
    path.write_text(json.dumps({"host": "elsewhere", "pid": os.getpid(), "started": 1.0}))
    stop = threading.Event()

    def beat():
        while not stop.wait(0.02):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(LockError, match="host elsewhere"):
        RunLock(tmp_path, quiet, watch_s=5).acquire()
    stop.set()
    thread.join()
    said = []
    with RunLock(tmp_path, said.append, watch_s=0.3):
        assert "host elsewhere" in said[0]


def test_the_holder_beats_and_stops_when_released(tmp_path):
    lock = RunLock(tmp_path, quiet, beat_s=0.02).acquire()
    first = os.stat(lock.path).st_mtime_ns
    deadline = time.monotonic() + 10
    while os.stat(lock.path).st_mtime_ns == first:
        assert time.monotonic() < deadline, "no heartbeat"
        time.sleep(0.01)
    lock.release()
    lock.release()
    assert (tmp_path / "run.lock").read_text() == ""


def test_of_many_starters_one_wins(tmp_path):
    (tmp_path / "run.lock").write_text(json.dumps({"host": socket.gethostname(), "pid": 2 ** 22 + 5, "started": 1.0}))
    won, lost = [], []

    def start():
        try:
            won.append(RunLock(tmp_path, lambda line: None).acquire())
        except LockError:
            lost.append(1)

    threads = [threading.Thread(target=start) for _ in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(won) == 1 and len(lost) == 7
    won[0].release()


def test_release_does_not_take_the_lock_from_a_new_owner(tmp_path):
    lock = RunLock(tmp_path, quiet).acquire()
    other = {"host": "elsewhere", "pid": 1, "started": 1.0}
    lock.path.write_text(json.dumps(other))
    lock.release()
    assert json.loads(lock.path.read_text()) == other
