"""Sources of a step's groups: sampled in turn with training, or one step ahead of it in a thread."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import torch

from verl.algorithms.base import Algorithm
from verl.core.batch import Batch
from verl.core.errors import WorkerError
from verl.core.types import Group
from verl.core.weights import Weights
from verl.trainer.rl import collect, pack
from verl.trainer.run import Run
from verl.trainer.sampler import Sampler

STALL_S = 1800.0  # without a sign of life from the engine, beside what the reward sources may take
CLOSE_S = 30.0  # for sampling to end when the run does
POLL_S = 0.2
T = TypeVar("T")


class Groups(NamedTuple):
    """What a step trains on."""

    groups: list[Group]
    batch: Batch | None
    metrics: dict[str, float]


NOTHING = Groups([], None, {})


class Source:
    """Sampling and training in turn, on the same memory."""

    def __init__(self, run: Run, tasks, sampler: Sampler, algo: Algorithm):
        self.run, self.tasks, self.sampler, self.algo = run, tasks, sampler, algo
        self.needs_old = run.config.updates_per_step > 1  # log-probs before the first update, by a pass of their own

    def next(self, weights: Weights) -> Groups:
        """The next step's groups, scored and packed; these are the weights that they will train. Nothing when a signal came."""
        self.sampler.forget(self.tasks.state())
        self.run.verb("load", self.sampler.load, weights)
        groups, metrics, places = collect(self.run, self.tasks, self.sampler, self.algo)
        if self.run.stopped:
            return NOTHING
        self.tasks.done(places)
        batch = pack(self.run, groups, self.sampler, self.algo)
        self.sampler.engine.sleep()  # its cache is the trainer's memory now
        return Groups(groups, batch, metrics)

    @contextlib.contextmanager
    def at_rest(self, weights: Weights) -> Iterator[Sampler]:
        """The sampler for other work, under these weights; nothing else is sampled meanwhile."""
        self.run.verb("load", self.sampler.load, weights)
        yield self.sampler

    def settle(self) -> None:
        """Before a checkpoint: wait for what it is better to have finished."""

    def close(self) -> None:
        """End what runs in the background."""


class Background(Source):
    """A source whose sampler works in a thread. State that both threads use is guarded by `changed`.

    The thread's error is raised by the next wait, and every wait ends: by what it waits for, by that error, or when the
    engine has given no sign of life for `stall_s`.
    """

    def __init__(self, run: Run, tasks, sampler: Sampler, algo: Algorithm, lag: int):
        super().__init__(run, tasks, sampler, algo)
        self.lag = lag
        if getattr(algo, "kl_coef", 0) > 0 and algo.kl_in == "reward":
            self.needs_old = True  # the penalty is the policy's own, not that of the weights that sampled
        samples = run.config.rollout_batch_size * run.config.samples_per_prompt * (lag + 1)
        self.stall_s = STALL_S + max(e.source.limit_s(samples) for e in sampler.scorer.composition.entries)
        self.device = getattr(getattr(sampler.engine, "lm", None), "device", torch.device("cpu"))
        self.changed = threading.Condition()
        self.error: BaseException | None = None
        self.closed, self.alive = False, time.monotonic()
        sampler.cancelled = self._over
        self.thread = threading.Thread(target=self._run, daemon=True, name="rollout")
        self._prepare()
        self.thread.start()

    def _prepare(self) -> None:
        """Attributes of a subclass, before its thread starts."""

    def _work(self) -> None:
        raise NotImplementedError

    def _run(self) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream(self.device)) if self.device.type == "cuda" else contextlib.nullcontext():
                self._work()
        except BaseException as error:
            self.error = error
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def _over(self) -> bool:
        """Whether to stop; engines ask before every launch, which is their sign of life."""
        self.alive = time.monotonic()
        return self.closed or self.run.stopped

    def _wait(self, ready: Callable[[], T]) -> T:
        """ready()'s first true value; its last one when a signal came."""
        self.alive = time.monotonic()
        with self.changed:
            while not (value := ready()) and not self.run.stopped:
                if self.error is not None:
                    raise self.error
                if time.monotonic() - self.alive > self.stall_s:
                    self.error = WorkerError(f"the sampler in the background has given no sign of life for {self.stall_s:.0f} s; "
                                             "look at its engine, or set trainer.pipeline: step to see where it hangs")
                    continue
                self.changed.wait(POLL_S)
            return value

    def _load(self, weights: Weights) -> None:
        """Put weights in force; the trainer may change their storage, and the sampler use its own, when this returns."""
        self._synchronize()
        self.sampler.load(weights)
        self._synchronize()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _trained_on(self, groups: list[Group], batch: Batch, metrics: dict[str, float], weights: Weights) -> Groups:
        late_T = weights.version - batch.versions_T[batch.mask_T]
        lag = {"sampling/lag/mean": float(late_T.mean()), "sampling/lag/max": float(late_T.max())} if len(late_T) else {}
        return Groups(groups, batch, metrics | lag)

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        self.thread.join(CLOSE_S)
        self.sampler.engine.close()


class Ahead(Background):
    """One step ahead: while a step trains, the next one's groups are sampled and scored under the weights before it.

    A run that is killed and resumed equals the uninterrupted one: a checkpoint waits for the step under way to be sampled, and
    its samples are in the journal.
    """

    def _prepare(self) -> None:
        self.asked: int | None = None  # the step whose groups are being made
        self.made: tuple[list[Group], Batch, dict[str, float], list[int]] | None = None

    def _work(self) -> None:
        while True:
            with self.changed:
                while self.asked is None and not self._over():
                    self.changed.wait(POLL_S)
                step = self.asked
            if self._over():
                return
            groups, metrics, places = collect(self.run, self.tasks, self.sampler, self.algo, step - 1)
            if self._over():
                return
            batch = pack(self.run, groups, self.sampler, self.algo)
            with self.changed:
                self.asked, self.made = None, (groups, batch, metrics, places)
                self.changed.notify_all()

    def _ask(self, step: int, weights: Weights) -> None:
        self.run.verb("load", self._load, weights)
        with self.changed:
            self.asked = step
            self.changed.notify_all()

    def next(self, weights: Weights) -> Groups:
        """See Source. From the second step of a process on, the weights that sampled are those before the last step."""
        self.sampler.forget(self.tasks.state())
        step = self.run.step + 1
        if self.made is None and self.asked is None:
            self._ask(step, weights)
        made = self.run.verb("wait", self._wait, lambda: self.made)
        if made is None:
            return NOTHING
        groups, batch, metrics, places = made
        self.made = None
        self.tasks.done(places)
        if step < self.run.total:
            self._ask(step + 1, weights)
        return self._trained_on(groups, batch, metrics, weights)

    @contextlib.contextmanager
    def at_rest(self, weights: Weights) -> Iterator[Sampler]:
        self.run.verb("wait", self._wait, lambda: self.asked is None)
        self.run.verb("load", self._load, weights)
        yield self.sampler

    def settle(self) -> None:
        with contextlib.suppress(Exception):  # it is raised by the next step
            self._wait(lambda: self.asked is None)
