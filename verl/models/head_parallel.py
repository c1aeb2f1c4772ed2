"""Log-probs of an output layer whose rows lie on several ranks: three sums and a maximum a token travel, logits never do."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from verl.models.head import HeadSpec, _add_product_, _grad_logits_, _logits, _parts, keep, rows_at_a_time


class _ParallelLogprobs(torch.autograd.Function):
    """head.py's chunked log softmax over this rank's rows; sums over all rows are added up between the ranks."""

    @staticmethod
    def forward(ctx, hidden_TD, weight_VD, targets_T, first: int, rows: int, temperature: float, chunk: int, group):
        spec = HeadSpec(min(max(rows - first, 0), weight_VD.shape[0]))
        wide = torch.promote_types(hidden_TD.dtype, torch.float32)
        logprobs_T = hidden_TD.new_empty(hidden_TD.shape[0], dtype=wide)
        entropy_T, lse_T = torch.empty_like(logprobs_T), torch.empty_like(logprobs_T)
        own_T = (targets_T >= first) & (targets_T < first + spec.rows)
        local_T = torch.where(own_T, targets_T - first, 0)
        for part in _parts(hidden_TD.shape[0], chunk):
            z_TR = _logits(hidden_TD[part], weight_VD, None, spec, temperature)
            top_T = z_TR.amax(-1) if spec.rows else z_TR.new_full((len(z_TR),), float("-inf"))
            dist.all_reduce(top_T, dist.ReduceOp.MAX, group)
            z_TR -= top_T[:, None]
            e_TR = z_TR.exp()
            target_T = z_TR.gather(-1, local_T[part, None]).squeeze(-1) if spec.rows else torch.zeros_like(top_T)
            sums_3T = torch.stack([e_TR.sum(-1), torch.linalg.vecdot(e_TR, z_TR), torch.where(own_T[part], target_T, 0.0)])
            dist.all_reduce(sums_3T, group=group)
            sum_T, weighted_T, target_T = sums_3T
            log_T = sum_T.log()
            lse_T[part] = top_T + log_T
            logprobs_T[part] = target_T - log_T
            entropy_T[part] = log_T - weighted_T / sum_T
        logprobs_T.masked_fill_(targets_T >= rows, float("-inf"))
        keep(ctx, (hidden_TD, weight_VD, local_T, own_T, lse_T, entropy_T), spec, temperature, chunk)
        return logprobs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs_T, grad_entropy_T):
        hidden_TD, weight_VD, local_T, own_T, lse_T, entropy_T = ctx.saved_tensors
        rows = ctx.spec.rows
        grad_logprobs_T = torch.zeros_like(lse_T) if grad_logprobs_T is None else grad_logprobs_T
        own_grad_T = torch.where(own_T, grad_logprobs_T, 0.0)
        grad_hidden = torch.zeros_like(hidden_TD)
        grad_weight = torch.zeros_like(weight_VD, dtype=lse_T.dtype)
        for part in _parts(hidden_TD.shape[0] if rows else 0, ctx.chunk):
            z_TR = _logits(hidden_TD[part], weight_VD, None, ctx.spec, ctx.temperature)
            grad_TR = _grad_logits_(z_TR.sub_(lse_T[part, None]), grad_logprobs_T[part, None],
                                    None if grad_entropy_T is None else grad_entropy_T[part, None], entropy_T[part, None])
            grad_TR.scatter_add_(-1, local_T[part, None], own_grad_T[part, None])
            grad_TR = grad_TR.div_(ctx.temperature).to(hidden_TD.dtype)
            torch.mm(grad_TR, weight_VD[:rows], out=grad_hidden[part])
            _add_product_(grad_weight[:rows], grad_TR.T, hidden_TD[part])
        return grad_hidden, grad_weight.to(weight_VD.dtype), None, None, None, None, None, None


def parallel_logprobs(hidden_TD: torch.Tensor, weight_VD: torch.Tensor, targets_T: torch.Tensor, rows: int, temperature: float,
                      group: dist.ProcessGroup, chunk_bytes: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """head.token_logprobs with V rows of the output layer on each rank of `group`, in rank order; ids >= `rows` do not count.

    Every rank passes all T hidden states. The gradient of a rank's hidden states holds its own rows' part: add them up.
    """
    first = dist.get_rank(group) * weight_VD.shape[0]
    chunk = rows_at_a_time(hidden_TD, weight_VD, chunk_bytes)
    return _ParallelLogprobs.apply(hidden_TD, weight_VD, targets_T, first, rows, float(temperature), chunk, group)
