"""From one layout to another: which rank sends which block to whom, each byte once to every receiver that lacks it.

HybridFlow (arXiv 2409.19256, section 5) avoids redundant weights within one grid of parallel groups; here the two layouts
may be any rectangular ones, on the same ranks, other ranks or both. Planning is pure and deterministic: every rank makes
the same plan from the same layouts, and no rank has to be told.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from verl.core.errors import WeightsError
from verl.flow.layout import Box, Layout

BUCKET_BYTES = 32 << 20
Part = tuple[Box, int, tuple[int, ...]]  # a block, its elements, and the ranks that hold it


@dataclass(frozen=True, slots=True)
class Move:
    """One block from one rank to another (or, when they are the same, from its training to its rollout storage)."""

    source: int
    destination: int
    tensor: str
    box: Box
    nbytes: int  # in the destination's dtype: the sender casts


@dataclass(frozen=True, slots=True)
class Bucket:
    """Moves of one dtype between one pair of ranks that travel as one message, the `index`-th of `count`."""

    index: int
    count: int
    moves: tuple[Move, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return sum(m.nbytes for m in self.moves)


@dataclass(frozen=True)
class Plan:
    """What must move so that every receiver is whole.

    `wire`: moves between ranks, by sender, receiver, dtype and the table's order. `local`: moves within a rank (no traffic;
    nothing at all where the two storages are one). `lacking`: bytes each receiver lacks, the least that can reach it.
    `base`: the version a receiver must already hold, because tensors that have not changed since are not sent.
    """

    source: Layout
    destination: Layout
    wire: tuple[Move, ...]
    local: tuple[Move, ...]
    lacking: Mapping[int, int]
    base: Mapping[int, int]
    bucket_bytes: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that holds something before or after."""
        return tuple(sorted({*self.source.pieces, *self.destination.pieces}))

    @property
    def wire_bytes(self) -> int:
        return sum(m.nbytes for m in self.wire)

    @property
    def sent(self) -> dict[int, int]:
        """Bytes each sender puts on the wire."""
        total = dict.fromkeys(self.source.pieces, 0)
        for m in self.wire:
            total[m.source] += m.nbytes
        return total

    @cached_property
    def buckets(self) -> dict[tuple[int, int], tuple[Bucket, ...]]:
        """(sender, receiver) -> the messages between them, in order."""
        runs: dict[tuple[int, int], list[list[Move]]] = {}
        room, last = 0, None
        for m in self.wire:
            kind = (m.source, m.destination, self.destination.table[m.tensor].dtype)
            if kind != last or m.nbytes > room:
                runs.setdefault(kind[:2], []).append([])
                room, last = self.bucket_bytes, kind
            runs[kind[:2]][-1].append(m)
            room -= m.nbytes
        return {pair: tuple(Bucket(i, len(found), tuple(moves), self.destination.table[moves[0].tensor].dtype)
                            for i, moves in enumerate(found)) for pair, found in runs.items()}

    @cached_property
    def fingerprint(self) -> int:
        """A number that differs between plans: ranks compare it before anything moves."""
        text = repr((self.wire, self.local, sorted(self.base.items()), self.bucket_bytes,
                     sorted((name, spec) for name, spec in self.destination.table.items())))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def plan(source: Layout, destination: Layout, versions: Mapping[str, int] | None = None,
         held: Mapping[int, int] | None = None, bucket_bytes: int = BUCKET_BYTES) -> Plan:
    """The moves that make every receiver whole.

    `versions`: tensor -> the version at which it last changed, `held`: receiver -> the version it holds; a receiver gets
    the tensors that changed after that. Receivers that `held` does not name, and all when `versions` is None, get
    everything. Blocks that several ranks hold are sent by the one with the least to send; none is larger than a bucket.

    Raises WeightsError for tensors that no rank of the source holds, that no rank of the destination stores, or whose
    shapes differ.
    """
    _check_tables(source, destination)
    shards, places = _Boxes(source), _Boxes(destination)
    fragments, local, lacking, cut = [], [], dict.fromkeys(destination.pieces, 0), {}
    for name, spec in destination.table.items():
        itemsize = spec.dtype.itemsize
        _check_stored(name, spec.shape, places)
        for rank, boxes in places.boxes[name].items():
            if versions is not None and held is not None and rank in held and versions[name] <= held[rank]:
                continue
            key = (shards.pattern[name], places.pattern[name], rank, itemsize)
            if key not in cut:
                cut[key] = _need(shards.boxes[name], boxes, rank, max(1, bucket_bytes // itemsize))
            own, lacks = cut[key]
            local += [Move(rank, rank, name, box, size * itemsize) for box, size, _ in own]
            for box, size, holders in lacks:
                if not holders:
                    raise WeightsError(f"rank {rank} needs {name} {box.start} to {box.stop}, which no rank of the source holds")
                lacking[rank] += size * itemsize
                fragments.append((holders, Move(-1, rank, name, box, size * itemsize)))
    return Plan(source, destination, _with_senders(fragments, source, destination), tuple(local), lacking,
                _base(destination, versions, held), bucket_bytes)


class Planner:
    """Plans between two fixed layouts, each made once and kept: after the first steps, asking costs nothing."""

    def __init__(self, source: Layout, destination: Layout, bucket_bytes: int = BUCKET_BYTES):
        self.source, self.destination, self.bucket_bytes = source, destination, bucket_bytes
        self._made: dict[tuple, Plan] = {}

    def plan(self, versions: Mapping[str, int], held: Mapping[int, int]) -> Plan:
        """See `plan`. Two steps in which the same tensors changed for the same receivers share one plan."""
        changed = tuple((rank, frozenset(n for n in self.destination.table if versions[n] > held[rank]))
                        for rank in sorted(held))
        key = (changed, tuple(sorted(_base(self.destination, versions, held).items())))
        if key not in self._made:
            self._made[key] = plan(self.source, self.destination, versions, held, self.bucket_bytes)
        return self._made[key]


class _Boxes:
    """A layout by tensor: name -> rank -> boxes. Tensors that lie alike (a layer's and the next one's) share a pattern."""

    def __init__(self, layout: Layout):
        found: dict[str, dict[int, list[Box]]] = {name: {} for name in layout.table}
        for rank in sorted(layout.pieces):
            for p in layout.pieces[rank]:
                if p.box.size:
                    found[p.tensor].setdefault(rank, []).append(p.box)
        self.boxes = {name: {rank: tuple(boxes) for rank, boxes in by.items()} for name, by in found.items()}
        numbers: dict[tuple, int] = {}
        self.pattern = {name: numbers.setdefault(tuple(by.items()), len(numbers)) for name, by in self.boxes.items()}


def _cut(box: Box, by: Iterable[tuple[Box, tuple[int, ...]]]) -> list[tuple[Box, tuple[int, ...]]]:
    """Disjoint parts of a box, each inside or outside of every box of `by`, with the tags of those it is inside of."""
    parts = [(box, ())]
    for other, tags in by:
        cut = []
        for part, seen in parts:
            common = part.meet(other)
            if common is None:
                cut.append((part, seen))
            else:
                cut.append((common, (*seen, *tags)))
                cut += [(rest, seen) for rest in part.minus(other)]
        parts = cut
    return parts


def _need(shards: Mapping[int, tuple[Box, ...]], places: tuple[Box, ...], rank: int,
          limit: int) -> tuple[list[Part], list[Part]]:
    """What one rank stores of one tensor: the parts it has already, and the parts it lacks (of at most `limit` elements).

    Every part lies inside or outside of each piece, so that one view serves it on either side.
    """
    holders: dict[Box, tuple[int, ...]] = {}
    for holder, boxes in shards.items():
        for box in boxes:
            holders[box] = (*holders.get(box, ()), holder)
    own, lacks, done = [], [], []
    for place in places:
        fresh = [place]
        for earlier in done:
            fresh = [rest for part in fresh for rest in part.minus(earlier)]
        done.append(place)
        for part in fresh:
            for piece, _ in _cut(part, [(other, ()) for other in places]):
                near = [(box, who) for box, who in holders.items() if box.meet(piece)]
                for box, who in _cut(piece, near):
                    if rank in who:
                        own.append((box, box.size, who))
                    else:
                        lacks += [(part, part.size, tuple(sorted(set(who)))) for part in box.split(limit)]
    return own, lacks


def _with_senders(fragments: list[tuple[tuple[int, ...], Move]], source: Layout, destination: Layout) -> tuple[Move, ...]:
    """Each fragment from the holder with the least to send so far: those with the least choice first, large before small."""
    load = dict.fromkeys(source.pieces, 0)
    moves = []
    for holders, m in sorted(fragments, key=lambda f: (len(f[0]), -f[1].nbytes)):
        sender = holders[0] if len(holders) == 1 else min(holders, key=lambda rank: (load[rank], rank))
        load[sender] += m.nbytes
        moves.append(Move(sender, m.destination, m.tensor, m.box, m.nbytes))
    # one dtype behind the other: fuller buckets
    order = {name: (str(spec.dtype), i) for i, (name, spec) in enumerate(destination.table.items())}
    return tuple(sorted(moves, key=lambda m: (m.source, m.destination, order[m.tensor], m.box.start)))


def _base(destination: Layout, versions: Mapping[str, int] | None, held: Mapping[int, int] | None) -> dict[int, int]:
    """Receiver -> the newest version among the tensors it is not sent."""
    base = {}
    for rank, version in (held or {}).items() if versions is not None else ():
        kept = [versions[p.tensor] for p in destination.pieces[rank] if versions[p.tensor] <= version]
        if kept:
            base[rank] = max(kept)
    return base


def _check_tables(source: Layout, destination: Layout) -> None:
    for name, spec in destination.table.items():
        if name not in source.table:
            raise WeightsError(f"the receivers need {name}, which the source does not have; nothing would fill it")
        if source.table[name].shape != spec.shape:
            raise WeightsError(f"{name} has shape {source.table[name].shape} at the source and {spec.shape} at the receivers")


def _check_stored(name: str, shape: tuple[int, ...], places: _Boxes) -> None:
    missing = [Box.of(shape)] if all(shape) else []
    for boxes in places.boxes[name].values():
        for box in boxes:
            missing = [rest for part in missing for rest in part.minus(box)]
    if missing:
        raise WeightsError(f"no receiver stores {name} {missing[0].start} to {missing[0].stop}: the layout is incomplete")
