"""The root forward beyond packing: value head, adapters, architectures that run unpacked."""

import pytest
import torch
from peft.tuners.lora import LoraLayer

from tests.models.small_lms import gradients, ragged, small, stock, worst
from verl.models import LoraConfig, Packed, bind


@pytest.mark.parametrize("kind", ["falcon", "mamba2"])
def test_refused_architectures_train_unpacked(kind):
    """Log-probs, entropies, values and gradients equal to every sequence alone, shared prompts included."""
    plain, lm, batch = small(kind), bind(small(kind), None), ragged()
    assert not lm.native
    head = lm.add_value_head()
    want = stock(plain, batch, 0.8, value_head=head)
    out = lm.forward(Packed(batch, "cpu"), 0.8, values=True)
    got = (out.logprobs_T, out.entropy_T, out.values_T)
    real = torch.from_numpy(batch.mask_T)
    for g, w in zip(got, want):
        assert (g.double() - w)[real].abs().max() < 1e-5
    for columns in (got, want):
        sum(torch.where(real, c.double() * torch.linspace(0.5, 1, len(real)), 0.0).sum() for c in columns).backward()
    assert worst(gradients(lm.module), gradients(plain)) < 1e-5


def test_unpacked_scores_and_lonely_prompts():
    """Answers that are empty or one token long need no forward of their own beside their prompt's."""
    plain, lm = small("falcon"), bind(small("falcon"), None)
    batch = ragged(prompts=(5,), answers=((1, 0, 4, 1),))
    calls = []
    lm.module.base_model.register_forward_pre_hook(lambda m, a, k: calls.append(k["input_ids"].shape[1]), with_kwargs=True)
    got = lm.forward(Packed(batch, "cpu"), 1.0).logprobs_T
    assert calls == [8]
    assert (got.double() - stock(plain, batch)[0]).abs().max() < 1e-5


def test_value_head():
    lm = bind(small("llama", torch.bfloat16), None)
    with pytest.raises(ValueError, match="add_value_head"):
        lm.forward(Packed(ragged(), "cpu"), 1.0, values=True)
    head = lm.add_value_head(seed=3)
    assert head.weight.dtype is torch.float32 and not head.bias.any()
    assert torch.equal(head.weight, bind(small("llama"), None).add_value_head(seed=3).weight)
    values = lm.forward(Packed(ragged(), "cpu"), 1.0, logprobs=False, values=True)
    assert values.logprobs_T is None and values.values_T.abs().max() < 0.5
    assert [n for n, _ in lm.parameters()][-2:] == ["value_head.weight", "value_head.bias"]
    assert bind(small("llama", torch.float64), None).add_value_head().weight.dtype is torch.float64


def test_tied_parameters_are_listed_once():
    names = [n for n, _ in bind(small("llama", tie_word_embeddings=True), None).parameters()]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names and len(names) == len(set(names))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_adapters_start_at_the_base_and_leave_it_frozen(kind):
    batch, plain = ragged(), bind(small(kind), None)
    packed = Packed(batch, "cpu")
    base = plain.forward(packed, 1.0).logprobs_T
    lm = bind(small(kind), None, lora=LoraConfig(rank=4, alpha=8))
    assert torch.equal(lm.forward(packed, 1.0).logprobs_T, base)
    trained = [n for n, p in lm.parameters() if p.requires_grad]
    assert trained and all("lora_" in n for n in trained)
    assert not any("lm_head" in n for n in trained)
    for name, parameter in lm.parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    assert (lm.forward(packed, 1.0).logprobs_T - base).abs().max() > 0.1
    with lm.adapters_off():
        assert torch.equal(lm.forward(packed, 1.0).logprobs_T, base)
    assert (lm.forward(packed, 1.0).logprobs_T - base).abs().max() > 0.1
    assert [n for n, p in lm.parameters() if p.requires_grad] == trained
    lm.forward(packed, 1.0).logprobs_T.sum().backward()
    assert set(gradients(lm.module)) == set(trained)


def test_adapters_come_back_after_an_error():
    lm = bind(small("llama"), None, lora=LoraConfig(rank=2))
    with pytest.raises(ZeroDivisionError), lm.adapters_off():
        raise ZeroDivisionError
    assert not any(m.disable_adapters for m in lm.module.modules() if isinstance(m, LoraLayer))
    with pytest.raises(ValueError, match="no adapters"), bind(small("llama"), None).adapters_off():
        pass


def test_context_is_the_models_own():
    assert bind(small("llama"), None).context == 128
