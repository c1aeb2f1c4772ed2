"""The output layer on a GPU: matrix products over large chunks, and one Triton pass over their logits each way.

A program owns a row. Forward keeps a running maximum m and, relative to it, the sums of e^z and of z e^z, from which
log-normaliser, target log-prob and entropy follow; the logits stay in the working precision, all sums are float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from verl.models.head import keep

_BLOCK = 4096


@triton.jit
def _shape(raw, scale, softcap, over_temperature, CAPPED: tl.constexpr):
    z = raw.to(tl.float32) * scale
    if CAPPED:
        z = softcap * (2 * tl.sigmoid(2 * z / softcap) - 1)
    return z * over_temperature


@triton.jit
def _forward(raw_ptr, target_ptr, logprob_ptr, entropy_ptr, lse_ptr, stride, rows, scale, softcap, over_temperature,
             CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0)
    raw_ptr += n.to(tl.int64) * stride
    v_V = tl.arange(0, BLOCK)
    peak_V = tl.full([BLOCK], -1e30, tl.float32)
    sum_V, weighted_V = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, rows, BLOCK):
        real = start + v_V < rows
        z_V = _shape(tl.load(raw_ptr + start + v_V, mask=real, other=0.0), scale, softcap, over_temperature, CAPPED)
        z_V = tl.where(real, z_V, -1e30)
        new_V = tl.maximum(peak_V, z_V)
        shrink_V, p_V = tl.exp(peak_V - new_V), tl.where(real, tl.exp(z_V - new_V), 0.0)
        sum_V = sum_V * shrink_V + p_V
        weighted_V = weighted_V * shrink_V + p_V * tl.where(real, z_V, 0.0)
        peak_V = new_V
    peak = tl.max(peak_V, 0)
    shrink_V = tl.exp(peak_V - peak)
    total = tl.sum(sum_V * shrink_V, 0)
    mean = tl.sum(weighted_V * shrink_V, 0) / total
    lse = peak + tl.log(total)
    target = tl.load(raw_ptr + tl.load(target_ptr + n))
    tl.store(logprob_ptr + n, _shape(target, scale, softcap, over_temperature, CAPPED) - lse)
    tl.store(entropy_ptr + n, lse - mean)
    tl.store(lse_ptr + n, lse)


@triton.jit
def _backward(raw_ptr, target_ptr, entropy_ptr, lse_ptr, grad_logprob_ptr, grad_entropy_ptr, stride, rows, width, scale, softcap,
              over_temperature, CAPPED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr):
    n, v_V = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    raw_ptr += n.to(tl.int64) * stride
    real = v_V < rows
    z_V = _shape(tl.load(raw_ptr + v_V, mask=real, other=0.0), scale, softcap, over_temperature, CAPPED)
    logp_V = z_V - tl.load(lse_ptr + n)
    g = tl.load(grad_logprob_ptr + n)
    slope_V = -g + tl.zeros([BLOCK], tl.float32)
    if ENTROPY:
        slope_V -= (logp_V + tl.load(entropy_ptr + n)) * tl.load(grad_entropy_ptr + n)
    grad_V = tl.exp(logp_V) * slope_V + tl.where(v_V == tl.load(target_ptr + n), g, 0.0)
    grad_V *= scale * over_temperature
    if CAPPED:
        inner_V = z_V / over_temperature / softcap
        grad_V *= 1 - inner_V * inner_V
    tl.store(raw_ptr + v_V, tl.where(real, grad_V, 0.0).to(raw_ptr.dtype.element_ty), mask=v_V < width)


class FusedTokenLogprobs(torch.autograd.Function):
    """What head._TokenLogprobs computes, for low-precision weights on a GPU: same arguments, same results."""

    @staticmethod
    def forward(ctx, hidden_TD, weight_VD, bias_V, targets_T, spec, temperature: float, chunk: int):
        logprobs_T = hidden_TD.new_empty(hidden_TD.shape[0], dtype=torch.float32)
        entropy_T, lse_T = torch.empty_like(logprobs_T), torch.empty_like(logprobs_T)
        for start in range(0, hidden_TD.shape[0], chunk):
            part = slice(start, start + chunk)
            raw_TV = linear(hidden_TD[part], weight_VD, bias_V)
            _forward[raw_TV.shape[0],](raw_TV, targets_T[part], logprobs_T[part], entropy_T[part], lse_T[part], raw_TV.stride(0),
                                       spec.rows, spec.scale, spec.softcap or 1.0, 1 / temperature,
                                       CAPPED=spec.softcap is not None, BLOCK=_BLOCK, num_warps=8)
        logprobs_T.masked_fill_(targets_T >= spec.rows, float("-inf"))
        keep(ctx, (hidden_TD, weight_VD, bias_V, targets_T, lse_T, entropy_T), spec, temperature, chunk)
        return logprobs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs_T, grad_entropy_T):
        hidden_TD, weight_VD, bias_V, targets_T, lse_T, entropy_T = ctx.saved_tensors
        spec = ctx.spec
        grad_logprobs_T = torch.zeros_like(lse_T) if grad_logprobs_T is None else grad_logprobs_T.float().contiguous()
        grad_logprobs_T = grad_logprobs_T.masked_fill(targets_T >= spec.rows, 0.0)
        grad_entropy_T = None if grad_entropy_T is None else grad_entropy_T.float().contiguous()
        grad_hidden = torch.empty_like(hidden_TD) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight_VD, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias_V, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        for start in range(0, hidden_TD.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            raw_TV = linear(hidden_TD[part], weight_VD, bias_V)
            width = raw_TV.shape[1]
            _backward[raw_TV.shape[0], triton.cdiv(width, _BLOCK)](
                raw_TV, targets_T[part], entropy_T[part], lse_T[part], grad_logprobs_T[part],
                (grad_logprobs_T if grad_entropy_T is None else grad_entropy_T)[part], raw_TV.stride(0), spec.rows, width,
                spec.scale, spec.softcap or 1.0, 1 / ctx.temperature, CAPPED=spec.softcap is not None,
                ENTROPY=grad_entropy_T is not None, BLOCK=_BLOCK, num_warps=8)
            if grad_hidden is not None:
                torch.mm(raw_TV, weight_VD, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight += raw_TV.T @ hidden_TD[part]
            if grad_bias is not None:
                grad_bias += raw_TV.sum(0, dtype=torch.float32)
        grad_weight = None if grad_weight is None else grad_weight.to(weight_VD.dtype)
        grad_bias = None if grad_bias is None else grad_bias.to(bias_V.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None
