"""RolloutPool: one rollout engine made of workers in other processes, which may die without ending the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

import torch

from verl.core.errors import VerlError, WeightsError, WorkerError
from verl.core.types import Request, Sample, Sampling
from verl.core.weights import Receipt, Weights
from verl.engine.base import OnSample, RolloutEngine
from verl.engine.pool_run import PATIENCE_S, TICK_S, Generation
from verl.engine.pool_worker import RolloutWorker
from verl.engine.requests import check_newer, check_requests
from verl.flow.actors import CALL_S, Actor, Call, Slot, gather
from verl.flow.layout import Layout, Table, TensorSpec, table_of, whole
from verl.flow.link import Meeting, Member, gpu_id
from verl.flow.transfer import DEADLINE_S

_GROUPS = count(1)  # numbers of groups for loads: whoever meets under one name meets nobody else
ATTEMPTS = 3  # at a load in which workers die


@dataclass(slots=True, eq=False)
class Worker:
    """A worker as the pool sees it; `held`: the version it samples from."""

    actor: Actor
    facts: dict[str, Any] = field(default_factory=dict)
    held: int | None = None

    @property
    def name(self) -> str:
        return str(self.actor.rank)


class RolloutPool(RolloutEngine):
    """W workers, each with an engine of its own made from the model directory by `make` (device -> engine, picklable).

    Requests go to workers by token cost, finished samples come back one by one, weights by plan and receipt: from an engine of
    this process, or straight from the ranks of a TrainGroup. A worker that dies loses nothing but time: what it had not finished
    is sampled again by the others, from the same seeds, and a new process takes its place under the current weights.

    note: called with a line when something like that happens. within: the actors whose processes the workers share, as many as
    slots: they train and sample in turn, and one that dies ends the run.
    receipts: worker -> what it held after the last load. Raises the first error when no worker is left, or work fails repeatedly.
    """

    def __init__(self, slots: Sequence[Slot], make: Callable[[torch.device], RolloutEngine], meeting: Meeting,
                 note: Callable[[str], None] = print, within: Sequence[Actor] = ()):
        self._make, self._meeting, self.note = make, meeting, note
        self._serial = 0
        self.workers: list[Worker] = []  # at work
        self.starting = [self._start(slot, *within[i:i + 1]) for i, slot in enumerate(slots)]
        self._closed: list[tuple[Slot, Actor | None]] = []
        self.receipts: dict[str, Receipt] = {}
        self.first_error: WorkerError | None = None
        self._source: Any = None  # of the weights in force
        self._table: Table = {}  # what is sent to workers
        self._group: tuple | None = None  # who is in the present group for loads
        self._void = ""

    # -- life --------------------------------------------------------------------------------------------------------

    def _start(self, slot: Slot, within: Actor | None = None) -> Worker:
        self._serial += 1
        make = partial(RolloutWorker, self._make, self._meeting.address)
        return Worker(Actor(slot, "rollout", self._serial - 1, make, within))

    def ready(self, deadline_s: float = CALL_S) -> RolloutPool:
        """Wait for every worker. Raises the first error of any."""
        gather([Call(w.actor, "start", w.actor.built) for w in self.starting], deadline_s)
        self.welcome()
        if self.first_error is not None:
            raise self.first_error
        return self

    def welcome(self) -> list[Worker]:
        """Take in the workers whose engines are made by now; one that could not make its own is not started again."""
        new = [w for w in self.starting if w.actor.started()]
        for worker in new:
            self.starting.remove(worker)
            try:
                worker.facts = worker.actor.ready().call("facts")
                self.workers.append(worker)
            except VerlError as error:
                self._record(error)
                self.note(f"verl: a rollout process could not start and is missing from now on: {error}")
        return [w for w in new if w in self.workers]

    def _record(self, error: VerlError) -> None:
        self.first_error = self.first_error or error

    def bury(self, worker: Worker, error: WorkerError) -> None:
        """A worker is gone: say so and start another in its place. Raises the error when a trainer is gone with it."""
        self._record(error)
        self.workers.remove(worker)
        if worker.actor.within is not None:
            raise error
        worker.actor.kill()
        self.starting.append(self._start(replace(worker.actor.slot, name=None)))
        self.note(f"verl: {error}; the others sample what it had not finished, and a new process takes its place")

    def _bury_dead(self) -> int:
        """Look after every worker; the number that were dead."""
        dead = 0
        for worker, call in [(w, w.actor.start("held", beside=True)) for w in self.workers]:
            try:
                worker.held = call.result(DEADLINE_S)
            except WorkerError as error:
                self.bury(worker, error)
                dead += 1
        return dead

    def _need_workers(self) -> None:
        """Wait until there is a worker. Raises the first error when there will be none."""
        until = time.monotonic() + PATIENCE_S
        self.starting += [self._start(replace(slot, name=None), within) for slot, within in self._closed]
        self._closed = []
        while not self.workers:
            if not self.starting or time.monotonic() > until:
                raise self.first_error or WorkerError(f"no rollout process started within {PATIENCE_S:g} s")
            time.sleep(TICK_S / 4)
            self.welcome()

    def sleep(self) -> None:
        self._tell("sleep")

    def wake(self) -> None:
        self._tell("wake")

    def _tell(self, name: str) -> None:
        for worker, call in [(w, w.actor.start(name)) for w in self.workers]:
            try:
                call.result()
            except WorkerError as error:
                self.bury(worker, error)

    def close(self) -> None:
        """End the workers' processes; the next use starts them again."""
        for worker in (*self.workers, *self.starting):
            worker.actor.kill()
            self._closed.append((worker.actor.slot, worker.actor.within))
        self.workers, self.starting, self._group = [], [], None

    @property
    def max_total_tokens(self) -> int:
        self._need_workers()
        return min(w.facts["limit"] for w in self.workers)

    @property
    def held(self) -> int | None:
        """The version in force; None: nothing was loaded, workers sample from the model directory."""
        return self.version if self._source is not None else None

    @property
    def pids(self) -> dict[str, int]:
        """The workers at work -> their processes."""
        return {w.name: w.actor.pid for w in self.workers}

    # -- weights -----------------------------------------------------------------------------------------------------

    def load_weights(self, weights: Weights) -> Receipt:
        """See BaseEngine. Only tensors that train are sent: all others are what every worker read from the model directory."""
        check_newer(weights, self.held)
        if hasattr(weights.owner, "join"):  # a TrainGroup: from its ranks to the workers, not by way of this process
            self._source = weights.owner
        elif isinstance(self._source, _Local):
            self._source.weights = weights
        else:
            self._source = _Local(weights)
        self._void = f"the load of version {weights.version} did not complete"
        for attempt in range(ATTEMPTS):
            self.welcome()
            self._bury_dead()
            self._need_workers()
            try:
                self._send(self._source, weights.version, [w for w in self.workers if w.held != weights.version])
                break
            except (WeightsError, WorkerError):
                self._group = None
                if not self._bury_dead() or attempt == ATTEMPTS - 1:
                    raise
        self.version, self._void = weights.version, ""
        return next(iter(self.receipts.values()))

    def _send(self, source: Any, version: int, receivers: list[Worker]) -> None:
        """Move a version from the source to these workers; all of them then hold the same tensors, or none may be used."""
        if not receivers:
            return
        layout = source.layout()
        self._table = table = _arriving(layout.table, receivers[0].facts["table"], source.frozen)
        group = (source, table, tuple(w.name for w in receivers))
        shared = [a.within and next((i for i, s in enumerate(source.actors) if s is a.within), None)
                  for a in (w.actor for w in receivers)]
        ranks = [len(source.gpus) + i if at is None else at for i, at in enumerate(shared)]
        if self._group != group:
            self._group = None
            gpus = [*source.gpus, *(w.facts["gpu"] for w, at in zip(receivers, shared) if at is None)]
            fast = None not in gpus and len(set(gpus)) == len(gpus)
            name, to = f"group {next(_GROUPS)}", whole(table, ranks)
            calls = [w.actor.start("join", name, rank, layout, to, fast, source.lora, None if at is None else source.role)
                     for w, rank, at in zip(receivers, ranks, shared)]
            gather([*calls, *source.join(self._meeting, name, layout, to, fast)], 2 * DEADLINE_S)
            self._group = group
        calls = [w.actor.start("load", version, DEADLINE_S) for w in receivers]
        answers = gather([*calls, *source.load(version, DEADLINE_S)], 2 * DEADLINE_S)[:len(receivers)]
        for worker, receipt in zip(receivers, answers):
            answers[0].expect(receipt, worker.actor.who)
            self.receipts[worker.name], worker.held = receipt, version

    def catch_up(self, worker: Worker) -> bool:
        """Give a new worker the weights in force: from one that samples from them, else from their source. False: not now."""
        if self._source is None:
            return True
        peer = next((w for w in self.workers if w.held == self.version and w is not worker), None)
        try:
            source = self._source
            self._send(_Peer(peer, self._table, source.frozen, source.lora) if peer is not None else source, self.version, [worker])
            return True
        except (WeightsError, WorkerError) as error:
            self.note(f"verl: {worker.actor.who} joins with the next weights ({error})")
            return False
        finally:
            self._group = None

    # -- sampling ----------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], sampling: Sampling, on_sample: OnSample | None = None,
                 cancelled: Callable[[], bool] | None = None) -> list[list[Sample]]:
        """See RolloutEngine."""
        if self._void:
            raise WeightsError(f"nothing can be sampled: {self._void}")
        self._need_workers()
        rows = self.workers[0].facts["rows"]
        check_requests(requests, sampling, self.max_total_tokens, 1 << 31 if rows is None else rows)
        return Generation(self, requests, sampling, on_sample).run(cancelled or (lambda: False))


class _Local:
    """Weights of an engine in this process, as a source; one object for all versions."""

    actors: Sequence[Actor] = ()

    def __init__(self, weights: Weights):
        self.weights, self.member = weights, None

    def trained(self) -> dict[str, torch.Tensor]:
        """The tensors that change; all, when nothing says which."""
        owner = self.weights.owner
        names = {n for n, p in owner.named_parameters() if p.requires_grad} if owner is not None else None
        return {n: t for n, t in self.weights if not names or n in names}

    @property
    def frozen(self) -> set[str]:
        """Tensors that workers have from the model directory."""
        trained = self.trained()
        return {n for n, _ in self.weights if n not in trained}

    @property
    def lora(self) -> Any:
        return getattr(self.weights.owner, "verl_lora", None)

    @property
    def device(self) -> torch.device:
        return next(iter(self.trained().values())).device

    @property
    def gpus(self) -> list[str | None]:
        return [gpu_id(self.device)]

    def layout(self) -> Layout:
        return whole(table_of(self.trained().items()), [0])

    def join(self, meeting: Meeting, name: str, source: Layout, destination: Layout, fast: bool) -> list[Call]:
        self.member = Member(0, meeting.store, self.trained)
        self.member.join(name, source, destination, self.device if fast else torch.device("cpu"))
        return []

    def load(self, version: int, deadline_s: float) -> list[Call]:
        self.member.load(version, deadline_s)
        return []


@dataclass(slots=True)
class _Peer:
    """A worker at work as a source, while it goes on sampling."""

    worker: Worker
    table: Table
    frozen: Collection[str]
    lora: Any
    actors: Sequence[Actor] = ()

    @property
    def gpus(self) -> list[str | None]:
        return [self.worker.facts["gpu"]]

    def layout(self) -> Layout:
        return whole(self.table, [0])

    def join(self, meeting: Meeting, name: str, source: Layout, destination: Layout, fast: bool) -> list[Call]:
        return [self.worker.actor.start("join", name, 0, source, destination, fast, self.lora, None, beside=True)]

    def load(self, version: int, deadline_s: float) -> list[Call]:
        return [self.worker.actor.start("load", version, deadline_s, beside=True)]


def _arriving(table: Table, own: Table | None, frozen: Collection[str]) -> dict[str, TensorSpec]:
    """The table as the workers store it (`own`; None: as it comes), in their dtypes. Raises WeightsError unless it fits and,
    but for the frozen tensors, fills it."""
    if own is None:
        return dict(table)
    for name, spec in table.items():
        if name not in own or own[name].shape != spec.shape:
            want = f"shape {own[name].shape}" if name in own else "no such tensor"
            raise WeightsError(f"tensor {name!r} of shape {spec.shape} has no place at the workers, which have {want}")
    if missing := sorted(own.keys() - table.keys() - set(frozen)):
        raise WeightsError(f"{len(missing)} of {len(own)} tensors would not reach the rollout workers, the first is {missing[0]!r}")
    return {n: TensorSpec(s.shape, own[n].dtype) for n, s in table.items()}
