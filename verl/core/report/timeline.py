"""Who worked when: spans of every role, as a trace that chrome://tracing and Perfetto open, a picture and a table."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from verl.core.errors import DataError

FIRST, LAST = 1000, 5000  # spans kept of the beginning and of the end of a process' life
JOIN_S = 0.002  # pauses shorter than this do not part two spans of one kind
WRITE_S = 60.0
_SHOWN_STEPS = 6
_COLOURS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#0891b2", "#be123c", "#ca8a04", "#64748b", "#db2777", "#4d7c0f")
_ROLES = {"generate": "rollout", "greedy": "rollout", "evaluate": "rollout", "load": "rollout", "reference": "reference",
          "values": "critic", "update": "actor", "old_logprobs": "actor", "score": "wait for scores", "wait": "wait for samples"}


def role_of(verb: str) -> str:
    """The role that a verb of the loop keeps busy; verbs of a task of a mixture carry its name before a slash."""
    return _ROLES.get(verb.rpartition("/")[2], "driver")


class Timeline:
    """Collects spans from any thread. Memory and file are bounded: the first and last spans, and totals over all of them.

    devices: role -> device, for the reader. Times are seconds of `time.perf_counter`.
    """

    def __init__(self, path: str | Path, devices: Mapping[str, str] | None = None):
        self.path, self.devices = Path(path), dict(devices or {})
        self._written = time.perf_counter()
        self._start, self._end = float("inf"), 0.0  # of all spans
        self._lock = threading.Lock()
        self._first: list[list] = []
        self._last: deque[list] = deque(maxlen=LAST)
        self._open: dict[str, list] = {}  # the newest span of each role
        self._totals: dict[str, list] = {}  # role -> [spans, busy seconds]

    def add(self, role: str, name: str, start: float, end: float, step: int) -> None:
        """One span of work for a step. Spans of one role do not overlap."""
        with self._lock:
            self._start, self._end = min(start, self._start), max(end, self._end)
            total = self._totals.setdefault(role, [0, 0.0])
            last = self._open.get(role)
            if last is not None and last[1] == name and last[4] == step and 0 <= start - last[3] < JOIN_S:
                total[1] += end - last[3]
                last[3] = end
                return
            total[0] += 1
            total[1] += end - start
            self._open[role] = span = [role, name, start, end, step]
            (self._first if len(self._first) < FIRST else self._last).append(span)

    def write_if_due(self) -> None:
        """Write when the file is older than a minute, so that a killed run leaves one."""
        if time.perf_counter() - self._written > WRITE_S:
            self.write()

    def write(self) -> None:
        """Write the trace, whole or not at all."""
        with self._lock:
            spans = [list(span) for span in chain(self._first, self._last)]
            totals = {role: {"device": self.devices.get(role, ""), "spans": n, "busy_s": round(busy, 4)}
                      for role, (n, busy) in self._totals.items()}
            self._written = time.perf_counter()
        threads = {role: number for number, role in enumerate(totals, 1)}
        events = [{"name": "thread_name", "ph": "M", "pid": 1, "tid": number, "args": {"name": role}}
                  for role, number in threads.items()]
        events += [{"name": name, "ph": "X", "pid": 1, "tid": threads[role], "ts": round((start - self._start) * 1e6),
                    "dur": round((end - start) * 1e6), "args": {"step": step}} for role, name, start, end, step in spans]
        data = {"traceEvents": events, "displayTimeUnit": "ms",
                "otherData": {"seconds": round(max(self._end - self._start, 0.0), 4), "roles": totals}}
        aside = self.path.with_suffix(".writing")
        with contextlib.suppress(OSError):  # a full disk costs the trace, not the run
            aside.write_text(json.dumps(data, separators=(",", ":")))
            os.replace(aside, self.path)


def read_timeline(run_dir: str | Path) -> dict[str, Any]:
    """What a run wrote. Raises DataError when there is nothing."""
    path = Path(run_dir) / "timeline.json"
    if not path.is_file():
        raise DataError(f"{path} does not exist; a run writes it every minute and when it ends")
    return json.loads(path.read_text())


def utilisation(data: Mapping[str, Any]) -> list[tuple[str, str, int, float, float]]:
    """(role, device, spans, busy seconds, share of the time) of each role, over the whole life of the process."""
    seconds = data["otherData"]["seconds"] or 1.0
    return [(role, row["device"], row["spans"], row["busy_s"], row["busy_s"] / seconds)
            for role, row in data["otherData"]["roles"].items()]


def draw_timeline(run_dir: str | Path) -> Path:
    """Draw the last steps to run_dir/timeline.png, a row for each role; returns it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    data = read_timeline(run_dir)
    spans = [e for e in data["traceEvents"] if e["ph"] == "X"]
    if not spans:
        raise DataError(f"{Path(run_dir) / 'timeline.json'} holds no spans yet")
    names = {e["tid"]: e["args"]["name"] for e in data["traceEvents"] if e["ph"] == "M"}
    newest = max(e["args"]["step"] for e in spans)
    spans = [e for e in spans if e["args"]["step"] > newest - _SHOWN_STEPS]
    start, end = min(e["ts"] for e in spans) / 1e6, max(e["ts"] + e["dur"] for e in spans) / 1e6
    rows = [tid for tid in names if any(e["tid"] == tid for e in spans)]
    shares = {row[0]: row[4] for row in utilisation(data)}
    colours = dict(zip(dict.fromkeys(e["name"] for e in spans), _COLOURS * 3))
    figure = Figure(figsize=(13, 1.3 + 0.45 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, colour in colours.items():
        for y, tid in enumerate(rows):
            own = [(e["ts"] / 1e6 - start, e["dur"] / 1e6) for e in spans if e["tid"] == tid and e["name"] == name]
            if own:
                axes.broken_barh(own, (y - 0.38, 0.76), color=colour, edgecolor="white", linewidth=0.4)
        axes.plot([], [], color=colour, linewidth=6, label=name)
    axes.set_yticks(range(len(rows)), [f"{names[tid]}  {shares[names[tid]]:.0%}" for tid in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, end - start)
    axes.set_xlabel(f"seconds; steps {min(e['args']['step'] for e in spans)} to {newest}; shares are of the whole run", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(axis="x", alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    path = Path(run_dir) / "timeline.png"
    aside = path.with_suffix(".writing")
    figure.savefig(aside, dpi=130, format="png")
    os.replace(aside, path)
    return path
