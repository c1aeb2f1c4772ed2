"""How far sampling may run ahead of training: which prompts may start, and which finished groups are trained next.

Bounded staleness as in AReaL (arXiv 2505.24298): nothing trained by the step after `version` steps has a token older than
`version - lag`. Prompts are places in the data stream (0, 1, 2, ...), and they are trained in that order whatever the order
they finish in, so that neither the time an answer takes nor a resume decides what a step is made of.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class _Place:
    running: bool = False
    oldest: int | None = None  # finished: the oldest version among its tokens


class StalenessQueue:
    """Admits places, keeps them until they are trained, `batch` at a time, and says how old their tokens may be.

    `version` counts steps trained: the weights a step leaves have the next version. lag 0 samples and trains in turn; lag k
    lets (k + 1) * batch prompts be under way. A place that is admitted under weights `held` is trained at version
    `held + lag` or earlier, because only (held + lag - version + 1) * batch places are ever open: each open place is
    trained by the step that its rank among them names, and dropped ones only move the others forward.

        for place in queue.admit(limit): ...start sampling under the weights in force
        queue.finished(place, oldest)      # in any order, more than once
        places = queue.take()              # None: wait for a result or a failure
        ...train them
        queue.trained()                    # the next version is in force
    """

    def __init__(self, batch: int, lag: int, first_place: int = 0):
        if batch < 1 or lag < 0:
            raise ValueError(f"batch {batch}, lag {lag}: need batch >= 1 and lag >= 0")
        self.batch, self.lag, self.version, self.next_place = batch, lag, 0, first_place
        self.training: tuple[int, ...] = ()
        self.dropped = self.refused = 0  # places that are never trained; results that were too old and are made again
        self._open: dict[int, _Place] = {}  # in stream order: rising places, removed but never put back

    @property
    def running(self) -> tuple[int, ...]:
        """Places whose sampling has been started and is not finished."""
        return tuple(p for p, place in self._open.items() if place.running)

    def admit(self, limit: int | None = None, held: int | None = None) -> list[int]:
        """Places to start now, at most `limit`: first those to be made again, then new ones of the stream.

        held: the oldest version that a worker may begin them with, when not all have the one in force.
        """
        held = self.version if held is None else held
        room = max((held + self.lag - self._next_step() + 1) * self.batch, 0)  # ranks that may start under `held`
        out = [p for p, place in list(self._open.items())[:room] if not place.running and place.oldest is None][:limit]
        fresh = max(room - len(self._open), 0)
        fresh = fresh if limit is None else min(fresh, limit - len(out))
        out += range(self.next_place, self.next_place + fresh)
        self.next_place += fresh
        for place in out:
            self._open.setdefault(place, _Place()).running = True
        return out

    def finished(self, place: int, oldest: int) -> bool:
        """True when the group is taken, and will be trained; `oldest` is the lowest version among its tokens.

        False: it has been taken before, was dropped or is trained; or it is too old for its step, and `admit` will name the
        place again.
        """
        known = self._open.get(place)
        if known is None or known.oldest is not None:
            return False
        known.running = False
        if oldest < self._step_of(place) - self.lag:
            self.refused += 1
            return False
        known.oldest = oldest
        return True

    def drop(self, place: int) -> bool:
        """Never train this place (it failed for good, or its group is of no use); the next one moves up. True the first time."""
        if self._open.pop(place, None) is None:
            return False
        self.dropped += 1
        return True

    def take(self) -> tuple[int, ...] | None:
        """The next `batch` places of the stream, when all are finished; they are in training until `trained`."""
        if self.training:
            raise RuntimeError(f"places {self.training} are in training; call trained() before the next take()")
        first = tuple(self._open)[:self.batch]
        if len(first) < self.batch or any(self._open[p].oldest is None for p in first):
            return None
        for place in first:
            del self._open[place]
        self.training = first
        return first

    def trained(self) -> int:
        """The places taken are trained, for ever; the version that is in force now."""
        if not self.training:
            raise RuntimeError("nothing is in training; take() comes first")
        self.training = ()
        self.version += 1
        return self.version

    def state(self) -> dict[str, Any]:
        """What a checkpoint between two steps holds (plain data). What is running will be made again."""
        if self.training:
            raise RuntimeError(f"places {self.training} are in training; a checkpoint is made before take() or after trained()")
        return {"version": self.version, "next_place": self.next_place, "dropped": self.dropped, "refused": self.refused,
                "open": [[p, place.oldest] for p, place in self._open.items()]}

    def restore(self, state: dict[str, Any], groups: Container[int]) -> None:
        """Continue from `state`. Finished places stay so when the caller has their `groups`; the other open ones are made again."""
        self.version, self.next_place, self.training = state["version"], state["next_place"], ()
        self.dropped, self.refused = state["dropped"], state["refused"]
        self._open = {p: _Place(oldest=oldest if p in groups else None) for p, oldest in state["open"]}

    def _next_step(self) -> int:
        """The version at which the next batch that is taken will be trained."""
        return self.version + bool(self.training)

    def _step_of(self, place: int) -> int:
        """The version at which an open place will be trained (or an earlier one, when others are dropped)."""
        return self._next_step() + list(self._open).index(place) // self.batch
