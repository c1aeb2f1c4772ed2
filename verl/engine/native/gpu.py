"""The runner for GPUs: state lives on the device, the host launches whole decode steps and reads results later.

Every admitted sequence has a row (its slot) in `state`: tokens of its prompt, own tokens stored, the most it may store,
its seed; `last` is its newest token and two tables hold its pages. A decode step is one fixed series of launches over
the first B rows of `batch`, which names slots: so it can be one CUDA graph, replayed while lengths grow on the device.
Row 0 is scratch, for padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton

from verl.core.types import Sampling
from verl.engine.native import kernels
from verl.engine.native.config import NativeConfig
from verl.engine.native.graphs import DecodeGraphs
from verl.engine.native.plain import Drawn
from verl.engine.native.sampler import truncate
from verl.engine.native.scheduler import Decode, Prefill, Segment, Sequence
from verl.models.attention import AttentionSpec
from verl.models.head import shape_logits
from verl.models.lm import LM

_STATE = 8  # int32 columns of a row: prompt tokens, own tokens stored, most own tokens, seed low, seed high, unused
_VOCABULARY_BLOCK = 4096
_FP8 = torch.float8_e4m3fn


def _pow2(n: int, least: int = 1) -> int:
    return max(least, triton.next_power_of_2(n))


@dataclass(slots=True)
class _Shape:
    """Compile-time facts of one attention call."""

    H: int
    K: int
    D: int
    E: int

    @classmethod
    def of(cls, q_THD, k_TKD, v_TKE) -> _Shape:
        return cls(q_THD.shape[1], k_TKD.shape[1], q_THD.shape[2], v_TKE.shape[2])

    def kernel(self, spec: AttentionSpec, page: int, dtype: torch.dtype) -> dict:
        block_d, block_e = _pow2(self.D, 16), _pow2(self.E, 16)
        return {"H": self.H, "K": self.K, "D": self.D, "E": self.E, "PAGE": page, "BLOCK_D": block_d, "BLOCK_E": block_e,
                "N": 64 if max(block_d, block_e) <= 128 else 32, "WINDOW": spec.window is not None,
                "SOFTCAP": spec.softcap is not None, "PRECISION": "ieee" if dtype == torch.float32 else "tf32"}


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@dataclass(slots=True)
class DecodeMeta:
    """One new token for each of the first `size` rows of the runner's batch."""

    runner: GpuRunner
    size: int

    @torch.compiler.disable
    def attend(self, module, q_THD, k_TKD, v_TKE, spec: AttentionSpec) -> torch.Tensor:
        """Store the new keys and values and attend, in three launches."""
        r, kv, size = self.runner, module.verl_kv, self.size
        q, k, v = _rows(q_THD), _rows(k_TKD), _rows(v_TKE)
        shape = _Shape.of(q, k, v)
        common = shape.kernel(spec, r.page_size, q.dtype)
        group = shape.H // shape.K
        prompt_parts, own_parts = r.parts(size, shape.K)
        parts = prompt_parts + own_parts
        m, l = q.new_empty(2, parts, size, shape.H, dtype=torch.float32)
        acc = q.new_empty(parts, size, shape.H, shape.E, dtype=torch.float32)
        slot, first, count = r.batch[0], r.batch[1], r.batch[2]
        slots, width, window, softcap = kv.k.shape[1], r.prompt_table.shape[1], spec.window or 0, spec.softcap or 0.0
        scale = spec.scale * kv.scale
        rows = _pow2(r.members * group, 16)
        kernels.prompt_part[size, shape.K, prompt_parts](
            q, kv.k, kv.v, r.prompt_table, slot, r.state, first, count, m, l, acc, size, slots, q.stride(0), q.stride(1), width,
            scale, softcap, window, STATE=_STATE, M=rows, PARTS=prompt_parts, LEAST=4, num_warps=4, num_stages=3, **common)
        kernels.own_part[size, shape.K, own_parts](
            q, k, v, kv.k, kv.v, r.own_table, slot, r.state, m, l, acc, size, slots, q.stride(0), q.stride(1), k.stride(0),
            k.stride(1), v.stride(0), v.stride(1), width, scale, kv.scale, softcap, window, prompt_parts, STATE=_STATE,
            M=_pow2(group, 16), PARTS=own_parts, LEAST=2, FP8=kv.k.dtype == _FP8, num_warps=r.own_warps,
            num_stages=r.own_stages, **common)
        out = torch.empty(size, shape.H, shape.E, dtype=q.dtype, device=q.device)
        kernels.merge[size, shape.H](m, l, acc, spec.sinks, out, size, parts, kv.scale, H=shape.H, E=shape.E,
                                     BLOCK_E=common["BLOCK_E"], BLOCK_P=_pow2(parts), SINK=spec.sinks is not None, num_warps=1)
        return out


@dataclass(slots=True)
class PrefillMeta:
    """Segments laid end to end: where their keys go, and blocks of queries with the pages they may read."""

    runner: GpuRunner
    write_N: torch.Tensor  # int64 slots
    items: torch.Tensor  # int32 [blocks, 5], see kernels.prefill
    tables: torch.Tensor  # int32 [2, segments, width]: pages of prompt and response
    block: int

    @torch.compiler.disable
    def attend(self, module, q_THD, k_TKD, v_TKE, spec: AttentionSpec) -> torch.Tensor:
        """Store the new keys and values, then attend over the pages."""
        r, kv, q = self.runner, module.verl_kv, _rows(q_THD)
        for pool, new in ((kv.k, k_TKD), (kv.v, v_TKE)):
            if pool.dtype == _FP8:
                new = (new.float() / kv.scale).clamp(-448, 448).to(_FP8).view(torch.uint8)
                pool = pool.view(torch.uint8)
            pool.index_copy_(1, self.write_N, new.transpose(0, 1).to(pool.dtype))
        shape = _Shape.of(q, k_TKD, v_TKE)
        out = torch.empty(q.shape[0], shape.H, shape.E, dtype=q.dtype, device=q.device)
        kernels.prefill[len(self.items), shape.H](
            q, kv.k, kv.v, self.tables[0], self.tables[1], self.items, spec.sinks, out, kv.k.shape[1], q.stride(0), q.stride(1),
            self.tables.shape[2], spec.scale * kv.scale, kv.scale, spec.softcap or 0.0, spec.window or 0, M=self.block,
            SINK=spec.sinks is not None, num_warps=4, num_stages=2, **shape.kernel(spec, r.page_size, q.dtype))
        return out


class GpuRunner:
    """Executes the scheduler's steps; results come back through an event, one step behind."""

    depth = 1
    programs = 528  # of an attention launch that fill a GPU of 132 multiprocessors
    own_warps, own_stages = 4, 3

    def __init__(self, lm: LM, config: NativeConfig, page_size: int, max_total_tokens: int):
        self.lm, self.page_size, self.decode_steps = lm, page_size, config.decode_steps
        rows, width = config.max_sequences + 1, -(-max_total_tokens // page_size) + 1
        self._pinned = lm.device.type == "cuda"

        def zeros(*shape, dtype=torch.int32):
            return torch.zeros(*shape, dtype=dtype, device=lm.device)

        self.prompt_table, self.own_table = zeros(rows, width), zeros(rows, width)
        self.state, self.last = zeros(rows, _STATE), zeros(rows, dtype=torch.int64)
        self.batch = zeros(3, rows)  # slot of each row of the batch; first row and count of each prompt item
        self.ids_B, self.positions_B = zeros(rows, dtype=torch.int64), zeros(rows, dtype=torch.int64)
        self.counter, self.least = zeros(1), zeros(1)
        self.ends: dict[int, torch.Tensor] = {}  # banned ids by how many: graphs hold the addresses
        self.temperature, self.one = zeros(1, dtype=torch.float32), torch.ones(1, device=lm.device)
        self.tokens_KB = zeros(config.decode_steps, rows)
        self.logprobs_KB = zeros(config.decode_steps, rows, dtype=torch.float32)
        self.graphs = DecodeGraphs(self, config)
        self.known: dict[int, tuple[list[int], int]] = {}  # per slot: the pages list and how many of it were uploaded
        self.members = 1
        self.group = max(1, lm.config.num_attention_heads // min(layer.heads for layer in lm.layers))
        self.most_rows = 128 if max(max(layer.key_dim, layer.value_dim) for layer in lm.layers) <= 128 else 64

    def forget(self) -> None:
        """The caches are about to move: graphs hold their addresses."""
        self.graphs.drop()

    def begin(self, sampling: Sampling, ends: tuple[int, ...], members: int) -> None:
        """Settings of the requests to come, `members` samples a group at most; earlier page numbers mean nothing now."""
        self.sampling, self.known = sampling, {}
        self.banned = ends if sampling.min_tokens else ()
        self.members = max(1, min(_pow2(members), self.most_rows // self.group))
        self.temperature.fill_(sampling.temperature or 1.0)
        self.least.fill_(sampling.min_tokens)
        banned = self._upload(np.array(self.banned or (0,), np.int32))
        self.ends.setdefault(len(self.banned), banned).copy_(banned)

    def parts(self, size: int, kv_heads: int) -> tuple[int, int]:
        """Stretches that prompts and own tokens are cut into, so that a small batch still fills the device."""
        items = max(1, size // self.members)
        return min(16, -(-self.programs // (items * kv_heads))), min(32, -(-self.programs // (size * kv_heads)))

    def run(self, step: Prefill | Decode) -> Drawn | None:
        """Launch one step. None when it draws no token."""
        with self.graphs.compiled():
            return self._prefill(step) if isinstance(step, Prefill) else self._decode(step)

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.pin_memory().to(self.lm.device, non_blocking=True) if self._pinned else tensor.clone()

    def _drawn(self, sequences: list[Sequence], tokens_KB: torch.Tensor, logprobs_KB: torch.Tensor) -> Drawn:
        if not self._pinned:
            return Drawn(sequences, tokens_KB.clone(), logprobs_KB.clone())
        tokens, logprobs = (torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in (tokens_KB, logprobs_KB))
        tokens.copy_(tokens_KB, non_blocking=True)
        logprobs.copy_(logprobs_KB, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return Drawn(sequences, tokens, logprobs, event)

    # -- rows ----------------------------------------------------------------------------------------------------------

    def _sync(self, sequences: list[Sequence]) -> None:
        """Bring the device's rows up to date: all of a sequence that is new in its slot, else only pages it gained."""
        new, grown = [], []
        for s in sequences:
            pages, count = self.known.get(s.slot, (None, 0))
            if pages is not s.pages:
                new.append(s)
            elif count < len(pages):
                grown.append(s)
            self.known[s.slot] = (s.pages, len(s.pages))
        if new:
            at = self._upload(np.array([s.slot for s in new]))
            self.prompt_table.index_copy_(0, at, self._table([s.prompt.pages for s in new]))
            state = np.zeros((len(new), _STATE), np.int64)
            for row, s in zip(state, new):
                row[:5] = len(s.prompt.ids), max(s.n - 1, 0), len(s.ids) - 1, s.seed & 0xFFFFFFFF, s.seed >> 32
            self.state.index_copy_(0, at, self._upload(state.astype(np.uint32).view(np.int32)))
            self.last.index_copy_(0, at, self._upload(np.array([s.ids[s.n - 1] if s.n else 0 for s in new], np.int64)))
        if new or grown:
            at = self._upload(np.array([s.slot for s in new + grown]))
            self.own_table.index_copy_(0, at, self._table([s.pages for s in new + grown]))

    def _table(self, rows: list[list[int]]) -> torch.Tensor:
        table = np.zeros((len(rows), self.prompt_table.shape[1]), np.int32)
        for row, pages in zip(table, rows):
            row[:len(pages)] = pages
        return self._upload(table)

    # -- decode --------------------------------------------------------------------------------------------------------

    def _decode(self, step: Decode) -> Drawn:
        n = len(step.sequences)
        launch, size = self.graphs.get(n)
        self._sync(step.sequences)
        batch = np.zeros((3, size), np.int32)
        batch[0, :n] = [s.slot for s in step.sequences]
        items = 0
        for b, s in enumerate(step.sequences):
            if b and s.prompt is step.sequences[b - 1].prompt and batch[2, items - 1] < self.members:
                batch[2, items - 1] += 1
            else:
                batch[1:, items] = b, 1
                items += 1
        self.batch[:, :size] = self._upload(batch)
        self.counter.zero_()
        for _ in range(step.steps):
            launch()
        return self._drawn(step.sequences, self.tokens_KB[:step.steps, :n], self.logprobs_KB[:step.steps, :n])

    def step(self, size: int) -> None:
        """One decode step over `size` rows; nothing here waits for the device."""
        kernels.feed[1,](self.batch[0], self.state, self.last, self.ids_B, self.positions_B, self.counter, size, STATE=_STATE,
                         BLOCK=_pow2(size))
        hidden = self.lm.hidden(self.ids_B[:size], self.positions_B[:size], DecodeMeta(self, size))
        self._draw(hidden, self.batch[0], self.tokens_KB, self.logprobs_KB, start=False)

    def _draw(self, hidden_BD, slot_B, ids, logprobs, start: bool, rows_B: torch.Tensor | None = None) -> None:
        """Sample every row; `rows_B` maps rows to hidden states when several samples share one."""
        raw_BV = torch.nn.functional.linear(hidden_BD, *self.lm.output_layer)
        raw_BV = raw_BV if rows_B is None else raw_BV[rows_B]
        head, sampling, temperature, banned = self.lm.head, self.sampling, self.temperature, len(self.banned)
        ends = self.ends[banned]
        rows, scale, softcap = head.rows, head.scale, head.softcap
        if self.filtered:
            raw_BV = self._filter(shape_logits(raw_BV, head), slot_B[:len(raw_BV)], start)
            scale, softcap, temperature, banned = 1.0, None, self.one, 0
        size, blocks = len(raw_BV), triton.cdiv(rows, _VOCABULARY_BLOCK)
        peak, total = raw_BV.new_empty(2, size, blocks, dtype=torch.float32)
        common = {"BLOCKS": blocks, "V": _VOCABULARY_BLOCK, "STATE": _STATE, "CAPPED": softcap is not None,
                  "START": start}
        numbers = (banned, raw_BV.stride(0), rows, scale, softcap or 0.0)
        kernels.weigh[size, blocks](raw_BV, slot_B, self.state, temperature, self.least, ends, peak, total, *numbers,
                                    **common, num_warps=4)
        kernels.pick[size,](raw_BV, slot_B, self.state, self.last, temperature, self.least, ends, peak, total, self.counter,
                            ids, logprobs, *numbers, ids.shape[-1], P=_pow2(blocks), GREEDY=sampling.temperature == 0, **common,
                            num_warps=4)

    @property
    def filtered(self) -> bool:
        """top_k and top_p sort the logits: for evaluation, outside the graphs."""
        return self.sampling.top_k > 0 or self.sampling.top_p < 1

    def _filter(self, z_BV: torch.Tensor, slot_B: torch.Tensor, start: bool) -> torch.Tensor:
        if self.banned:
            early = torch.ones(len(z_BV), dtype=torch.bool, device=z_BV.device) if start else (
                self.state[slot_B.long(), 1] + 1 < self.least)
            z_BV[:, self.ends[len(self.banned)].long()] -= torch.where(early, float("inf"), 0.0)[:, None]
        return truncate(z_BV / self.temperature, self.sampling.top_k, self.sampling.top_p)

    # -- prefill -------------------------------------------------------------------------------------------------------

    def _prefill(self, step: Prefill) -> Drawn | None:
        if step.segments:
            self._compute(step.segments)
        if not step.starts:
            return None
        self._sync(step.starts)
        prompts = list(dict.fromkeys(s.prompt for s in step.starts))
        place = {p: i for i, p in enumerate(prompts)}
        n = len(step.starts)
        plan = self._upload(np.array([[s.slot for s in step.starts], [place[s.prompt] for s in step.starts]], np.int32))
        ids = torch.empty(1, n, dtype=torch.int32, device=self.lm.device)
        logprobs = torch.empty(1, n, dtype=torch.float32, device=self.lm.device)
        self._draw(torch.stack([p.hidden for p in prompts]), plan[0], ids, logprobs, start=True, rows_B=plan[1].long())
        return self._drawn(step.starts, ids, logprobs)

    def _compute(self, segments: list[Segment]) -> None:
        """Forward of the segments' tokens; a completed prompt keeps its last hidden state."""
        block = 64
        items, write, positions, end, ends = [], [], [], 0, []
        for i, segment in enumerate(segments):
            prompt = len(segment.prompt.ids)
            before = segment.start + (prompt if segment.sequence else 0)
            pages = np.asarray((segment.sequence or segment.prompt).pages, np.int64)
            token = np.arange(segment.start, segment.start + segment.count)
            write.append(pages[token // self.page_size] * self.page_size + token % self.page_size)
            positions.append(np.arange(before, before + segment.count))
            items += [(end + o, min(block, segment.count - o), before + o, prompt, i) for o in range(0, segment.count, block)]
            end += segment.count
            ends.append(end)
        tables = torch.stack([self._table([s.prompt.pages for s in segments]),
                              self._table([s.sequence.pages if s.sequence else [] for s in segments])])
        meta = PrefillMeta(self, self._upload(np.concatenate(write)), self._upload(np.array(items, np.int32)), tables, block)
        ids_N = self._upload(np.concatenate([s.ids for s in segments]).astype(np.int64))
        hidden_ND = self.lm.hidden(ids_N, self._upload(np.concatenate(positions)), meta)
        for segment, end in zip(segments, ends):
            if segment.sequence is None and segment.start + segment.count == len(segment.prompt.ids):
                segment.prompt.hidden = hidden_ND[end - 1].clone()
