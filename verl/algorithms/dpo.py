"""DPO (arXiv 2305.18290) and its variants over the same log-ratio gap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from verl.algorithms.base import LossInputs, LossOutputs
from verl.algorithms.pairs import PairLoss, logistic, logps_metrics, of_pair, pair_outputs, reference_sums
from verl.algorithms.policy import sequence_sum, token_counts
from verl.algorithms.settings import check_choice, check_range
from verl.core.errors import ConfigError


def _ipo(gap_S: torch.Tensor, beta: float, noise: float) -> torch.Tensor:
    return (gap_S - 1 / (2 * beta)).square()


# name -> loss of (gap, beta, label_smoothing), gap = chosen log ratio - rejected log ratio
VARIANTS: dict[str, Callable[[torch.Tensor, float, float], torch.Tensor]] = {
    "sigmoid": lambda gap, beta, noise: logistic(beta * gap),
    "hinge": lambda gap, beta, noise: torch.relu(1 - beta * gap),  # SLiC, arXiv 2305.10425
    "ipo": _ipo,  # arXiv 2310.12036, log ratios per token
    "ipo_sum": _ipo,  # log ratios summed over tokens
    "cdpo": lambda gap, beta, noise: (1 - noise) * logistic(beta * gap) + noise * logistic(-beta * gap),
    "robust": lambda gap, beta, noise:  # arXiv 2403.00409
        ((1 - noise) * logistic(beta * gap) - noise * logistic(-beta * gap)) / (1 - 2 * noise),
}


@dataclass(frozen=True, kw_only=True)
class DPO(PairLoss):
    """-log sigmoid(beta * gap), or one of VARIANTS; log ratio = log pi - log ref over the completion's tokens.

    "ipo" divides each side's log ratio by its own number of tokens (as TRL), "ipo_sum" does not (as OpenRLHF).
    Metrics: rewards/* are beta * log ratio (per token for ipo), logps/* are sums.
    """

    name: ClassVar[str] = "dpo"

    beta: float = 0.1  # strength of the pull towards the reference
    variant: str = "sigmoid"  # one of VARIANTS
    label_smoothing: float = 0.0  # share of flipped labels assumed by cdpo and robust, in (0, 0.5)

    def __post_init__(self):
        check_range(self, "beta", 0, above=True)
        check_choice(self, "variant", VARIANTS)
        smooth = self.variant in ("cdpo", "robust")
        if smooth != (self.label_smoothing != 0) or not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(f"trainer.algo.label_smoothing: {self.label_smoothing!r} with variant {self.variant}; "
                              "cdpo and robust need a number above 0 and below 0.5 (e.g. 0.1), the others have none")

    @property
    def needs_reference(self) -> bool:
        return True

    def loss(self, x: LossInputs) -> LossOutputs:
        """[S], the pair's value on its chosen row."""
        log_ratio_S = sequence_sum(x.logprobs_T, x) - reference_sums(x)
        if self.variant == "ipo":
            log_ratio_S = log_ratio_S / token_counts(x).clamp(min=1)
        chosen_S, rejected_S = of_pair(log_ratio_S, x)
        values_S = VARIANTS[self.variant](chosen_S - rejected_S, self.beta, self.label_smoothing)
        outputs = pair_outputs(x, values_S, (self.beta * chosen_S, self.beta * rejected_S))
        outputs.metrics.update(logps_metrics(x))
        return outputs
