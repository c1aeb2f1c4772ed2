"""The planner against brute force: every receiver whole, the fewest bytes, none twice."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.flow.layouts import elements, filled, layout_pairs, same_bits, stored
from verl.core.errors import WeightsError
from verl.flow.layout import Box, Layout, Piece, Split, TensorSpec, fsdp, merge, only, table_of, tensor_parallel, whole
from verl.flow.reshard import Planner, plan

BF16 = torch.bfloat16


def held(layout, rank, name):
    """Brute force: the indices of a tensor that a rank stores."""
    found = set()
    for p in layout.pieces.get(rank, ()):
        if p.tensor == name:
            found |= elements(p.box)
    return found


def check(source, destination, made, wanted=None):
    """Compare a plan with sets of indices."""
    for rank in destination.pieces:
        lacking = 0
        for name, spec in destination.table.items():
            if wanted is not None and name not in wanted[rank]:
                assert not [m for m in (*made.wire, *made.local) if m.destination == rank and m.tensor == name]
                continue
            want, have = held(destination, rank, name), held(source, rank, name)
            arrived, copied = set(), set()
            for m in made.wire:
                if m.destination == rank and m.tensor == name:
                    assert m.source != rank
                    assert elements(m.box) <= held(source, m.source, name), "sent by a rank that does not hold it"
                    assert not elements(m.box) & arrived, "a byte came twice"
                    assert m.nbytes == m.box.size * spec.dtype.itemsize
                    arrived |= elements(m.box)
            for m in made.local:
                if m.destination == rank and m.tensor == name:
                    assert m.source == rank and not elements(m.box) & copied
                    copied |= elements(m.box)
            assert arrived == want - have and copied == want & have
            lacking += len(want - have) * spec.dtype.itemsize
        assert made.lacking[rank] == lacking
    assert made.wire_bytes == sum(made.lacking.values()) == sum(made.sent.values())


@settings(max_examples=120, deadline=None)
@given(layout_pairs(), st.sampled_from([1, 16, 64, 1 << 20]))
def test_every_receiver_is_whole_at_the_least_cost(pair, bucket_bytes):
    source, destination = pair
    made = plan(source, destination, bucket_bytes=bucket_bytes)
    check(source, destination, made)
    for m in (*made.wire, *made.local):  # one view serves each block, on either side
        assert any(p.tensor == m.tensor and p.box.contains(m.box) for p in source.pieces[m.source])
        for p in destination.pieces[m.destination]:
            if p.tensor == m.tensor:
                assert p.box.contains(m.box) or p.box.meet(m.box) is None
    again = plan(source, destination, bucket_bytes=bucket_bytes)
    assert again.wire == made.wire and again.fingerprint == made.fingerprint


@settings(max_examples=40, deadline=None)
@given(layout_pairs(), st.data())
def test_only_what_changed_since_the_receivers_version_moves(pair, data):
    source, destination = pair
    versions = {name: data.draw(st.integers(0, 3)) for name in destination.table}
    now = {r: v for r in destination.pieces if (v := data.draw(st.one_of(st.none(), st.integers(0, 3)))) is not None}
    made = plan(source, destination, versions, now)
    wanted = {r: {n for n in versions if r not in now or versions[n] > now[r]} for r in destination.pieces}
    check(source, destination, made, wanted)
    for rank in now:
        kept = [versions[p.tensor] for p in destination.pieces[rank] if p.tensor not in wanted[rank]]
        assert made.base.get(rank) == (max(kept) if kept else None)
    assert Planner(source, destination).plan(versions, now).fingerprint == made.fingerprint


@settings(max_examples=40, deadline=None)
@given(layout_pairs(), st.sampled_from([8, 64, 1 << 20]))
def test_buckets_hold_every_move_once_and_stay_within_their_size(pair, bucket_bytes):
    made = plan(*pair, bucket_bytes=bucket_bytes)
    assert sorted(m for b in made.buckets.values() for bucket in b for m in map(repr, bucket.moves)) == sorted(map(repr, made.wire))
    for (source, destination), buckets in made.buckets.items():
        assert [b.index for b in buckets] == list(range(len(buckets))) and {b.count for b in buckets} == {len(buckets)}
        for bucket in buckets:
            assert bucket.nbytes <= bucket_bytes
            assert {(m.source, m.destination) for m in bucket.moves} == {(source, destination)}
            assert {made.destination.table[m.tensor].dtype for m in bucket.moves} == {bucket.dtype}


def shapes(**named):
    return {name: TensorSpec(shape, BF16) for name, shape in named.items()}


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_replicas_share_the_sending(replicas):
    """One huge tensor among small ones: blocks of a bucket's size keep the senders even."""
    table = shapes(embed=(1000, 16), a=(16, 16), b=(16, 16), c=(7,))
    made = plan(whole(table, range(replicas)), whole(table, [8, 9]), bucket_bytes=1024)
    loads = made.sent.values()
    assert sum(loads) == 2 * made.source.total_bytes
    assert max(loads) - min(loads) <= 1024


def test_the_only_holder_is_relieved_of_what_others_can_send():
    table = shapes(mine=(64, 4), both=(64, 4))
    source = merge(whole(only(table, "mine"), [0]), whole(only(table, "both"), [0, 1]))
    made = plan(source, whole(table, [2]))
    assert made.sent == {0: 512, 1: 512}


def test_fsdp_shards_are_those_of_torch_chunk():
    for rows in (1, 3, 4, 5, 9, 10):
        table, full = shapes(w=(rows, 2)), torch.arange(rows * 2, dtype=BF16).view(rows, 2)
        layout, chunks = fsdp(table, range(4)), torch.chunk(full, 4)
        for rank in range(4):
            mine = stored(layout, rank, {"w": full}).get("w")
            assert (mine is None) if rank >= len(chunks) else torch.equal(mine, chunks[rank])


def test_fused_projections_are_stacked_in_the_order_of_the_rules():
    """A grouped-query layer on a pair of ranks: q, k, v one behind the other, the KV head of each rank's queries."""
    table = shapes(**{"l.v_proj.weight": (4, 6), "l.q_proj.weight": (8, 6), "l.k_proj.weight": (4, 6), "l.o_proj.weight": (6, 8),
                      "l.gate.weight": (10, 6), "l.up.weight": (10, 6), "norm.weight": (6,)})
    rules = [Split("*.q_proj.*", 0, units=4, into=("q_proj", "qkv")), Split("*.k_proj.*", 0, units=2, into=("k_proj", "qkv")),
             Split("*.v_proj.*", 0, units=2, into=("v_proj", "qkv")), Split("*.o_proj.*", 1, units=4),
             Split("*.gate.*", 0, into=("gate", "gate_up")), Split("*.up.*", 0, into=("up", "gate_up"))]
    full = filled(table, 1)
    for rank in range(2):
        arrays = stored(tensor_parallel(table, rules, [0, 1]), rank, full)
        q, k, v = (full[f"l.{n}_proj.weight"].chunk(2)[rank] for n in "qkv")
        assert set(arrays) == {"l.qkv.weight", "l.o_proj.weight", "l.gate_up.weight", "norm.weight"}
        assert same_bits(arrays["l.qkv.weight"], torch.cat([q, k, v]))
        assert same_bits(arrays["l.gate_up.weight"], torch.cat([full[f"l.{n}.weight"].chunk(2)[rank] for n in ("gate", "up")]))
        assert same_bits(arrays["l.o_proj.weight"], full["l.o_proj.weight"].chunk(2, 1)[rank])
        assert same_bits(arrays["norm.weight"], full["norm.weight"])


def test_fewer_kv_heads_than_ranks_are_shared_by_neighbours():
    table = shapes(k=(6, 2))
    layout = tensor_parallel(table, [Split("k", 0, units=2)], range(4))
    assert [layout.pieces[r][0].box.start[0] for r in range(4)] == [0, 0, 3, 3]
    made = plan(fsdp(table, [4, 5]), layout)
    assert made.lacking == dict.fromkeys(range(4), 12)


def test_interleaved_units_are_stored_group_by_group():
    table = shapes(q=(8, 3), k=(4, 3), v=(4, 3))
    rules = [Split(n, 0, units=4, into=(n, "linear_qkv"), interleaved=True) for n in "qkv"]
    full = filled(table, 2)
    arrays = stored(tensor_parallel(table, rules, [0, 1]), 1, full)
    groups = [torch.cat([full[n].chunk(4)[g] for n in "qkv"]) for g in (2, 3)]
    assert same_bits(arrays["linear_qkv"], torch.cat(groups))


def test_experts_stacked_in_one_array_are_places_of_their_own():
    table = shapes(e0=(2, 3), e1=(2, 3))
    layout = Layout(table, {0: tuple(Piece(n, Box.of((2, 3)), "experts", (i, 2, 0)) for i, n in enumerate(table))})
    full = filled(table, 3)
    arrays = stored(layout, 0, full)
    assert arrays["experts"].shape == (2, 4, 3)
    assert same_bits(arrays["experts"][:, 2:].contiguous(), torch.stack([full["e0"], full["e1"]]))


def test_what_a_rank_holds_already_is_no_traffic():
    table = shapes(w=(8, 8))
    made = plan(fsdp(table, range(4)), tensor_parallel(table, [Split("w", 0)], [0, 1]))
    assert [(m.source, m.destination, m.box.start) for m in made.wire] == [(1, 0, (2, 0)), (2, 1, (4, 0)), (3, 1, (6, 0))]
    assert [(m.source, m.box.start) for m in made.local] == [(0, (0, 0))]  # rank 1 holds rows 2 and 3, and serves 4 to 7


def test_a_tied_tensor_stored_twice_travels_once():
    table = shapes(embed=(8, 4))
    twice = Layout(table, {1: (Piece("embed", Box.of((8, 4)), "embed", (0, 0)), Piece("embed", Box.of((8, 4)), "head", (0, 0)))})
    made = plan(whole(table, [0]), twice)
    assert made.wire_bytes == 64 and len(made.wire) == 1


def test_adapters_alone_move():
    table = shapes(base=(64, 64), lora_A=(4, 64), lora_B=(64, 4))
    source, destination = fsdp(table, range(4)), whole(table, [4, 5])
    planner, frozen = Planner(source, destination), {"base": 0}
    first = planner.plan(frozen | {"lora_A": 1, "lora_B": 1}, {4: 0, 5: 0})
    assert {m.tensor for m in first.wire} == {"lora_A", "lora_B"} and first.base == {4: 0, 5: 0}
    assert planner.plan(frozen | {"lora_A": 2, "lora_B": 2}, {4: 1, 5: 1}) is first
    restarted = planner.plan(frozen | {"lora_A": 3, "lora_B": 3}, {4: 2})
    assert {m.destination for m in restarted.wire if m.tensor == "base"} == {5} and restarted.base == {4: 0}


def test_layouts_that_cannot_meet_are_refused_by_name():
    table = shapes(w=(8, 2), head=(4, 2))
    with pytest.raises(WeightsError, match="receivers need head, which the source does not have"):
        plan(whole(only(table, "w"), [0]), whole(table, [1]))  # field case D058: an untied head that is not exported
    with pytest.raises(WeightsError, match=r"rank 2 needs w \(4, 0\) to \(8, 2\), which no rank of the source holds"):
        plan(Layout(table, {0: fsdp(table, [0, 1]).pieces[0]}), whole(only(table, "w"), [2]))
    with pytest.raises(WeightsError, match="no receiver stores head"):
        plan(whole(table, [0]), Layout(table, {1: whole(only(table, "w"), [1]).pieces[1]}))
    with pytest.raises(WeightsError, match=r"w has shape \(8, 2\) at the source and \(2, 8\)"):
        plan(whole(table, [0]), whole(shapes(w=(2, 8)), [1]))
    with pytest.raises(WeightsError, match="lies outside of its shape"):
        Layout(table, {0: (Piece("w", Box((0, 0), (9, 2)), "w", (0, 0)),)})
    with pytest.raises(WeightsError, match="whole number for each of 3 units"):
        tensor_parallel(table, [Split("w", 0, units=3)], [0, 1])
    with pytest.raises(WeightsError, match="put a rule for it before this one"):
        tensor_parallel(shapes(bias=(4,)), [Split("*", 1)], [0, 1])
    with pytest.raises(WeightsError, match="in one layout and"):
        merge(whole(table, [0]), whole(shapes(w=(3, 3)), [1]))


def test_the_table_of_a_module():
    module = torch.nn.Linear(3, 2, bias=False)
    assert table_of(module.state_dict().items()) == {"weight": TensorSpec((2, 3), torch.float32)}
