"""Support by proof: at load, three short sequences run three ways and must agree, or the model is not native.

stock: transformers' own attention, one sequence at a time. packed: the training layout. cached: prefill, then one
token at a time, all sequences together. Properties that short sequences cannot show are checked from the config.
"""

from __future__ import annotations

import numpy as np
import torch

from verl.core.batch import Batch
from verl.models import attention
from verl.models.attention import AttentionSpec, masked_attention
from verl.models.lm import LM, LayerKV
from verl.models.packed import Packed

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}  # short probes cannot vouch for any other kind
_LENGTHS = (5, 4, 6)
_PREFIX = 3


class _Cached:
    """Keys and values of a few sequences in growing lists: the simplest thing a paged pool can be checked against."""

    def __init__(self, sequences: int):
        self.store: dict[int, list] = {}
        self.calls: list[LayerKV] = []
        self.sequences = sequences
        self.lengths: list[int] = []  # new tokens of each sequence in this call

    def attend(self, module, q_THD, k_TKD, v_TKE, spec: AttentionSpec) -> torch.Tensor:
        if id(module) not in self.store:
            self.store[id(module)] = [None] * self.sequences
            self.calls.append(LayerKV(module, k_TKD.shape[1], k_TKD.shape[2], v_TKE.shape[2], spec.window))
        store, out, start = self.store[id(module)], [], 0
        for s, n in enumerate(self.lengths):
            part = slice(start, start + n)
            start += n
            k, v = k_TKD[part], v_TKE[part]
            if store[s] is not None:
                k, v = torch.cat([store[s][0], k]), torch.cat([store[s][1], v])
            store[s] = (k, v)
            total = k.shape[0]
            distance = torch.arange(total - n, total, device=k.device)[:, None] - torch.arange(total, device=k.device)[None]
            visible = (distance >= 0) if spec.window is None else (distance >= 0) & (distance < spec.window)
            o = masked_attention(q_THD[part].transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None],
                                 visible[None], spec)
            out.append(o[0].transpose(0, 1))
        return torch.cat(out)


def foreign(config) -> str | None:
    """The first property of a config that the layouts cannot carry, in words; None when there is none."""
    if other := set(getattr(config, "layer_types", None) or []) - _KNOWN_LAYERS:
        return f"layers of type {', '.join(sorted(other))}"
    if getattr(config, "attention_chunk_size", None):
        return "chunked attention"
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        return "ALiBi position biases"
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(r for r in ropes.values() if isinstance(r, dict))):
        if rope.get("rope_type") == "longrope" and rope["original_max_position_embeddings"] < config.max_position_embeddings:
            return "rotary frequencies that change with the longest sequence of a call (longrope)"
    return None


@torch.no_grad()
def prove(lm: LM) -> None:
    """Set lm.native (and lm.layers), or lm.why_not with the stock attention left in force."""
    module, stock = lm.module, lm.module.config._attn_implementation
    reason = foreign(lm.config)
    if reason is None and not all(m._can_set_attn_implementation() for m in (module, module.base_model)):
        reason = "attention that does not go through transformers' attention interface"
    elif reason is None:
        rng = np.random.default_rng(0)
        sequences = [rng.integers(0, lm.head.rows, n).astype(np.int32) for n in _LENGTHS]
        training = module.training
        module.eval()
        try:
            reason = _compare(lm, sequences)
        except Exception as error:  # an architecture may fail in any way here; the reason is kept and shown
            reason = f"{type(error).__name__}: {error}"
        module.train(training)
        if reason is not None:
            module.set_attn_implementation(stock)
    lm.native, lm.why_not = reason is None, reason or ""


def _compare(lm: LM, sequences: list[np.ndarray]) -> str | None:
    want = [_stock_logits(lm, ids) for ids in sequences]
    lm.module.set_attn_implementation(attention.NAME)
    reason = _disagree("packed rows", want, _packed_logits(lm, sequences), lm.dtype)
    if reason is None:
        got, lm.layers = _cached_logits(lm, sequences)
        reason = _disagree("prefill and decode", want, got, lm.dtype)
    return reason or _windows(lm)


def _stock_logits(lm: LM, ids: np.ndarray) -> torch.Tensor:
    lm.module.set_attn_implementation("eager")
    out = lm.module(input_ids=torch.from_numpy(ids.astype(np.int64))[None].to(lm.device), use_cache=False)
    return out.logits[0, :, :lm.head.rows].float()


def _packed_logits(lm: LM, sequences: list[np.ndarray]) -> list[torch.Tensor]:
    """Sequences 0 and 1 alone, sequence 2 as a prompt with a continuation: both kinds of segment are exercised."""
    prompts = [sequences[0], sequences[1], sequences[2][:_PREFIX]]
    tail = sequences[2][_PREFIX:]
    empty = np.zeros(0, np.int32)
    batch = Batch(prompts=prompts, prompt_S=np.array([0, 1, 2]), lengths_S=np.array([0, 0, len(tail)]),
                  ids_T=np.concatenate([empty, empty, tail]), mask_T=np.ones(len(tail), bool), row_S=np.arange(3),
                  group_S=np.arange(3))
    packed = Packed(batch, lm.device, keep_last=True)
    logits = lm.logits(lm.hidden(packed.ids_N, packed.positions_N, packed))[:, :lm.head.rows]
    return list(logits.split([len(sequences[0]), len(sequences[1]), len(sequences[2])]))


def _cached_logits(lm: LM, sequences: list[np.ndarray]) -> tuple[list[torch.Tensor], list[LayerKV]]:
    meta, done = _Cached(len(sequences)), [0] * len(sequences)
    out: list[list[torch.Tensor]] = [[] for _ in sequences]
    while any(d < len(s) for d, s in zip(done, sequences)):
        meta.lengths = [min(_PREFIX if d == 0 else 1, len(s) - d) for d, s in zip(done, sequences)]
        ids = np.concatenate([s[d:d + n] for s, d, n in zip(sequences, done, meta.lengths)]).astype(np.int64)
        positions = np.concatenate([np.arange(d, d + n) for d, n in zip(done, meta.lengths)])
        logits = lm.logits(lm.hidden(torch.from_numpy(ids).to(lm.device), torch.from_numpy(positions).to(lm.device), meta))
        for i, piece in enumerate(logits[:, :lm.head.rows].split(meta.lengths)):
            out[i].append(piece)
            done[i] += meta.lengths[i]
    return [torch.cat(o) for o in out], meta.calls


def _disagree(what: str, want: list[torch.Tensor], got: list[torch.Tensor], dtype: torch.dtype) -> str | None:
    tolerance = 1e-4 if dtype in (torch.float32, torch.float64) else 0.06
    for w, g in zip(want, got):
        error = float((w - g).norm() / w.norm())
        if not error <= tolerance:
            return f"{what} differ from transformers' own attention by {error:.1e} (allowed {tolerance:.0e})"
    return None


def _windows(lm: LM) -> str | None:
    """Windows longer than the probe must have arrived as a keyword, layer by layer: a mask alone is not seen here."""
    config, window = lm.config, getattr(lm.config, "sliding_window", None)
    if not window or window >= lm.context:
        return None
    every = "sliding_attention" if getattr(config, "use_sliding_window", True) else "full_attention"
    types = getattr(config, "layer_types", None) or [every] * len(lm.layers)
    for i, (kind, layer) in enumerate(zip(types, lm.layers)):
        if kind == "sliding_attention" and layer.window != window:
            return f"layer {i} declares a window of {window}, but the attention call was given {layer.window}"
    return None
