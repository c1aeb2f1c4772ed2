"""The training layout: segments laid end to end, a prompt computed once for all sequences that answer it.

Every prompt is one segment, every sequence another whose keys are its prompt's followed by its own. Because both are
causal and the query segment is the tail of its key range, "bottom-right causal" over gathered keys is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from verl.core.batch import Batch
from verl.models.attention import AttentionSpec, masked_attention

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # older torch: the bucketed path below serves every device
    varlen_attn = None


@dataclass(slots=True)
class _Bucket:
    """Segments of similar shape, padded to a rectangle: indices into the packed tokens and who sees whom."""

    query_BL: torch.Tensor  # int64, 0 where padded
    key_BM: torch.Tensor  # int64, 0 where padded
    visible_BLM: torch.Tensor  # bool, causal and real
    distance_BLM: torch.Tensor | None  # query position - key position, for windows
    real: torch.Tensor  # flat positions of the real queries in B*L


class Packed:
    """N packed tokens on a device, and where each of the batch's T target tokens is predicted.

    ids_N, positions_N: int64 [N]. source_T: packed index of the token whose hidden state predicts target t.
    targets_T: int64. last_S: packed index of each sequence's last token (only with `keep_last`; the last token of a
    sequence predicts nothing and is not computed otherwise).
    """

    def __init__(self, batch: Batch, device: torch.device | str, keep_last: bool = False):
        self.device = torch.device(device)
        prompt_lengths = np.array([len(p) for p in batch.prompts], np.int64)
        own = batch.lengths_S if keep_last else np.maximum(batch.lengths_S - 1, 0)
        offsets = batch.offsets
        keep = np.ones(len(batch.ids_T), bool)
        if not keep_last:
            keep[offsets[1:][batch.lengths_S > 0] - 1] = False
        lengths = np.concatenate([prompt_lengths, own])
        self.starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        before = np.concatenate([np.zeros(len(prompt_lengths), np.int64), prompt_lengths[batch.prompt_S]])
        self.lengths, self.before = lengths, before  # per segment: own tokens, tokens of the prompt it continues
        self.parent = np.concatenate([np.full(len(prompt_lengths), -1), batch.prompt_S])
        ids = np.concatenate([*batch.prompts, batch.ids_T[keep]]) if len(batch.prompts) else batch.ids_T[keep]
        within = np.arange(self.starts[-1]) - np.repeat(self.starts[:-1], lengths)
        self.ids_N = self._to(ids.astype(np.int64))
        self.positions_N = self._to(within + np.repeat(before, lengths))
        first = self.starts[len(prompt_lengths):-1]  # packed start of each sequence
        prompt_last = self.starts[1:len(prompt_lengths) + 1] - 1
        sequence_T = batch.sequence_T
        index = np.arange(len(batch.ids_T)) - offsets[sequence_T]
        source = np.where(index == 0, prompt_last[batch.prompt_S][sequence_T] if len(prompt_lengths) else 0,
                          first[sequence_T] + index - 1)
        self.source_T = self._to(np.maximum(source, 0))
        self.targets_T = self._to(batch.ids_T.astype(np.int64))
        last = np.where(batch.lengths_S > 0, first + own - 1, prompt_last[batch.prompt_S] if len(prompt_lengths) else 0)
        self.last_S = self._to(last) if keep_last else None
        if len(batch.ids_T) and bool((batch.mask_T & (index == 0) & (before[len(prompt_lengths):][sequence_T] == 0)).any()):
            raise ValueError("a sequence without a prompt has its first token in the loss; nothing predicts it: mask it out")

    def _to(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)

    def __len__(self) -> int:
        return int(self.starts[-1])

    # -- attention ---------------------------------------------------------------------------------------------------

    def attend(self, module, q_THD, k_TKD, v_TKE, spec: AttentionSpec) -> torch.Tensor:
        """Each segment's queries over its prompt's and its own keys; differentiable, exact for every spec."""
        fused = (varlen_attn is not None and q_THD.is_cuda and q_THD.dtype in (torch.bfloat16, torch.float16)
                 and spec.softcap is None and spec.sinks is None and q_THD.shape[-1] == v_TKE.shape[-1])
        return self._attend_fused(q_THD, k_TKD, v_TKE, spec) if fused else self._attend_buckets(q_THD, k_TKD, v_TKE, spec)

    @cached_property
    def _varlen(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
        """Key gather index and cumulative lengths for the fused kernel; segments without tokens left out."""
        real = np.flatnonzero(self.lengths > 0)
        keys = [self.key_range(s) for s in real]
        kv_lengths = (self.lengths + self.before)[real]
        cu_q = np.concatenate([[0], np.cumsum(self.lengths[real])]).astype(np.int32)
        cu_k = np.concatenate([[0], np.cumsum(kv_lengths)]).astype(np.int32)
        return (self._to(np.concatenate(keys)), self._to(cu_q), self._to(cu_k),
                int(self.lengths.max()), int(kv_lengths.max()))

    def key_range(self, segment: int) -> np.ndarray:
        """Packed indices of the keys of one segment: its prompt's tokens, then its own."""
        own = np.arange(self.starts[segment], self.starts[segment + 1])
        if self.parent[segment] < 0:
            return own
        parent = self.parent[segment]
        return np.concatenate([np.arange(self.starts[parent], self.starts[parent + 1]), own])

    def _attend_fused(self, q_THD, k_TKD, v_TKE, spec: AttentionSpec) -> torch.Tensor:
        key_index, cu_q, cu_k, max_q, max_k = self._varlen
        window = (-1, 0) if spec.window is None else (spec.window - 1, 0)
        heads, kv_heads = q_THD.shape[1], k_TKD.shape[1]
        return varlen_attn(q_THD.contiguous(), k_TKD[key_index], v_TKE[key_index], cu_q, cu_k, max_q, max_k,
                           scale=spec.scale, window_size=window, **({"enable_gqa": True} if heads != kv_heads else {}))

    @cached_property
    def _buckets(self) -> list[_Bucket]:
        """Segments grouped so that padding stays below about half of the real area."""
        area = self.lengths * (self.lengths + self.before)
        order = [s for s in np.lexsort((self.before, self.lengths)) if self.lengths[s] > 0]
        groups: list[list[int]] = []
        for segment in order:
            if groups:
                group = [*groups[-1], segment]
                padded = len(group) * self.lengths[group].max() * (self.lengths + self.before)[group].max()
                if padded <= max(1.5 * area[group].sum(), 65536):
                    groups[-1] = group
                    continue
            groups.append([segment])
        return [self._bucket(np.array(g)) for g in groups]

    def _bucket(self, segments: np.ndarray) -> _Bucket:
        length, keys = self.lengths[segments], (self.lengths + self.before)[segments]
        l = np.arange(length.max())[None]
        m = np.arange(keys.max())[None]
        query = np.where(l < length[:, None], self.starts[segments][:, None] + l, 0)
        before = self.before[segments][:, None]
        parent_start = self.starts[np.maximum(self.parent[segments], 0)][:, None]
        key = np.where(m < before, parent_start + m, self.starts[segments][:, None] + m - before)
        key = np.where(m < keys[:, None], key, 0)
        distance = (before + l)[:, :, None] - m[:, None, :]
        visible = (distance >= 0) & (m < keys[:, None])[:, None, :]
        return _Bucket(self._to(query), self._to(key), self._to(visible), self._to(distance),
                       self._to(np.flatnonzero((l < length[:, None]).ravel())))

    def _attend_buckets(self, q_THD, k_TKD, v_TKE, spec: AttentionSpec) -> torch.Tensor:
        pieces, places = [], []
        for bucket in self._buckets:
            visible = bucket.visible_BLM
            if spec.window is not None:
                visible = visible & (bucket.distance_BLM < spec.window)
            o = masked_attention(q_THD[bucket.query_BL].transpose(1, 2), k_TKD[bucket.key_BM].transpose(1, 2),
                                 v_TKE[bucket.key_BM].transpose(1, 2), visible, spec)
            pieces.append(o.transpose(1, 2).flatten(0, 1)[bucket.real])
            places.append(bucket.query_BL.flatten()[bucket.real])
        out = torch.empty(q_THD.shape[0], q_THD.shape[1], v_TKE.shape[-1], dtype=q_THD.dtype, device=q_THD.device)
        return out.index_copy(0, torch.cat(places), torch.cat(pieces).to(out.dtype))
