"""GSPO: one importance ratio per sequence (arXiv 2507.18071)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from verl.algorithms import policy
from verl.algorithms.base import LossInputs
from verl.algorithms.grpo import GRPO


@dataclass(frozen=True, kw_only=True)
class GSPO(GRPO):
    """GRPO with r_i = exp(mean over the sequence's trained tokens of log pi / old), clipped as a whole.

    The sequence's value stands on each of its tokens, so that sequence_mean gives the paper's mean over sequences.
    """

    name: ClassVar[str] = "gspo"

    reduction: str = "sequence_mean"  # the paper's
    clip_low: float = 3e-4  # the paper's ranges: a geometric mean moves far less than a token's ratio
    clip_high: float = 4e-4  # see clip_low

    def policy_term(self, x: LossInputs, log_ratio_T: torch.Tensor, advantages_T: torch.Tensor):
        spread_T = policy.sequence_mean(log_ratio_T, x)[x.sequence_T]
        return super().policy_term(x, torch.where(x.mask_T, spread_T, 0.0), advantages_T)
