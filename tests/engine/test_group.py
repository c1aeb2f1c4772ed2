"""Training engines whose ranks live in other processes, against the one that lives here."""

import os
from functools import partial

import pytest

pytest.importorskip("ray", reason="ray is not installed")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from tests.engine import tiny  # noqa: E402
from tests.engine.conformance import ids, requests  # noqa: E402
from verl.algorithms import ALGORITHMS  # noqa: E402
from verl.algorithms.reduce import coefficients  # noqa: E402
from verl.core.batch import from_groups  # noqa: E402
from verl.core.errors import WorkerError  # noqa: E402
from verl.core.types import Group, Sampling, Task  # noqa: E402
from verl.engine.fsdp import FsdpEngine  # noqa: E402
from verl.engine.group import TrainGroup, pack_tensors, unpack_tensors  # noqa: E402
from verl.engine.native.config import NativeConfig  # noqa: E402
from verl.engine.native.engine import NativeEngine  # noqa: E402
from verl.engine.optimizer import OptimConfig  # noqa: E402
from verl.engine.pool import RolloutPool  # noqa: E402
from verl.engine.train import TrainEngine  # noqa: E402
from verl.flow.actors import Cluster  # noqa: E402
from verl.flow.devices import device_group  # noqa: E402
from verl.flow.link import Meeting  # noqa: E402
from verl.models.load import LoraConfig, load_lm, load_tokenizer  # noqa: E402

OPTIM = OptimConfig(lr=1e-2)
ALGO = ALGORITHMS["grpo"]()


def train_engine(path, lora, device):
    lm = load_lm(path, "float32", device, lora=lora)
    if dist.get_world_size() > 1:
        return FsdpEngine(lm, 1.0, OPTIM, 10, 256)
    return TrainEngine(lm, 1.0, OPTIM, 10, 256)


def native(path, lora, device):
    return NativeEngine(load_lm(path, "float32", device, lora=lora), NativeConfig(max_total_tokens=96, kv_tokens=4096))


@pytest.fixture(scope="module")
def cluster():
    cluster = Cluster()
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(tiny.model_dir(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def slots(cluster):
    return cluster.place({"actor": device_group("cpu*2", "actor"), "critic": device_group("cpu*1", "critic"),
                          "rollout": device_group("cpu*1", "rollout")})


@pytest.fixture(scope="module")
def meeting(cluster):
    return Meeting(cluster.address)


def group_of(slots, role, path, meeting, lora=None):
    return TrainGroup(slots[role], role, partial(train_engine, path, lora), meeting, load_tokenizer(path),
                      partial(load_lm, path, "float32", "cpu", lora))


@pytest.fixture(scope="module")
def pair(slots, path, meeting):
    """(group of two FSDP ranks, pool of a worker of its own, pool in the ranks' processes)."""
    group = group_of(slots, "actor", path, meeting)
    own = RolloutPool(slots["rollout"], partial(native, path, None), meeting)
    inside = RolloutPool(slots["actor"], partial(native, path, None), meeting, within=group.actors)
    return group.ready(), own.ready(), inside.ready()


def a_batch(lm, seed=0):
    engine, asked = NativeEngine(lm, NativeConfig(max_total_tokens=96, kv_tokens=4096)), requests([4, 9, 3], n=4, seed=seed)
    sampled = engine.generate(asked, Sampling(max_tokens=20))
    batch = from_groups([Group(Task(r.key, ""), r.prompt_ids, samples) for r, samples in zip(asked, sampled)])
    batch.rewards_S = np.arange(12) % 5 / 4
    batch.advantages_T = ALGO.credit(batch).advantages_T
    batch.weights_T, batch.weights_S = coefficients(ALGO.reduction, batch, constant=20)
    return batch


def one_update(engine, batch):
    metrics = engine.forward_backward(batch, ALGO.loss, ALGO.unit)
    return metrics, engine.step()


def same(a, b, atol=1e-5):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.allclose(a[name].float(), b[name].float(), atol=atol), (name, (a[name] - b[name]).abs().max())


def test_two_sharded_ranks_are_one_engine(pair, path):
    group, own, inside = pair
    local = TrainEngine(load_lm(path, "float32"), 1.0, OPTIM, 10, 256)
    assert len({os.getpid(), *(a.pid for a in group.actors), *own.pids.values()}) == 4
    assert set(inside.pids.values()) == {a.pid for a in group.actors}
    assert group.lm.stop_ids == local.lm.stop_ids and group.lm.context == local.lm.context
    batch = a_batch(local.lm)
    assert np.allclose(group.logprobs(batch), local.logprobs(batch), atol=1e-5)
    for _ in range(2):
        (here, info), (there, far) = one_update(local, batch), one_update(group, batch)
        assert here == pytest.approx(there, rel=1e-4, abs=1e-5) and info.grad_norm == pytest.approx(far.grad_norm, rel=1e-4)
    assert group.version == local.version == 2
    same(group.exported(), local.exported(), 1e-4)
    same(dict(group.weights()), dict(local.weights()), 1e-4)


def test_weights_go_from_the_ranks_to_workers_elsewhere_and_in_their_own_processes(pair):
    group, own, inside = pair
    group.step()  # no gradient: the version stays
    for pool in (own, inside):
        pool.load_weights(group.weights())
        assert pool.version == group.version
    lm = load_lm(group.lm.path, "float32")
    with torch.no_grad():
        for name, tensor in group.weights():
            lm.module.get_parameter(name).copy_(tensor)
    whole = group.weights().receipt()
    assert set(own.receipts.values()) == {whole} and {r.version for r in inside.receipts.values()} == {group.version}
    asked, sampling = requests([4, 9, 3], n=3), Sampling(max_tokens=20)
    want = ids(NativeEngine(lm, NativeConfig(max_total_tokens=96, kv_tokens=4096)).generate(asked, sampling))
    assert ids(own.generate(asked, sampling)) == want == ids(inside.generate(asked, sampling))


def test_the_state_of_two_ranks_continues_in_one_engine_and_back(pair, path):
    group, *_ = pair
    tensors, numbers = group.state()
    local = TrainEngine(load_lm(path, "float32"), 1.0, OPTIM, 10, 256)
    local.load_state(tensors, numbers)
    same(local.state()[0], tensors, 0)
    batch = a_batch(local.lm, seed=1)
    one_update(local, batch)
    one_update(group, batch)
    same(group.exported(), local.exported(), 1e-4)
    group.load_state(tensors, numbers)
    assert group.version == numbers["version"]
    same(group.state()[0], tensors, 0)


def test_an_error_on_the_ranks_is_raised_here_and_the_group_goes_on(pair):
    group, *_ = pair
    batch = a_batch(load_lm(group.lm.path, "float32"))
    with pytest.raises(WorkerError, match="actor rank . .*ValueError: values were asked of a model without a value head"):
        group.values(batch)


def test_one_rank_with_adapters_is_the_reference_too(slots, path, meeting):
    """A plain engine in a process of its own; with its adapters off it answers as the starting policy."""
    lora = LoraConfig(rank=2)
    torch.manual_seed(0)
    local = TrainEngine(load_lm(path, "float32", lora=lora), 1.0, OPTIM, 10, 256)
    group = group_of(slots, "critic", path, meeting, lora).ready()
    with torch.no_grad():
        group.load_state(*local.state())
    batch = a_batch(local.lm)
    start = local.logprobs(batch)
    one_update(group, batch)
    assert not np.allclose(group.logprobs(batch), start, atol=1e-4)
    with group.lm.adapters_off():
        assert np.allclose(group.logprobs(batch), start, atol=1e-5)
    assert all("lora_" in n for n in group.exported()) and group.frozen
    group.close()


def test_tensors_travel_as_bytes_of_every_kind():
    tensors = {"a": torch.randn(3, 4).bfloat16().t(), "b": torch.tensor(3), "c": torch.zeros(0, 2), "d": torch.arange(5).float()}
    back = unpack_tensors(pack_tensors(tensors))
    assert all(back[n].dtype == t.dtype and torch.equal(back[n], t) for n, t in tensors.items())
    back["d"] += 1
