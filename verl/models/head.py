"""From hidden states to log-probs and entropy without ever holding [tokens, vocabulary] logits.

Everything that shapes logits lives here and nowhere else: scale, final softcap, temperature, rows without a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """logits = softcap(scale * (hidden @ weight^T + bias)); rows >= `rows` can never be sampled or counted."""

    rows: int
    scale: float = 1.0
    softcap: float | None = None


def shape_logits(raw: torch.Tensor, spec: HeadSpec) -> torch.Tensor:
    """Raw head output [..., V] -> float32 (or wider) logits with scale and softcap applied and spare rows at -inf."""
    z = raw.to(torch.promote_types(raw.dtype, torch.float32))
    if spec.scale != 1.0:
        z = z * spec.scale
    if spec.softcap is not None:
        z = spec.softcap * torch.tanh(z / spec.softcap)
    if spec.rows < z.shape[-1]:
        z = z.clone() if z is raw else z
        z[..., spec.rows:] = float("-inf")
    return z


class _TokenLogprobs(torch.autograd.Function):
    """Chunked log softmax: forward keeps two numbers a token, backward recomputes each chunk's logits."""

    @staticmethod
    def forward(ctx, hidden_TD, weight_VD, bias_V, targets_T, spec: HeadSpec, temperature: float, chunk: int):
        wide = torch.promote_types(hidden_TD.dtype, torch.float32)
        total = hidden_TD.shape[0]
        logprobs = torch.empty(total, dtype=wide, device=hidden_TD.device)
        entropy, lse = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for a in range(0, total, chunk):
            part = slice(a, min(a + chunk, total))
            z = _chunk_logits(hidden_TD[part], weight_VD, bias_V, spec, temperature)
            lse[part] = torch.logsumexp(z, -1)
            logprobs[part] = z.gather(-1, targets_T[part, None]).squeeze(-1) - lse[part]
            z -= lse[part, None]
            entropy[part] = -(z.exp() * z.clamp(min=-1e30)).sum(-1)
        ctx.save_for_backward(hidden_TD, weight_VD, bias_V, targets_T, lse, entropy)
        ctx.spec, ctx.temperature, ctx.chunk = spec, temperature, chunk
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden_TD, weight_VD, bias_V, targets_T, lse, entropy = ctx.saved_tensors
        spec, wide = ctx.spec, lse.dtype
        grad_hidden = torch.empty_like(hidden_TD)
        grad_weight = torch.zeros_like(weight_VD, dtype=wide) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias_V, dtype=wide) if bias_V is not None and ctx.needs_input_grad[2] else None
        for a in range(0, hidden_TD.shape[0], ctx.chunk):
            part = slice(a, min(a + ctx.chunk, hidden_TD.shape[0]))
            z = _chunk_logits(hidden_TD[part], weight_VD, bias_V, spec, ctx.temperature)
            inner = (1 - (z * ctx.temperature / spec.softcap) ** 2) if spec.softcap is not None else None
            logp = z.sub_(lse[part, None])
            grad = logp.exp()  # the probabilities; becomes d/dz
            if grad_entropy is not None:
                slope = -(logp.clamp(min=-1e30) + entropy[part, None]) * grad_entropy[part, None]
                grad = grad * (slope - grad_logprobs[part, None]) if grad_logprobs is not None else grad * slope
            else:
                grad.mul_(-grad_logprobs[part, None])
            if grad_logprobs is not None:
                grad.scatter_add_(-1, targets_T[part, None], grad_logprobs[part, None])
            grad *= spec.scale / ctx.temperature
            if inner is not None:
                grad = torch.where(logp == float("-inf"), 0, grad * inner)
            grad = grad.to(hidden_TD.dtype)
            grad_hidden[part] = grad @ weight_VD
            if grad_weight is not None:
                grad_weight += (grad.T @ hidden_TD[part]).to(wide)
            if grad_bias is not None:
                grad_bias += grad.to(wide).sum(0)
        grad_weight = None if grad_weight is None else grad_weight.to(weight_VD.dtype)
        grad_bias = None if grad_bias is None else grad_bias.to(bias_V.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _chunk_logits(hidden, weight, bias, spec: HeadSpec, temperature: float) -> torch.Tensor:
    z = shape_logits(torch.nn.functional.linear(hidden, weight, bias), spec)
    return z if temperature == 1.0 else z / temperature


def token_logprobs(hidden_TD: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor | None,
                   targets_T: torch.Tensor, spec: HeadSpec, temperature: float,
                   chunk_bytes: int = 256 << 20) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob (nats) of each target and entropy (nats) of each distribution under logits / temperature, float32 [T].

    Gradients are exact for hidden, weight and bias; the peak is one chunk of about `chunk_bytes` of logits.
    """
    if temperature <= 0:
        raise ValueError(f"temperature {temperature} has no log-probs; scoring needs temperature > 0")
    chunk = max(16, chunk_bytes // (4 * weight_VD.shape[0]))
    return _TokenLogprobs.apply(hidden_TD, weight_VD, bias_V, targets_T, spec, float(temperature), chunk)
