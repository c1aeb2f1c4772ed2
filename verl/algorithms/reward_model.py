"""Reward-model training: Bradley-Terry over the scores of a pair (arXiv 2203.02155)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from verl.algorithms.base import LossInputs, LossOutputs
from verl.algorithms.pairs import PairLoss, logistic, of_pair, pair_outputs
from verl.algorithms.settings import check_range


@dataclass(frozen=True, kw_only=True)
class BradleyTerry(PairLoss):
    """-log sigmoid(s_chosen - s_rejected - margin) + center_coef (s_chosen + s_rejected)^2, s the model's scores.

    margin: the chosen row's margin_S when the data have one (Llama 2, arXiv 2307.09288); centring: arXiv 2312.09244.
    """

    name: ClassVar[str] = "reward_model"
    needs_scores: ClassVar[bool] = True

    center_coef: float = 0.0  # pulls the scores of a pair towards mean 0; 0.01 is common

    def __post_init__(self):
        check_range(self, "center_coef", 0)

    def loss(self, x: LossInputs) -> LossOutputs:
        """[S], the pair's value on its chosen row."""
        chosen_S, rejected_S = of_pair(x.scores_S, x)
        margin_S = 0.0 if x.margin_S is None else torch.where(x.label_S > 0, x.margin_S, 0.0)
        values_S = logistic(chosen_S - rejected_S - margin_S) + self.center_coef * (chosen_S + rejected_S).square()
        return pair_outputs(x, values_S, (chosen_S, rejected_S))
