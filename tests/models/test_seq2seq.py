"""Encoder-decoders: log-probs and gradients equal to transformers' own, sampled by generate, trained by the same engine."""

import numpy as np
import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration

from verl.core.batch import Batch
from verl.core.types import Request, Sampling
from verl.engine.hf_engine import HFEngine
from verl.models.load import bind
from verl.models.packed import Packed


def tiny(kind: str):
    torch.manual_seed(0)
    if kind == "bart":
        module = BartForConditionalGeneration(BartConfig(
            vocab_size=90, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, pad_token_id=1, bos_token_id=0, eos_token_id=2,
            decoder_start_token_id=2, forced_eos_token_id=None))
    else:
        module = T5ForConditionalGeneration(T5Config(
            vocab_size=90, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=2, decoder_start_token_id=0,
            tie_word_embeddings=kind == "t5-tied", eos_token_id=1, pad_token_id=0))
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return bind(module.eval(), None)


@pytest.mark.parametrize("kind", ["t5", "t5-tied", "bart"])
def test_log_probs_and_gradients_equal_the_stock_model(kind):
    lm = tiny(kind)
    assert not lm.native and lm.why_not == "an encoder-decoder"
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 90, n).astype(np.int32) for n in (5, 3)]
    lengths = np.array([4, 1, 6])
    batch = Batch(prompts=prompts, prompt_S=np.array([0, 0, 1]), lengths_S=lengths, ids_T=rng.integers(3, 90, 11).astype(np.int32),
                  mask_T=np.ones(11, bool), row_S=np.arange(3), group_S=np.array([0, 0, 1]))
    want = []
    for s, (a, b) in enumerate(zip(batch.offsets[:-1], batch.offsets[1:])):
        answer = torch.from_numpy(batch.ids_T[a:b].astype(np.int64))
        ids = torch.cat([torch.tensor([lm.module.config.decoder_start_token_id]), answer[:-1]])[None]
        prompt = torch.from_numpy(prompts[batch.prompt_S[s]].astype(np.int64))[None]
        logits = lm.module(input_ids=prompt, decoder_input_ids=ids).logits[0] / 0.7
        want.append(logits.log_softmax(-1).gather(1, answer[:, None])[:, 0])
    want = torch.cat(want)
    got = lm.forward(Packed(batch, "cpu"), 0.7).logprobs_T
    assert torch.allclose(got, want, atol=1e-5)
    weight = torch.randn(11)
    used = [p for p in lm.module.parameters()]
    for a, b in zip(torch.autograd.grad((got * weight).sum(), used, allow_unused=True),
                    torch.autograd.grad((want * weight).sum(), used, allow_unused=True)):
        assert (a is None) == (b is None) and (a is None or torch.allclose(a, b, atol=1e-4))


def test_samples_carry_the_log_probs_of_the_training_forward():
    lm = tiny("t5")
    engine = HFEngine(lm)
    rng = np.random.default_rng(1)
    requests = [Request(str(i), rng.integers(3, 90, n).astype(np.int32), (10 * i, 10 * i + 1)) for i, n in enumerate((4, 7))]
    answers = engine.generate(requests, Sampling(max_tokens=6, stop_ids=(1,)))
    samples = [s for group in answers for s in group]
    batch = Batch(prompts=[r.prompt_ids for r in requests], prompt_S=np.array([0, 0, 1, 1]),
                  lengths_S=np.array([len(s) for s in samples]), ids_T=np.concatenate([s.ids_L for s in samples]),
                  mask_T=np.ones(sum(map(len, samples)), bool), row_S=np.arange(4), group_S=np.array([0, 0, 1, 1]))
    got = lm.forward(Packed(batch, "cpu"), 1.0).logprobs_T.detach().numpy()
    assert np.abs(got - np.concatenate([s.logprobs_L for s in samples])).max() < 1e-4
