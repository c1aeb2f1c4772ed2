"""Random layouts, tensors to fill them with, and what every rank should hold: element by element, without boxes' algebra."""

from __future__ import annotations

import itertools

import torch
from hypothesis import strategies as st

from verl.flow.layout import Box, Layout, Piece, Split, TensorSpec, fsdp, merge, only, tensor_parallel, whole


def filled(table, seed):
    """The full tensors of a table: every bit random."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(-128, 128, (*spec.shape, spec.dtype.itemsize), generator=generator, dtype=torch.int8)
            .view(spec.dtype).reshape(spec.shape) for name, spec in table.items()}


def empty_arrays(layout, rank):
    """Zeroed storage for a rank, as large as its pieces need."""
    extent, dtype = {}, {}
    for p in layout.pieces.get(rank, ()):
        extra = len(p.offset) - len(p.box.start)
        ends = [o + n for o, n in zip(p.offset, (*[1] * extra, *p.box.shape))]
        extent[p.array] = [max(a, b) for a, b in zip(ends, extent.get(p.array, ends))]
        dtype[p.array] = layout.table[p.tensor].dtype
    return {name: torch.zeros(shape, dtype=dtype[name]) for name, shape in extent.items()}


def stored(layout, rank, full):
    """A rank's storage holding its pieces of the full tensors."""
    arrays = empty_arrays(layout, rank)
    for p in layout.pieces.get(rank, ()):
        p.view(arrays, p.box).copy_(block(full[p.tensor], p.box))
    return arrays


def block(tensor, box):
    return tensor[tuple(slice(a, b) for a, b in zip(box.start, box.stop))]


def same_bits(a, b):
    return a.shape == b.shape and torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def elements(box):
    """Every index of a box."""
    return set(itertools.product(*(range(a, b) for a, b in zip(box.start, box.stop))))


@st.composite
def boxes(draw, shape):
    bounds = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))


@st.composite
def arbitrary(draw, table, ranks, complete):
    """Any overlapping, ragged pieces; with `complete`, one rank more holds everything, so that nothing is missing."""
    pieces = {rank: [] for rank in ranks}
    for name, spec in table.items():
        for rank in ranks:
            for i in range(draw(st.integers(0, 2))):
                pieces[rank].append(Piece(name, draw(boxes(spec.shape)), f"{name}.{i}", (0,) * len(spec.shape)))
    layout = Layout(table, {rank: tuple(p) for rank, p in pieces.items()})
    return merge(layout, whole(table, [draw(st.sampled_from(ranks))])) if complete else layout


@st.composite
def regular(draw, table, ranks):
    """The layouts of real engines: FSDP, tensor parallel, pipeline stages, replicas."""
    kind = draw(st.sampled_from(["fsdp", "tp", "whole", "stages", "replicas"]))
    if kind == "stages" and len(ranks) > 1:
        at = draw(st.integers(1, len(ranks) - 1))
        names = sorted(table)
        half = draw(st.integers(1, len(names)))
        rest = only(table, *names[half:])
        parts = [draw(regular(only(table, *names[:half]), ranks[:at]))]
        return merge(*parts, draw(regular(rest, ranks[at:]))) if rest else parts[0]
    if kind == "replicas" and len(ranks) > 1:
        return merge(draw(regular(table, ranks[::2])), draw(regular(table, ranks[1::2])))
    if kind == "tp":
        axis = draw(st.integers(0, 1))
        rules = [Split(name, min(axis, len(spec.shape) - 1)) for name, spec in table.items() if spec.shape]
        return tensor_parallel(table, rules, ranks)
    return (fsdp if kind == "fsdp" else whole)(table, ranks)


@st.composite
def tables(draw):
    shapes = st.lists(st.integers(1, 6), max_size=3).map(tuple)
    dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int8])
    return {f"t{i}": TensorSpec(draw(shapes), draw(dtypes)) for i in range(draw(st.integers(1, 4)))}


@st.composite
def layout_pairs(draw):
    """(source, destination) over ranks that are the same, other ones, or some of both."""
    table = draw(tables())
    before = list(range(draw(st.integers(1, 4))))
    first = draw(st.integers(0, 4))
    after = list(range(first, first + draw(st.integers(1, 4))))
    source = draw(st.one_of(regular(table, before), arbitrary(table, before, complete=True)))
    destination = draw(st.one_of(regular(table, after), arbitrary(table, after, complete=True)))
    return source, destination
