"""SimPO: length-normalised preference without a reference (arXiv 2405.14734)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from verl.algorithms.base import LossInputs, LossOutputs
from verl.algorithms.pairs import PairLoss, logistic, logps_metrics, of_pair, pair_outputs
from verl.algorithms.policy import sequence_mean
from verl.algorithms.settings import check_range


@dataclass(frozen=True, kw_only=True)
class SimPO(PairLoss):
    """-log sigmoid(beta (mean log pi(chosen) - mean log pi(rejected)) - gamma), means over each side's own tokens."""

    name: ClassVar[str] = "simpo"

    beta: float = 2.0  # scale of the implied reward
    gamma: float = 0.5  # target margin between the two rewards

    def __post_init__(self):
        check_range(self, "beta", 0, above=True)
        check_range(self, "gamma", 0)

    def loss(self, x: LossInputs) -> LossOutputs:
        """[S], the pair's value on its chosen row."""
        chosen_S, rejected_S = of_pair(self.beta * sequence_mean(x.logprobs_T, x), x)
        outputs = pair_outputs(x, logistic(chosen_S - rejected_S - self.gamma), (chosen_S, rejected_S))
        outputs.metrics.update(logps_metrics(x))
        return outputs
