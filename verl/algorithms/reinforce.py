"""REINFORCE: the plain policy gradient (Williams 1992)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from verl.algorithms.base import Credit
from verl.algorithms.gae import discounted_returns, place_scores
from verl.algorithms.online import PolicyGradient
from verl.algorithms.settings import check_choice, check_range
from verl.core.batch import Batch


@dataclass(frozen=True, kw_only=True)
class Reinforce(PolicyGradient):
    """-(G_t - b) log pi, G_t the discounted return over trained tokens, b the step's mean return or 0.

    With several updates on a batch each term is weighted by sg(pi / old), so the gradient stays unbiased.
    """

    name: ClassVar[str] = "reinforce"

    gamma: float = 1.0  # discount per trained token
    baseline: str = "mean"  # "mean": of G_t over the step's trained tokens; "none": Williams' plain estimator

    def __post_init__(self):
        super().__post_init__()
        check_range(self, "gamma", 0, 1)
        check_choice(self, "baseline", ("mean", "none"))

    def credit(self, batch: Batch) -> Credit:
        rewards_T = place_scores(batch.rewards_S, batch.mask_T, batch.sequence_T) - self.kl_penalty(batch)
        returns_T = discounted_returns(rewards_T, batch.mask_T, batch.sequence_T, self.gamma)
        live_T = batch.mask_T & self.keep(batch)[batch.sequence_T]
        baseline = returns_T[live_T].mean() if self.baseline == "mean" and live_T.any() else 0.0
        return self.finish(batch, returns_T - baseline)
