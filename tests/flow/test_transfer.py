"""Transfers inside one process: bits arrive, shared storage costs nothing, every planted fault is caught by name."""

import dataclasses
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.flow.layouts import block, empty_arrays, filled, layout_pairs, same_bits, stored
from verl.core.errors import WeightsError
from verl.core.weights import Receipt, Weights
from verl.flow.layout import Box, Layout, Piece, Split, TensorSpec, fsdp, tensor_parallel, whole
from verl.flow.reshard import plan
from verl.flow.transfer import Target, transfer, transfer_in_process
from verl.flow.transport import Wires

TABLE = {"w": TensorSpec((8, 8), torch.bfloat16), "v": TensorSpec((6, 4), torch.float32), "n": TensorSpec((5,), torch.bfloat16)}
RULES = [Split("w", 0), Split("v", 1)]


def send(made, full, version=1, targets=None, **options):
    """Run a plan on storage filled from full tensors; the targets."""
    if targets is None:
        targets = {r: Target(empty_arrays(made.destination, r)) for r in made.destination.pieces}
    arrays = {r: stored(made.source, r, full) for r in made.source.pieces}
    return targets, transfer_in_process(made, version, arrays, targets, **options)


def assert_whole(made, full, targets):
    for rank, target in targets.items():
        for p in made.destination.pieces[rank]:
            assert same_bits(p.view(target.arrays, p.box), block(full[p.tensor], p.box)), (rank, p)


@settings(max_examples=40, deadline=None)
@given(layout_pairs(), st.sampled_from([16, 1 << 20]))
def test_every_bit_arrives_whatever_the_layouts(pair, bucket_bytes):
    made = plan(*pair, bucket_bytes=bucket_bytes)
    full = filled(made.source.table, 1)
    targets, reports = send(made, full)
    assert_whole(made, full, targets)
    for rank, report in reports.items():
        assert report.sent_bytes == made.sent.get(rank, 0) and report.received_bytes == made.lacking.get(rank, 0)
        assert report.copied_bytes == sum(m.nbytes for m in made.local if m.destination == rank) and not report.shared_bytes
        assert report.messages == sum(len(b) for (source, _), b in made.buckets.items() if source == rank)
        assert report.receipts.keys() == targets.keys()
    assert all(target.require() == 1 for target in targets.values())


def test_a_receiver_of_whole_tensors_holds_the_trainers_receipt():
    """Field case D020: after a sync the checksum of the engine's weights equals the trainer's."""
    full = filled(TABLE, 4)
    made = plan(fsdp(TABLE, range(3)), whole(TABLE, [3, 4]), bucket_bytes=64)
    _, reports = send(made, full, version=7)
    trainer = Weights(7, full.items).receipt()
    for report in reports.values():
        assert report.receipts == {3: trainer, 4: trainer}
        trainer.expect(report.receipts[3], "rank 3")


def test_the_sender_casts_masters_to_the_receivers_dtype():
    masters = {"w": TensorSpec((8, 8), torch.float32)}
    halves = {"w": TensorSpec((8, 8), torch.bfloat16)}
    full = {"w": torch.randn(8, 8, generator=torch.Generator().manual_seed(0))}
    made = plan(fsdp(masters, range(2)), tensor_parallel(halves, [Split("w", 1)], [1, 2]))
    targets, reports = send(made, full)
    assert sum(r.sent_bytes for r in reports.values()) == made.wire_bytes == (32 + 16) * 2
    assert_whole(made, {"w": full["w"].bfloat16()}, targets)


def test_shared_storage_is_not_copied_and_not_written():
    full = filled(TABLE, 5)
    made = plan(whole(TABLE, [0]), whole(TABLE, [0, 1]))
    arrays = {0: stored(made.source, 0, full)}
    for tensor in arrays[0].values():
        tensor.requires_grad_()
    before = {name: t._version for name, t in arrays[0].items()}
    targets = {0: Target(arrays[0]), 1: Target(empty_arrays(made.destination, 1))}
    reports = transfer_in_process(made, 3, arrays, targets)
    assert reports[0].shared_bytes == made.source.total_bytes and reports[0].copied_bytes == 0
    assert {name: t._version for name, t in arrays[0].items()} == before
    assert reports[0].receipts[0] == Receipt(3, 0, 0) and reports[0].receipts[1] == Weights(3, full.items).receipt()
    assert targets[0].require() == targets[1].require() == 3
    alone = plan(whole(TABLE, [0]), whole(TABLE, [0]))
    assert transfer_in_process(alone, 4, arrays, {0: targets[0]})[0].sent_bytes == alone.wire_bytes == 0


def test_a_tied_tensor_fills_both_of_its_places():
    """Field case D058: an engine with its own copy of a tied head gets it from the one tensor that travelled."""
    table = {"embed": TensorSpec((8, 4), torch.bfloat16)}
    places = tuple(Piece("embed", Box.of((8, 4)), array, (0, 0)) for array in ("embed", "lm_head"))
    made = plan(fsdp(table, [0, 1]), Layout(table, {2: places}))
    full = filled(table, 6)
    targets, reports = send(made, full)
    assert same_bits(targets[2].arrays["embed"], full["embed"]) and same_bits(targets[2].arrays["lm_head"], full["embed"])
    assert sum(r.sent_bytes for r in reports.values()) == 64


def test_only_changed_tensors_are_written():
    made = plan(fsdp(TABLE, range(2)), whole(TABLE, [2]))
    targets, _ = send(made, old := filled(TABLE, 1), version=1)
    adapters = plan(fsdp(TABLE, range(2)), whole(TABLE, [2]), {"w": 2, "v": 1, "n": 1}, {2: 1})
    new = filled(TABLE, 2)
    _, reports = send(adapters, new, version=2, targets=targets)
    assert_whole(made, old | {"w": new["w"]}, targets)
    assert reports[0].receipts[2] == Weights(2, {"w": new["w"]}.items).receipt() and targets[2].require() == 2


def test_what_is_left_out_must_be_there_already():
    """A restarted receiver must not get adapters on top of nothing."""
    adapters = plan(whole(TABLE, [0]), whole(TABLE, [1]), {"w": 6, "v": 0, "n": 0}, {1: 5})
    with pytest.raises(WeightsError, match="leaves out what rank 1 should hold since version 0, but it holds nothing"):
        send(adapters, filled(TABLE, 1), version=6)


# -- planted faults ----------------------------------------------------------------------------------------------------


class Faulty(Wires):
    """Wires that change, or drop, the message with this tag from one rank to another (1: the first bucket, 0: checksums)."""

    def __init__(self, ranks, change, source=0, destination=2, tag=1):
        super().__init__(ranks)
        self.change, self.where = change, (source, destination, tag)

    def deliver(self, source, destination, tag, message):
        if (source, destination, tag) == self.where:
            message = self.change(message)
        if message is not None:
            super().deliver(source, destination, tag, message)


def flip(message):
    message[5] ^= 16
    return message


def run_faulty(made, change, targets=None, version=1, **where):
    targets = targets or {r: Target(empty_arrays(made.destination, r)) for r in made.destination.pieces}
    with pytest.raises(WeightsError) as caught:
        send(made, filled(TABLE, version), version, targets, deadline_s=0.3, wires=Faulty(made.ranks, change, **where))
    for target in targets.values():  # no receiver may be used, the untouched one neither
        with pytest.raises(WeightsError, match=f"the load of version {version} did not complete"):
            target.require()
    send(made, filled(TABLE, version), version, targets)
    assert_whole(made, filled(TABLE, version), targets)  # and a whole load repairs it
    assert all(target.require() == version for target in targets.values())
    return str(caught.value)


def pair():
    return plan(fsdp(TABLE, [0, 1]), tensor_parallel(TABLE, RULES, [2, 3]), bucket_bytes=64)


def test_a_dropped_bucket_is_missed_by_the_deadline():
    message = run_faulty(pair(), lambda message: None)
    assert "bucket 1 of" in message and "from rank 0" in message and "did not get through to rank 2 within 0.3 s" in message


def test_dropped_checksums_are_missed_too():
    message = run_faulty(pair(), lambda message: None, tag=0)
    assert "checksums from rank 0 did not get through to rank 2 within 0.3 s" in message


def test_a_flipped_bit_is_named():
    message = run_faulty(pair(), flip)
    assert "w (0, 0) to (4, 8) at rank 2, bucket 1 of" in message and "its bytes are not those that were sent" in message
    assert "1 of" in message


@pytest.mark.parametrize("shape", [(8, 8), (6, 4)])
def test_a_transposed_tensor_is_named(shape):
    table = {"w": TensorSpec(shape, torch.bfloat16)}
    made = plan(whole(table, [0]), whole(table, [2]))

    def transpose(message):
        return message.view(torch.bfloat16).view(shape).t().contiguous().view(-1).view(torch.uint8)

    targets = {2: Target(empty_arrays(made.destination, 2))}
    with pytest.raises(WeightsError, match=r"w \(0, 0\) to .* at rank 2, .*it is transposed"):
        send(made, filled(table, 1), 1, targets, wires=Faulty(made.ranks, transpose))
    with pytest.raises(WeightsError, match="may not be used"):
        targets[2].require()


def test_a_stale_message_is_named():
    """The sender's first bucket comes out of a cache that outlived its version."""
    made, seen = pair(), []
    targets, _ = send(made, filled(TABLE, 1), 1, wires=Faulty(made.ranks, lambda m: seen.append(m.clone()) or m))
    message = run_faulty(made, lambda _: seen[0].clone(), targets, version=2)
    assert "at rank 2, bucket 1 of" in message and "still that of version 1: a stale copy was sent or kept" in message


def test_an_engine_that_reads_from_a_stale_copy_is_named():
    """The load writes to arrays that the engine has replaced meanwhile: what it would read is checked."""
    made = plan(whole(TABLE, [0]), whole(TABLE, [1]))
    full = filled(TABLE, 1)

    class Moved(dict):
        copies = False

        def __getitem__(self, name):
            found = super().__getitem__(name)
            return found.clone() if self.copies and name == "v" else found

    arrays = Moved(empty_arrays(made.destination, 1))
    targets, _ = send(made, full, 1, {1: Target(arrays)})
    arrays.copies = True
    with pytest.raises(WeightsError, match=r"v \(0, 0\) to \(6, 4\) at rank 1, .*still that of version 1: a stale copy"):
        send(made, filled(TABLE, 2), 2, targets)


@pytest.mark.parametrize("version", [3, 2])
def test_a_repeated_or_older_version_is_refused_before_anything_moves(version):
    made = pair()
    targets, _ = send(made, full := filled(TABLE, 3), 3)
    with pytest.raises(WeightsError, match=f"version {version} was sent, but rank 2 holds version 3 already"):
        send(made, filled(TABLE, 9), version, targets)
    assert all(target.require() == 3 for target in targets.values())
    assert_whole(made, full, targets)  # the old version stays whole and in force
    with pytest.raises(WeightsError, match="version 3 was sent, but version 3 is held already"):
        targets[2].begin(3)


def test_nothing_may_be_used_before_the_first_load():
    with pytest.raises(WeightsError, match="nothing has been loaded into it yet"):
        Target({}).require()
    assert Target({}, version=0).require() == 0


def test_arrays_that_do_not_fit_the_layout_are_refused_everywhere():
    made = pair()
    targets = {r: Target(empty_arrays(made.destination, r)) for r in (2, 3)}
    targets[3].arrays["w"] = torch.zeros(2, 8, dtype=torch.bfloat16)
    with pytest.raises(WeightsError, match=r"rank 3: w .* that array is \(2, 8\).*another parallel size"):
        send(made, filled(TABLE, 1), 1, targets)
    targets[3].arrays["w"] = torch.zeros(4, 8)
    with pytest.raises(WeightsError, match="rank 3: w is stored as torch.float32, the layout says torch.bfloat16"):
        send(made, filled(TABLE, 1), 1, targets)


def test_ranks_with_different_plans_do_not_start():
    full, made, errors = filled(TABLE, 1), pair(), []
    other = plan(made.source, made.destination, bucket_bytes=128)
    wires = Wires(made.ranks)
    targets = {r: Target(empty_arrays(made.destination, r)) for r in (2, 3)}

    def one(rank):
        arrays = stored(made.source, rank, full) if rank < 2 else None
        try:
            transfer(other if rank == 1 else made, wires.transport(rank), version=1 if rank < 2 else None, arrays=arrays,
                     target=targets.get(rank), deadline_s=5)
        except WeightsError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=one, args=(rank,)) for rank in made.ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 4 and all("hold different plans" in e for e in errors)


def test_a_block_that_a_broken_plan_forgets_is_missed():
    """A plan that lost a move does not move what is lacking."""
    made = pair()
    short = dataclasses.replace(made, wire=made.wire[1:])
    with pytest.raises(WeightsError, match=r"rank 2 sent 0 and received \d+ bytes, the plan says"):
        send(short, filled(TABLE, 1))
