"""ORPO: likelihood of the chosen answer plus an odds-ratio penalty, no reference (arXiv 2403.07691)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from verl.algorithms.base import LossInputs, LossOutputs
from verl.algorithms.pairs import PairLoss, logistic, logps_metrics, of_pair, pair_outputs
from verl.algorithms.policy import sequence_mean
from verl.algorithms.settings import check_range

LARGEST = -1e-6  # nats: a mean log-prob above it counts as this one, where the odds are still finite


@dataclass(frozen=True, kw_only=True)
class ORPO(PairLoss):
    """NLL per token of the chosen answer - beta * log sigmoid(log odds(chosen) - log odds(rejected)).

    odds = p / (1 - p), p the geometric mean of the token probabilities. The likelihood term is a mean within each pair,
    as the paper writes it; TRL averages it over the tokens of a micro-batch.
    """

    name: ClassVar[str] = "orpo"

    beta: float = 0.1  # the paper's lambda: weight of the odds-ratio term

    def __post_init__(self):
        check_range(self, "beta", 0)

    def loss(self, x: LossInputs) -> LossOutputs:
        """[S], the pair's value on its chosen row."""
        chosen_S, rejected_S = of_pair(sequence_mean(x.logprobs_T, x), x)
        values_S = -chosen_S + self.beta * logistic(_log_odds(chosen_S) - _log_odds(rejected_S))
        outputs = pair_outputs(x, values_S, (self.beta * chosen_S, self.beta * rejected_S))
        outputs.metrics.update(logps_metrics(x))
        return outputs


def _log_odds(logprob_S: torch.Tensor) -> torch.Tensor:
    logprob_S = logprob_S.clamp(max=LARGEST)
    return logprob_S - torch.log(-torch.expm1(logprob_S))
