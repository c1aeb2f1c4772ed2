"""One module, two attentions: how transformers' attention layers reach verl's layouts.

A model whose attention implementation is "verl" hands every layer's query, key and value to the metadata object that
travels through `forward` as the keyword argument `verl_meta`. Training passes a `Packed` layout (packed.py), sampling
a paged one (engine/native), the proof at load a growing cache (prove.py). Nothing global, nothing keyed by layer number:
what belongs to a layer (its KV pool) is an attribute of its attention module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

NAME = "verl"


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one layer's attention does besides causal softmax(q k^T * scale) v.

    window: a query sees keys at distance < window (None: all). softcap: scores become c * tanh(scores / c).
    sinks: [query heads] extra logits that take part in the softmax and carry no value.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class AttentionMeta(Protocol):
    """A layout of tokens that knows which keys each query may see."""

    def attend(self, module: torch.nn.Module, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKE: torch.Tensor,
               spec: AttentionSpec) -> torch.Tensor:
        """T new tokens, H query heads, K key-value heads (H a multiple of K) -> [T, H, E]."""


def verl_attention(module, query, key, value, attention_mask, scaling=None, sliding_window=None, softcap=None,
                   s_aux=None, verl_meta: AttentionMeta | None = None, **_):
    """transformers' attention interface: [1, heads, T, D] tensors in, ([1, T, heads, E], None) out."""
    if verl_meta is None:
        raise RuntimeError("attention implementation 'verl' was called without verl_meta: the model's forward does not "
                           "hand keyword arguments through to its attention layers; use trainer.rollout.engine: hf")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    spec = AttentionSpec(float(scale), sliding_window, softcap, s_aux)
    out = verl_meta.attend(module, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), spec)
    return out.unsqueeze(0), None


AttentionInterface.register(NAME, verl_attention)


def masked_attention(q_BHLD: torch.Tensor, k_BKMD: torch.Tensor, v_BKME: torch.Tensor, visible_BLM: torch.Tensor,
                     spec: AttentionSpec) -> torch.Tensor:
    """Attention under an explicit boolean mask [B, L, M]; softmax in float32 or better. Exact for every spec.

    Every query, padded ones too, must see at least one key. `spec.window` is taken to be in the mask already.
    """
    heads, kv_heads = q_BHLD.shape[1], k_BKMD.shape[1]
    if spec.softcap is None and spec.sinks is None:
        return F.scaled_dot_product_attention(q_BHLD, k_BKMD, v_BKME, attn_mask=visible_BLM[:, None], scale=spec.scale,
                                              enable_gqa=heads != kv_heads)
    if heads != kv_heads:
        k_BKMD = k_BKMD.repeat_interleave(heads // kv_heads, dim=1)
        v_BKME = v_BKME.repeat_interleave(heads // kv_heads, dim=1)
    wide = torch.promote_types(q_BHLD.dtype, torch.float32)
    scores = (q_BHLD @ k_BKMD.transpose(-1, -2)).to(wide) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores.masked_fill(~visible_BLM[:, None], torch.finfo(wide).min)
    if spec.sinks is not None:
        sinks = spec.sinks.to(wide).view(1, heads, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        probs = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        probs = scores.softmax(-1)
    return probs.to(v_BKME.dtype) @ v_BKME
