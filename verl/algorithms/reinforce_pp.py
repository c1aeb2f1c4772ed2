"""REINFORCE++: PPO's loss and token-level KL without a critic, advantages whitened over the step (arXiv 2501.03262)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from verl.algorithms.base import Credit
from verl.algorithms.gae import discounted_returns, place_scores, whiten
from verl.algorithms.groups import group_stats
from verl.algorithms.online import Clipped
from verl.algorithms.settings import check_range
from verl.core.batch import Batch


@dataclass(frozen=True, kw_only=True)
class ReinforcePP(Clipped):
    """A_t = whitened discounted return of (score on the last trained token - kl_coef * k1 on every token).

    Whitening runs over the trained tokens of the step, std with n - 1 (gae.whiten).
    """

    name: ClassVar[str] = "reinforce_pp"

    kl_coef: float = 0.01  # OpenRLHF's
    kl_in: str = "reward"  # as in the paper
    kl_estimator: str = "k1"  # as in the paper
    gamma: float = 1.0  # discount per trained token

    def __post_init__(self):
        super().__post_init__()
        check_range(self, "gamma", 0, 1)

    def scores(self, batch: Batch) -> np.ndarray:
        """float64 [S]: what stands on the last trained token; NaN where nobody scored."""
        return batch.rewards_S

    def credit(self, batch: Batch) -> Credit:
        rewards_T = place_scores(self.scores(batch), batch.mask_T, batch.sequence_T) - self.kl_penalty(batch)
        returns_T = discounted_returns(rewards_T, batch.mask_T, batch.sequence_T, self.gamma)
        live_T = batch.mask_T & self.keep(batch)[batch.sequence_T]
        advantages_T = np.zeros(len(returns_T))
        advantages_T[live_T] = whiten(returns_T[live_T])
        return self.finish(batch, advantages_T)


@dataclass(frozen=True, kw_only=True)
class ReinforcePPBaseline(ReinforcePP):
    """REINFORCE++ with the group's mean reward subtracted first (the paper's variant for several samples a prompt).

    A group with one scored sample has baseline 0. KL goes into the loss as k2, whose gradient is exact.
    """

    name: ClassVar[str] = "reinforce_pp_baseline"

    kl_in: str = "loss"  # as in the paper
    kl_estimator: str = "k2"  # as in the paper

    def scores(self, batch: Batch) -> np.ndarray:
        stats = group_stats(batch.rewards_S, batch.group_S)
        return batch.rewards_S - np.where(stats.count_S > 1, stats.mean_S, 0.0)
