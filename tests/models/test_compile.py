"""Compiled layers: one piece each, for any lengths, with the results of plain ones."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Qwen2Config

from verl.core.batch import Batch
from verl.models import packed
from verl.models.compile import decoder_layers
from verl.models.load import bind
from verl.models.packed import Packed

SIZES = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def varlen_on_cpu(query, key, value, cu_q, cu_k, max_q, max_k, scale, window_size, enable_gqa=False):
    """What the fused kernel computes, for any device: bottom-right causal within each segment."""
    def place(cu, total):
        index = torch.arange(total, device=cu.device)
        segment = torch.searchsorted(cu, index, right=True) - 1
        return segment, index - cu[segment]
    (segment_q, at_q), (segment_k, at_k) = place(cu_q, query.shape[0]), place(cu_k, key.shape[0])
    own, all_ = cu_q.diff(), cu_k.diff()
    distance = (at_q + (all_ - own)[segment_q])[:, None] - at_k[None]
    seen = (segment_q[:, None] == segment_k[None]) & (distance >= 0)
    if window_size[0] >= 0:
        seen = seen & (distance <= window_size[0])
    repeat = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeat, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -1e30).softmax(-1), value)


def batch(seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    prompts, samples = int(rng.integers(2, 4)), int(rng.integers(2, 4))
    lengths = rng.integers(3, 9, prompts * samples)
    total, rows = int(lengths.sum()), np.arange(prompts * samples)
    return Batch(prompts=[rng.integers(0, 100, int(rng.integers(4, 9))).astype(np.int32) for _ in range(prompts)],
                 prompt_S=np.repeat(np.arange(prompts), samples), lengths_S=lengths, mask_T=np.ones(total, bool), row_S=rows,
                 ids_T=rng.integers(0, 100, total).astype(np.int32), group_S=np.repeat(np.arange(prompts), samples))


def gradients(lm, data: Batch) -> list[torch.Tensor]:
    lm.module.zero_grad()
    out = lm.forward(Packed(data, "cpu"), 1.0).logprobs_T
    (out * torch.linspace(-1, 1, len(out), dtype=out.dtype)).sum().backward()
    return [out.detach(), *(p.grad.clone() for p in lm.module.parameters())]


@pytest.mark.parametrize("config", [Qwen2Config(**SIZES), Gemma2Config(**SIZES, sliding_window=4, attn_logit_softcapping=None)],
                         ids=["qwen2", "gemma2 with a window"])
def test_a_layer_is_one_compiled_piece_with_the_fused_kernel(monkeypatch, config):
    torch.manual_seed(0)
    torch._dynamo.reset()
    lm = bind(AutoModelForCausalLM.from_config(config, dtype=torch.float64), None)
    assert lm.native, lm.why_not
    want = [gradients(lm, batch(seed)) for seed in range(3)]  # plain, through the buckets
    monkeypatch.setattr(packed, "varlen_attn", varlen_on_cpu)
    monkeypatch.setattr(packed, "_FUSED_DEVICE", "cpu")
    monkeypatch.setattr(packed, "_FUSED_DTYPES", (torch.float64,))
    pieces = []

    def backend(graph, inputs):
        pieces.append(graph)
        return graph.forward

    layers = decoder_layers(lm)
    for layer in layers:
        layer._compiled_call_impl = torch.compile(layer._call_impl, dynamic=True, backend=backend)
    for seed in range(3):
        for a, b in zip(gradients(lm, batch(seed)), want[seed], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    kinds = len({getattr(layer, "attention_type", "full") for layer in layers})
    calls = [n for graph in pieces for n in graph.graph.nodes if "linear" in str(n.target)]
    assert len(calls) % 7 == 0 and len(pieces) * 7 == len(calls), "a layer's seven matrices are in one piece"
    assert len(pieces) <= 2 * kinds, f"{len(pieces)} compilations for {len(layers)} layers of {kinds} kinds and three batches"
