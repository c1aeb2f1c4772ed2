"""Real vLLM, in this process and in its own, held against the rules of all engines."""

import os
import random

import numpy as np
import psutil
import pytest
import torch

from tests.engine import tiny
from tests.engine.conformance import LIMIT, Conformance, agree, ids, requests
from verl.core.errors import WeightsError
from verl.core.types import Sampling
from verl.core.weights import Weights
from verl.engine.vllm_engine import vllm_available, vLLMEngine
from verl.models.load import LoraConfig, load_lm

usable, why = vllm_available()
pytestmark = [pytest.mark.skipif(not usable, reason=why), pytest.mark.timeout(600)]
os.environ["HF_HUB_OFFLINE"] = "1"


def engine_of(path, **settings):
    return vLLMEngine(path, dtype="float32", max_total_tokens=LIMIT, gpu_memory_utilization=0.2, **settings)


def weights_of(lm, version):
    return Weights(version, lambda: ((n, p.detach()) for n, p in lm.module.named_parameters()), lm.module)


class TestVLLM(Conformance):
    def build(self, lm, path):
        def draws():
            return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()

        states = torch.get_rng_state(), np.random.get_state(), random.getstate()
        want = draws()
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        engine = engine_of(path)
        engine.wake()
        assert draws() == want, "starting vLLM changed this process's random numbers"
        return engine

    def test_receipts_are_those_of_what_was_sent_and_partial_loads_void_the_engine(self, engine, lm):
        sent = {n: p.detach().clone() for n, p in lm.module.named_parameters()}
        asked, sampling = requests([4]), Sampling(max_tokens=4)
        version = engine.version + 1
        for broken, words in [({n: t for n, t in sent.items() if n != "model.norm.weight"}, "did not arrive.*model.norm.weight"),
                              ({**sent, "extra": torch.zeros(1)}, "extra"),
                              ({**sent, "model.norm.weight": torch.zeros(3)}, r"model.norm.weight.*\(3,\)")]:
            with pytest.raises(WeightsError, match=words):
                engine.load_weights(Weights(version, lambda broken=broken: iter(broken.items())))
            with pytest.raises(WeightsError, match="nothing can be sampled"):
                engine.generate(asked, sampling)
        weights = Weights(version, lambda: iter(sent.items()))
        assert engine.load_weights(weights) == weights.receipt()
        agree(lm, asked, engine.generate(asked, sampling), 1.0)

    def test_what_is_not_what_was_sent_is_noticed(self, engine, lm, path):
        passes = iter([1.0, 1.5])

        def tensors():
            scale = next(passes)
            return ((n, p.detach() * scale) for n, p in lm.module.named_parameters())

        version = engine.version + 1
        with pytest.raises(WeightsError, match="checksum"):
            engine.load_weights(Weights(version, tensors))
        with pytest.raises(WeightsError, match="set the engine's max_lora_rank"):
            engine.load_weights(weights_of(load_lm(path, "float32", lora=LoraConfig(rank=4)), version))
        engine.load_weights(weights_of(lm, version))


@pytest.mark.parametrize("kind", ["llama", "phi"])
def test_in_its_own_process_weights_arrive_through_shared_memory(tmp_path, kind, capfd):
    """vLLM has no classes of its own for Phi and rewires transformers': never in this process, without being asked."""
    path = tiny.model_dir(tmp_path, kind, num_key_value_heads=2)
    lm, engine = load_lm(path, "float32"), engine_of(path, own_process=kind == "llama")
    try:
        asked, sampling = requests([9, 3], n=2), Sampling(temperature=0.7, max_tokens=12)
        before = engine.generate(asked, sampling)
        assert ("process of its own" in capfd.readouterr().out) is (kind == "phi") and engine.own_process
        agree(lm, asked, before, 0.7)
        with torch.no_grad():
            for parameter in lm.module.parameters():
                parameter.mul_(1.2)
        weights = weights_of(lm, 1)
        assert engine.load_weights(weights) == weights.receipt()
        after = engine.generate(asked, sampling)
        agree(lm, asked, after, 0.7)
        assert ids(after) != ids(before) and after[0][0].versions_L.tolist() == [1] * len(after[0][0])
        children = [c for c in psutil.Process().children(recursive=True) if "vllm" in c.name().lower()]
        assert children
    finally:
        engine.close()
    assert not psutil.wait_procs(children, timeout=20)[1]


def test_adapters_travel_alone_and_are_in_force_without_merging(tmp_path):
    lm = load_lm(tiny.model_dir(tmp_path), "float32", lora=LoraConfig(rank=4, alpha=8))
    engine = engine_of(tmp_path, max_lora_rank=4)
    try:
        asked, sampling = requests([9, 40]), Sampling(max_tokens=12)
        agree(lm, asked, engine.generate(asked, sampling), 1.0)  # B is zero: the policy as it was loaded
        for version in (1, 2):
            with torch.no_grad():
                for name, parameter in lm.module.named_parameters():
                    if "lora_" in name:
                        parameter.normal_(0, 0.15 * version)
            receipt = engine.load_weights(weights_of(lm, version))
            assert (receipt.version, receipt.count) == (version, 2 * 2 * 7)  # A and B of seven matrices in two layers
            found = engine.generate(asked, sampling)
            agree(lm, asked, found, 1.0)
            assert {int(v) for samples in found for s in samples for v in s.versions_L} == {version}
        with pytest.raises(WeightsError, match="carry none"):
            engine.load_weights(weights_of(load_lm(tmp_path, "float32"), 3))
        rank = load_lm(tmp_path, "float32", lora=LoraConfig(rank=16))
        with pytest.raises(WeightsError, match="rank 16.*max_lora_rank"):
            engine.load_weights(weights_of(rank, 3))
    finally:
        engine.close()
