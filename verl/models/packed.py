"""The training layout: segments laid end to end, a prompt computed once for all sequences that answer it.

Every prompt is one segment, every sequence another whose keys are its prompt's followed by its own. Because both are
causal and the query segment is the tail of its key range, "bottom-right causal" over gathered keys is exact.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from verl.core.batch import Batch
from verl.models.attention import AttentionSpec, masked_attention

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # older torch: the bucketed path below serves every device
    varlen_attn = None

_GQA = {"enable_gqa": True} if varlen_attn and "enable_gqa" in inspect.signature(varlen_attn).parameters else {}  # 2.11 needs none
_FUSED_DTYPES = (torch.bfloat16, torch.float16)
_FUSED_DEVICE = "cuda"


@dataclass(slots=True)
class _Bucket:
    """Segments of similar shape, padded to a rectangle: indices into the packed tokens and who sees whom."""

    query_BL: torch.Tensor  # int64, 0 where padded
    key_BM: torch.Tensor  # int64, 0 where padded
    position_BL: torch.Tensor  # int32, of each query among its keys
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)  # bool [B, L, M] by window

    def visible(self, window: int | None) -> torch.Tensor:
        """Causal within `window`; built once and shared by all layers. Padded keys lie after every real query."""
        if window not in self.masks:
            key_M = torch.arange(self.key_BM.shape[1], dtype=torch.int32, device=self.key_BM.device)
            distance_BLM = self.position_BL[:, :, None] - key_M
            self.masks[window] = distance_BLM >= 0 if window is None else (distance_BLM >= 0) & (distance_BLM < window)
        return self.masks[window]


def to_device(array: np.ndarray, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A host array as a tensor there. To a GPU it goes through pinned memory: from pageable memory each copy would first
    wait for everything queued, and a device that idles between micro-batches loses a quarter of its time."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True).to(dtype or tensor.dtype)


class Packed:
    """N packed tokens on a device, and where each of the batch's T target tokens is predicted.

    ids_N, positions_N: int64 [N]. source_T: packed index of the token whose hidden state predicts target t.
    targets_T: int64. last_S: packed index of each sequence's last token (only with `keep_last`; the last token of a
    sequence predicts nothing and is not computed otherwise). Raises ValueError when the first token of a sequence
    without a prompt is in the mask: nothing predicts it.
    """

    def __init__(self, batch: Batch, device: torch.device | str, keep_last: bool = False):
        self.device = torch.device(device)
        prompts_P = np.array([len(p) for p in batch.prompts], np.int64)
        before_S = prompts_P[batch.prompt_S]
        own_S = batch.lengths_S if keep_last else np.minimum(batch.lengths_S, np.maximum(batch.lengths_S - 1, before_S == 0))
        # per segment, prompts first: own tokens, tokens of the prompt it continues, segment of that prompt
        self.lengths = np.concatenate([prompts_P, own_S])
        self.before = np.concatenate([np.zeros_like(prompts_P), before_S])
        self.parent = np.concatenate([np.full_like(prompts_P, -1), batch.prompt_S])
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)
        first_S = self.starts[len(prompts_P):-1]
        prompt_last_S = (self.starts[1:len(prompts_P) + 1] - 1)[batch.prompt_S]

        sequence_T = batch.sequence_T
        index_T = np.arange(len(sequence_T)) - batch.offsets[sequence_T]
        if (batch.mask_T & (index_T == 0) & (before_S[sequence_T] == 0)).any():
            raise ValueError("a sequence without a prompt has its first token in the loss; nothing predicts it: mask it out")
        within_N = np.arange(self.starts[-1]) - np.repeat(self.starts[:-1], self.lengths)
        source_T = np.where(index_T == 0, prompt_last_S[sequence_T], first_S[sequence_T] + index_T - 1)
        self.ids_N = self._to(np.concatenate([*batch.prompts, batch.ids_T[index_T < own_S[sequence_T]]]).astype(np.int64))
        self.positions_N = self._to(within_N + np.repeat(self.before, self.lengths))
        self.source_T = self._to(np.maximum(source_T, 0))
        self.targets_T = self._to(batch.ids_T.astype(np.int64))
        self.experts_NLK = None  # recorded choices of a mixture-of-experts sampler
        if batch.experts_T is not None:
            own = batch.experts_T[index_T < own_S[sequence_T]]
            self.experts_NLK = self._to(np.concatenate([*batch.prompt_experts, own]).astype(np.int64))
        fused = varlen_attn is not None and self.device.type == _FUSED_DEVICE and self.starts[-1] > 0
        self.fused = self._fused_layout() if fused else None
        self.last_S = self._to(np.where(batch.lengths_S > 0, first_S + own_S - 1, prompt_last_S)) if keep_last else None

    def _to(self, array: np.ndarray) -> torch.Tensor:
        return to_device(array, self.device)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def key_range(self, segment: int) -> np.ndarray:
        """Packed indices of the keys of one segment: its prompt's tokens, then its own."""
        own = np.arange(self.starts[segment], self.starts[segment + 1])
        if self.parent[segment] < 0:
            return own
        parent = self.parent[segment]
        return np.concatenate([np.arange(self.starts[parent], self.starts[parent + 1]), own])

    # -- attention ---------------------------------------------------------------------------------------------------

    def attend(self, module, q_THD, k_TKD, v_TKE, spec: AttentionSpec) -> torch.Tensor:
        """Each segment's queries over its prompt's and its own keys; differentiable, exact for every spec.

        torch.compile traces the fused path, so that a compiled layer is one piece: the host's work a layer is what limits
        small micro-batches.
        """
        width = q_THD.shape[-1]
        if (self.fused is not None and q_THD.dtype in _FUSED_DTYPES and spec.softcap is None and spec.sinks is None
                and width == v_TKE.shape[-1] and width % 8 == 0 and width <= 256):
            return self._attend_fused(q_THD, k_TKD, v_TKE, spec)
        return self._attend_buckets(q_THD, k_TKD, v_TKE, spec)

    def _fused_layout(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
        """Key gather index, cumulative lengths and longest lengths for the fused kernel; segments without tokens left out.
        The longest are rounded up to powers of two: a compiled layer may have been made for one of them."""
        real = np.flatnonzero(self.lengths > 0)
        kv_lengths = (self.lengths + self.before)[real]
        cu_q = np.concatenate([[0], np.cumsum(self.lengths[real])]).astype(np.int32)
        cu_k = np.concatenate([[0], np.cumsum(kv_lengths)]).astype(np.int32)
        return (self._to(np.concatenate([self.key_range(s) for s in real])), self._to(cu_q), self._to(cu_k),
                1 << int(self.lengths.max() - 1).bit_length(), 1 << int(kv_lengths.max() - 1).bit_length())

    def _attend_fused(self, q_THD, k_TKD, v_TKE, spec: AttentionSpec) -> torch.Tensor:
        key_index, cu_q, cu_k, max_q, max_k = self.fused
        window = (-1, 0) if spec.window is None else (spec.window - 1, 0)
        return varlen_attn(q_THD.contiguous(), k_TKD[key_index], v_TKE[key_index], cu_q, cu_k, max_q, max_k, scale=spec.scale,
                           window_size=window, **_GQA)

    @cached_property
    def _buckets(self) -> tuple[list[_Bucket], torch.Tensor]:
        """Segments grouped so that padding stays below about half of the real area, and where each packed token's
        query stands among all the padded ones laid end to end."""
        total = self.lengths + self.before
        area = self.lengths * total
        groups: list[list[int]] = []
        widest = covered = 0  # of the last group: most keys, real area
        order = np.lexsort((self.before, self.lengths))  # shortest first: the newest segment has the most queries
        for segment, length, keys in zip(order.tolist(), self.lengths[order].tolist(), total[order].tolist()):
            if length == 0:
                continue
            wide, real = max(widest, keys), covered + area[segment]
            if groups and (len(groups[-1]) + 1) * length * wide <= max(1.5 * real, 65536):
                groups[-1].append(segment)
                widest, covered = wide, real
            else:
                groups.append([segment])
                widest, covered = keys, area[segment]
        place_N, offset, buckets = np.empty(len(self), np.int64), 0, []
        for group in groups:
            bucket, real_BL, query_BL = self._bucket(np.array(group))
            buckets.append(bucket)
            place_N[query_BL[real_BL]] = offset + np.flatnonzero(real_BL)
            offset += query_BL.size
        return buckets, self._to(place_N)

    def _bucket(self, segments: np.ndarray) -> tuple[_Bucket, np.ndarray, np.ndarray]:
        """A bucket, with its real queries (bool [B, L]) and their packed indices."""
        length, before, start = (a[segments][:, None] for a in (self.lengths, self.before, self.starts))
        parent_start = self.starts[np.maximum(self.parent[segments], 0)][:, None]
        l, m = np.arange(length.max())[None], np.arange((length + before).max())[None]
        query = np.where(l < length, start + l, 0)
        key = np.where(m < before, parent_start + m, start + m - before)
        key = np.where(m < length + before, key, 0)
        return _Bucket(self._to(query), self._to(key), self._to((before + l).astype(np.int32))), l < length, query

    @torch.compiler.disable
    def _attend_buckets(self, q_THD, k_TKD, v_TKE, spec: AttentionSpec) -> torch.Tensor:
        buckets, place_N = self._buckets
        pieces = []
        for bucket in buckets:
            o_BHLE = masked_attention(q_THD[bucket.query_BL].transpose(1, 2), k_TKD[bucket.key_BM].transpose(1, 2),
                                      v_TKE[bucket.key_BM].transpose(1, 2), bucket.visible(spec.window), spec)
            pieces.append(o_BHLE.transpose(1, 2).flatten(0, 1))
        return torch.cat(pieces)[place_N]
