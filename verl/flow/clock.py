"""Time as an argument: the wall clock of a run, or one that a test moves."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Seconds that never go back, and a wait that always ends."""

    def now(self) -> float:
        """Seconds since some moment."""

    def wait_until(self, deadline: float, wake: threading.Event) -> bool:
        """Return when `wake` is set (True) or at the deadline (False), whichever is first."""


class WallClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def wait_until(self, deadline: float, wake: threading.Event) -> bool:
        return wake.wait(max(deadline - time.monotonic(), 0.0))


class VirtualClock:
    """Time that passes only while somebody waits: what was put on the calendar happens then, in order of time and of booking.

    One thread, no real waiting, the same run every time.
    """

    def __init__(self, start: float = 0.0):
        self._now, self._booked = start, 0
        self._calendar: list[tuple[float, int, Callable[[], None]]] = []

    def now(self) -> float:
        return self._now

    def call_at(self, when: float, action: Callable[[], None]) -> None:
        """Do this at that time (at once in the next wait, when it is past)."""
        self._booked += 1
        heapq.heappush(self._calendar, (max(when, self._now), self._booked, action))

    def wait_until(self, deadline: float, wake: threading.Event) -> bool:
        while not wake.is_set():
            if not self._calendar or self._calendar[0][0] > deadline:
                self._now = max(self._now, deadline)
                return False
            self._now, _, action = heapq.heappop(self._calendar)
            action()
        return True
