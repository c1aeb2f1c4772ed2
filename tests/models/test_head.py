"""Log-probs and entropy from hidden states agree with a float64 log_softmax over whole logits, gradients included."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.models.head import HeadSpec, shape_logits, token_logprobs

SPECS = {"plain": HeadSpec(40), "spare rows": HeadSpec(33), "softcap": HeadSpec(40, softcap=3.0), "scale": HeadSpec(40, 0.25),
         "all": HeadSpec(37, 1.7, 4.0)}


def case(tokens=9, width=6, rows=40, dtype=torch.float64, seed=0, limit=None):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(rows, width, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    bias = torch.randn(rows, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, bias, torch.randint(0, limit or rows, (tokens,), generator=g)


def plainly(hidden, weight, bias, targets, spec, temperature):
    z = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    z = z * spec.scale
    z = z if spec.softcap is None else spec.softcap * torch.tanh(z / spec.softcap)
    logp = (z[:, :spec.rows] / temperature).log_softmax(-1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("with_bias", [True, False])
def test_values_and_gradients(name, temperature, with_bias):
    spec = SPECS[name]
    hidden, weight, bias, targets = case(limit=spec.rows)
    bias = bias if with_bias else None
    inputs = [x for x in (hidden, weight, bias) if x is not None]
    got = token_logprobs(hidden, weight, bias, targets, spec, temperature)
    want = plainly(hidden, weight, bias, targets, spec, temperature)
    weights = torch.randn(2, len(targets), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for used in (weights, weights * torch.tensor([[1.0], [0.0]])):
        for g, w in zip(torch.autograd.grad((torch.stack(got) * used).sum(), inputs, retain_graph=True),
                        torch.autograd.grad((torch.stack(want) * used).sum(), inputs, retain_graph=True)):
            assert torch.allclose(g, w, rtol=1e-10, atol=1e-12)
    assert all(torch.allclose(g, w, rtol=1e-12, atol=1e-13) for g, w in zip(got, want))


@pytest.mark.parametrize("name", SPECS)
def test_gradcheck(name):
    hidden, weight, bias, targets = case(tokens=4, limit=SPECS[name].rows)
    assert torch.autograd.gradcheck(lambda h, w, b: token_logprobs(h, w, b, targets, SPECS[name], 0.7, chunk_bytes=4 * 40 * 3),
                                    (hidden, weight, bias))


@settings(max_examples=20, deadline=None)
@given(chunk=st.integers(1, 12), which=st.sampled_from(["logprobs", "entropy", "both"]))
def test_the_chunk_changes_nothing(chunk, which):
    hidden, weight, bias, targets = case(limit=37)
    ends = []
    for chunk_bytes in (4 * 40 * chunk, None):
        logprobs, entropy = token_logprobs(hidden, weight, bias, targets, SPECS["all"], 0.7, chunk_bytes)
        total = {"logprobs": logprobs, "entropy": entropy, "both": logprobs + entropy}[which].sum()
        ends.append((logprobs, entropy, *torch.autograd.grad(total, (hidden, weight, bias))))
    assert all(torch.allclose(a, b, rtol=1e-11, atol=1e-13) for a, b in zip(*ends))


def test_float32_against_float64():
    hidden, weight, bias, targets = case(tokens=30, width=64, rows=5000, dtype=torch.float32)
    got = token_logprobs(hidden, weight, bias, targets, HeadSpec(5000), 1.0)
    want = plainly(hidden.double(), weight.double(), bias.double(), targets, HeadSpec(5000), 1.0)
    assert got[0].dtype is torch.float32
    for g, w in zip(got, want):
        assert (g.double() - w).abs().max() < 2e-5
    g = torch.autograd.grad(got[0].sum() + got[1].sum(), weight, retain_graph=True)[0]
    w = torch.autograd.grad(want[0].sum() + want[1].sum(), weight)[0]
    assert (g - w).abs().max() < 1e-5 * w.abs().max()


def one(logits, target, spec, temperature, dtype=torch.float32):
    """Log-prob of `target` when the head's raw output is exactly `logits`."""
    weight = torch.tensor(logits, dtype=dtype)[:, None]
    return float(token_logprobs(torch.ones(1, 1, dtype=dtype), weight, None, torch.tensor([target]), spec, temperature)[0])


def test_temperature_divides_before_the_softmax():
    """Field case D022: logits [2, 1, 0] at temperature 0.5, token 1."""
    assert one([2.0, 1.0, 0.0], 1, HeadSpec(3), 0.5) == pytest.approx(-2.142932, abs=1e-4)
    with pytest.raises(ValueError, match="temperature > 0"):
        one([2.0, 1.0, 0.0], 1, HeadSpec(3), 0.0)


def test_rows_without_a_token_do_not_count():
    """Field case D030: 3 tokens, 5 rows, logits [0, 0, 0, 9, 9]; a target without a token has no probability."""
    logits = [0.0, 0.0, 0.0, 9.0, 9.0]
    assert one(logits, 0, HeadSpec(3), 1.0) == pytest.approx(-1.098612, abs=1e-4)
    assert shape_logits(torch.tensor(logits), HeadSpec(3)).tolist() == [0, 0, 0, -math.inf, -math.inf]
    assert one(logits, 3, HeadSpec(3), 1.0) == -math.inf
    hidden, weight, bias, targets = case(limit=33)
    targets[2] = 35
    logprobs, _ = token_logprobs(hidden, weight, bias, targets, SPECS["spare rows"], 1.0)
    grads = torch.autograd.grad(logprobs.sum(), (hidden, weight, bias))
    assert not grads[0][2].any() and not grads[1][33:].any() and all(g.isfinite().all() for g in grads)


def test_softmax_is_summed_in_float32():
    """Field case D050: 1000 equal bfloat16 logits."""
    assert one([1.0] * 1000, 0, HeadSpec(1000), 1.0, torch.bfloat16) == pytest.approx(-6.907755, abs=1e-3)


def test_a_certain_token():
    """Entropy of a peaked distribution does not cancel; log-probs of impossible tokens stay finite."""
    hidden, weight = torch.ones(1, 1), torch.tensor([[0.0], [200.0], [0.0]])
    logprobs, entropy = token_logprobs(hidden, weight, None, torch.tensor([1]), HeadSpec(3), 1.0)
    assert float(logprobs) == 0 and float(entropy) == 0
    assert one([0.0, 200.0, 0.0], 0, HeadSpec(3), 1.0) == -200


def test_raw_logits_are_left_alone():
    raw = torch.ones(2, 5)
    shape_logits(raw, HeadSpec(3, 2.0, 1.0))
    assert raw.eq(1).all()
