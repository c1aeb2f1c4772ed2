"""Nested state, random states and the journal of a step in flight."""

import random
import signal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.checkpoint import Journal, flatten, load, rng_state, save, set_rng_state, unflatten
from verl.core.errors import CheckpointError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner)
    | st.dictionaries(st.text(max_size=3) | st.sampled_from(["$tensor", "$items"]), inner, max_size=3)
    | st.dictionaries(st.integers(0, 5), inner, max_size=3), max_leaves=8)


@given(VALUES)
def test_any_plain_state_comes_back_with_its_types(value):
    plain, tensors = flatten(value)
    back = unflatten(plain, tensors)
    assert back == value and repr(back) == repr(value) and not tensors


def test_arrays_go_to_tensors_and_back():
    state = {"o": {0: {"m": torch.ones(2, dtype=torch.bfloat16)}, "0": {"m": torch.zeros(1)}},
             "n": [np.arange(3, dtype=np.int32)], "s": np.float32(0.5),
             "a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}}
    plain, tensors = flatten(state)
    assert len(tensors) == 5
    back = unflatten(plain, tensors)
    assert torch.equal(back["o"][0]["m"], state["o"][0]["m"]) and back["o"]["0"]["m"].item() == 0
    assert back["n"][0].dtype == np.int32 and back["n"][0].tolist() == [0, 1, 2] and back["s"] == 0.5
    assert (back["a.b"].item(), back["a"]["b"].item()) == (1, 2), "names that spell alike stay apart"
    with pytest.raises(CheckpointError, match="refers to tensor 'state.o.0.m'"):
        unflatten(plain, {})


@pytest.mark.parametrize("value", [b"x", {1, 2}, object(), {(1, 2): 3}, np.array(["a"])])
def test_what_is_no_data_is_refused(value):
    with pytest.raises(CheckpointError, match="state.x: .* cannot be stored"):
        flatten({"x": value})


def test_every_generator_continues(tmp_path):
    def draw():
        return random.random(), random.gauss(0, 1), np.random.randn(), torch.rand(3).tolist()

    draw()
    save(tmp_path, 1, {}, {"rng": rng_state()})
    expected = [draw() for _ in range(3)]
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    set_rng_state(load(tmp_path / "step_1").state["rng"])
    assert [draw() for _ in range(3)] == expected


KEY = {"step": 12, "version": 11}


def record(i):
    return {"key": f"task-{i}", "ids": np.arange(i, i + 4, dtype=np.int32), "logprobs": np.full(4, -0.5, np.float32)}


def test_the_journal_gives_back_what_was_appended(tmp_path):
    journal = Journal(tmp_path / "progress.bin", KEY)
    assert journal.read() == []
    for i in range(3):
        journal.append(record(i))
    back = Journal(tmp_path / "progress.bin", KEY).read()
    assert [r["key"] for r in back] == ["task-0", "task-1", "task-2"]
    assert back[2]["ids"].dtype == np.int32 and back[2]["ids"].tolist() == [2, 3, 4, 5]
    assert back[2]["logprobs"].dtype == np.float32


def keys(path, key):
    return [r["key"] for r in Journal(path, key).read()]


def test_a_journal_turns_to_the_next_key_with_what_is_carried_over(tmp_path):
    path, then = tmp_path / "progress.bin", KEY | {"step": 13}
    journal = Journal(path, KEY)
    for i in range(3):
        journal.append(record(i))
    journal.prepare(then, lambda: [record(1)])
    journal.append(record(5))  # a thread goes on
    assert keys(path, KEY) == ["task-0", "task-1", "task-2", "task-5"], "until the commit the old key holds"
    journal.commit()
    journal.append(record(9))
    assert keys(path, then) == ["task-1", "task-5", "task-9"] and keys(path, KEY) == []
    journal.prepare(KEY, lambda: [])
    journal.commit()
    assert journal.read() == [] and not path.exists()


def test_after_a_kill_between_the_two_files_whichever_key_is_true_is_read(tmp_path):
    path, then = tmp_path / "progress.bin", KEY | {"step": 13}
    journal = Journal(path, KEY)
    journal.append(record(0))
    journal.prepare(then, lambda: [record(1)])
    assert keys(path, KEY) == ["task-0"]
    again = Journal(path, then)
    again.append(record(2))
    assert keys(path, then) == ["task-1", "task-2"]


def test_a_journal_of_another_step_or_version_is_not_read_and_is_replaced(tmp_path):
    path = tmp_path / "progress.bin"
    Journal(path, KEY).append(record(0))
    other = Journal(path, KEY | {"version": 12})
    assert other.read() == []
    other.append(record(1))
    assert [r["key"] for r in other.read()] == ["task-1"] and Journal(path, KEY).read() == []


def test_every_torn_tail_is_tolerated_and_overwritten(tmp_path):
    path = tmp_path / "progress.bin"
    journal = Journal(path, KEY)
    journal.append(record(0))
    whole = path.stat().st_size
    journal.append(record(1))
    data = path.read_bytes()
    for size in [*range(whole, len(data), 7), len(data) - 1]:
        path.write_bytes(data[:size])
        again = Journal(path, KEY)
        assert [r["key"] for r in again.read()] == ["task-0"]
        again.append(record(2))
        again.close()
        assert [r["key"] for r in Journal(path, KEY).read()] == ["task-0", "task-2"]
    for size in range(0, 16):
        path.write_bytes(data[:size])
        assert Journal(path, KEY).read() == []
    path.write_bytes(data[:-3] + b"xyz")
    assert [r["key"] for r in Journal(path, KEY).read()] == ["task-0"]


def test_a_killed_writer_loses_at_most_its_last_record(tmp_path, child):
    path = tmp_path / "progress.bin"

    def write(say):
        journal = Journal(path, {"step": 1})
        for i in range(100_000):
            journal.append({"i": i, "x": np.full(1000, i)})
            say(i)

    writer = child(write)
    said = [int(writer.lines.readline()) for _ in range(50)][-1]
    status, rest = writer.kill()
    assert status == -signal.SIGKILL
    said = int(rest[-1]) if rest else said
    rows = Journal(path, {"step": 1}).read()
    assert [r["i"] for r in rows] == list(range(len(rows))) and len(rows) in (said + 1, said + 2)
    assert all((r["x"] == r["i"]).all() for r in rows)
