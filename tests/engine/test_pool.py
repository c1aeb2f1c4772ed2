"""Rollout by workers in other processes: held against the rules of all engines, then killed."""

import os
import signal
import time
from functools import partial

import pytest

pytest.importorskip("ray", reason="ray is not installed")

import numpy as np  # noqa: E402
import torch  # noqa: E402

from tests.engine.conformance import LIMIT, Conformance, ids, requests  # noqa: E402
from verl.core.errors import WeightsError, WorkerError  # noqa: E402
from verl.core.types import Sampling  # noqa: E402
from verl.core.weights import Weights  # noqa: E402
from verl.engine.hf_engine import HFEngine  # noqa: E402
from verl.engine.native.config import NativeConfig  # noqa: E402
from verl.engine.native.engine import NativeEngine  # noqa: E402
from verl.engine.pool import RolloutPool  # noqa: E402
from verl.flow.actors import Cluster  # noqa: E402
from verl.flow.devices import device_group  # noqa: E402
from verl.flow.link import Meeting  # noqa: E402
from verl.models.load import LoraConfig, load_lm  # noqa: E402

CLUSTER: list[Cluster] = []


@pytest.fixture(scope="module", autouse=True)
def cluster():
    CLUSTER.append(Cluster())
    yield CLUSTER[0]
    CLUSTER.pop().close()


def native(path, lora, device):
    return NativeEngine(load_lm(path, "float32", device, lora=lora), NativeConfig(max_total_tokens=LIMIT, kv_tokens=4096))


def broken(path, device):
    raise MemoryError("no room for the model")


def pool_of(words, make, notes):
    slots = CLUSTER[0].place({"rollout": device_group(words, "rollout")})["rollout"]
    return RolloutPool(slots, make, Meeting(CLUSTER[0].address), notes.append)


def named(lm):
    return lambda: ((n, p.detach()) for n, p in lm.module.named_parameters())


def until(condition, limit_s=60):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


class TestPool(Conformance):
    notes: list[str] = []

    def build(self, lm, path):
        return pool_of("cpu*2", partial(native, str(path), None), self.notes).ready()

    def own(self, lm):
        return NativeEngine(lm, NativeConfig(max_total_tokens=LIMIT, kv_tokens=4096))

    def test_workers_are_processes_and_samples_are_those_of_one_engine(self, engine, lm):
        assert len({os.getpid(), *engine.pids.values()}) == 3
        sampling = Sampling(max_tokens=30)
        for asked in (requests([4, 1, 33, 9, 5], n=3), requests([7], n=11), requests([3, 60], n=1)):
            got, want = engine.generate(asked, sampling), self.own(lm).generate(asked, sampling)
            assert ids(got) == ids(want)
            assert all(np.allclose(a.logprobs_L, b.logprobs_L, atol=1e-4) for x, y in zip(got, want) for a, b in zip(x, y))
        assert engine.generate([], sampling) == []

    def test_every_worker_answers_a_load_with_the_trainers_receipt(self, engine, lm, publish):
        version = publish(lambda module: [p.mul_(1.01) for p in module.parameters()])
        want = Weights(version, named(lm)).receipt()
        assert {n: engine.receipts[n] for n in engine.pids} == dict.fromkeys(engine.pids, want)

    def test_weights_that_do_not_fit_are_refused_everywhere_until_whole_ones_come(self, engine, lm, publish):
        whole = dict(named(lm)())
        for wrong, words in [(whole | {"lm_head.weight": torch.zeros(3, 3)}, r"'lm_head.weight' of shape \(3, 3\) has no place"),
                             (whole | {"other": torch.zeros(3)}, "'other' .* no such tensor"),
                             ({n: whole[n] for n in list(whole)[1:]}, "1 of 21 tensors would not reach")]:
            with pytest.raises(WeightsError, match=words):
                engine.load_weights(Weights(engine.version + 1, wrong.items))
        with pytest.raises(WeightsError, match="did not complete"):
            engine.generate(requests([3]), Sampling(max_tokens=2))
        publish(lambda module: None)
        assert len(engine.generate(requests([3]), Sampling(max_tokens=2))) == 1

    def test_a_worker_killed_in_mid_generation_costs_nothing_but_time(self, engine, lm, publish):
        publish(lambda module: [p.mul_(1.02) for p in module.parameters()])  # a new process has to get these
        asked, sampling, seen, before = requests([4, 1, 33, 9], n=30), Sampling(max_tokens=60, ignore_eos=True), [], engine.pids
        want = ids(self.own(lm).generate(asked, sampling))

        def kill_one(*finished):
            seen.append(finished[:2])
            if len(seen) == 3:
                os.kill(list(before.values())[0], signal.SIGKILL)

        assert ids(engine.generate(asked, sampling, kill_one)) == want
        assert sorted(seen) == sorted({(r.key, j) for r in asked for j in range(30)})
        assert len(self.notes) == 1 and f"pid {list(before.values())[0]}" in self.notes[0] and "died" in self.notes[0]
        until(lambda: engine.starting[0].actor.started())
        assert ids(engine.generate(asked[:2], sampling)) == want[:60]  # the new one joins in here
        assert len(engine.pids) == 2 and not set(engine.pids.values()) <= set(before.values())
        assert {w.held for w in engine.workers} == {engine.version}
        publish(lambda module: None)

    def test_a_worker_killed_between_steps_is_replaced(self, engine, lm, publish):
        os.kill(list(engine.pids.values())[0], signal.SIGKILL)
        publish(lambda module: [p.mul_(0.99) for p in module.parameters()])
        assert len(engine.pids) == 1
        asked = requests([4, 1], n=4)
        assert ids(engine.generate(asked, Sampling(max_tokens=9))) == ids(self.own(lm).generate(asked, Sampling(max_tokens=9)))

    def test_all_workers_killed_again_and_again_end_with_the_first_error(self, engine):
        killed = []

        def kill_all(*_):
            for pid in set(engine.pids.values()) - set(killed):
                killed.append(pid)
                os.kill(pid, signal.SIGKILL)

        with pytest.raises(WorkerError, match="rollout rank .* died"):
            engine.generate(requests([4, 1], n=200), Sampling(max_tokens=60, ignore_eos=True), kill_all)
        assert len(killed) >= 3


def test_adapters_travel_alone_and_any_engine_samples():
    """LoRA: the base is what every worker has read; the adapters of the trainer, which differ, are all that is sent."""
    path = pytest.importorskip("tests.engine.tiny").model_dir
    import tempfile
    with tempfile.TemporaryDirectory() as folder:
        path(folder)
        lora = LoraConfig(rank=2)
        lm = load_lm(folder, "float32", lora=lora)
        with torch.no_grad():
            for n, p in lm.module.named_parameters():
                if "lora_" in n:
                    p.normal_(0, 0.3)
        pool = pool_of("cpu*1", partial(hf, folder, lora), [])
        pool.load_weights(Weights(0, named(lm), lm.module))
        adapters = [n for n, p in lm.module.named_parameters() if p.requires_grad]
        assert next(iter(pool.receipts.values())).count == len(adapters) and all("lora_" in n for n in adapters)
        asked, sampling = requests([4, 9], n=2), Sampling(max_tokens=12)
        assert ids(pool.generate(asked, sampling)) == ids(HFEngine(lm).generate(asked, sampling))
        pool.close()


def hf(path, lora, device):
    return HFEngine(load_lm(path, "float32", device, lora=lora))


def test_workers_that_cannot_start_are_the_first_error():
    pool = pool_of("cpu*2", partial(broken, "x"), [])
    with pytest.raises(WorkerError, match="rollout rank .*: MemoryError: no room for the model"):
        pool.ready()
    pool.close()
