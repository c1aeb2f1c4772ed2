"""Dr.GRPO: GRPO without its length and difficulty biases (arXiv 2503.20783)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from verl.algorithms.groups import group_stats
from verl.algorithms.online import Clipped
from verl.core.batch import Batch


@dataclass(frozen=True, kw_only=True)
class DrGRPO(Clipped):
    """A_i = r_i - group mean, no std; token losses are summed and divided by sequences * max response tokens.

    Departure from the paper: sequences that do not take part in the loss do not count in the denominator.
    """

    name: ClassVar[str] = "dr_grpo"
    min_group: ClassVar[int] = 2

    reduction: str = "constant"  # the constant is the response limit in tokens

    def advantages(self, rewards_S: np.ndarray, batch: Batch) -> np.ndarray:
        stats = group_stats(rewards_S, batch.group_S)
        return np.where(stats.constant_S & np.isfinite(rewards_S), 0.0, rewards_S - stats.mean_S)
