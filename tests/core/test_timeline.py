"""The timeline: spans of any thread, bounded however long a run is, a trace other tools open, a table that adds up."""

import json
import threading

import pytest

from verl.core.errors import DataError
from verl.core.report import Timeline, draw_timeline, read_timeline, role_of, utilisation


def spans(data):
    names = {e["tid"]: e["args"]["name"] for e in data["traceEvents"] if e["ph"] == "M"}
    return [(names[e["tid"]], e["name"], e["ts"], e["dur"], e["args"]["step"]) for e in data["traceEvents"] if e["ph"] == "X"]


def test_verbs_belong_to_roles():
    assert [role_of(v) for v in ("generate", "ppo/generate", "update", "values", "score", "wait", "encode")] == [
        "rollout", "rollout", "actor", "critic", "wait for scores", "wait for samples", "driver"]


def test_the_trace_holds_every_span_and_the_table_adds_up(tmp_path):
    timeline = Timeline(tmp_path / "timeline.json", {"actor": "cuda:0"})
    timeline.add("rollout", "generate", 10.0, 12.0, 1)
    timeline.add("actor", "update", 12.0, 13.0, 1)
    timeline.add("rollout", "generate", 12.5, 14.0, 2)
    timeline.write()
    data = read_timeline(tmp_path)
    assert spans(data) == [("rollout", "generate", 0, 2_000_000, 1), ("actor", "update", 2_000_000, 1_000_000, 1),
                           ("rollout", "generate", 2_500_000, 1_500_000, 2)]
    assert utilisation(data) == [("rollout", "", 2, 3.5, 3.5 / 4), ("actor", "cuda:0", 1, 1.0, 0.25)]
    assert draw_timeline(tmp_path).read_bytes()[:4] == b"\x89PNG"


def test_short_pauses_join_spans_of_one_kind_and_step(tmp_path):
    timeline = Timeline(tmp_path / "timeline.json")
    for start, step in ((0.0, 1), (0.1005, 1), (0.2005, 2), (0.31, 2)):
        timeline.add("reward", "score", start, start + 0.1, step)
    timeline.write()
    data = read_timeline(tmp_path)
    assert [(s[2], s[3]) for s in spans(data)] == [(0, 200500), (200500, 100000), (310000, 100000)]
    assert utilisation(data)[0][3] == pytest.approx(0.4005)


def test_ten_thousand_steps_stay_bounded_and_totals_count_all(tmp_path):
    timeline = Timeline(tmp_path / "timeline.json")
    for step in range(10_000):
        for i, (role, name) in enumerate((("rollout", "generate"), ("actor", "update"), ("driver", "credit"))):
            timeline.add(role, name, step + i / 3, step + i / 3 + 0.25, step)
    timeline.write()
    data = read_timeline(tmp_path)
    assert (tmp_path / "timeline.json").stat().st_size < 1_000_000
    assert {s[4] for s in spans(data)} >= {0, 9_999} and len(spans(data)) == 6_000
    assert [(row[2], row[3]) for row in utilisation(data)] == [(10_000, pytest.approx(2_500.0))] * 3


def test_threads_may_add_while_another_writes(tmp_path):
    timeline = Timeline(tmp_path / "timeline.json")

    def work(role):
        for i in range(300):
            timeline.add(role, "generate", i, i + 0.5, i)

    threads = [threading.Thread(target=work, args=(f"rollout {n}",)) for n in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        timeline.write()
    for thread in threads:
        thread.join()
    timeline.write()
    assert sorted(row[2] for row in utilisation(read_timeline(tmp_path))) == [300, 300, 300]
    assert json.loads((tmp_path / "timeline.json").read_text())["displayTimeUnit"] == "ms"


def test_a_directory_without_one_is_named(tmp_path):
    with pytest.raises(DataError, match="timeline.json does not exist"):
        read_timeline(tmp_path)
    Timeline(tmp_path / "timeline.json").write()
    with pytest.raises(DataError, match="no spans yet"):
        draw_timeline(tmp_path)
