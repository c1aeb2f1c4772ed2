"""The control plane keeps its promises in thousands of histories of faults, and the simulator that says so finds planted faults."""

import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulator import Broken, Driver, Schedule, simulate

from verl.core.errors import WorkerError
from verl.flow.clock import VirtualClock, WallClock
from verl.flow.dispatch import Dispatcher
from verl.flow.staleness import StalenessQueue

SEEDS = 1000


def test_no_prompt_is_lost_or_trained_twice_and_no_wait_is_unbounded():
    ended = 0
    for seed in range(SEEDS):
        schedule = Schedule.drawn(seed)
        try:
            ended += len(simulate(schedule).trained) == schedule.steps
        except Broken as broken:
            raise AssertionError(f"{broken}; replay: simulate({schedule})") from broken
    assert ended > 0.9 * SEEDS, "most histories must be survived, or the promises say little"


rates = st.floats(0, 0.3)
schedules = st.builds(
    Schedule, seed=st.integers(0, 2**16), batch=st.integers(1, 4), lag=st.integers(0, 3), steps=st.integers(1, 4),
    slots=st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple), loss=rates, double=rates, delay=st.floats(0.01, 3),
    death=st.floats(0, 0.1), hang=st.floats(0, 0.1), refuse=rates, rejoin=st.none() | st.floats(0.5, 10), slow_reward=rates,
    kills=st.lists(st.integers(1, 50), max_size=3).map(tuple), save_every=st.integers(1, 3))


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(schedules)
def test_any_history(schedule):
    simulate(schedule)


def test_a_schedule_is_one_history():
    """What a seed found once it finds again."""
    for seed in range(20):
        one, two = simulate(Schedule.drawn(seed)), simulate(Schedule.drawn(seed))
        assert (one.trained, one.sent, one.seconds, str(one.dropped)) == (two.trained, two.sent, two.seconds, str(two.dropped))


def test_a_quiet_day_wastes_nothing():
    for lag in (0, 1, 3):
        schedule = Schedule(seed=1, lag=lag, steps=6, batch=3)
        world = simulate(schedule)
        assert [p for step in world.trained for p in step] == list(range(18))
        assert not world.dropped and world.refused == 0 and 18 <= world.sent <= 18 + lag * 3


def test_running_ahead_saves_time():
    """Later batches are sampled while earlier ones are trained: the same work ends sooner, the more so the larger the lag."""
    seconds = [sum(simulate(Schedule(seed=s, lag=lag, steps=8, batch=3)).seconds for s in range(10)) for lag in (0, 1, 2)]
    assert seconds[0] > 1.2 * seconds[1] and seconds[1] > seconds[2]


# -- planted faults: each must be found -----------------------------------------------------------------------------


class ForgetsToReissue(Dispatcher):
    def _break(self, lease, error):
        for item in list(self._leases[lease].items.values()):
            self._release(item)

    def withdraw(self, keys=None):
        self._items.clear()


class TakesLateResultsToo(Dispatcher):
    """The result of an expired lease counts as one more sample."""

    def assign(self, now):
        out = super().assign(now)
        self.issued = getattr(self, "issued", set()) | {(a.lease, key) for a in out for key in a.keys}
        return out

    def finished(self, worker, lease, key, now):
        return super().finished(worker, lease, key, now) or (lease, key) in self.issued


class TakesDoubles(Dispatcher):
    def finished(self, worker, lease, key, now):
        super().finished(worker, lease, key, now)
        return True


class WaitsForWorkersForEver(Dispatcher):
    def next_deadline(self):
        return min((held.until for held in self._leases.values()), default=None)


class NeverExpels(Dispatcher):
    def _break(self, lease, error):
        self._heard(self._leases[lease].worker, 0.0)
        super()._break(lease, error)


class ReportsTheLastError(Dispatcher):
    def _retry(self, item, error):
        item.error = None
        super()._retry(item, error)


class AdmitsTwoStepsMore(StalenessQueue):
    def __init__(self, batch, lag):
        super().__init__(batch, lag + 2)


class AdmitsFirstAndRefusesLater(StalenessQueue):
    def admit(self, limit=None, held=None):
        self.lag += 2
        out = super().admit(limit, held)
        self.lag -= 2
        return out


class TrustsThatWeightsArrived(StalenessQueue):
    """Admits as if every worker had the version in force."""

    def admit(self, limit=None, held=None):
        return super().admit(limit)


class TrainsWhatFinishesFirst(StalenessQueue):
    def take(self):
        done = tuple(p for p, place in self._open.items() if place.oldest is not None)[:self.batch]
        if len(done) < self.batch:
            return None
        self.training = done
        for place in done:
            del self._open[place]
        return done


class ForgetsWhatWasRunning(StalenessQueue):
    """The checkpoint holds how far the stream was read and the finished groups, as most do."""

    def state(self):
        state = super().state()
        return state | {"open": [row for row in state["open"] if row[1] is not None]}


class CountsInsteadOfPlaces(StalenessQueue):
    """The checkpoint holds one number: prompts trained (field case D004)."""

    def state(self):
        return super().state() | {"open": [], "next_place": self.version * self.batch}


def with_dispatcher(cls):
    return type(cls.__name__, (Driver,), {"dispatcher_class": cls})


def with_queue(cls):
    return type(cls.__name__, (Driver,), {"queue_class": cls})


class ALivingProcessIsProgress(Driver):
    def on_beat(self, worker, slots, version):
        super().on_beat(worker, slots, version)
        for held in self.dispatcher._leases.values():
            if held.worker == worker:
                held.until = self.clock.now() + self.dispatcher.lease_s


class ClearsTheJournalAtACheckpoint(Driver):
    def forget_trained(self):
        self.world.journal = {}


class ForgetsBeforeItSaves(Driver):
    def save(self):
        self.forget_trained()
        super().save()


class WaitsForRewardsForEver(Driver):
    def score(self, place, oldest):
        super().score(place, oldest)
        self.scoring[place] = float("inf")


class LeavesItsWorkersBehind(Driver):
    def close(self):
        self.dispatcher.withdraw()


FAULTS = [*map(with_dispatcher, (ForgetsToReissue, TakesLateResultsToo, TakesDoubles, WaitsForWorkersForEver, NeverExpels,
                                 ReportsTheLastError)),
          *map(with_queue, (AdmitsTwoStepsMore, AdmitsFirstAndRefusesLater, TrustsThatWeightsArrived, TrainsWhatFinishesFirst,
                            ForgetsWhatWasRunning, CountsInsteadOfPlaces)),
          ALivingProcessIsProgress, ClearsTheJournalAtACheckpoint, ForgetsBeforeItSaves, WaitsForRewardsForEver,
          LeavesItsWorkersBehind]


@pytest.mark.parametrize("driver", FAULTS, ids=lambda d: d.__name__)
def test_the_simulator_finds(driver):
    for seed in range(SEEDS):
        try:
            simulate(Schedule.drawn(seed), driver)
        except Broken as broken:
            print(f"found by seed {seed}: {broken}")
            return
    pytest.fail(f"{driver.__name__} keeps every promise in {SEEDS} histories: the simulator does not look")


# -- clocks ----------------------------------------------------------------------------------------------------------


def test_virtual_time_passes_in_order_and_only_while_waiting():
    clock, seen, wake = VirtualClock(), [], threading.Event()
    clock.call_at(2, lambda: seen.append(("b", clock.now())))
    clock.call_at(1, lambda: (seen.append(("a", clock.now())), clock.call_at(0.5, lambda: seen.append(("late", clock.now())))))
    clock.call_at(2, lambda: (seen.append(("c", clock.now())), wake.set()))
    assert clock.now() == 0 and not seen
    assert clock.wait_until(1.5, wake) is False and clock.now() == 1.5
    assert clock.wait_until(9, wake) is True and clock.now() == 2
    assert seen == [("a", 1), ("late", 1), ("b", 2), ("c", 2)]
    wake.clear()
    assert clock.wait_until(9, wake) is False and clock.now() == 9
    assert clock.wait_until(3, wake) is False and clock.now() == 9, "time never goes back"


def test_the_wall_clock_wakes_and_ends():
    clock, wake = WallClock(), threading.Event()
    start = clock.now()
    assert clock.wait_until(start + 0.05, wake) is False and clock.now() >= start + 0.05
    threading.Timer(0.02, wake.set).start()
    assert clock.wait_until(clock.now() + 60, wake) is True
    assert clock.wait_until(clock.now() - 1, wake) is True
    assert abs(clock.now() - time.monotonic()) < 5


def test_the_first_error_ends_a_run_without_workers():
    """Every worker dies and none comes back: the run ends in bounded time, and says what happened first."""
    seen = []

    class Watching(Driver):
        def expire(self):
            try:
                super().expire()
            except WorkerError as error:
                seen.append((self.clock.now(), str(error), error.__cause__))
                raise

    simulate(Schedule(seed=3, death=1.0, rejoin=None), Watching)
    (when, text, cause), = seen
    assert when < 120 and "without a worker" in text and str(cause) in text
