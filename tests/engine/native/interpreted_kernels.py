"""The GPU runner and its kernels, run on the CPU by Triton's interpreter, against plain attention and sampling.

Run by test_kernels.py in a process of its own, with TRITON_INTERPRET=1 set before anything imports Triton.
"""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.engine.native.tiny import requests, tiny
from verl.core.types import Sampling, derive_seed
from verl.engine.native.config import NativeConfig
from verl.engine.native.engine import NativeEngine
from verl.engine.native.gpu import GpuRunner
from verl.engine.native.kernels import uniform
from verl.engine.native.sampler import uniforms


class Interpreted(NativeEngine):
    def _make_runner(self):
        runner = GpuRunner(self.lm, self.config, self.page_size, self.limit)
        runner.programs = 4  # the interpreter runs them one by one
        return runner


CONFIG = {"page_size": 8, "kv_tokens": 400, "max_sequences": 4, "decode_steps": 2, "prefill_tokens": 11}
GENTLE = Sampling(max_tokens=3, ignore_eos=True)


@triton.jit
def probe(state_ptr, index_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    low = tl.load(state_ptr + 2 * i).to(tl.uint32, bitcast=True)
    high = tl.load(state_ptr + 2 * i + 1).to(tl.uint32, bitcast=True)
    tl.store(out_ptr + i, uniform(low, high, tl.load(index_ptr + i).to(tl.uint32)))


def close(want, got, logprob=2e-5):
    for a, b in zip([s for w in want for s in w], [s for g in got for s in g], strict=True):
        assert a.ids_L.tolist() == b.ids_L.tolist() and a.finish == b.finish
        assert np.abs(a.logprobs_L - b.logprobs_L).max() < logprob


@pytest.mark.parametrize("architecture", ["Gemma2", "GptOss"])
def test_engine_on_kernels_equals_engine_on_plain_attention(architecture):
    """Shared prompts, GQA, windows, softcap, sinks, chunked prefill, results one step late."""
    lm, asked = tiny(architecture), requests([13], n=2)
    want = NativeEngine(lm, NativeConfig(**CONFIG)).generate(asked, GENTLE)
    close(want, Interpreted(lm, NativeConfig(**CONFIG)).generate(asked, GENTLE))


def test_preemption_on_the_device_leaves_no_trace():
    lm, asked = tiny("Llama", num_hidden_layers=1), requests([5], n=2)
    sampling = Sampling(max_tokens=6, ignore_eos=True)
    want = NativeEngine(lm).generate(asked, sampling)
    cramped = Interpreted(lm, NativeConfig(page_size=2, kv_tokens=16, max_sequences=4, decode_steps=2))
    close(want, cramped.generate(asked, sampling))
    assert cramped.preemptions > 0


@pytest.mark.parametrize("sampling", [
    Sampling(max_tokens=3, temperature=0), Sampling(max_tokens=3, temperature=0.6),
    Sampling(max_tokens=4, min_tokens=2, stop_ids=tuple(range(0, 97, 4))), Sampling(max_tokens=3, top_k=3),
    Sampling(max_tokens=3, top_p=0.7, min_tokens=2, stop_ids=(5, 6))], ids=["greedy", "cool", "min_tokens", "top_k", "top_p"])
def test_sampling_settings_equal_the_reference_sampler(sampling):
    lm, asked = tiny("Gemma2", num_hidden_layers=1, layer_types=["sliding_attention"]), requests([3], n=3)
    close(NativeEngine(lm).generate(asked, sampling), Interpreted(lm, NativeConfig(**CONFIG)).generate(asked, sampling))


def test_fp8_keys_and_values_stay_near(monkeypatch):
    lm, asked = tiny("Llama", num_hidden_layers=1), requests([13], n=2)
    monkeypatch.setattr(NativeEngine, "_cache_dtype", lambda self: torch.float8_e4m3fn)  # refused on a CPU, but for the interpreter
    engine = Interpreted(lm, NativeConfig(**CONFIG, kv_scale=0.5))
    answers = engine.generate(asked, GENTLE)
    assert engine.memory.pools[0].k.dtype == torch.float8_e4m3fn
    from tests.engine.native.tiny import rescore
    error = np.abs(np.concatenate(rescore(lm, asked, answers)) - np.concatenate([s.logprobs_L for a in answers for s in a]))
    assert 1e-4 < error.mean() < 0.3


def test_long_contexts_are_cut_into_parts_and_merged():
    """A prompt longer than one part reads, and responses computed again that are as long."""
    lm = tiny("Llama", max_position_embeddings=512, num_hidden_layers=1)
    asked = requests([300], n=2)
    config = NativeConfig(page_size=16, max_sequences=4, kv_tokens=1200)
    want = NativeEngine(lm, config).generate(asked, GENTLE)
    close(want, Interpreted(lm, config).generate(asked, GENTLE), 1e-4)


def test_the_kernels_uniform_is_the_reference_uniform():
    seeds = [derive_seed(i) for i in range(64)]
    words = np.array([(s & 0xFFFFFFFF, s >> 32) for s in seeds], np.uint64).astype(np.uint32).view(np.int32)
    index, out = torch.arange(64, dtype=torch.int32) * 1001, torch.empty(64)
    probe[1,](torch.from_numpy(words), index, out, N=64)
    assert torch.equal(out, uniforms(torch.tensor(seeds), index.long()))
