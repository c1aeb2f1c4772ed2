"""From hidden states to log-probs and entropy without ever holding [tokens, vocabulary] logits.

Everything that shapes logits lives here and nowhere else: scale, final softcap, temperature, rows without a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """logits = softcap(scale * (hidden @ weight^T + bias)); rows >= `rows` can never be sampled or counted."""

    rows: int
    scale: float = 1.0
    softcap: float | None = None


def shape_logits(raw: torch.Tensor, spec: HeadSpec) -> torch.Tensor:
    """Raw head output [..., V] -> float32 (or wider) logits with scale and softcap applied and spare rows at -inf."""
    z = _shape_(raw.to(torch.promote_types(raw.dtype, torch.float32), copy=True), spec)
    z[..., spec.rows:] = float("-inf")
    return z


def _shape_(z: torch.Tensor, spec: HeadSpec) -> torch.Tensor:
    """Scale and softcap, in place."""
    if spec.scale != 1.0:
        z.mul_(spec.scale)
    if spec.softcap is not None:
        z.div_(spec.softcap).tanh_().mul_(spec.softcap)
    return z


class _TokenLogprobs(torch.autograd.Function):
    """Chunked log softmax: forward keeps two numbers a token, backward recomputes each chunk's logits.

    Rows without a token are never computed: R = spec.rows columns stand for the whole distribution.
    """

    @staticmethod
    def forward(ctx, hidden_TD, weight_VD, bias_V, targets_T, spec: HeadSpec, temperature: float, chunk: int):
        wide = torch.promote_types(hidden_TD.dtype, torch.float32)
        logprobs_T = hidden_TD.new_empty(hidden_TD.shape[0], dtype=wide)
        entropy_T, lse_T = torch.empty_like(logprobs_T), torch.empty_like(logprobs_T)
        for part in _parts(hidden_TD.shape[0], chunk):
            z_TR = _logits(hidden_TD[part], weight_VD, bias_V, spec, temperature)
            top_T = z_TR.amax(-1)
            z_TR -= top_T[:, None]
            e_TR = z_TR.exp()
            sum_T = e_TR.sum(-1)
            log_T = sum_T.log()
            lse_T[part] = top_T + log_T
            logprobs_T[part] = z_TR.gather(-1, _within(targets_T[part], spec)[:, None]).squeeze(-1) - log_T
            entropy_T[part] = log_T - torch.linalg.vecdot(e_TR, z_TR) / sum_T
        if spec.rows < weight_VD.shape[0]:
            logprobs_T.masked_fill_(targets_T >= spec.rows, float("-inf"))
        keep(ctx, (hidden_TD, weight_VD, bias_V, targets_T, lse_T, entropy_T), spec, temperature, chunk)
        return logprobs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs_T, grad_entropy_T):
        hidden_TD, weight_VD, bias_V, targets_T, lse_T, entropy_T = ctx.saved_tensors
        spec, wide = ctx.spec, lse_T.dtype
        if grad_logprobs_T is None:
            grad_logprobs_T = torch.zeros_like(lse_T)
        elif spec.rows < weight_VD.shape[0]:
            grad_logprobs_T = grad_logprobs_T.masked_fill(targets_T >= spec.rows, 0.0)
        grad_hidden = torch.empty_like(hidden_TD) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight_VD, dtype=wide) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias_V, dtype=wide) if ctx.needs_input_grad[2] else None
        for part in _parts(hidden_TD.shape[0], ctx.chunk):
            z_TR = _logits(hidden_TD[part], weight_VD, bias_V, spec, ctx.temperature)
            slope_TR = None if spec.softcap is None else (z_TR * (ctx.temperature / spec.softcap)).square_().neg_().add_(1)
            grad_TR = _grad_logits_(z_TR.sub_(lse_T[part, None]), grad_logprobs_T[part, None],
                                    None if grad_entropy_T is None else grad_entropy_T[part, None], entropy_T[part, None])
            grad_TR.scatter_add_(-1, _within(targets_T[part], spec)[:, None], grad_logprobs_T[part, None])
            if spec.scale != ctx.temperature:
                grad_TR *= spec.scale / ctx.temperature
            if slope_TR is not None:
                grad_TR *= slope_TR
            if grad_bias is not None:
                grad_bias[:spec.rows] += grad_TR.sum(0)
            grad_TR = grad_TR.to(hidden_TD.dtype)
            if grad_hidden is not None:
                torch.mm(grad_TR, weight_VD[:spec.rows], out=grad_hidden[part])
            if grad_weight is not None:
                _add_product_(grad_weight[:spec.rows], grad_TR.T, hidden_TD[part])
        grad_weight = None if grad_weight is None else grad_weight.to(weight_VD.dtype)
        grad_bias = None if grad_bias is None else grad_bias.to(bias_V.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def keep(ctx, tensors: tuple, spec: HeadSpec, temperature: float, chunk: int) -> None:
    """What the backward of every chunked log softmax needs: its tensors, and how logits were made from them."""
    ctx.save_for_backward(*tensors)
    ctx.spec, ctx.temperature, ctx.chunk = spec, temperature, chunk
    ctx.set_materialize_grads(False)


def rows_at_a_time(hidden_TD: torch.Tensor, weight_VD: torch.Tensor, chunk_bytes: int | None) -> int:
    """Tokens whose logits may exist together (None: 64 MiB of them on a CPU, 1 GiB on a GPU)."""
    chunk_bytes = chunk_bytes or (1 << 30 if hidden_TD.is_cuda else 64 << 20)
    return max(1, chunk_bytes // (4 * weight_VD.shape[0]))


def _parts(total: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, total)) for start in range(0, total, chunk))


def _within(targets_T: torch.Tensor, spec: HeadSpec) -> torch.Tensor:
    """Targets without a token are looked up anywhere; their log-prob is -inf and their gradient 0."""
    return targets_T.clamp(max=spec.rows - 1)


def _logits(hidden_TD, weight_VD, bias_V, spec: HeadSpec, temperature: float) -> torch.Tensor:
    """Logits / temperature [T, R] in float32 or wider, owned by the caller."""
    raw = linear(hidden_TD, weight_VD[:spec.rows], None if bias_V is None else bias_V[:spec.rows])
    z_TR = _shape_(raw.to(torch.promote_types(raw.dtype, torch.float32)), spec)
    return z_TR if temperature == 1.0 else z_TR.div_(temperature)


def _grad_logits_(logp_TR, grad_logprobs_T1, grad_entropy_T1, entropy_T1) -> torch.Tensor:
    """The gradient's dense part, p * (-g_logprob - g_entropy * (log p + entropy)), over `logp_TR` in place."""
    if grad_entropy_T1 is None:
        return logp_TR.exp_().mul_(-grad_logprobs_T1)
    p_TR = logp_TR.exp()
    return logp_TR.add_(entropy_T1).mul_(-grad_entropy_T1).sub_(grad_logprobs_T1).mul_(p_TR)


def _add_product_(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b, where the sum may be wider than the factors."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def token_logprobs(hidden_TD: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor | None,
                   targets_T: torch.Tensor, spec: HeadSpec, temperature: float,
                   chunk_bytes: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob (nats) of each target and entropy (nats) of each distribution under logits / temperature, float32 [T]
    (float64 for a float64 model).

    Gradients are exact for hidden, weight and bias; the peak is two chunks of `chunk_bytes` of logits (None: 64 MiB on
    a CPU, 1 GiB on a GPU, where every chunk's share of the weight gradient costs a pass over the whole weight).
    """
    if temperature <= 0:
        raise ValueError(f"temperature {temperature} has no log-probs; scoring needs temperature > 0")
    chunk = rows_at_a_time(hidden_TD, weight_VD, chunk_bytes)
    function = _TokenLogprobs
    if hidden_TD.is_cuda and hidden_TD.dtype in (torch.bfloat16, torch.float16):
        from verl.models.head_fused import FusedTokenLogprobs as function  # triton exists wherever torch has a GPU
    return function.apply(hidden_TD, weight_VD, bias_V, targets_T, spec, float(temperature), chunk)
