"""CISPO: clip the importance weight, keep every token's gradient (MiniMax-M1, arXiv 2506.13585)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from verl.algorithms import policy
from verl.algorithms.base import LossInputs
from verl.algorithms.grpo import GRPO
from verl.algorithms.kl import ratio
from verl.algorithms.settings import check_range
from verl.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CISPO(GRPO):
    """-sg(clip(pi / old, 1 - clip_low, 1 + clip_high)) A log pi with GRPO's advantages, token mean."""

    name: ClassVar[str] = "cispo"

    clip_low: float = 1.0  # 1: no lower bound, as in the paper
    clip_high: float = 4.0  # weights up to 5, as in ScaleRL (arXiv 2510.13786); TRL's epsilon_high 5.0

    def __post_init__(self):
        super().__post_init__()
        check_range(self, "clip_high", 0, above=True)
        if self.dual_clip is not None:
            raise ConfigError("trainer.algo.dual_clip: has no meaning for cispo, whose weights are clipped already; "
                              "remove it, or use trainer.algorithm: grpo")

    def policy_term(self, x: LossInputs, log_ratio_T: torch.Tensor, advantages_T: torch.Tensor):
        r_T = ratio(log_ratio_T.detach())
        clipped_T = r_T.clamp(*self.clip_range)
        metrics = {"clip_ratio/region_mean": ((clipped_T != r_T).to(r_T.dtype), x.mask_T)}
        return policy.score_function(x, clipped_T * advantages_T), metrics
