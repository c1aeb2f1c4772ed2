"""ReMax: REINFORCE with the reward of the greedy answer as baseline (arXiv 2310.10505)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from verl.algorithms.online import PolicyGradient
from verl.core.batch import Batch
from verl.core.errors import DataError


@dataclass(frozen=True, kw_only=True)
class ReMax(PolicyGradient):
    """A_i = r_i - reward of the greedy answer to the same prompt, which is sampled and scored but not trained on.

    A prompt whose greedy answer nobody scored is not trained on.
    """

    name: ClassVar[str] = "remax"
    needs_greedy: ClassVar[bool] = True

    kl_in: str = "reward"  # as in the paper
    kl_estimator: str = "k1"  # as in the paper

    def advantages(self, rewards_S: np.ndarray, batch: Batch) -> np.ndarray:
        if batch.baselines_S is None:
            raise DataError("remax: the batch has no baselines_S; sample one greedy answer per prompt, score it, and "
                            "put its reward on every row of the prompt")
        return rewards_S - batch.baselines_S
