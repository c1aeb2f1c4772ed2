"""Who holds what: the rectangular pieces of every named tensor that each rank stores.

A layout is plain data. Trainers and samplers describe theirs with the helpers below (`fsdp`, `tensor_parallel`, `whole`),
combined with `only` and `merge`: pipeline stages are layouts of different tensors on different ranks, data-parallel
replicas the same tensors on other ranks. reshard.py turns two layouts into the moves between them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from verl.core.errors import WeightsError


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The global shape and the dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Table = Mapping[str, TensorSpec]


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The indices with start <= index < stop on every axis of a tensor."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @staticmethod
    def of(shape: Sequence[int]) -> Box:
        """All of a tensor."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop))

    @property
    def size(self) -> int:
        return math.prod(b - a for a, b in zip(self.start, self.stop))

    def with_axis(self, axis: int, start: int, stop: int) -> Box:
        """This box with another range on one axis."""
        return Box((*self.start[:axis], start, *self.start[axis + 1:]), (*self.stop[:axis], stop, *self.stop[axis + 1:]))

    def contains(self, other: Box) -> bool:
        return (all(a <= b for a, b in zip(self.start, other.start))
                and all(a >= b for a, b in zip(self.stop, other.stop)))

    def meet(self, other: Box) -> Box | None:
        """What both hold; None when that is nothing."""
        start, stop = [], []
        for a, b, c, d in zip(self.start, self.stop, other.start, other.stop):
            low, high = max(a, c), min(b, d)
            if low >= high:
                return None
            start.append(low)
            stop.append(high)
        return Box(tuple(start), tuple(stop))

    def minus(self, other: Box) -> list[Box]:
        """Disjoint boxes that hold what `other` does not."""
        common = self.meet(other)
        if common is None:
            return [self]
        rest, core = [], self
        for axis, (low, high) in enumerate(zip(common.start, common.stop)):
            if core.start[axis] < low:
                rest.append(core.with_axis(axis, core.start[axis], low))
            if high < core.stop[axis]:
                rest.append(core.with_axis(axis, high, core.stop[axis]))
            core = core.with_axis(axis, low, high)
        return rest

    def split(self, limit: int) -> list[Box]:
        """Disjoint boxes of at most `limit` elements each, cut along the first axes."""
        axis = next((i for i, n in enumerate(self.shape) if n > 1), None)
        if self.size <= limit or axis is None:
            return [self]
        step = max(1, limit // (self.size // self.shape[axis]))
        slabs = [self.with_axis(axis, a, min(a + step, self.stop[axis]))
                 for a in range(self.start[axis], self.stop[axis], step)]
        return [part for slab in slabs for part in slab.split(limit)]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, and where a rank stores it.

    `array` is the rank's own name of the storage, `offset` the place of the box's first element there. An offset with
    more axes than the tensor picks an index on the leading ones (experts stacked in one array).
    """

    tensor: str
    box: Box
    array: str
    offset: tuple[int, ...]

    def view(self, arrays: Mapping[str, torch.Tensor], box: Box) -> torch.Tensor:
        """The part of the storage that holds `box`, which lies in this piece. Raises WeightsError when it cannot."""
        extra = len(self.offset) - len(box.start)
        within = (slice(place + low - first, place + high - first) for place, first, low, high
                  in zip(self.offset[extra:], self.box.start, box.start, box.stop))
        array = arrays[self.array] if self.array in arrays else None
        if array is not None and array.dim() == len(self.offset) and all(i < n for i, n in zip(self.offset[:extra], array.shape)):
            found = array[(*self.offset[:extra], *within)]
            if found.shape == box.shape:
                return found
        raise WeightsError(f"{self.tensor} {self.box.start} to {self.box.stop} should be stored in {self.array!r} at "
                           f"{self.offset}, but that array is {'missing' if array is None else tuple(array.shape)}. The layout "
                           "describes another model or another parallel size than the one that is running")


@dataclass(frozen=True)
class Layout:
    """The tensors there are, and the pieces of them that each rank stores. Ranks may hold nothing, or overlap."""

    table: Table
    pieces: Mapping[int, tuple[Piece, ...]]

    def __post_init__(self):
        for rank, pieces in self.pieces.items():
            for p in pieces:
                spec = self.table.get(p.tensor)
                if spec is None or len(p.box.start) != len(spec.shape) or not Box.of(spec.shape).contains(p.box):
                    raise WeightsError(f"rank {rank}: {p.tensor} {p.box.start} to {p.box.stop} lies outside of "
                                       f"{'the table' if spec is None else f'its shape {spec.shape}'}")

    def bytes_of(self, rank: int) -> int:
        """Bytes this rank stores, in the table's dtypes."""
        return sum(p.box.size * self.table[p.tensor].dtype.itemsize for p in self.pieces[rank])

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors, each once."""
        return sum(math.prod(s.shape) * s.dtype.itemsize for s in self.table.values())


def table_of(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, TensorSpec]:
    """The table of named tensors (plain ones, or DTensors with their global shapes)."""
    return {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in named}


def only(table: Table, *patterns: str) -> dict[str, TensorSpec]:
    """The tensors whose name matches one of the shell patterns: a pipeline stage, the adapters."""
    return {name: spec for name, spec in table.items() if any(fnmatchcase(name, p) for p in patterns)}


def whole(table: Table, ranks: Iterable[int]) -> Layout:
    """Each rank holds all of every tensor."""
    pieces = tuple(_piece(name, Box.of(spec.shape)) for name, spec in table.items())
    return Layout(table, {rank: pieces for rank in ranks})


def fsdp(table: Table, ranks: Sequence[int]) -> Layout:
    """Shards along the first axis as `fully_shard` (and torch.chunk) cuts them: ceil(n / ranks) rows each, the last ranks
    with fewer or none. Tensors without axes are on every rank."""
    pieces = {rank: [] for rank in ranks}
    for name, spec in table.items():
        box = Box.of(spec.shape)
        rows = spec.shape[0] if spec.shape else 0
        step = -(-rows // len(ranks))
        for index, rank in enumerate(ranks):
            shard = box.with_axis(0, min(index * step, rows), min((index + 1) * step, rows)) if spec.shape else box
            pieces[rank].append(_piece(name, shard))
    return Layout(table, {rank: tuple(p for p in held if p.box.size) for rank, held in pieces.items()})


@dataclass(frozen=True, slots=True)
class Split:
    """How tensors whose name matches the shell pattern lie on tensor-parallel ranks.

    `axis`: the axis that is cut; None: every rank holds all. `units`: what cannot be cut further along it (heads, KV
    heads); when there are fewer units than ranks, neighbouring ranks hold the same one. `into`: (old, new) replaced in the
    name gives the name of a fused array, whose members lie one behind the other on `axis` in the order of the rules, or
    `interleaved` unit by unit (Megatron's linear_qkv: the queries, key and value of one group, then of the next).
    """

    pattern: str
    axis: int | None
    units: int | None = None
    into: tuple[str, str] | None = None
    interleaved: bool = False


def tensor_parallel(table: Table, rules: Sequence[Split], ranks: Sequence[int]) -> Layout:
    """Each tensor as the first rule that matches its name says; tensors without a rule are on every rank."""
    arrays: dict[str, list[tuple[int, str, Split]]] = {}
    for name in table:
        order, rule = next(((i, r) for i, r in enumerate(rules) if fnmatchcase(name, r.pattern)), (0, Split(name, None)))
        if (0 if rule.axis is None else rule.axis + 1) > len(table[name].shape) or (rule.into and rule.axis is None):
            raise WeightsError(f"{rule} does not fit {name} of shape {table[name].shape}; put a rule for it before this one")
        arrays.setdefault(name.replace(*rule.into) if rule.into else name, []).append((order, name, rule))
    for members in arrays.values():
        members.sort(key=lambda member: member[0])
    return Layout(table, {rank: tuple(p for array, members in arrays.items()
                                      for p in _array(table, array, members, index, len(ranks)) if p.box.size)
                          for index, rank in enumerate(ranks)})


def _array(table: Table, array: str, members: list[tuple[int, str, Split]], index: int, ranks: int) -> Iterable[Piece]:
    """The pieces of one rank's array: its share of every member, in the order they lie there."""
    shares = [_share(name, table[name].shape, rule, index, ranks) for _, name, rule in members]
    if any(rule.interleaved for _, _, rule in members):
        if len({len(boxes) for boxes in shares}) > 1:
            raise WeightsError(f"{array}: interleaved members need equal units, seen {[r.units for _, _, r in members]}")
        laid = [(name, box) for boxes in zip(*shares) for (_, name, _), box in zip(members, boxes)]
    else:
        laid = [(name, box) for (_, name, _), boxes in zip(members, shares) for box in boxes]
    place = 0
    for name, box in laid:
        axis = members[0][2].axis
        yield Piece(name, box, array, tuple(place * (d == axis) for d in range(len(box.start))))
        place += 0 if axis is None else box.shape[axis]


def _share(name: str, shape: tuple[int, ...], rule: Split, index: int, ranks: int) -> list[Box]:
    """A rank's box of one tensor, or a box for each of its units when they are interleaved."""
    if rule.axis is None:
        return [Box.of(shape)]
    size = shape[rule.axis]
    units = size if rule.units is None else rule.units
    if units < 1 or size % units:
        raise WeightsError(f"{name}: {size} rows on axis {rule.axis} are not a whole number for each of {units} units")
    first = units * index // ranks
    last = max(units * (index + 1) // ranks, first + 1)
    bounds = [(u, u + 1) for u in range(first, last)] if rule.interleaved else [(first, last)]
    return [Box.of(shape).with_axis(rule.axis, a * size // units, b * size // units) for a, b in bounds]


def merge(*layouts: Layout) -> Layout:
    """All of them at once: pipeline stages, data-parallel replicas, adapters beside their base."""
    table: dict[str, TensorSpec] = {}
    pieces: dict[int, tuple[Piece, ...]] = {}
    for layout in layouts:
        for name, spec in layout.table.items():
            if table.setdefault(name, spec) != spec:
                raise WeightsError(f"{name} is {spec} in one layout and {table[name]} in another")
        for rank, held in layout.pieces.items():
            pieces[rank] = (*pieces.get(rank, ()), *held)
    return Layout(table, pieces)


def _piece(name: str, box: Box) -> Piece:
    return Piece(name, box, name, (0,) * len(box.start))
