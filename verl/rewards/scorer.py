"""Scorer: scoring that starts as samples finish and overlaps generation; one lane (thread) for each slow source."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from verl.core.errors import RewardError
from verl.core.types import Finish, Group, RewardResult, Sample, Task
from verl.rewards.base import Item, Source, failure
from verl.rewards.compose import Composition, Entry, check_budgets, measure
from verl.rewards.function import FunctionSource


class Scorer:
    """Feeds samples to the sources of a composition and collects their results.

    `submit(group)` starts scoring a finished group; `submit_sample(task, sample)` starts a single sample earlier, on
    the sources that need no whole group. `collect(groups)` waits for them, fills Sample.rewards and Sample.score and
    returns metrics. Sample.text must be decoded before submission. Fast verifiers run in the calling thread, every
    other source in a lane of its own that takes all that waits in one call.
    """

    def __init__(self, composition: Composition, trainer_state: Any = None):
        self.composition = composition
        self._lanes: dict[str, _Lane] = {}
        self._sent: dict[int, tuple[Sample, set[str]]] = {}  # keeps the sample alive, so that its id stays its own
        self._pending: list[Group] = []
        self._lock = threading.RLock()  # samples may be submitted while another thread collects
        self.on_span: Callable[[str, float, float], None] | None = None  # (source, start, end) of each call, perf_counter
        self.trainer_state = trainer_state

    @property
    def trainer_state(self) -> Any:
        """What reward functions receive as `trainer_state`; set it before each step."""
        return self._state

    @trainer_state.setter
    def trainer_state(self, state: Any) -> None:
        self._state = state
        for entry in self.composition.entries:
            if isinstance(entry.source, FunctionSource):
                entry.source.trainer_state = state

    def submit(self, group: Group) -> None:
        """Start scoring every sample of a group whose samples are all finished. Aborted samples are never scored."""
        with self._lock:
            self._pending.append(group)
        for entry in self.composition.entries_of(group.task):
            self._send(entry, [Item(group.task, sample) for sample in group.samples])

    def submit_sample(self, task: Task, sample: Sample) -> None:
        """Start scoring one finished sample whose group follows later with `submit`."""
        for entry in self.composition.entries_of(task):
            if not entry.source.whole_groups:
                self._send(entry, [Item(task, sample)])

    def _send(self, entry: Entry, items: list[Item]) -> None:
        name, fresh = entry.source.name, []
        with self._lock:
            for item in items:
                _, sent = self._sent.setdefault(id(item.sample), (item.sample, set()))
                if name not in sent and item.sample.finish is not Finish.ABORT:
                    sent.add(name)
                    fresh.append(item)
            if not fresh:
                return
            if name not in self._lanes:
                self._lanes[name] = _Lane(entry.source, self)
        self._lanes[name].put(fresh)

    def collect(self, groups: Sequence[Group] | None = None) -> dict[str, float]:
        """Wait until these submitted groups (None: all since the last collect) are scored; metrics as plain floats.

        Raises RewardError when a source broke its contract, spent its failure budget, failed on everything or hangs.
        """
        with self._lock:
            groups = self._pending if groups is None else list(groups)
            taken = {id(group) for group in groups}
            self._pending = [group for group in self._pending if id(group) not in taken]
            lanes = dict(self._lanes)
        waiting = {id(sample) for group in groups for sample in group.samples}
        for lane in lanes.values():
            lane.wait(waiting)
        for group in groups:
            self.composition.finish(group)
            with self._lock:
                for sample in group.samples:
                    self._sent.pop(id(sample), None)
        check_budgets(self.composition, groups)
        metrics = measure(self.composition, groups)
        for name, lane in lanes.items():
            metrics |= lane.report(name)
        return metrics

    def score(self, groups: Sequence[Group]) -> dict[str, float]:
        """submit and collect in one call."""
        for group in groups:
            self.submit(group)
        return self.collect(groups)

    def close(self) -> None:
        """End the lanes and the sources. Idempotent."""
        for lane in self._lanes.values():
            lane.queue.put(None)
        self._lanes = {}
        self.composition.close()


class _Lane:
    """The thread of one source. It takes every waiting item in one call, so that batches grow with the load."""

    def __init__(self, source: Source, scorer: Scorer):
        self.source, self.scorer = source, scorer
        self.queue: queue.SimpleQueue[list[Item] | None] = queue.SimpleQueue()
        self.changed = threading.Condition()
        self.open: set[int] = set()  # ids of samples that wait for a result
        self.error: RewardError | None = None
        self.busy_since: float | None = None
        self.busy_items = 0
        self.seconds, self.scored = 0.0, 0
        self._thread: threading.Thread | None = None

    def put(self, items: list[Item]) -> None:
        if self.source.inline:
            self._score(items)
            return
        with self.changed:
            self.open.update(id(item.sample) for item in items)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name=f"reward-lane-{self.source.name}")
            self._thread.start()
        self.queue.put(items)

    def _run(self) -> None:
        while (items := self.queue.get()) is not None:
            while not self.queue.empty():
                more = self.queue.get()
                if more is None:
                    return
                items = items + more
            with self.changed:
                self.busy_since, self.busy_items = time.monotonic(), len(items)
            start = time.perf_counter()
            self._score(items)
            if self.scorer.on_span is not None:
                self.scorer.on_span(self.source.name, start, time.perf_counter())
            with self.changed:
                self.busy_since = None
                self.open.difference_update(id(item.sample) for item in items)
                self.changed.notify_all()

    def _score(self, items: list[Item]) -> None:
        start = time.monotonic()
        results: list[RewardResult]
        try:
            results = self.source.score(items)
        except RewardError as error:
            self.error = self.error or error
            return
        except Exception as error:
            results = [failure(error)] * len(items)
        for item, result in zip(items, results, strict=True):
            item.sample.rewards[self.source.name] = result
        self.seconds += time.monotonic() - start
        self.scored += len(items)

    def wait(self, samples: set[int]) -> None:
        """Return once none of these samples waits. Raises the lane's error, or RewardError when its source hangs."""
        with self.changed:
            while self.open & samples and self.error is None:
                self.changed.wait(0.2)
                if self.busy_since is not None:
                    limit = self.source.limit_s(self.busy_items)
                    if time.monotonic() - self.busy_since > limit:
                        raise RewardError(f"reward {self.source.name!r} has not answered for {limit:.0f} s on "
                                          f"{self.busy_items} samples and is taken for hung; look at it, or raise its "
                                          f"timeout_s (now {self.source.timeout_s:g})")
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def report(self, name: str) -> dict[str, float]:
        """Latency (seconds of scoring a sample) and what the source logged, since the last report."""
        metrics: dict[str, float] = {}
        if self.scored:
            metrics[f"rewards/{name}/latency_s"] = self.seconds / self.scored
        logged, self.source.metrics = self.source.metrics, []
        for key in dict.fromkeys(key for key, _ in logged):
            values = [value for k, value in logged if k == key and value == value and abs(value) != float("inf")]
            if values:
                metrics[key] = sum(values) / len(values)
        self.seconds, self.scored = 0.0, 0
        return metrics
