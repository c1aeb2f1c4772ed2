"""Transfers between real processes over gloo: shards go in, slices come out, faults and dead ranks are named in time."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.flow.layouts import block, empty_arrays, filled, same_bits, stored
from tests.flow.worlds import run_world
from verl.core.errors import WeightsError
from verl.core.weights import Weights
from verl.flow.layout import Split, TensorSpec, fsdp, merge, only, tensor_parallel, whole
from verl.flow.reshard import Planner, plan
from verl.flow.transfer import Target, transfer
from verl.flow.transport import TorchTransport

BF16 = torch.bfloat16


def model(layers=3, hidden=16, vocab=40):
    """Names and shapes of a small grouped-query model: two KV heads, a norm in float32."""
    table = {"embed.weight": TensorSpec((vocab, hidden), BF16)}
    for i in range(layers):
        shapes = {"q_proj.weight": (hidden, hidden), "k_proj.weight": (8, hidden), "v_proj.weight": (8, hidden),
                  "o_proj.weight": (hidden, hidden), "gate_proj.weight": (22, hidden), "up_proj.weight": (22, hidden),
                  "down_proj.weight": (hidden, 22), "q_proj.lora_A": (2, hidden), "q_proj.lora_B": (hidden, 2)}
        table |= {f"layers.{i}.{name}": TensorSpec(shape, BF16) for name, shape in shapes.items()}
        table[f"layers.{i}.norm.weight"] = TensorSpec((hidden,), torch.float32)
    return table


RULES = [Split("*.lora_*", None),
         *(Split(f"*.{n}_proj.*", 0, units, (f"{n}_proj", "qkv_proj")) for n, units in (("q", 4), ("k", 2), ("v", 2))),
         *(Split(f"*.{n}_proj.*", 0, None, (f"{n}_proj", "gate_up_proj")) for n in ("gate", "up")),
         Split("*.o_proj.*", 1, 4), Split("*.down_proj.*", 1), Split("embed.*", 0)]
TABLE = model()


def four_to_two():
    return fsdp(TABLE, range(4)), tensor_parallel(TABLE, RULES, [4, 5])


def three_to_three():
    """Training pairs of stages on ranks 0 to 2, sampling on ranks 1 to 3: some ranks do both."""
    first, last = only(TABLE, "embed*", "layers.0.*"), only(TABLE, "layers.[12].*")
    source = merge(tensor_parallel(first, RULES, [0, 1]), whole(last, [2]))
    return source, merge(tensor_parallel(TABLE, RULES, [1, 2]), whole(TABLE, [3]))


def sync(made, transport, target, full, version, **options):
    """One transfer; checks every element that landed. Returns the report."""
    rank = transport.rank
    arrays = stored(made.source, rank, full) if rank in made.source.pieces else None
    report = transfer(made, transport, version=None if arrays is None else version, arrays=arrays, target=target, **options)
    for p in made.destination.pieces.get(rank, ()):
        assert same_bits(p.view(target.arrays, p.box), block(full[p.tensor], p.box)), p
    return report


def full_and_adapters(rank, layouts, bucket_bytes):
    """A whole load, then adapters alone; what every rank saw of both."""
    source, destination = layouts()
    transport, planner = TorchTransport("policy"), Planner(source, destination, bucket_bytes)
    target = Target(empty_arrays(destination, rank)) if rank in destination.pieces else None
    full = filled(TABLE, 1)
    versions = dict.fromkeys(TABLE, 1)
    reports = [sync(planner.plan(versions, {}), transport, target, full, 1, deadline_s=20)]
    full |= filled(only(TABLE, "*lora*"), 2)
    versions |= dict.fromkeys(only(TABLE, "*lora*"), 2)
    made = planner.plan(versions, dict.fromkeys(destination.pieces, 1))
    reports.append(sync(made, transport, target, full, 2, deadline_s=20))
    with pytest.raises(WeightsError, match="holds version 2 already"):
        transfer(made, transport, version=2, arrays=stored(source, rank, full), target=target, deadline_s=20)
    return [(r.sent_bytes, r.received_bytes, r.messages, r.receipts) for r in reports]


@pytest.mark.parametrize("ranks, layouts, bucket_bytes", [(6, four_to_two, 1 << 20), (4, three_to_three, 256)])
def test_weights_and_then_adapters_move_between_processes(ranks, layouts, bucket_bytes):
    source, destination = layouts()
    results = run_world(ranks, full_and_adapters, layouts, bucket_bytes)
    assert not [error for _, error in results if error], results
    names = (None, set(only(TABLE, "*lora*")))
    for i, changed in enumerate(names):
        versions = {n: 2 if changed is None or n in changed else 1 for n in TABLE}
        made = plan(source, destination, versions, dict.fromkeys(destination.pieces, 1), bucket_bytes)
        seen = {rank: result[i] for rank, (result, _) in enumerate(results)}
        assert {r: s[0] for r, s in seen.items() if s[0]} == {r: n for r, n in made.sent.items() if n}
        assert sum(s[1] for s in seen.values()) == made.wire_bytes == sum(made.lacking.values())
        assert sum(s[2] for s in seen.values()) == sum(map(len, made.buckets.values()))
        receipts = seen[0][3]
        assert all(s[3] == receipts for s in seen.values()) and receipts.keys() == destination.pieces.keys()
        if layouts is three_to_three:  # rank 3 holds all of it: its receipt is that of the tensors themselves
            full = filled(TABLE, 1) | filled(only(TABLE, "*lora*"), 2) if i else filled(TABLE, 1)
            assert receipts[3] == Weights(i + 1, {n: full[n] for n in changed or TABLE}.items).receipt()
    if layouts is four_to_two:
        assert sum(s[2] for s in seen.values()) == 8  # thousands of tensors or eighteen: one message a pair


class Planted(TorchTransport):
    """A transport with one fault: what rank 0 sends to rank 1 under tag 1."""

    def __init__(self, fault):
        super().__init__("policy", grace_s=1)
        self.fault = fault

    def post(self, tag, sends, receives):
        if self.rank == 0 and tag == 1 and self.fault == "drop":
            waits = iter(super().post(tag, [m for m in sends if m[0] != 1], receives))
            return [(lambda _: None) if peer == 1 else next(waits) for peer, _ in [*sends, *receives]]
        if self.rank == 0 and tag == 1 and self.fault == "flip":
            for peer, message in sends:
                if peer == 1:
                    message[7] ^= 1
        if self.rank == 0 and tag == 1 and self.fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().post(tag, sends, receives)


def faulty(rank, fault, deadline_s):
    """A load with a fault: (error, seconds, what the receiver says when it is used)."""
    made = plan(whole(TABLE, [0]), whole(TABLE, [1, 2]))
    target = Target(empty_arrays(made.destination, rank), version=0) if rank else None
    started = time.monotonic()
    with pytest.raises(WeightsError) as caught:
        sync(made, Planted(fault), target, filled(TABLE, 1), 1, deadline_s=deadline_s)
    seconds = time.monotonic() - started
    if target is not None:
        with pytest.raises(WeightsError, match="may not be used: the load of version 1 did not complete"):
            target.require()
    return str(caught.value), seconds


def test_a_flipped_bit_between_processes_is_named_on_every_rank():
    results = run_world(3, faulty, "flip", 20)
    assert not [error for _, error in results if error], results
    messages = [message for (message, _), _ in results]
    assert all("rank 1, bucket 1 of" in m and "its bytes are not those that were sent" in m for m in messages), messages
    assert "void on every receiver: rank 1" in messages[0] and "void on every receiver: rank 1" in messages[2]


def test_a_dropped_bucket_between_processes_is_named_by_the_deadline():
    results = run_world(3, faulty, "drop", 1.5)
    assert not [error for _, error in results if error], results
    messages, seconds = zip(*(result for result, _ in results))
    assert "from rank 0" in messages[1] and "did not get through to rank 1 within 1.5 s" in messages[1]
    assert all("did not get through to rank 1 within 1.5 s" in m for m in messages), messages
    assert max(seconds) < 1.5 + 10


def test_a_killed_sender_is_named():
    results = run_world(3, faulty, "die", 3)
    assert results[0] == (None, None)
    assert not [error for _, error in results[1:] if error], results
    for (message, seconds), _ in results[1:]:
        assert "rank 0" in message and seconds < 3 + 10, message


def absent(rank, deadline_s):
    """Rank 2 never comes to the transfer."""
    if rank == 2:
        TorchTransport("policy")
        return None
    made = plan(whole(TABLE, [0]), whole(TABLE, [1, 2]))
    target = Target(empty_arrays(made.destination, rank), version=0) if rank else None
    with pytest.raises(WeightsError) as caught:
        sync(made, TorchTransport("policy"), target, filled(TABLE, 1), 1, deadline_s=deadline_s)
    assert target is None or target.require() == 0  # nothing was touched: the old version is in force
    return str(caught.value)


def test_a_rank_that_does_not_come_is_named():
    results = run_world(3, absent, 1.0)
    assert not [error for _, error in results if error], results
    assert all("rank 2 did not come to the transfer of weights within 1 s" in m for m, _ in results[:2])


def two_models(rank):
    """Two models, then one of them again through a transport made anew, over a group of two of the three ranks."""
    table = only(TABLE, "embed*")
    made = plan(whole(table, [1]), whole(table, [2]))
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    transports = [TorchTransport(name, group) for name in ("actor", "critic", "actor")]
    for seed, transport in enumerate(transports):
        target = Target(empty_arrays(made.destination, rank)) if rank == 2 else None
        sync(made, transport, target, filled(table, seed), 1, deadline_s=20)
    return transports[0].ranks


def test_a_group_of_some_ranks_and_two_models():
    results = run_world(3, two_models)
    assert [result for result, _ in results] == [None, (1, 2), (1, 2)], results


def over_nccl(rank):
    """Two GPUs that train and sample: FSDP shards become tensor-parallel slices, some by wire and some by copy."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    made = plan(fsdp(TABLE, [0, 1]), tensor_parallel(TABLE, RULES, [0, 1]), bucket_bytes=512)
    transport = TorchTransport("policy", dist.new_group(backend="nccl"), device)
    full = filled(TABLE, 1)
    arrays = {name: t.to(device) for name, t in stored(made.source, rank, full).items()}
    target = Target({name: t.to(device) for name, t in empty_arrays(made.destination, rank).items()})
    report = transfer(made, transport, version=1, arrays=arrays, target=target, deadline_s=60)
    for p in made.destination.pieces[rank]:
        assert same_bits(p.view(target.arrays, p.box).cpu(), block(full[p.tensor], p.box)), p
    return report.sent_bytes, report.received_bytes, made.sent[rank], made.lacking[rank]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_weights_move_between_gpus():
    results = run_world(2, over_nccl)
    assert not [error for _, error in results if error], results
    assert all(r[0] == r[2] and r[1] == r[3] for r, _ in results)
