"""The whole control plane under a virtual clock: a driver, its workers, rewards, a trainer and a disk, on a bad network.

One `Schedule` is one history: what is lost, late, doubled, slow, killed. `simulate` plays it and raises `Broken` when a
promise of verl.flow.dispatch or verl.flow.staleness does not hold. What is true is written down by the simulated workers
and disk themselves, never read from the classes under test. `python tests/flow/simulator.py 10000` plays that many.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from verl.core.errors import WorkerError
from verl.flow.clock import VirtualClock
from verl.flow.dispatch import Dispatcher
from verl.flow.staleness import StalenessQueue

LEASE, PATIENCE, SYNC, BEAT, SCORING, ATTEMPTS = 8.0, 40.0, 15.0, 4.0, 12.0, 4
LONGEST_LIFE = 1000.0  # that nobody asks about
LONGEST_WAIT = max(LEASE, PATIENCE, SYNC, SCORING)  # of the driver, in virtual seconds


class Broken(AssertionError):
    """A promise that did not hold."""


class Killed(Exception):
    """The driver's process ends here, between two of its actions."""


@dataclass(frozen=True)
class Schedule:
    """One history. Rates are probabilities for each message, item or worker; seconds are virtual."""

    seed: int
    batch: int = 2
    lag: int = 1
    steps: int = 4
    slots: tuple[int, ...] = (2, 2)  # one a worker
    loss: float = 0.0
    double: float = 0.0
    delay: float = 0.1  # mean of an exponential: messages overtake each other
    death: float = 0.0  # of a worker at each chunk it makes
    hang: float = 0.0
    refuse: float = 0.0  # an item fails on a worker
    rejoin: float | None = 3.0  # seconds until a dead worker's successor starts; None: never
    slow_reward: float = 0.0
    kills: tuple[int, ...] = ()  # the driver's actions before which it dies, one life after the other
    save_every: int = 1

    @staticmethod
    def drawn(seed: int) -> Schedule:
        """A history of its own for every seed; a third of them have a quiet network, so that each fault also comes alone."""
        r = random.Random(seed)
        noisy = r.random() < 0.67
        return Schedule(seed, batch=r.randint(1, 3), lag=r.choice((0, 1, 1, 2)), steps=r.randint(2, 4),
                        slots=tuple(r.randint(1, 4) for _ in range(r.randint(1, 3))),
                        loss=noisy * r.choice((0, 0.02, 0.1)), double=noisy * r.choice((0, 0.1, 0.3)),
                        delay=r.choice((0.01, 0.3, 1.5)), death=r.choice((0, 0, 0.02, 0.1)), hang=r.choice((0, 0, 0.02)),
                        refuse=r.choice((0, 0, 0.05, 0.3)), rejoin=r.choice((1.0, 5.0, 5.0, None)),
                        slow_reward=r.choice((0, 0.1)), save_every=r.randint(1, 2),
                        kills=tuple(r.randint(1, 40) for _ in range(r.choice((0, 0, 1, 2)))))


@dataclass
class World:
    """What outlives a driver: time, chance, the disk, and the record of what really happened."""

    schedule: Schedule
    clock: VirtualClock = field(default_factory=VirtualClock)
    checkpoint: dict | None = None
    journal: dict[int, int] = field(default_factory=dict)  # place -> the oldest version in its group, as it was made
    finished: set[int] = field(default_factory=set)  # places that have a group which may be trained
    dropped: dict[int, BaseException] = field(default_factory=dict)  # reported as failed, in the life that counts
    trained: list[tuple[int, ...]] = field(default_factory=list)  # places of every step, in the life that counts
    refused: int = 0
    sent: int = 0  # items, each time they are handed to a worker
    seconds: float = 0.0  # until the end

    def __post_init__(self):
        self.random = random.Random(self.schedule.seed)

    def chance(self, rate: float) -> bool:
        return rate > 0 and self.random.random() < rate


class Wire:
    """One direction of a connection between two processes. It dies with either end: nothing of it reaches a successor."""

    def __init__(self, world: World, receive: Callable):
        self.world, self.receive, self.open = world, receive, True

    def send(self, *message) -> None:
        world, s = self.world, self.world.schedule
        for _ in range(2 if world.chance(s.double) else 1):
            if not world.chance(s.loss):
                world.clock.call_at(world.clock.now() + world.random.expovariate(1 / s.delay), lambda: self._arrive(message))

    def _arrive(self, message: tuple) -> None:
        if self.open:
            self.receive(*message)


class Worker:
    """Makes items chunk by chunk under the weights it holds at the moment, `slots` at a time; tells of life every BEAT."""

    def __init__(self, driver: Driver, name: str, slots: int):
        self.world, self.name, self.slots, self.version = driver.world, name, slots, -1
        self.alive, self.hung = True, False
        self.inbox, self.outbox = Wire(self.world, self.receive), Wire(self.world, driver.receive)
        self.waiting: list[tuple[int, int]] = []  # (lease, place)
        self.seen: set[int] = set()
        self.busy = 0
        self.tokens: dict[int, int] = {}
        self.seconds = self.world.random.choice((0.2, 0.5, 2.0))  # a chunk: workers are uneven
        self.beat()

    def receive(self, kind: str, *data) -> None:
        if kind == "weights":
            self.version = max(self.version, data[0])
            self.outbox.send("beat", self.name, self.slots, self.version)
        elif data[0] not in self.seen:  # work: (lease, places)
            self.seen.add(data[0])
            self.waiting += [(data[0], place) for place in data[1]]
            self.start()

    def beat(self) -> None:
        if self.alive:
            self.outbox.send("beat", self.name, self.slots, self.version)
            self.later(BEAT, self.beat)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        clock = self.world.clock
        clock.call_at(clock.now() + seconds, lambda: self.alive and action())

    def start(self) -> None:
        while self.waiting and self.busy < self.slots and not self.hung:
            lease, place = self.waiting.pop(0)
            self.busy += 1
            if self.world.chance(self.world.schedule.refuse):
                error = ValueError(f"{self.name} cannot make {place} under lease {lease}")
                self.later(0.1, lambda lease=lease, place=place, error=error: self.end("failed", lease, place, error))
            else:
                self.chunk(lease, place, self.version, self.world.random.randint(1, 3))

    def chunk(self, lease: int, place: int, oldest: int, left: int) -> None:
        """`oldest` is the version of the first token; later ones come from newer weights as they arrive."""
        schedule = self.world.schedule
        if self.world.chance(schedule.death):
            return self.die()
        self.hung = self.hung or self.world.chance(schedule.hang)
        if self.hung:  # lives, beats, makes nothing any more
            return
        if left == 0:
            return self.end("finished", lease, place, oldest)
        self.tokens[lease] = self.tokens.get(lease, 0) + 10
        self.outbox.send("progress", self.name, lease, self.tokens[lease])
        self.later(self.seconds, lambda: self.chunk(lease, place, oldest, left - 1))

    def end(self, kind: str, lease: int, place: int, what) -> None:
        self.busy -= 1
        self.outbox.send(kind, self.name, lease, place, what)
        self.start()

    def die(self, quietly: bool = False) -> None:
        self.alive = self.inbox.open = False
        if not quietly and self.world.chance(0.5):  # some transports notice; what was sent before still arrives
            self.outbox.send("lost", self.name, WorkerError(f"{self.name} died"))


class Driver:
    """One life of the job's single controller, as the trainer drives the two classes. `run` ends, is Killed, or raises."""

    dispatcher_class, queue_class = Dispatcher, StalenessQueue

    def __init__(self, world: World, dies_at: int | None):
        s = world.schedule
        self.world, self.clock, self.dies_at, self.actions = world, world.clock, dies_at, 0
        self.inbox: list[tuple] = []
        self.wake = threading.Event()
        self.dispatcher = self.dispatcher_class(LEASE, PATIENCE, ATTEMPTS)
        self.queue = self.queue_class(s.batch, s.lag)
        self.groups: dict[int, int] = {}  # finished places of this life -> oldest version, as the worker made them
        self.scoring: dict[int, float] = {}  # place -> deadline
        self.held: dict[str, int] = {}  # worker -> version it has shown
        self.born = self.published = self.clock.now()
        self.given: dict[int, tuple[str, int]] = {}  # place -> (worker, lease) in force, by the driver's own account
        self.first: dict[int, BaseException | None] = {}  # place -> first error it met; None: a lease that ran out
        self.met: list[BaseException | None] = []  # every error since nothing was last outstanding
        self.workers: dict[str, Worker] = {}
        self.ended: set[str] = set()  # workers whose process was ended
        self.restore()
        for i, slots in enumerate(s.slots):
            self.launch(f"w{i}.0", slots)

    # -- one life ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        while self.queue.version < self.world.schedule.steps:
            self.train_if_ready()
            self.admit()
            self.hand_out()
            deadline = self.deadline()
            if deadline is None:
                raise Broken(f"stuck at version {self.queue.version}: work remains and nothing is waited for")
            if deadline > self.clock.now() + LONGEST_WAIT:
                raise Broken(f"a wait of {deadline - self.clock.now():.1f} s")
            if self.clock.now() > self.born + LONGEST_LIFE:
                self.check_length_of_life()
            self.wake.clear()
            self.clock.wait_until(deadline, self.wake)
            for message in self.inbox:
                getattr(self, f"on_{message[0]}")(*message[1:])
            self.inbox.clear()
            if self.clock.now() >= deadline:
                self.expire()
            if self.dispatcher.failures:
                self.report_failures()

    def check_length_of_life(self) -> None:
        """No life is longer than if every wait ran to its end, one item after the other."""
        s = self.world.schedule
        items = (s.steps + s.lag + 1) * s.batch + s.steps + min(len(self.world.dropped), 30)
        if self.clock.now() - self.born > LONGEST_WAIT * (ATTEMPTS + 1) * items:
            raise Broken(f"a life of {self.clock.now() - self.born:.0f} s, at version {self.queue.version}")

    def act(self) -> None:
        """Called before everything the world can see: the process may end between any two of these."""
        self.actions += 1
        if self.actions == self.dies_at:
            raise Killed

    def receive(self, *message) -> None:
        self.inbox.append(message)
        self.wake.set()

    def later(self, seconds: float, *message) -> None:
        """A message to itself, from the trainer or the scorer in its own process."""
        self.clock.call_at(self.clock.now() + seconds, lambda: self.receive(*message))

    def deadline(self) -> float | None:
        times = [self.dispatcher.next_deadline(), *self.scoring.values()]
        if any(self.held[w] < self.queue.version for w in self.dispatcher.workers):
            times.append(self.published + SYNC)
        if self.queue.training:
            times.append(self.trains_until)
        return min((t for t in times if t is not None), default=None)

    # -- work --------------------------------------------------------------------------------------------------------

    def lowest_held(self) -> int:
        return min((self.held[w] for w in self.dispatcher.workers), default=self.queue.version)

    def admit(self) -> None:
        for place in self.queue.admit(held=self.lowest_held()):
            if place in self.world.journal:
                self.score(place, self.world.journal[place])
            else:
                if self.dispatcher.done and self.dispatcher.workers:
                    self.met.clear()
                self.dispatcher.add(place, self.world.random.randint(10, 30), self.clock.now())

    def hand_out(self) -> None:
        for worker, places, lease in self.dispatcher.assign(self.clock.now()):
            if again := self.world.finished.intersection(places):
                raise Broken(f"places {again} were finished, and are sampled again")
            self.act()
            self.world.sent += len(places)
            self.given |= dict.fromkeys(places, (worker, lease))
            self.workers[worker].inbox.send("work", lease, places)

    def score(self, place: int, oldest: int) -> None:
        self.groups[place] = oldest
        self.scoring[place] = self.clock.now() + SCORING
        slow = self.world.chance(self.world.schedule.slow_reward)
        self.later(self.world.random.choice((0.1, 3.0)) if not slow else 2 * SCORING, "scored", place)

    def train_if_ready(self) -> None:
        places = None if self.queue.training else self.queue.take()
        if places is None:
            return
        s, version = self.world.schedule, self.queue.version
        old = [p for p in places if self.groups[p] < version - s.lag]
        if old:
            raise Broken(f"step at version {version}: places {old} have tokens older than {version - s.lag}")
        seconds = self.world.random.choice((0.5, 4.0))
        self.trains_until = self.clock.now() + seconds
        self.later(seconds, "trained", places)

    # -- messages ----------------------------------------------------------------------------------------------------

    def on_beat(self, worker: str, slots: int, version: int) -> None:
        self.held[worker] = max(version, self.held.get(worker, -1))
        if worker not in self.ended and self.held[worker] == self.queue.version:
            self.dispatcher.join(worker, slots, self.clock.now())
        if self.held[worker] < self.queue.version:
            self.workers[worker].inbox.send("weights", self.queue.version)

    def on_progress(self, worker: str, lease: int, tokens: int) -> None:
        self.dispatcher.progress(worker, lease, tokens, self.clock.now())

    def on_finished(self, worker: str, lease: int, place: int, oldest: int) -> None:
        if self.dispatcher.finished(worker, lease, place, self.clock.now()):
            if place in self.scoring or place in self.groups:
                raise Broken(f"a second result of place {place} was taken")
            self.act()
            self.world.journal[place] = oldest
            self.world.finished.add(place)
            self.given.pop(place, None)
            self.score(place, oldest)

    def on_failed(self, worker: str, lease: int, place: int, error: BaseException) -> None:
        if self.given.get(place) == (worker, lease):
            self.met.append(error)
            self.first.setdefault(place, error)
            del self.given[place]
        self.dispatcher.failed(worker, lease, place, error, self.clock.now())

    def on_lost(self, worker: str, error: BaseException) -> None:
        if worker in self.dispatcher.workers:
            self.met.append(error)
            for place in [p for p, (w, _) in self.given.items() if w == worker]:
                self.first.setdefault(place, error)
                del self.given[place]
        self.dispatcher.lost(worker, error, self.clock.now())
        self.end(worker)

    def end(self, worker: str) -> None:
        """End the process of a worker that is lost (it may be alive), and start its successor."""
        if worker in self.ended:
            return
        self.ended.add(worker)
        self.workers[worker].die(quietly=True)
        name, _, life = worker.partition(".")
        if self.world.schedule.rejoin is not None:
            self.later(self.world.schedule.rejoin, "launch", f"{name}.{int(life) + 1}", self.workers[worker].slots)

    def on_launch(self, worker: str, slots: int) -> None:
        self.launch(worker, slots)

    def launch(self, worker: str, slots: int) -> None:
        self.workers[worker] = Worker(self, worker, slots)

    def on_scored(self, place: int) -> None:
        if self.scoring.pop(place, None) is None:
            return  # its deadline has passed
        if not self.queue.finished(place, self.groups[place]):
            self.world.refused += 1
            del self.groups[place], self.world.journal[place]  # too old for its step: made again
            self.world.finished.discard(place)

    def on_trained(self, places: tuple[int, ...]) -> None:
        self.act()
        self.queue.trained()
        self.world.trained.append(places)
        self.published = self.clock.now()
        if self.queue.version % self.world.schedule.save_every == 0:
            self.save()
        for worker in self.workers.values():
            worker.inbox.send("weights", self.queue.version)

    def expire(self) -> None:
        now = self.clock.now()
        for place in self.dispatcher.expired(now):
            self.met.append(None)
            self.first.setdefault(place, None)
            self.given.pop(place, None)
        for worker in list(self.dispatcher.expelled):
            self.end(worker)
        self.dispatcher.expelled.clear()
        for place in [p for p, until in self.scoring.items() if until <= now]:
            del self.scoring[place]
            self.report(place, TimeoutError(f"no reward for {place}"))
        if self.published + SYNC <= now:
            for worker in [w for w in self.dispatcher.workers if self.held[w] < self.queue.version]:
                self.on_lost(worker, WorkerError(f"{worker} did not take version {self.queue.version}"))

    def report_failures(self) -> None:
        for place, error in self.dispatcher.failures.items():
            first = self.first[place]
            if error is not first and (first is not None or "made no progress" not in str(error)):
                raise Broken(f"place {place} first met {first!r}, reported is {error!r}")
            self.report(place, error)
        self.dispatcher.failures.clear()

    def report(self, place: int, error: BaseException) -> None:
        self.act()
        self.world.dropped[place] = error
        self.queue.drop(place)

    # -- the disk ----------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """The checkpoint first; the journal keeps what it does not cover."""
        world = self.world
        self.act()
        world.checkpoint = {"queue": self.queue.state(), "trained": list(world.trained), "dropped": dict(world.dropped)}
        self.act()
        self.forget_trained()

    def forget_trained(self) -> None:
        done = {p for places in self.world.trained for p in places}
        self.world.journal = {p: oldest for p, oldest in self.world.journal.items() if p not in done}

    def restore(self) -> None:
        world, found = self.world, self.world.checkpoint
        world.trained = list(found["trained"]) if found else []
        world.dropped = dict(found["dropped"]) if found else {}
        if found:
            self.queue.restore(found["queue"], world.journal)
        self.groups = {p: world.journal[p] for p, _ in found["queue"]["open"] if p in world.journal} if found else {}

    def close(self) -> None:
        """The end of the process, and with it of its connections and children."""
        self.dispatcher.withdraw()
        for worker in self.workers.values():
            worker.outbox.open = False
            worker.die(quietly=True)
        self.receive = _nobody


def _nobody(*_) -> None:
    """A message to a process that has ended."""


def simulate(schedule: Schedule, driver_class: type[Driver] = Driver) -> World:
    """Play one history to its end and check every promise; what really happened. Raises Broken."""
    world = World(schedule)
    for dies_at in (*schedule.kills, None):
        driver = driver_class(world, dies_at)
        try:
            driver.run()
            _check_end(world)
            break
        except Killed:
            pass
        except WorkerError as error:
            _check_desertion(driver, error)
            break
        finally:
            driver.close()
    if not driver.dispatcher.done or driver.dispatcher.next_deadline() is not None:
        raise Broken("something is waited for after the end")
    end = world.clock.now()
    world.clock.wait_until(end + LONGEST_WAIT, threading.Event())
    if any(w.alive for w in driver.workers.values()):
        raise Broken("a worker outlives its driver")
    world.seconds = end
    return world


def _check_end(world: World) -> None:
    """Every place up to the last trained one was trained once, in stream order, or reported as failed."""
    s, places = world.schedule, [p for step in world.trained for p in step]
    if len(world.trained) != s.steps or any(len(step) != s.batch for step in world.trained):
        raise Broken(f"{s.steps} steps of {s.batch} were asked for: {world.trained}")
    if places != sorted(set(places)):
        raise Broken(f"trained twice or out of order: {world.trained}")
    lost = set(range(places[-1])) - set(places) - set(world.dropped)
    if lost or set(places) & set(world.dropped):
        raise Broken(f"lost without a word: {sorted(lost)}; trained though reported as failed: {set(places) & set(world.dropped)}")
    if world.refused and not s.kills:
        raise Broken(f"{world.refused} groups were too old: admission let prompts start that it should have held back")


def _check_desertion(driver: Driver, error: WorkerError) -> None:
    """A run may end early only because every worker is gone or silent, and must say what happened first."""
    s = driver.world.schedule
    if not (s.death or s.hang or s.loss):
        raise Broken(f"ended early on a good day: {error}") from error
    first = driver.met[0] if driver.met else "no worker has joined"
    if (str(first) if first is not None else "made no progress") not in str(error):
        raise Broken(f"the first error was {first}, reported is: {error}")


def main(count: int) -> None:
    start, ended, virtual = time.perf_counter(), 0, 0.0
    for seed in range(count):
        try:
            world = simulate(Schedule.drawn(seed))
        except Broken as broken:
            sys.exit(f"{broken}\nreplay: simulate({Schedule.drawn(seed)})")
        ended += len(world.trained) == world.schedule.steps
        virtual += world.seconds
    seconds = time.perf_counter() - start
    print(f"{count} schedules in {seconds:.1f} s ({count / seconds:.0f} a second), {virtual / 3600:.0f} virtual hours")
    print(f"{ended} trained to the end, {count - ended} ended because every worker was gone; nothing broken")


if __name__ == "__main__":
    main(int(sys.argv[1]))
