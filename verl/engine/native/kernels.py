"""Triton kernels of the decode step: paged attention in three launches a layer, and sampling in two.

Attention follows flash-decoding: partial softmaxes over stretches of keys, merged by their log-sum-exp.
`prompt_part` takes the queries of up to `count` samples of one group together, so that the shared prompt's keys are
read once for all of them and fill the rows of one matrix product; `own_part` takes one sample's own keys and stores
the new token's; `merge` joins the parts and the sink. Scores are kept in units of log 2. Keys lie at
[K, slots, D]; token n of a table row is slot table[n // PAGE] * PAGE + n % PAGE.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
FP8_MAX = tl.constexpr(448.0)


@triton.jit
def _cap(x, softcap):
    return softcap * (2 * tl.sigmoid(2 * x / softcap) - 1)


@triton.jit
def _walk(q_MD, m_M, l_M, acc_ME, k_ptr, v_ptr, table_ptr, low, high, base, position_M, scale, softcap, window,
          D: tl.constexpr, E: tl.constexpr, PAGE: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
          CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Online softmax over tokens low ... high of one table row (low a multiple of N), which stand at base + token."""
    n_N, d_D, e_E = tl.arange(0, N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    for start in range(low, high, N):
        token_N = start + n_N
        real_N = token_N < high
        if PAGE % N == 0:
            slot_N = tl.load(table_ptr + start // PAGE).to(tl.int64) * PAGE + start % PAGE + n_N
        else:
            slot_N = tl.load(table_ptr + token_N // PAGE, mask=real_N, other=0).to(tl.int64) * PAGE + token_N % PAGE
        k_DN = tl.load(k_ptr + slot_N[None, :] * D + d_D[:, None], mask=real_N[None, :] & (d_D[:, None] < D), other=0.0)
        s_MN = tl.dot(q_MD, k_DN.to(q_MD.dtype), input_precision=PRECISION) * scale
        if SOFTCAP:
            s_MN = _cap(s_MN, softcap)
        seen_MN = real_N[None, :]
        distance_MN = position_M[:, None] - (base + token_N)[None, :]
        if CAUSAL:
            seen_MN = seen_MN & (distance_MN >= 0)
        if WINDOW:
            seen_MN = seen_MN & (distance_MN < window)
        s_MN = tl.where(seen_MN, s_MN * LOG2E, float("-inf"))
        peak_M = tl.maximum(m_M, tl.max(s_MN, 1))
        safe_M = tl.where(peak_M == float("-inf"), 0.0, peak_M)
        p_MN = tl.exp2(s_MN - safe_M[:, None])
        shrink_M = tl.exp2(m_M - safe_M)
        l_M = l_M * shrink_M + tl.sum(p_MN, 1)
        v_NE = tl.load(v_ptr + slot_N[:, None] * E + e_E[None, :], mask=real_N[:, None] & (e_E[None, :] < E), other=0.0)
        acc_ME = acc_ME * shrink_M[:, None] + tl.dot(p_MN.to(q_MD.dtype), v_NE.to(q_MD.dtype), input_precision=PRECISION)
        m_M = peak_M
    return m_M, l_M, acc_ME


@triton.jit
def _stretch(low, high, part, PARTS: tl.constexpr, N: tl.constexpr, LEAST: tl.constexpr):
    """The part-th of PARTS stretches of low ... high, whole tiles of N from the tile of `low`, at least LEAST tiles each."""
    first = low // N
    tiles = tl.cdiv(high, N) - first
    each = tl.maximum(tl.cdiv(tiles, PARTS), LEAST)
    start = first + part * each
    return start * N, tl.minimum((start + each) * N, high)


@triton.jit
def _put(m_ptr, l_ptr, acc_ptr, row_M, real_M, m_M, l_M, acc_ME, E: tl.constexpr, BLOCK_E: tl.constexpr):
    e_E = tl.arange(0, BLOCK_E)
    tl.store(m_ptr + row_M, m_M, mask=real_M)
    tl.store(l_ptr + row_M, l_M, mask=real_M)
    tl.store(acc_ptr + row_M[:, None].to(tl.int64) * E + e_E[None, :], acc_ME, mask=real_M[:, None] & (e_E[None, :] < E))


@triton.jit
def prompt_part(q_ptr, k_ptr, v_ptr, table_ptr, slot_ptr, state_ptr, first_ptr, count_ptr, m_ptr, l_ptr, acc_ptr, batch,
                slots, q_b, q_h, table_s, scale, softcap, window,
                H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, E: tl.constexpr, PAGE: tl.constexpr, STATE: tl.constexpr,
                M: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, PARTS: tl.constexpr,
                LEAST: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Rows first ... first + count of the batch share a prompt; program (item, kv head, part) reads a stretch of it."""
    item, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(count_ptr + item)
    if count > 0:
        G: tl.constexpr = H // K
        first = tl.load(first_ptr + item)
        i_M, d_D = tl.arange(0, M), tl.arange(0, BLOCK_D)
        b_M, h_M = first + i_M // G, head * G + i_M % G
        real_M = i_M < count * G
        slot_M = tl.load(slot_ptr + b_M, mask=real_M, other=0)
        position_M = (tl.load(state_ptr + slot_M * STATE, mask=real_M, other=0)
                      + tl.load(state_ptr + slot_M * STATE + 1, mask=real_M, other=0))
        row = tl.load(slot_ptr + first)
        high = tl.load(state_ptr + row * STATE)
        low = 0
        if WINDOW:
            nearest = tl.min(tl.where(real_M, position_M, 2147483647), 0)
            low = tl.minimum(tl.maximum(nearest - window + 1, 0), high)
        start, end = _stretch(low, high, part, PARTS, N, LEAST)
        out_M = (part * batch + b_M) * H + h_M
        if start < end:
            q_MD = tl.load(q_ptr + b_M[:, None].to(tl.int64) * q_b + h_M[:, None] * q_h + d_D[None, :],
                           mask=real_M[:, None] & (d_D[None, :] < D), other=0.0)
            at = head.to(tl.int64) * slots
            m_M, l_M, acc_ME = _walk(q_MD, tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32),
                                     tl.zeros([M, BLOCK_E], tl.float32), k_ptr + at * D, v_ptr + at * E,
                                     table_ptr + row.to(tl.int64) * table_s, start, end, 0, position_M, scale, softcap, window,
                                     D, E, PAGE, N, BLOCK_D, BLOCK_E, False, WINDOW, SOFTCAP, PRECISION)
            _put(m_ptr, l_ptr, acc_ptr, out_M, real_M, m_M, l_M, acc_ME, E, BLOCK_E)
        else:
            tl.store(m_ptr + out_M, tl.full([M], float("-inf"), tl.float32), mask=real_M)


@triton.jit
def _stored(x, scale, FP8: tl.constexpr, ptr):
    """What the cache will hold of x (in its own type)."""
    if FP8:
        x = tl.minimum(tl.maximum(x.to(tl.float32) / scale, -FP8_MAX), FP8_MAX)
    return x.to(ptr.dtype.element_ty)


@triton.jit
def own_part(q_ptr, new_k_ptr, new_v_ptr, k_ptr, v_ptr, table_ptr, slot_ptr, state_ptr, m_ptr, l_ptr, acc_ptr, batch, slots,
             q_b, q_h, k_b, k_h, v_b, v_h, table_s, scale, kv_scale, softcap, window, before,
             H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, E: tl.constexpr, PAGE: tl.constexpr, STATE: tl.constexpr,
             M: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, PARTS: tl.constexpr,
             LEAST: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, FP8: tl.constexpr, PRECISION: tl.constexpr):
    """Program (row, kv head, part): store the new token (part 0), then attend to a stretch of the row's own tokens."""
    b, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    G: tl.constexpr = H // K
    i_M, d_D, e_E = tl.arange(0, M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    h_M, real_M = head * G + i_M, i_M < G
    slot = tl.load(slot_ptr + b)
    prompt, own = tl.load(state_ptr + slot * STATE), tl.load(state_ptr + slot * STATE + 1)
    table_ptr += slot.to(tl.int64) * table_s
    at = head.to(tl.int64) * slots
    k_ptr, v_ptr = k_ptr + at * D, v_ptr + at * E
    q_MD = tl.load(q_ptr + b.to(tl.int64) * q_b + h_M[:, None] * q_h + d_D[None, :],
                   mask=real_M[:, None] & (d_D[None, :] < D), other=0.0)
    m_M, l_M = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    acc_ME = tl.zeros([M, BLOCK_E], tl.float32)
    if part == 0:
        k_D = _stored(tl.load(new_k_ptr + b.to(tl.int64) * k_b + head * k_h + d_D, mask=d_D < D, other=0.0), kv_scale, FP8, k_ptr)
        v_E = _stored(tl.load(new_v_ptr + b.to(tl.int64) * v_b + head * v_h + e_E, mask=e_E < E, other=0.0), kv_scale, FP8, v_ptr)
        new = tl.load(table_ptr + own // PAGE).to(tl.int64) * PAGE + own % PAGE
        tl.store(k_ptr + new * D + d_D, k_D, mask=d_D < D)
        tl.store(v_ptr + new * E + e_E, v_E, mask=e_E < E)
        s_M = tl.sum(q_MD.to(tl.float32) * k_D.to(tl.float32)[None, :], 1) * scale
        if SOFTCAP:
            s_M = _cap(s_M, softcap)
        m_M, l_M = s_M * LOG2E, tl.full([M], 1.0, tl.float32)
        acc_ME += v_E.to(tl.float32)[None, :]
    low = 0
    if WINDOW:
        low = tl.minimum(tl.maximum(prompt + own - window + 1 - prompt, 0), own)
    start, end = _stretch(low, own, part, PARTS, N, LEAST)
    position_M = tl.zeros([M], tl.int32) + prompt + own
    m_M, l_M, acc_ME = _walk(q_MD, m_M, l_M, acc_ME, k_ptr, v_ptr, table_ptr, start, end, prompt, position_M, scale, softcap,
                             window, D, E, PAGE, N, BLOCK_D, BLOCK_E, False, WINDOW, SOFTCAP, PRECISION)
    _put(m_ptr, l_ptr, acc_ptr, ((before + part) * batch + b) * H + h_M, real_M, m_M, l_M, acc_ME, E, BLOCK_E)


@triton.jit
def merge(m_ptr, l_ptr, acc_ptr, sink_ptr, out_ptr, batch, parts, kv_scale, H: tl.constexpr, E: tl.constexpr,
          BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr, SINK: tl.constexpr):
    """Program (row, head): join its parts, weighing each by its share of the softmax; a sink adds to the denominator."""
    b, h = tl.program_id(0), tl.program_id(1)
    p_P, e_E = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_E)
    row_P = (p_P * batch + b) * H + h
    m_P = tl.load(m_ptr + row_P, mask=p_P < parts, other=float("-inf"))
    real_P = m_P > float("-inf")
    l_P = tl.load(l_ptr + row_P, mask=real_P, other=0)
    peak = tl.max(m_P, 0)
    if SINK:
        sink = tl.load(sink_ptr + h).to(tl.float32) * LOG2E
        peak = tl.maximum(peak, sink)
    weight_P = tl.where(real_P, tl.exp2(m_P - peak), 0.0)
    total = tl.sum(weight_P * l_P, 0)
    if SINK:
        total += tl.exp2(sink - peak)
    acc_PE = tl.load(acc_ptr + row_P[:, None].to(tl.int64) * E + e_E[None, :], mask=real_P[:, None] & (e_E[None, :] < E), other=0.0)
    out_E = tl.sum(acc_PE * weight_P[:, None], 0) / total * kv_scale
    tl.store(out_ptr + (b.to(tl.int64) * H + h) * E + e_E, out_E.to(out_ptr.dtype.element_ty), mask=e_E < E)


@triton.jit
def prefill(q_ptr, k_ptr, v_ptr, prompt_table_ptr, own_table_ptr, item_ptr, sink_ptr, out_ptr, slots, q_n, q_h, table_s, scale,
            kv_scale, softcap, window,
            H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, E: tl.constexpr, PAGE: tl.constexpr, M: tl.constexpr,
            N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
            SINK: tl.constexpr, PRECISION: tl.constexpr):
    """Program (block of M queries, head): attend to the prompt's pages, then to the response's, all stored before.

    item: first query, queries, position of the first, prompt tokens to read, table row.
    """
    item_ptr += tl.program_id(0) * 5
    head = tl.program_id(1)
    first, count, position = tl.load(item_ptr), tl.load(item_ptr + 1), tl.load(item_ptr + 2)
    prompt, row = tl.load(item_ptr + 3), tl.load(item_ptr + 4).to(tl.int64)
    i_M, d_D, e_E = tl.arange(0, M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    n_M, real_M, position_M = first + i_M, i_M < count, position + i_M
    q_MD = tl.load(q_ptr + n_M[:, None].to(tl.int64) * q_n + head * q_h + d_D[None, :],
                   mask=real_M[:, None] & (d_D[None, :] < D), other=0.0)
    at = (head // (H // K)).to(tl.int64) * slots
    k_ptr, v_ptr = k_ptr + at * D, v_ptr + at * E
    m_M, l_M = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    acc_ME = tl.zeros([M, BLOCK_E], tl.float32)
    low, own_low = 0, 0
    if WINDOW:
        low = tl.maximum(position - window + 1, 0) // N * N
        own_low = tl.maximum(position - window + 1 - prompt, 0) // N * N
    m_M, l_M, acc_ME = _walk(q_MD, m_M, l_M, acc_ME, k_ptr, v_ptr, prompt_table_ptr + row * table_s, low,
                             tl.minimum(prompt, position + count), 0, position_M, scale, softcap, window,
                             D, E, PAGE, N, BLOCK_D, BLOCK_E, True, WINDOW, SOFTCAP, PRECISION)
    m_M, l_M, acc_ME = _walk(q_MD, m_M, l_M, acc_ME, k_ptr, v_ptr, own_table_ptr + row * table_s, own_low,
                             position + count - prompt, prompt, position_M, scale, softcap, window,
                             D, E, PAGE, N, BLOCK_D, BLOCK_E, True, WINDOW, SOFTCAP, PRECISION)
    if SINK:
        sink = tl.load(sink_ptr + head).to(tl.float32) * LOG2E
        peak_M = tl.maximum(m_M, sink)
        shrink_M = tl.exp2(m_M - peak_M)
        l_M, acc_ME = l_M * shrink_M + tl.exp2(sink - peak_M), acc_ME * shrink_M[:, None]
    out_ME = acc_ME / tl.where(l_M == 0, 1.0, l_M)[:, None] * kv_scale
    tl.store(out_ptr + (n_M[:, None].to(tl.int64) * H + head) * E + e_E[None, :], out_ME.to(out_ptr.dtype.element_ty),
             mask=real_M[:, None] & (e_E[None, :] < E))


@triton.jit
def feed(slot_ptr, state_ptr, last_ptr, ids_ptr, positions_ptr, counter_ptr, batch, STATE: tl.constexpr, BLOCK: tl.constexpr):
    """What the next forward reads: each row's last token and its position. Counts the step."""
    b_B = tl.arange(0, BLOCK)
    real_B = b_B < batch
    slot_B = tl.load(slot_ptr + b_B, mask=real_B, other=0)
    tl.store(ids_ptr + b_B, tl.load(last_ptr + slot_B, mask=real_B, other=0), mask=real_B)
    position_B = tl.load(state_ptr + slot_B * STATE, mask=real_B, other=0) + tl.load(state_ptr + slot_B * STATE + 1,
                                                                                  mask=real_B, other=0)
    tl.store(positions_ptr + b_B, position_B.to(tl.int64), mask=real_B)
    tl.store(counter_ptr, tl.load(counter_ptr) + 1)


@triton.jit
def _shaped(z_ptr, row, v_V, rows, head_scale, head_softcap, temperature, index, least, ends_ptr, ends, CAPPED: tl.constexpr):
    """Logits / temperature in float32: head's scale and softcap, spare rows and banned ends at -inf."""
    z_V = tl.load(z_ptr + row + v_V, mask=v_V < rows, other=float("-inf")).to(tl.float32) * head_scale
    if CAPPED:
        z_V = tl.where(v_V < rows, _cap(z_V, head_softcap), float("-inf"))
    for i in range(ends):
        z_V = tl.where((v_V == tl.load(ends_ptr + i)) & (index < least), float("-inf"), z_V)
    return z_V / temperature


@triton.jit
def weigh(z_ptr, slot_ptr, state_ptr, setting_ptr, least_ptr, ends_ptr, peak_ptr, sum_ptr, ends, z_b, rows, head_scale,
          head_softcap, BLOCKS: tl.constexpr, V: tl.constexpr, STATE: tl.constexpr, CAPPED: tl.constexpr, START: tl.constexpr):
    """Program (row, block): maximum of the block's logits and the sum of exp(logit - maximum)."""
    b, block = tl.program_id(0), tl.program_id(1)
    index = 0
    if not START:
        index = tl.load(state_ptr + tl.load(slot_ptr + b) * STATE + 1) + 1
    v_V = block * V + tl.arange(0, V)
    z_V = _shaped(z_ptr, b.to(tl.int64) * z_b, v_V, rows, head_scale, head_softcap, tl.load(setting_ptr), index,
                  tl.load(least_ptr), ends_ptr, ends, CAPPED)
    peak = tl.max(z_V, 0)
    tl.store(peak_ptr + b * BLOCKS + block, peak)
    tl.store(sum_ptr + b * BLOCKS + block, tl.sum(tl.exp(z_V - tl.where(peak == float("-inf"), 0.0, peak)), 0))


@triton.jit
def _mix32(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def uniform(low, high, index):
    """The documented uniform of (seed, position); all three are uint32. See sampler.py."""
    h = _mix32(low ^ _mix32(index * 0x9E3779B9 + high))
    return ((h >> 8).to(tl.float32) + 0.5) * 5.9604644775390625e-08


@triton.jit
def _first(cumulative, weight, target, position, COUNT: tl.constexpr):
    """First position whose cumulative weight reaches the target; never one of weight 0, whatever the rounding."""
    found = tl.min(tl.where((cumulative >= target) & (weight > 0), position, COUNT), 0)
    last = tl.max(tl.where(weight > 0, position, 0), 0)
    return tl.minimum(found, last)


@triton.jit
def pick(z_ptr, slot_ptr, state_ptr, last_ptr, setting_ptr, least_ptr, ends_ptr, peak_ptr, sum_ptr, counter_ptr, ids_ptr,
         logprobs_ptr, ends, z_b, rows, head_scale, head_softcap, width,
         BLOCKS: tl.constexpr, P: tl.constexpr, V: tl.constexpr, STATE: tl.constexpr, CAPPED: tl.constexpr, START: tl.constexpr,
         GREEDY: tl.constexpr):
    """Program (row): draw by inverse CDF in id order, first the block, then the id; advance the row's state."""
    b = tl.program_id(0)
    slot = tl.load(slot_ptr + b)
    state_ptr += slot * STATE
    own = tl.load(state_ptr + 1)
    index = own * 0 if START else own + 1
    p_P, i_V = tl.arange(0, P), tl.arange(0, V)
    peak_P = tl.load(peak_ptr + b * BLOCKS + p_P, mask=p_P < BLOCKS, other=float("-inf"))
    sum_P = tl.load(sum_ptr + b * BLOCKS + p_P, mask=p_P < BLOCKS, other=0)
    peak = tl.max(peak_P, 0)
    weight_P = tl.where(peak_P > float("-inf"), sum_P * tl.exp(peak_P - peak), 0.0)
    total = tl.sum(weight_P, 0)
    if GREEDY:
        block = tl.min(tl.where(peak_P == peak, p_P, P), 0)
        rest = 0.0
    else:
        low = tl.load(state_ptr + 3).to(tl.uint32, bitcast=True)
        high = tl.load(state_ptr + 4).to(tl.uint32, bitcast=True)
        target = uniform(low, high, index.to(tl.uint32)) * total
        cumulative_P = tl.cumsum(weight_P, 0)
        block = _first(cumulative_P, weight_P, target, p_P, P)
        rest = target - tl.sum(tl.where(p_P < block, weight_P, 0.0), 0)
    z_V = _shaped(z_ptr, b.to(tl.int64) * z_b, block * V + i_V, rows, head_scale, head_softcap, tl.load(setting_ptr), index,
                  tl.load(least_ptr), ends_ptr, ends, CAPPED)
    if GREEDY:
        i = tl.min(tl.where(z_V == peak, i_V, V), 0)
    else:
        weight_V = tl.exp(z_V - peak)
        i = _first(tl.cumsum(weight_V, 0), weight_V, rest, i_V, V)
    z = tl.sum(tl.where(i_V == i, z_V, 0.0), 0)
    token = block * V + i
    out = b
    if not START:
        out += (tl.load(counter_ptr) - 1) * width
        tl.store(state_ptr + 1, tl.minimum(own + 1, tl.load(state_ptr + 2)))
    tl.store(ids_ptr + out, token)
    tl.store(logprobs_ptr + out, z - peak - tl.log(total))
    tl.store(last_ptr + slot, token.to(tl.int64))
