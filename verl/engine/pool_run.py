"""One call of RolloutPool.generate: who samples what, driven by verl.flow.dispatch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from verl.core.errors import VerlError, WorkerError
from verl.core.types import Finish, Request, Sample, Sampling
from verl.engine.base import OnSample
from verl.flow.actors import Stream, wait_any
from verl.flow.dispatch import Dispatcher

if TYPE_CHECKING:
    from verl.engine.pool import RolloutPool, Worker

LEASE_S = 600.0  # without a finished sample, before a worker counts as hanging
PATIENCE_S = 180.0  # without any worker
CANCEL_S = 60.0  # for a worker to end what was cancelled
TICK_S = 0.2
PIECES = 4  # items for each worker when prompts are few: enough to even out, few enough to share a prompt's computation

_LEASES = count(1)
Key = tuple[int, int]  # request, its first sample in the item


@dataclass(slots=True, eq=False)
class _Lent:
    """A stream of samples under way. asked: name of a request to the worker -> its item and which samples it is about."""

    worker: Worker
    lease: int  # the dispatcher's
    number: int  # the worker's
    asked: dict[str, tuple[Key, list[int]]]
    stream: Stream
    tokens: int = 0


class Generation:
    """Items are runs of samples of one prompt. What a lost worker had finished stays; only the rest is asked for again."""

    def __init__(self, pool: RolloutPool, requests: Sequence[Request], sampling: Sampling, on_sample: OnSample | None):
        self.pool, self.requests, self.sampling, self.on_sample = pool, requests, sampling, on_sample
        self.results: list[list[Sample | None]] = [[None] * r.n for r in requests]
        self.dispatcher, self.lent, self.cancelling = Dispatcher(LEASE_S, PATIENCE_S), [], False
        self.items: dict[Key, list[int]] = {}
        pieces = -(-PIECES * len(pool.workers) // max(len(requests), 1))
        for i, request in enumerate(requests):
            for part in np.array_split(np.arange(request.n), min(pieces, request.n)):
                key = (i, int(part[0]))
                self.items[key] = part.tolist()
                self.dispatcher.add(key, len(request.prompt_ids) + len(part) * sampling.max_tokens, time.monotonic())

    def run(self, cancelled: Callable[[], bool]) -> list[list[Sample]]:
        """Until every sample is there, or cancelled. Whatever happens, no worker is left at work."""
        try:
            self._join([w for w in self.pool.workers])
            while not self.dispatcher.done:
                if cancelled():
                    self._cancel()
                    break
                self._hand_out()
                wait_any([lent.stream for lent in self.lent], TICK_S)
                self._collect()
                self._look_around()
            if self.dispatcher.failures:
                raise self.dispatcher.first_error
        finally:
            self._end()
        return self.results

    def _join(self, workers: Sequence[Worker]) -> None:
        """Workers that hold the weights in force may take everything: the costs, not the counts, even out."""
        for worker in workers:
            if worker.held == self.pool.held or self.pool.catch_up(worker):
                self.dispatcher.join(worker.name, max(len(self.items), 1), time.monotonic())

    def _hand_out(self) -> None:
        for name, keys, lease in self.dispatcher.assign(time.monotonic()):
            worker = next(w for w in self.pool.workers if w.name == name)
            asked, requests = {}, []
            for i, first in keys:
                missing = [j for j in self.items[i, first] if self.results[i][j] is None]
                asked[f"{i}/{first}"] = ((i, first), missing)
                requests.append(Request(f"{i}/{first}", self.requests[i].prompt_ids,
                                        tuple(self.requests[i].seeds[j] for j in missing)))
            number = next(_LEASES)
            stream = worker.actor.stream("generate", number, requests, self.sampling)
            self.lent.append(_Lent(worker, lease, number, asked, stream))

    def _collect(self) -> None:
        for lent in list(self.lent):
            if lent not in self.lent:  # its worker was lost with another of its streams
                continue
            try:
                for name, index, sample in lent.stream.take():
                    self._take(lent, name, index, sample)
            except WorkerError as error:
                self._failed(lent, error)
            if lent.stream.ended and lent in self.lent:
                self.lent.remove(lent)

    def _take(self, lent: _Lent, name: str, index: int, sample: Sample) -> None:
        (i, first), numbers = lent.asked[name]
        j = numbers[index]
        if self.results[i][j] is not None or (sample.finish is Finish.ABORT and not self.cancelling):
            return
        columns = {n: np.array(getattr(sample, n)) for n in ("ids_L", "logprobs_L", "versions_L", "mask_L")}
        self.results[i][j] = sample = replace(sample, **columns)  # arrays that travelled could not be written to
        now, lent.tokens = time.monotonic(), lent.tokens + len(sample)
        self.dispatcher.progress(lent.worker.name, lent.lease, lent.tokens, now)
        if all(self.results[i][k] is not None for k in self.items[i, first]):
            self.dispatcher.finished(lent.worker.name, lent.lease, (i, first), now)
        if self.on_sample is not None:
            self.on_sample(self.requests[i].key, j, sample)

    def _failed(self, lent: _Lent, error: WorkerError) -> None:
        """The worker died, or could not do what it was lent."""
        if lent.worker.actor.dead is not None:
            return self._lost(lent.worker, error)
        for key, _ in lent.asked.values():
            self.dispatcher.failed(lent.worker.name, lent.lease, key, error, time.monotonic())

    def _lost(self, worker: Worker, error: WorkerError) -> None:
        self.lent = [lent for lent in self.lent if lent.worker is not worker]
        self.pool.bury(worker, error)
        self.dispatcher.lost(worker.name, error, time.monotonic())

    def _look_around(self) -> None:
        """Take in new workers; end those that hang."""
        self._join(self.pool.welcome())
        self.dispatcher.expired(time.monotonic())
        for worker in [w for w in self.pool.workers if w.name in self.dispatcher.expelled]:
            self._lost(worker, WorkerError(f"{worker.actor.who} finished no sample for {LEASE_S:g} s, twice"))
        if not self.pool.workers and not self.pool.starting:
            raise self.pool.first_error

    def _cancel(self) -> None:
        """End everything under way; what is not finished comes back aborted."""
        self.cancelling = True
        self._stop_workers()
        for i, request in enumerate(self.requests):
            for j, seed in enumerate(request.seeds):
                if self.results[i][j] is None:
                    nothing = np.zeros(0, np.int32)
                    self.results[i][j] = sample = Sample(nothing, nothing.astype(np.float32), nothing, Finish.ABORT, seed)
                    if self.on_sample is not None:
                        self.on_sample(request.key, j, sample)
        self.dispatcher.withdraw()

    def _end(self) -> None:
        """After an error: nobody waits for what is still under way."""
        self.cancelling, self.on_sample = True, None
        self._stop_workers()

    def _stop_workers(self) -> None:
        for lent in self.lent:
            lent.worker.actor.start("cancel", lent.number, beside=True)
        until = time.monotonic() + CANCEL_S
        while self.lent:
            wait_any([lent.stream for lent in self.lent], TICK_S)
            try:
                self._collect()
            except VerlError:  # of work that nobody wants any more
                self.lent = [lent for lent in self.lent if not lent.stream.ended]
            if time.monotonic() > until:
                for lent in list(self.lent):
                    if lent in self.lent:
                        self._lost(lent.worker, WorkerError(f"{lent.worker.actor.who} did not stop within {CANCEL_S:g} s"))
