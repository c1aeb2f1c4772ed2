"""Pieces of policy-gradient losses: pure functions of tensors, unreduced, reading nothing from masked slots."""

from __future__ import annotations

import torch

from verl.algorithms.base import LossInputs
from verl.algorithms.kl import ratio

CORRECTIONS = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def difference(a_T: torch.Tensor, b_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """a - b inside the mask and 0 outside, whatever stands there."""
    return torch.where(mask_T, a_T - b_T, 0.0)


def old_logprobs(x: LossInputs) -> torch.Tensor:
    """[T] log-probs before the batch's first update; during that update they are the detached current ones."""
    return x.logprobs_T.detach() if x.old_logprobs_T is None else x.old_logprobs_T


def sequence_sum(values_T: torch.Tensor, x: LossInputs) -> torch.Tensor:
    """[S] sum over each sequence's trained tokens."""
    return values_T.new_zeros(x.sequences).index_add(0, x.sequence_T, torch.where(x.mask_T, values_T, 0.0))


def token_counts(x: LossInputs) -> torch.Tensor:
    """[S] trained tokens of each sequence, float32 (exact up to 16 million)."""
    return torch.zeros(x.sequences, device=x.mask_T.device).index_add(0, x.sequence_T, x.mask_T.float())


def sequence_mean(values_T: torch.Tensor, x: LossInputs) -> torch.Tensor:
    """[S] mean over each sequence's own trained tokens; 0 when it has none."""
    return sequence_sum(values_T, x) / token_counts(x).clamp(min=1)


def clipped_surrogate(log_ratio_T: torch.Tensor, advantages_T: torch.Tensor, lowest: float, highest: float,
                      dual_clip: float | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-min(r A, clip(r, lowest, highest) A) and two bool tensors: clipped low, clipped high.

    PPO, arXiv 1707.06347; the asymmetric range is DAPO's. dual_clip c bounds the loss by -c A where A < 0
    (arXiv 1912.09729); it never touches positive advantages. Shapes of all tensors are equal.
    """
    r_T = ratio(log_ratio_T)
    clipped_T = r_T.clamp(lowest, highest)
    loss_T = torch.maximum(-r_T * advantages_T, -clipped_T * advantages_T)
    if dual_clip is not None:
        loss_T = torch.where(advantages_T < 0, torch.minimum(loss_T, -dual_clip * advantages_T), loss_T)
    low_T = (r_T < lowest) & (advantages_T < 0)
    high_T = (r_T > highest) & (advantages_T > 0)
    return loss_T, low_T, high_T


def score_function(x: LossInputs, weight_T: torch.Tensor) -> torch.Tensor:
    """-weight * log pi inside the mask, weight without gradient (Williams 1992)."""
    return -weight_T.detach() * torch.where(x.mask_T, x.logprobs_T, 0.0)


def off_policy_weights(x: LossInputs, mode: str, floor: float, cap: float) -> tuple[torch.Tensor, dict]:
    """([T] weights without gradient, metrics): corrects for tokens that another distribution sampled.

    The importance ratio old / rollout, per token or as the product over a sequence, either clamped to [floor, cap]
    ("truncate": TIS, arXiv 2505.24034 and truncated V-trace) or set to 0 outside of it ("mask": IcePop, MIS).
    """
    gap_T = difference(old_logprobs(x).detach(), x.rollout_logprobs_T, x.mask_T)
    level, _, action = mode.partition("_")
    weight_T = ratio(sequence_sum(gap_T, x)[x.sequence_T] if level == "sequence" else gap_T)
    metrics = {
        "sampling/sampling_logp_difference/mean": (gap_T.abs(), x.mask_T),
        "sampling/sampling_logp_difference/max": (gap_T.abs(), x.mask_T),
        **{f"sampling/importance_sampling_ratio/{how}": (weight_T, x.mask_T) for how in ("min", "mean", "max")},
    }
    if mode == "none":
        return torch.ones_like(weight_T), metrics
    if action == "truncate":
        return weight_T.clamp(floor, cap), metrics
    return torch.where((weight_T >= floor) & (weight_T <= cap), weight_T, 0.0), metrics
