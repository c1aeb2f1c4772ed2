"""The runner that works everywhere: plain PyTorch attention over gathered pages, one call a layer for the whole batch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from verl.core.types import Sampling
from verl.engine.native.sampler import sample
from verl.engine.native.scheduler import Decode, Prefill, Prompt, Segment, Sequence
from verl.models import routing
from verl.models.attention import AttentionSpec, masked_attention
from verl.models.lm import LM


@dataclass(slots=True)
class Drawn:
    """K tokens for each of B sequences: ids and log-probs [K, B]. `wait` returns them as numpy arrays."""

    sequences: list[Sequence]
    tokens_KB: torch.Tensor
    logprobs_KB: torch.Tensor
    ready: object = None  # a CUDA event when the tensors are still being copied

    def wait(self) -> tuple[np.ndarray, np.ndarray]:
        if self.ready is not None:
            self.ready.synchronize()
        return self.tokens_KB.numpy(), self.logprobs_KB.numpy()


@dataclass(slots=True)
class PlainMeta:
    """N new tokens as B rows of up to L queries over up to M cached keys, themselves included."""

    write_N: torch.Tensor  # int64, slot of each new token's key and value
    query_BL: torch.Tensor | None  # int64, index of each query in N, 0 where padded; None: one query a row
    real: torch.Tensor | None  # flat positions of the real queries in B*L
    key_BM: torch.Tensor  # int64, slots, 0 (scratch) where padded
    distance_BLM: torch.Tensor  # query position - key position
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)  # by window

    def _mask(self, window: int | None) -> torch.Tensor:
        if window not in self.masks:
            d = self.distance_BLM
            self.masks[window] = (d >= 0) if window is None else (d >= 0) & (d < window)
        return self.masks[window]

    @torch.compiler.disable
    def attend(self, module, q_THD, k_TKD, v_TKE, spec: AttentionSpec) -> torch.Tensor:
        """Store the new keys and values, then attend over the pages."""
        kv, shape = module.verl_kv, self.key_BM.shape
        kv.k.index_copy_(1, self.write_N, k_TKD.transpose(0, 1).to(kv.k.dtype))
        kv.v.index_copy_(1, self.write_N, v_TKE.transpose(0, 1).to(kv.v.dtype))
        flat = self.key_BM.flatten()
        k_BKMD = kv.k.index_select(1, flat).unflatten(1, shape).transpose(0, 1).to(q_THD.dtype)
        v_BKME = kv.v.index_select(1, flat).unflatten(1, shape).transpose(0, 1).to(q_THD.dtype)
        q_BHLD = q_THD.unsqueeze(2) if self.query_BL is None else q_THD[self.query_BL].transpose(1, 2)
        o_BHLE = masked_attention(q_BHLD, k_BKMD, v_BKME, self._mask(spec.window), spec)
        if self.query_BL is None:
            return o_BHLE.squeeze(2)
        flat_o = o_BHLE.transpose(1, 2).flatten(0, 1)[self.real]
        return torch.empty_like(flat_o).index_copy(0, self.query_BL.flatten()[self.real], flat_o)


class PlainRunner:
    """Executes the scheduler's steps one at a time, on any device; results are there on return."""

    depth = 0  # steps that may be in flight before results are read
    decode_steps = 1

    def __init__(self, lm: LM, page_size: int, max_sequences: int, max_total_tokens: int):
        self.lm, self.page_size = lm, page_size
        width = max_total_tokens + 2 * page_size
        self.slots_SM = np.zeros((max_sequences + 1, width), np.int64)  # slot of token m of each sequence
        self.filled: list[tuple[list[int] | None, int]] = [(None, 0)] * (max_sequences + 1)

    def forget(self) -> None:
        """The caches are about to move; this runner keeps no address of them."""

    def begin(self, sampling: Sampling, ends: tuple[int, ...], members: int) -> None:
        """Settings of the requests to come; page numbers of earlier ones mean nothing any more."""
        self.sampling, self.ends = sampling, ends
        self.filled = [(None, 0)] * len(self.filled)

    def run(self, step: Prefill | Decode) -> Drawn | None:
        """Compute one step. None when it draws no token."""
        return self._prefill(step) if isinstance(step, Prefill) else self._decode(step)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.lm.device)

    def _expand(self, pages: list[int]) -> np.ndarray:
        return (np.asarray(pages, np.int64)[:, None] * self.page_size + np.arange(self.page_size)).ravel()

    def _row(self, sequence: Sequence) -> int:
        """The table row of an admitted sequence, brought up to date with its pages."""
        pages, count = self.filled[sequence.slot]
        start = len(sequence.prompt.ids)
        row = self.slots_SM[sequence.slot]
        if pages is not sequence.pages:
            count, row[:start] = 0, self._expand(sequence.prompt.pages)[:start]
        if count < len(sequence.pages):
            new = self._expand(sequence.pages[count:])
            at = start + count * self.page_size
            row[at:at + len(new)] = new
            self.filled[sequence.slot] = (sequence.pages, len(sequence.pages))
        return sequence.slot

    def _decode(self, step: Decode) -> Drawn:
        rows_B = np.array([self._row(s) for s in step.sequences])
        index_B = np.array([s.sampled for s in step.sequences]) - 1  # of the token that is drawn now
        position_B = np.array([len(s.prompt.ids) for s in step.sequences]) + index_B - 1
        ids_B = np.array([s.ids[s.n - 1] for s in step.sequences], np.int64)
        key_BM = self.slots_SM[rows_B, :position_B.max() + 1]
        distance_BM = position_B[:, None] - np.arange(key_BM.shape[1])
        meta = PlainMeta(self._tensor(self.slots_SM[rows_B, position_B]), None, None,
                         self._tensor(np.where(distance_BM >= 0, key_BM, 0)), self._tensor(distance_BM[:, None]))
        hidden_BD, experts_BLK = self._forward(self._tensor(ids_B), self._tensor(position_B), meta)
        if experts_BLK is not None:
            for s, chosen in zip(step.sequences, experts_BLK):
                _keep(s, len(s.ids), s.n - 1, chosen[None])
        return self._draw(step.sequences, self.lm.logits(hidden_BD), index_B)

    def _prefill(self, step: Prefill) -> Drawn | None:
        if step.segments:
            self._compute(step.segments)
        if not step.starts:
            return None
        prompts = list(dict.fromkeys(s.prompt for s in step.starts))
        logits_PV = self.lm.logits(torch.stack([p.hidden for p in prompts]))
        place = {p: i for i, p in enumerate(prompts)}
        rows_B = torch.tensor([place[s.prompt] for s in step.starts], device=logits_PV.device)
        return self._draw(step.starts, logits_PV[rows_B], np.zeros(len(step.starts), np.int64))

    def _compute(self, segments: list[Segment]) -> None:
        """Forward of the segments' tokens; a completed prompt keeps its last hidden state."""
        count_B = np.array([s.count for s in segments])
        before_B = np.array([s.start + (len(s.prompt.ids) if s.sequence else 0) for s in segments])
        first_B = np.cumsum(count_B) - count_B
        l, m = np.arange(count_B.max())[None], np.arange((before_B + count_B).max())
        key_BM = np.zeros((len(segments), len(m)), np.int64)
        for row, segment in zip(key_BM, segments):
            slots = self._expand(segment.prompt.pages)[:len(segment.prompt.ids)]
            if segment.sequence is not None:
                slots = np.concatenate([slots, self._expand(segment.sequence.pages)])
            total = min(len(slots), len(row))
            row[:total] = slots[:total]
        real_BL = l < count_B[:, None]
        position_BL = before_B[:, None] + l
        write_N = np.take_along_axis(key_BM, np.minimum(position_BL, len(m) - 1), 1)[real_BL]
        key_BM[m >= (before_B + count_B)[:, None]] = 0
        meta = PlainMeta(self._tensor(write_N), self._tensor(np.where(real_BL, first_B[:, None] + l, 0)),
                         self._tensor(np.flatnonzero(real_BL)), self._tensor(key_BM),
                         self._tensor(position_BL[:, :, None] - m))
        ids_N = self._tensor(np.concatenate([s.ids for s in segments]).astype(np.int64))
        hidden_ND, experts_NLK = self._forward(ids_N, self._tensor(position_BL[real_BL]), meta)
        if experts_NLK is not None:
            for s, first in zip(segments, first_B):
                holder = s.sequence if s.sequence is not None else s.prompt
                _keep(holder, len(holder.ids), s.start, experts_NLK[first:first + s.count])
        for segment, end in zip(segments, first_B + count_B):
            if segment.sequence is None and segment.start + segment.count == len(segment.prompt.ids):
                segment.prompt.hidden = hidden_ND[end - 1].clone()

    def _forward(self, ids_N: torch.Tensor, position_N: torch.Tensor, meta) -> tuple[torch.Tensor, np.ndarray | None]:
        """Hidden states, and of a mixture the experts that made them."""
        if not self.lm.mixture:
            return self.lm.hidden(ids_N, position_N, meta), None
        with routing.record(self.lm.module) as routes:
            return self.lm.hidden(ids_N, position_N, meta), routing.stacked(routes)

    def _draw(self, sequences: list[Sequence], logits_BV: torch.Tensor, index_B: np.ndarray) -> Drawn:
        seeds_B = self._tensor(np.array([s.seed for s in sequences], np.int64))
        ids_B, logprobs_B = sample(logits_BV, self.sampling, seeds_B, self._tensor(index_B), self.ends)
        return Drawn(sequences, ids_B[None].cpu(), logprobs_B[None].float().cpu())


def _keep(holder: Prompt | Sequence, room: int, start: int, chosen_NLK: np.ndarray) -> None:
    """Experts of some tokens of a prompt or a sequence."""
    if holder.experts is None:
        holder.experts = np.full((room, *chosen_NLK.shape[1:]), routing.NOT_COMPUTED, np.int16)
    holder.experts[start:start + len(chosen_NLK)] = chosen_NLK
