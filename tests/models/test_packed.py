"""Packed rows with shared prompts equal every sequence alone through stock transformers, gradients included."""

import numpy as np
import pytest
import torch

from tests.models.small_lms import gradients, ragged, small, stock, worst
from verl.models import Packed, bind

SHAPES = ["llama", "mistral", "qwen2", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "gpt2"]
EXACT = {"gpt2": 1e-12}  # float64 throughout; the others normalise in float32 whatever the module's dtype


def objective(logprobs_T, entropy_T, values_T, mask_T):
    c = torch.linspace(-1, 1, len(mask_T), dtype=torch.float64)
    value = c * logprobs_T.double() + c.flip(0) * entropy_T.double() + c.cos() * values_T.double()
    return torch.where(torch.from_numpy(mask_T), value, 0.0).sum()


def native(kind, dtype=torch.float32, **settings):
    """Bound and proven: a model that is not native would be exact for another reason."""
    lm = bind(small(kind, dtype, **settings), None)
    assert lm.native, lm.why_not
    return lm


def packed_gradients(lm, batch, budget, temperature=1.0):
    """Gradients summed over micro-batches, every token keeping the coefficient it has in the whole batch."""
    lm.module.zero_grad()
    lm.value_head.zero_grad()
    batch.weights_T = np.linspace(-1, 1, len(batch.ids_T)) if batch.weights_T is None else batch.weights_T
    for micro in batch.micro_batches(budget):
        out = lm.forward(Packed(micro, "cpu"), temperature, values=True)
        c = torch.from_numpy(micro.weights_T)
        value = c * out.logprobs_T.double() + c.square() * out.entropy_T.double() + c.cos() * out.values_T.double()
        total = torch.where(torch.from_numpy(micro.mask_T), value, 0.0).sum()
        if total.requires_grad:
            total.backward()
    return gradients(lm.module)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-6)])
@pytest.mark.parametrize("kind", SHAPES)
def test_equal_to_every_sequence_alone(kind, dtype, tolerance):
    batch, temperature = ragged(), 0.7
    tolerance = EXACT.get(kind, tolerance) if dtype is torch.float64 else tolerance
    plain, lm = small(kind, dtype), native(kind, dtype)
    head = lm.add_value_head()
    head.weight.data *= 100
    want = stock(plain, batch, temperature, value_head=head)
    objective(*want, batch.mask_T).backward()
    want_head, head.weight.grad = head.weight.grad.clone(), None
    out = lm.forward(Packed(batch, "cpu"), temperature, values=True)
    got = (out.logprobs_T, out.entropy_T, out.values_T)
    for g, w in zip(got, want):
        real = torch.from_numpy(batch.mask_T)
        assert (g.double() - w)[real].abs().max() <= tolerance * max(1, float(w.detach().abs().max()))
    objective(*got, batch.mask_T).backward()
    assert worst(gradients(lm.module), gradients(plain)) <= tolerance
    assert torch.allclose(head.weight.grad, want_head, rtol=1e-4, atol=tolerance)


@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "gpt_oss"])
def test_no_cut_and_no_order_changes_the_gradient(kind):
    lm, batch = native(kind, torch.float64), ragged()
    lm.add_value_head()
    whole = packed_gradients(lm, batch, 10_000)
    for budget in (1, 12, 20):
        assert len(batch.micro_batches(budget)) > 1
        assert worst(packed_gradients(lm, batch, budget), whole) <= EXACT.get(kind, 1e-6)
    for order in (np.arange(len(batch))[::-1], np.random.default_rng(1).permutation(len(batch))):
        assert worst(packed_gradients(lm, batch.select(order), 20), whole) <= EXACT.get(kind, 1e-6)


def test_many_buckets_and_padding():
    """Lengths far apart fall into several rectangles; padding within one must not be seen."""
    batch = ragged(prompts=(40, 2, 90), answers=((30, 1, 2), (3, 90), (5, 5)))
    packed = Packed(batch, "cpu")
    buckets, place_N = packed._buckets
    assert len(buckets) == 2 and sum(b.query_BL.numel() for b in buckets) > len(packed) == len(set(place_N.tolist()))
    assert len(Packed(ragged(), "cpu")._buckets[0]) == 1  # small areas share one
    want = stock(small("mistral"), batch)
    got = native("mistral").forward(packed, 1.0)
    assert (got.logprobs_T.double() - want[0]).abs().max() < 1e-5


def test_the_layout():
    """Prompt once, then each sequence without its last token; position and source of every target."""
    batch = ragged(prompts=(3, 0), answers=((2, 1, 0), (3,)))
    packed = Packed(batch, "cpu")
    a, b, p = batch.ids_T[:2], batch.ids_T[3:], batch.prompts[0]
    assert packed.ids_N.tolist() == [*p, a[0], b[0], b[1]] and len(packed) == 6
    assert packed.positions_N.tolist() == [0, 1, 2, 3, 0, 1]
    assert packed.source_T.tolist()[:3] == [2, 3, 2] and packed.source_T.tolist()[4:] == [4, 5]
    assert packed.targets_T.tolist() == batch.ids_T.tolist() and packed.last_S is None
    kept = Packed(batch, "cpu", keep_last=True)
    assert len(kept) == 9 and kept.last_S.tolist() == [4, 5, 2, 8]


def test_one_mask_serves_all_layers():
    packed = Packed(ragged(), "cpu")
    lm = native("gemma2", num_hidden_layers=4)
    lm.forward(packed, 1.0)
    assert all(set(b.masks) == {None, 4} for b in packed._buckets[0])


def test_absolute_positions_start_at_the_sequence():
    """Field case D035: rows of different length in one pack are scored as if alone, with learned absolute positions."""
    batch = ragged(prompts=(1, 2), answers=((2,), (3,)))
    assert Packed(batch, "cpu").positions_N.tolist() == [0, 0, 1, 1, 2, 3]
    want = stock(small("gpt2"), batch)[0]
    got = native("gpt2").forward(Packed(batch, "cpu"), 1.0).logprobs_T
    assert (got.double() - want).abs().max() < 1e-5


def test_first_token_without_a_prompt_cannot_be_trained():
    batch = ragged(prompts=(0,), answers=((3,),))
    batch.mask_T[:] = True
    with pytest.raises(ValueError, match="nothing predicts it"):
        Packed(batch, "cpu")


def test_nothing_to_predict():
    """Empty responses only, and a row that is one token without a prompt."""
    lm = native("llama")
    out = lm.forward(Packed(ragged(prompts=(4, 2), answers=((0, 0), (0,))), "cpu"), 1.0)
    assert out.logprobs_T.shape == out.entropy_T.shape == (0,)
    lonely = ragged(prompts=(0,), answers=((1,),))
    assert len(Packed(lonely, "cpu")) == 1 and lm.forward(Packed(lonely, "cpu"), 1.0).logprobs_T.shape == (1,)


def test_scores_are_read_at_the_last_token():
    batch, lm = ragged(), native("llama")
    head = lm.add_score_head()
    got = lm.forward(Packed(batch, "cpu", keep_last=True), 1.0, scores=True).scores_S
    plain = small("llama")
    for s, n in enumerate(batch.lengths_S):
        ids = np.concatenate([batch.prompts[batch.prompt_S[s]], batch.ids_T[batch.offsets[s]:batch.offsets[s] + n]])
        want = head(plain.base_model(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).last_hidden_state[0, -1])
        assert (got[s] - want).abs() < 1e-5


def test_padded_query_rows_are_finite_in_half_precision():
    batch = ragged(prompts=(5,), answers=((9, 1, 3),))
    lm = native("gemma2", torch.bfloat16)
    assert lm.forward(Packed(batch, "cpu"), 1.0).logprobs_T.isfinite().all()
