"""Who works on what: items of known cost go to workers under leases, and to another worker when a lease runs out.

A state machine without threads, clocks or I/O: whoever drives it tells what happened and when, and does what it says.
Leases as in Gray and Cheriton (SOSP 1989): a holder that is not heard of loses the work after a time that both know.

    dispatcher.add(key, cost, now)                         # work
    dispatcher.join(worker, slots, now)                    # hands; `lost` when one is gone
    while not dispatcher.done:
        for worker, keys, lease in dispatcher.assign(now): ...send
        ...wait for a message, at most until dispatcher.next_deadline()
        if dispatcher.finished(worker, lease, key, now): ...take the result
        dispatcher.expired(now)
    if dispatcher.failures: raise dispatcher.first_error
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from verl.core.errors import WorkerError

BARREN = 2  # leases in a row that run out while a worker makes nothing: one may be a lost message, more are a hang

Key = Hashable


class Assignment(NamedTuple):
    """Send these items to this worker; everything it reports about them names the lease."""

    worker: str
    keys: tuple[Key, ...]
    lease: int


@dataclass(slots=True, eq=False)
class _Item:
    key: Key
    cost: int  # tokens
    order: int
    lease: int | None = None  # in force; None: waits for a worker
    leases: set[int] = field(default_factory=set)  # every one it was handed out under
    tried: set[str] = field(default_factory=set)  # workers it failed on
    attempts: int = 0  # failed ones
    error: BaseException | None = None  # of the first


@dataclass(slots=True, eq=False)
class _Lease:
    worker: str
    items: dict[Key, _Item]  # not finished
    until: float
    tokens: int = 0


@dataclass(slots=True, eq=False)
class _Worker:
    name: str
    slots: int
    held: int = 0  # items
    cost: int = 0  # tokens of those items
    heard: float = 0.0  # when it last made something, or joined
    barren: int = 0  # leases in a row that ran out while it made nothing


class Dispatcher:
    """Hands items to workers so that every item ends once: as one result, or as a failure with the first error it met.

    lease_s: seconds a lease lasts beyond the last progress on it. patience_s: seconds that work may wait while there is no
    worker to give it to. attempts: times an item is handed out before it counts as failed. Seconds are those of the
    `now` that callers pass, which must not go back.

    Every wait is bounded: as long as an item is outstanding and `assign` has nothing to give, `next_deadline()` is a
    time, and calling `expired` then ends a lease, or raises. An item is handed out at most `attempts` times, and a lease is
    extended only by tokens that were not reported before, of which a sample has at most its length limit.
    """

    def __init__(self, lease_s: float, patience_s: float, attempts: int = 3):
        self.lease_s, self.patience_s, self.attempts = lease_s, patience_s, attempts
        self.failures: dict[Key, BaseException] = {}  # items given up, with the first error each met
        self.expelled: dict[str, BaseException] = {}  # workers given up, and why: the caller ends their processes
        self.first_error: BaseException | None = None  # of any item or worker since nothing was last outstanding
        self._items: dict[Key, _Item] = {}
        self._pending: list[_Item] = []  # by order, so that what came back goes out first
        self._workers: dict[str, _Worker] = {}
        self._leases: dict[int, _Lease] = {}
        self._orders = self._last_lease = 0
        self._alone_since: float | None = None  # items wait and nobody can take them

    @property
    def outstanding(self) -> tuple[Key, ...]:
        """Items without a result or a failure, in the order they were added."""
        return tuple(self._items)

    @property
    def done(self) -> bool:
        """Nothing is outstanding."""
        return not self._items

    @property
    def workers(self) -> tuple[str, ...]:
        """Who joined and is not lost, in the order of joining."""
        return tuple(self._workers)

    def add(self, key: Key, cost: int, now: float) -> None:
        """One more item of `cost` tokens; items go out in the order they are added. A key that has ended may come again.

        Raises ValueError when the key is outstanding.
        """
        if key in self._items:
            raise ValueError(f"item {key!r} is outstanding already; a key may come again when it has ended")
        self.failures.pop(key, None)
        if not self._items and self._workers:
            self.first_error = None  # the errors of work that has ended; without a worker, it says why there is none
        self._orders += 1
        item = self._items[key] = _Item(key, cost, self._orders)
        self._pending.append(item)
        self._watch(now)

    def join(self, worker: str, slots: int, now: float) -> None:
        """A worker that can hold `slots` items (1 or more) at once. From a known one: only its slots from now on."""
        if slots < 1:
            raise ValueError(f"worker {worker} joins with {slots} slots; it needs at least 1")
        self._workers.setdefault(worker, _Worker(worker, slots, heard=now)).slots = slots
        self.expelled.pop(worker, None)
        self._watch(now)

    def assign(self, now: float) -> list[Assignment]:
        """What to send now: waiting items to the workers with the least outstanding cost for each of their slots.

        Nobody gets more than its slots, so late joiners find work; an item waits rather than return to a worker it failed
        on while there is another.
        """
        given: dict[str, list[_Item]] = {}
        waiting, room = [], sum(max(w.slots - w.held, 0) for w in self._workers.values())
        for item in self._pending:
            worker = self._choose(item) if room > 0 else None
            if worker is None:
                waiting.append(item)
                continue
            worker.held, worker.cost, room = worker.held + 1, worker.cost + item.cost, room - 1
            given.setdefault(worker.name, []).append(item)
        self._pending = waiting
        out = []
        for worker, items in given.items():
            self._last_lease += 1
            self._leases[self._last_lease] = _Lease(worker, {i.key: i for i in items}, now + self.lease_s)
            for item in items:
                item.lease = self._last_lease
                item.leases.add(self._last_lease)
            out.append(Assignment(worker, tuple(i.key for i in items), self._last_lease))
        return out

    def progress(self, worker: str, lease: int, tokens: int, now: float) -> None:
        """The worker has made `tokens` tokens under this lease in all; more than it said before extends the lease.

        That the process lives is not enough: an engine can hang in a process that lives.
        """
        held = self._leases.get(lease)
        if held is not None and held.worker == worker and tokens > held.tokens:
            held.tokens, held.until = tokens, now + self.lease_s
            self._heard(worker, now)

    def finished(self, worker: str, lease: int, key: Key, now: float) -> bool:
        """True exactly once for an item: the caller takes this result. False: it has one, was given up or withdrawn.

        The first result wins, also when its lease has run out meanwhile: work that arrives late is still work.
        """
        item = self._items.get(key)
        if item is None or lease not in item.leases:
            return False
        self._heard(worker, now)
        self._release(item)
        del self._items[key]
        self._watch(now)
        return True

    def failed(self, worker: str, lease: int, key: Key, error: BaseException, now: float) -> None:
        """The worker could not do this item, and goes on with the others. Ignored unless the lease is in force."""
        item = self._items.get(key)
        if item is not None and item.lease == lease:
            self._heard(worker, now)
            self._retry(item, error)
            self._watch(now)

    def lost(self, worker: str, error: BaseException, now: float) -> None:
        """The worker is gone; what it held goes to others. A worker that is not known changes nothing."""
        if self._workers.pop(worker, None) is None:
            return
        self.first_error = self.first_error or error
        for lease in [n for n, held in self._leases.items() if held.worker == worker]:
            self._break(lease, error)
        self._watch(now)

    def expired(self, now: float) -> list[Key]:
        """End the leases whose deadline has come; the items that lost theirs, to be assigned again or failed.

        A worker that made nothing during BARREN leases in a row is lost too, and named in `expelled`.

        Raises WorkerError, from the first error, when items have waited patience_s without a worker: nobody is left.
        """
        out: list[Key] = []
        for lease in [n for n, held in self._leases.items() if held.until <= now]:
            if lease not in self._leases:  # its worker was expelled for one before it
                continue
            held = self._leases[lease]
            out += held.items
            worker, error = self._workers[held.worker], WorkerError(
                f"worker {held.worker} made no progress on {len(held.items)} item(s) for {self.lease_s:g} s (lease {lease}, first "
                f"item {next(iter(held.items))!r})")
            worker.barren += worker.heard + self.lease_s <= now
            self._break(lease, error)
            if worker.barren >= BARREN:
                out += [k for other in self._leases.values() if other.worker == held.worker for k in other.items]
                self.expelled[held.worker] = error
                self.lost(held.worker, error, now)
        self._watch(now)
        if self._alone_since is not None and self._alone_since + self.patience_s <= now:
            raise WorkerError(f"{len(self._pending)} item(s) waited {self.patience_s:g} s without a worker; the first error: "
                              f"{self.first_error or 'none, no worker has joined'}") from self.first_error
        return out

    def withdraw(self, keys: Iterable[Key] | None = None) -> list[Key]:
        """Forget these outstanding items (None: all): their results will be refused. The keys that were outstanding."""
        gone = [k for k in (list(self._items) if keys is None else keys) if k in self._items]
        for key in gone:
            self._release(self._items.pop(key))
        if not self._pending:
            self._alone_since = None
        return gone

    def next_deadline(self) -> float | None:
        """The time at which `expired` has to be called if nothing is heard until then; None when nothing is waited for."""
        times = [held.until for held in self._leases.values()]
        if self._alone_since is not None:
            times.append(self._alone_since + self.patience_s)
        return min(times, default=None)

    def _choose(self, item: _Item) -> _Worker | None:
        workers = list(self._workers.values())
        fresh = [w for w in workers if w.name not in item.tried]
        free = [w for w in fresh or workers if w.held < w.slots]
        return min(free, key=lambda w: (w.cost + item.cost) / w.slots, default=None)

    def _watch(self, now: float) -> None:
        """Keep the time since which items wait without anybody who could take them."""
        if not self._pending or self._workers:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now

    def _heard(self, name: str, now: float) -> None:
        worker = self._workers.get(name)
        if worker is not None:
            worker.heard, worker.barren = now, 0

    def _break(self, lease: int, error: BaseException) -> None:
        for item in list(self._leases[lease].items.values()):
            self._retry(item, error)

    def _retry(self, item: _Item, error: BaseException) -> None:
        """One attempt has failed: the item waits for the next, or has had its last."""
        self.first_error = self.first_error or error
        if item.lease is not None:
            item.tried.add(self._leases[item.lease].worker)
        item.error, item.attempts = item.error or error, item.attempts + 1
        self._release(item)
        if item.attempts < self.attempts:
            insort(self._pending, item, key=lambda i: i.order)
        else:
            self.failures[item.key] = item.error
            del self._items[item.key]

    def _release(self, item: _Item) -> None:
        """Take the item from whoever holds it."""
        if item.lease is None:
            self._pending.remove(item)
            return
        held = self._leases[item.lease]
        del held.items[item.key]
        if not held.items:
            del self._leases[item.lease]
        if (worker := self._workers.get(held.worker)) is not None:  # else it is being lost
            worker.held, worker.cost = worker.held - 1, worker.cost - item.cost
        item.lease = None
