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
from verl.models.load import load_lm

usable, why = vllm_available()
pytestmark = [pytest.mark.skipif(not usable, reason=why), pytest.mark.timeout(600)]
os.environ["HF_HUB_OFFLINE"] = "1"


def engine_of(path, **settings):
    return vLLMEngine(path, dtype="float32", max_total_tokens=LIMIT, gpu_memory_utilization=0.2, **settings)


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

    def test_weights_that_change_between_the_two_passes_are_noticed(self, engine, lm):
        passes = iter([1.0, 1.5])

        def tensors():
            scale = next(passes)
            return ((n, p.detach() * scale) for n, p in lm.module.named_parameters())

        version = engine.version + 1
        with pytest.raises(WeightsError, match="checksum"):
            engine.load_weights(Weights(version, tensors))
        engine.load_weights(Weights(version, lambda: ((n, p.detach()) for n, p in lm.module.named_parameters())))


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
        weights = Weights(1, lambda: ((n, p.detach()) for n, p in lm.module.named_parameters()), lm.module)
        assert engine.load_weights(weights) == weights.receipt()
        after = engine.generate(asked, sampling)
        agree(lm, asked, after, 0.7)
        assert ids(after) != ids(before) and after[0][0].versions_L.tolist() == [1] * len(after[0][0])
        children = psutil.Process().children(recursive=True)
    finally:
        engine.close()
    assert children and not any(c.is_running() and c.status() != psutil.STATUS_ZOMBIE for c in children if "vllm" in c.name().lower())
