"""The sampler against the distribution it claims to draw from."""

import math

import numpy as np
import pytest
import torch

from verl.core.types import Sampling, derive_seed
from verl.engine.native.sampler import sample, truncate, uniforms


def draw(logits, n=10_000, ends=(), **settings):
    """n draws with n seeds at position 0."""
    z = torch.tensor(logits, dtype=torch.float32).expand(n, -1)
    seeds = torch.tensor([derive_seed("draw", i) for i in range(n)])
    ids, logprobs = sample(z, Sampling(**settings), seeds, torch.zeros(n, dtype=torch.int64), ends)
    return ids.numpy(), logprobs.numpy()


def test_uniforms_are_uniform_over_seeds_and_positions():
    """Kolmogorov-Smirnov at the 0.1% level, and no correlation between neighbouring seeds, positions or high words."""
    n = 20_000
    zero, count = torch.zeros(n, dtype=torch.int64), torch.arange(n)
    series = [uniforms(count, zero), uniforms(zero, count), uniforms(count << 32, zero), uniforms(zero + 12345, count)]
    for u in series:
        ranked = np.sort(u.numpy())
        assert np.abs(ranked - (np.arange(n) + 0.5) / n).max() < 1.95 / math.sqrt(n)
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 4 / math.sqrt(n)
    for a in range(4):
        for b in range(a):
            assert abs(np.corrcoef(series[a], series[b])[0, 1]) < 4 / math.sqrt(n)


def test_uniform_is_the_documented_function():
    def mix(x):
        x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
        x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
        return x ^ x >> 16
    for seed, position in ((0, 0), (2**63 - 1, 70_000), (0x123456789ABCDEF, 5)):
        h = mix((seed & 0xFFFFFFFF) ^ mix((position * 0x9E3779B9 + (seed >> 32)) & 0xFFFFFFFF))
        assert float(uniforms(torch.tensor([seed]), torch.tensor([position]))) == np.float32(((h >> 8) + 0.5) / 2**24)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_frequencies_are_softmax(temperature):
    logits = np.random.default_rng(1).normal(0, 1.5, 40)
    n = 40_000
    ids, logprobs = draw(logits.tolist(), n, temperature=temperature)
    want = torch.tensor(logits / temperature).softmax(-1).numpy()
    chi2 = ((np.bincount(ids, minlength=40) - n * want) ** 2 / (n * want)).sum()
    assert chi2 < 39 + 3.3 * math.sqrt(2 * 39)  # 39 degrees of freedom, about the 0.1% level
    assert np.allclose(logprobs, np.log(want)[ids], atol=1e-5)


def test_logprob_is_of_the_tempered_distribution():
    """Field case D022: logits / T before the softmax; -1.4076 (T ignored) and -2.8152 (divided after) are wrong."""
    ids, logprobs = draw([2.0, 1.0, 0.0], temperature=0.5)
    assert logprobs[ids == 1] == pytest.approx(-2.142932, abs=1e-4)


def test_rows_without_a_token_are_never_drawn():
    """Field case D030: 10,000 draws stay below the tokenizer's size, and id 0 scores -1.098612."""
    ids, logprobs = draw([0.0, 0.0, 0.0, -math.inf, -math.inf])
    assert set(ids.tolist()) == {0, 1, 2} and logprobs == pytest.approx(-1.098612, abs=1e-4)
    edge = torch.tensor([[-math.inf, 0.0, -200.0, -math.inf]]).expand(50_000, -1)  # the tail underflows
    ids, _ = sample(edge, Sampling(), torch.arange(50_000), torch.arange(50_000), ())
    assert set(ids.tolist()) == {1}


def test_padded_rows_of_a_whole_model_are_never_sampled():
    """Field case D030 through the engine: the spare rows carry the highest logits and still never appear."""
    from tests.engine.native.tiny import requests, tiny
    from verl.engine.native.engine import NativeEngine
    from verl.models.head import HeadSpec
    lm = tiny("Llama")
    lm.head = HeadSpec(rows=5)
    with torch.no_grad():
        lm.module.lm_head.weight[5:] = 10 * lm.module.lm_head.weight[:5].repeat(19, 1)[:92]
    answers = NativeEngine(lm).generate(requests([4], n=100), Sampling(max_tokens=100, ignore_eos=True))
    ids = np.concatenate([s.ids_L for s in answers[0]])
    assert len(ids) == 10_000 and ids.max() < 5


def test_greedy_takes_the_first_maximum_and_reports_temperature_one():
    ids, logprobs = draw([0.0, 2.0, 1.0], n=3, temperature=0)
    assert set(ids.tolist()) == {1} and logprobs == pytest.approx(math.log(math.e**2 / (1 + math.e**2 + math.e)), abs=1e-6)


def test_truncation_keeps_the_top_and_renormalises():
    probs = np.array([0.5, 0.3, 0.15, 0.05])
    for settings, kept in (({"top_k": 2}, 2), ({"top_p": 0.8}, 2), ({"top_p": 0.81}, 3), ({"top_p": 1e-6}, 1),
                           ({"top_k": 3, "top_p": 0.6}, 2)):
        ids, logprobs = draw(np.log(probs).tolist(), n=2000, **settings)
        assert set(ids.tolist()) == set(range(kept)), settings
        assert np.allclose(np.exp(logprobs), (probs / probs[:kept].sum())[ids], atol=1e-5)
    z = torch.tensor([[1.0, 1.0, 0.0]])
    assert torch.isfinite(truncate(z, 1, 1.0)).tolist() == [[True, True, False]]  # ties at the k-th are all kept


def test_ends_are_banned_before_min_tokens_only():
    z = torch.zeros(2, 4)
    for position, allowed in ((1, {1, 3}), (2, {0, 1, 2, 3})):
        drawn = {int(sample(z[:1], Sampling(min_tokens=2), torch.tensor([s]), torch.tensor([position]), (0, 2))[0])
                 for s in range(200)}
        assert drawn == allowed
