"""GRPO: group-normalised rewards (DeepSeekMath, arXiv 2402.03300)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from verl.algorithms.groups import group_stats
from verl.algorithms.online import Clipped
from verl.core.batch import Batch

EPSILON = 1e-4  # TRL's; verl adds 1e-6, OpenRLHF 1e-9


@dataclass(frozen=True, kw_only=True)
class GRPO(Clipped):
    """A_i = (r_i - mean) / (std + 1e-4) within the prompt's group, std with n - 1; PPO's clipped loss per token.

    A group whose rewards are equal (max == min) or that holds one scored sample gets A = 0. Departures from the paper,
    as in TRL: token_mean instead of sequence_mean, no KL unless kl_coef is set, and then k3 * ratio instead of k3.
    """

    name: ClassVar[str] = "grpo"
    min_group: ClassVar[int] = 2

    def advantages(self, rewards_S: np.ndarray, batch: Batch) -> np.ndarray:
        stats = group_stats(rewards_S, batch.group_S)
        centred_S = np.where(stats.constant_S, 0.0, rewards_S - stats.mean_S) / (stats.std_S + EPSILON)
        return np.where(np.isfinite(rewards_S), centred_S, np.nan)
