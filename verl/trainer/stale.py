"""A source whose sampler never rests: bounded staleness, with new weights in mid-answer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from verl.core.types import Finish, Group, Request, Sample
from verl.core.weights import Weights
from verl.flow.staleness import StalenessQueue
from verl.trainer.ahead import NOTHING, POLL_S, Background, Groups
from verl.trainer.rl import pack
from verl.trainer.sampler import Attempt, Sampler, completion_metrics


class Stale(Background):
    """Bounded staleness: (lag + 1) steps of prompts are open at any time; a step trains the first of them in stream order.

    `queue` counts steps; `step_of` says at which step a version of the weights was newest, for the last few of them.
    """

    def _prepare(self) -> None:
        self.queue = StalenessQueue(self.run.config.rollout_batch_size, self.lag, self.tasks.position)
        self.queue.version = self.run.step
        self.left = (self.run.total - self.run.step) * self.queue.batch  # prompts that have never been started
        self.attempts: dict[int, Attempt] = {}  # by place: started, not yet trained
        self.again: set[int] = set()  # places whose samples of an interrupted run are too old
        self.waiting: Weights | None = None  # handed over, not yet in force
        self.held: int | None = None  # step at which the weights in force were newest
        self.step_of: dict[int, int] = {}
        self.resting, self.idle = False, True
        self.since = time.perf_counter()

    # -- the sampler's thread ----------------------------------------------------------------------------------------

    def _work(self) -> None:
        engine, sampling = self.sampler.engine, self.run.sampling
        while not self._over():
            if requests := self._between():
                self.since = time.perf_counter()
                engine.generate(requests, sampling, self._on_sample, self._over, self._between)
                self._span()
            with self.changed:
                self.idle = True
                self.changed.notify_all()
                if self.waiting is None:
                    self.changed.wait(POLL_S)

    def _span(self) -> None:
        now = time.perf_counter()
        self.run.timeline.add("rollout", "generate", self.since, now, min(self.run.step + 1, self.run.total))
        self.since = now

    def _between(self) -> list[Request]:
        """Between two launches: take the weights that wait, then start what may be started under those in force."""
        weights = self.waiting
        if weights is not None:
            if not self.idle:
                self._span()
            with self.run.span("rollout", "load"):
                self._load(weights)
            self.since = time.perf_counter()
            with self.changed:
                self.waiting, self.held = None, self.queue.version
                self.step_of[weights.version] = self.held
                for version in [v for v, step in self.step_of.items() if step < self.held - self.lag - 1]:
                    del self.step_of[version]
                self.changed.notify_all()
        with self.changed:
            if self.held is None or self.resting or self._over():
                return []
            places = self.queue.admit(self.left + len(self.again), self.held)
            self.idle = self.idle and not places
        return [request for place in places for request in self._start(place)]

    def _start(self, place: int) -> list[Request]:
        """What the engine is asked for; nothing when an interrupted run has finished the whole group."""
        if place in self.again:
            self.again.remove(place)
            old = self.attempts[place]
            attempt = Attempt(place, Group(old.group.task, old.group.prompt_ids, [None] * len(old.group.samples)),
                              list(range(len(old.group.samples))), old.purpose)
        else:
            self.left -= 1
            ((slot, task),) = self.tasks.issue(1)
            assert slot == place, f"the data hands out place {slot}, the queue counts {place}"
            attempt = self.sampler.begin(task, place, self.run.config.samples_per_prompt)
        self.attempts[place] = attempt
        if attempt.complete:
            self._complete(attempt)
        return [self.sampler.request(attempt)] if attempt.numbers else []

    def _on_sample(self, key: str, index: int, sample: Sample) -> None:
        attempt = self.attempts[int(key)]
        self.sampler.take(attempt, index, sample)
        if sample.finish is not Finish.ABORT and attempt.complete:
            self._complete(attempt)

    def _complete(self, attempt: Attempt) -> None:
        with self.changed:
            oldest = min(self._step_of(int(s.versions_L.min())) for s in attempt.group.samples)
            if self.queue.finished(attempt.place, oldest):
                self.sampler.scorer.submit(attempt.group)
            else:
                self.again.add(attempt.place)
            self.changed.notify_all()

    def _step_of(self, version: int) -> int:
        """The step at which a version was newest; for one of an earlier process, from the updates made since."""
        if version in self.step_of:
            return self.step_of[version]
        newest = max(self.step_of)
        return self.step_of[newest] - -(-(newest - version) // self.run.config.updates_per_step)

    # -- the trainer's thread ----------------------------------------------------------------------------------------

    def _hand_over(self, weights: Weights) -> None:
        """Let the sampler take these weights between two launches, and wait until it has: an update changes their storage."""
        self._synchronize()
        with self.changed:
            if self.queue.training and self.run.step > self.queue.version:
                self.queue.trained()
            self.waiting = weights
            self.changed.notify_all()
        self._wait(lambda: self.waiting is None)

    def next(self, weights: Weights) -> Groups:
        """See Source."""
        self.sampler.forget(self.tasks.state())
        self.resting = False
        self.sampler.scorer.trainer_state = self.run.state()
        self.run.verb("hand_over", self._hand_over, weights)
        places = self.run.verb("wait", self._wait, self.queue.take)
        if not places:
            return NOTHING
        groups = [self.attempts.pop(place).group for place in places]
        metrics = self.run.verb("score", self.sampler.scorer.collect, groups) | completion_metrics(groups)
        self.tasks.done(places)
        if self.queue.refused:
            metrics["sampling/groups_refused"] = float(self.queue.refused)
        return self._trained_on(groups, pack(self.run, groups, self.sampler, self.algo), metrics, weights)

    @contextlib.contextmanager
    def at_rest(self, weights: Weights) -> Iterator[Sampler]:
        """See Source: answers under way are finished first, no new ones are started until the next step."""
        self.resting = True
        self.run.verb("hand_over", self._hand_over, weights)
        self.run.verb("wait", self._wait, lambda: self.idle)
        yield self.sampler
