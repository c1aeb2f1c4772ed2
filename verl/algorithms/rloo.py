"""RLOO: REINFORCE with a leave-one-out baseline (arXiv 2402.14740)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from verl.algorithms.groups import group_stats
from verl.algorithms.online import Clipped
from verl.core.batch import Batch


@dataclass(frozen=True, kw_only=True)
class RLOO(Clipped):
    """A_i = r_i - mean of the other rewards of its prompt's group; r includes the sequence's KL penalty.

    There is no std scaling: a leave-one-out std is 0 for the only winner of a group. A group left with one scored
    sample is not trained on. Departures from the paper: a clipped loss (equal to its own on the first update), and
    token_mean, which on that update is the paper's sum over tokens times one positive number per batch.
    """

    name: ClassVar[str] = "rloo"
    min_group: ClassVar[int] = 2

    kl_coef: float = 0.05  # TRL's beta
    kl_in: str = "reward"  # as in the paper and TRL
    kl_estimator: str = "k1"  # as in the paper and TRL

    def advantages(self, rewards_S: np.ndarray, batch: Batch) -> np.ndarray:
        stats = group_stats(rewards_S, batch.group_S)
        others_S = np.maximum(stats.count_S - 1, 1)
        advantages_S = (rewards_S - stats.mean_S) * stats.count_S / others_S
        advantages_S[stats.constant_S & np.isfinite(rewards_S)] = 0.0
        return np.where(stats.count_S > 1, advantages_S, np.nan)
