"""DAPO: clip-higher, token mean, overlong shaping and dynamic sampling over GRPO (arXiv 2503.14476)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from verl.algorithms.groups import group_stats
from verl.algorithms.grpo import GRPO
from verl.algorithms.settings import check_range
from verl.core.batch import Batch


def overlong_penalty(lengths_S: np.ndarray, free: int, buffer: int) -> np.ndarray:
    """float64 [S] in [0, 1]: 0 up to `free` tokens, then linear, 1 from free + buffer tokens on (the paper's eq. 13)."""
    return np.clip((lengths_S - free) / buffer, 0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class DAPO(GRPO):
    """GRPO's advantages of rewards minus the overlong penalty; groups without any reward difference are not trained on.

    The paper's L_max and L_cache are overlong_free + overlong_buffer and overlong_buffer.
    """

    name: ClassVar[str] = "dapo"

    clip_high: float = 0.28  # clip-higher
    overlong_free: int | None = None  # response tokens without a length penalty; None: no penalty
    overlong_buffer: int = 4096  # tokens beyond them over which the penalty grows to 1

    def __post_init__(self):
        super().__post_init__()
        check_range(self, "overlong_free", 0)
        check_range(self, "overlong_buffer", 1)

    def usable(self, batch: Batch) -> np.ndarray:
        """bool [S]: rows whose group has two different raw rewards (max != min)."""
        return ~group_stats(batch.rewards_S, batch.group_S).constant_S

    def advantages(self, rewards_S: np.ndarray, batch: Batch) -> np.ndarray:
        if self.overlong_free is not None:
            rewards_S = rewards_S - overlong_penalty(batch.lengths_S, self.overlong_free, self.overlong_buffer)
        return super().advantages(rewards_S, batch)
