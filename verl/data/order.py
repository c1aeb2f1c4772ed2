"""Which prompt comes when: a pure function of (seed, epoch), and a frontier of what has been consumed.

A slot is a place in the endless order: slot s is place s % size of epoch s // size. What a run has consumed is stored
in slots, never in steps, batches or ranks, so any world size can go on from it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np

from verl.core.errors import ConfigError
from verl.core.types import Task, derive_seed

Item = TypeVar("Item")


class Sampler(Protocol):
    """What `data.sampler: module:Class` has to be."""

    def __init__(self, tasks: Sequence[Task], seed: int): ...

    def order(self, epoch: int) -> Sequence[int]:
        """Indexes into tasks, as many in every epoch; a pure function of (tasks, seed, epoch)."""


def permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """int64 [size]: a shuffled range that depends on its arguments only, not on any library's generator."""
    keys = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    keys += np.uint64(derive_seed(seed, "order", epoch))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64
        keys = (keys ^ (keys >> np.uint64(shift))) * np.uint64(factor)
    return np.argsort(keys ^ (keys >> np.uint64(31)), kind="stable")


@dataclass(frozen=True, slots=True)
class Order:
    """The built-in sampler: sources laid end to end, each shuffled over by itself, mixed evenly by weight.

    An epoch has as many slots as there are rows. With weights, source i fills its share of them (at least one), going
    on where it stopped in the epoch before, so that a small source repeats and a large one takes several epochs, and
    no row comes a second time before every row of its source came once. Without weights an epoch is every row once.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...] | None
    seed: int
    shuffle: bool

    def order(self, epoch: int) -> np.ndarray:
        """int64 [sum of sizes]: indexes into the rows."""
        if self.weights is None:
            return self._stream(0, sum(self.sizes), epoch * sum(self.sizes), sum(self.sizes))
        quotas = self.quotas()
        starts = np.cumsum([0, *self.sizes[:-1]])
        rows = [start + self._stream(source, size, epoch * quota, quota)
                for source, (start, size, quota) in enumerate(zip(starts, self.sizes, quotas))]
        places = np.concatenate([(np.arange(quota) + 0.5) / quota for quota in quotas])
        return np.concatenate(rows)[np.argsort(places, kind="stable")]

    def quotas(self) -> list[int]:
        """Slots of each source in an epoch: its share of the rows by largest remainder."""
        slots = sum(self.sizes) - len(self.sizes)
        exact = [1 + slots * weight / sum(self.weights) for weight in self.weights]
        quotas = [int(share) for share in exact]
        for source in sorted(range(len(exact)), key=lambda i: quotas[i] - exact[i])[:sum(self.sizes) - sum(quotas)]:
            quotas[source] += 1
        return quotas

    def _stream(self, source: int, size: int, start: int, count: int) -> np.ndarray:
        """`count` rows of a source from its place `start` on, through as many of its own rounds as that takes."""
        first, last = start // size, (start + count - 1) // size
        rounds = [permutation(size, derive_seed(self.seed, source), r) if self.shuffle else np.arange(size)
                  for r in range(first, last + 1)]
        return np.concatenate(rounds)[start - first * size:][:count]


def checked_order(order: Sequence[int], rows: int, size: int | None, setting: str) -> np.ndarray:
    """A foreign sampler's order as int64. Raises ConfigError unless it has `size` (any, if None) valid indexes."""
    made = np.asarray(order)
    if made.ndim != 1 or not len(made) or made.dtype.kind not in "iu" or made.min() < 0 or made.max() >= rows:
        raise ConfigError(f"{setting}: order(epoch) must return 1 or more indexes in 0..{rows - 1}, saw {order!r:.80}")
    if size is not None and len(made) != size:
        raise ConfigError(f"{setting}: order(epoch) returned {len(made)} indexes, {size} in the first epoch; "
                          "every epoch must have as many")
    return made.astype(np.int64)


@dataclass(slots=True)
class Frontier:
    """Slots consumed: all below `start`, and those in `done` (finished out of order). The rest is to be handed out.

    Slots in flight are not part of what is saved: after a restart they are handed out again.
    """

    start: int = 0
    done: set[int] = field(default_factory=set)
    flying: set[int] = field(default_factory=set)
    returned: list[int] = field(default_factory=list)  # a heap
    next: int = 0

    def issue(self, n: int) -> list[int]:
        """The next n slots: those put back first, then new ones in order."""
        slots = []
        while len(slots) < n:
            if self.returned:
                slots.append(heapq.heappop(self.returned))
                continue
            slot = max(self.next, self.start)  # the start passes `next` over slots finished in an earlier life
            if slot not in self.done:
                slots.append(slot)
            self.next = slot + 1
        self.flying.update(slots)
        return slots

    def settle(self, slots: Iterable[int]) -> None:
        """These slots in flight are consumed. Raises KeyError for one that is not in flight."""
        for slot in slots:
            self.flying.remove(slot)
            self.done.add(slot)
        while self.start in self.done:
            self.done.remove(self.start)
            self.start += 1

    def put_back(self, slots: Iterable[int]) -> None:
        """These slots in flight are to be handed out again, before any new one. Raises KeyError if not in flight."""
        for slot in slots:
            self.flying.remove(slot)
            heapq.heappush(self.returned, slot)


def shard(items: Sequence[Item], rank: int, world: int) -> Sequence[Item]:
    """One rank's part of a global batch: contiguous, as even as possible, empty when there are more ranks than items.

    Uneven parts are fine because losses are divided by the whole batch's count, never averaged over ranks.
    """
    bounds = [len(items) * r // world for r in (rank, rank + 1)]
    return items[bounds[0]:bounds[1]]
