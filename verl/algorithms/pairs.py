"""Preference pairs: a group of one chosen (+1) and one rejected (-1) sequence; the pair's value stands on the chosen row.

A pair of which one completion was cut away completely has no value: it is 0 here, has no weight (reduce.py) and enters
no metric.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.nn.functional import logsigmoid

from verl.algorithms.base import Algorithm, LossInputs, LossOutputs
from verl.algorithms.policy import sequence_sum, token_counts
from verl.core.errors import ConfigError


class PairLoss(Algorithm):
    """Base of losses over preference pairs."""

    online: ClassVar[bool] = False
    unit: ClassVar[str] = "group"

    @property
    def reduction(self) -> str:
        return "pair_mean"


def reference_sums(x: LossInputs) -> torch.Tensor:
    """[S] reference log-prob of each sequence's trained tokens, cached or summed here. Raises ConfigError without one."""
    if x.ref_sums_S is not None:
        return x.ref_sums_S
    if x.ref_logprobs_T is None:
        raise ConfigError("this loss compares with a reference model, and the batch has neither ref_sums_S nor "
                          "ref_logprobs_T; set model.reference, or use simpo or orpo, which need none")
    return sequence_sum(x.ref_logprobs_T, x)


def of_pair(values_S: torch.Tensor, x: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """([S] the value of the pair's chosen row, [S] of its rejected row), found by group id on every row."""
    groups, index_S = torch.unique(x.group_S, return_inverse=True)

    def side(sign: int) -> torch.Tensor:
        own_S = torch.where(x.label_S * sign > 0, values_S, 0.0)
        return values_S.new_zeros(len(groups)).index_add(0, index_S, own_S)[index_S]

    return side(1), side(-1)


def pair_outputs(x: LossInputs, values_S: torch.Tensor, rewards: tuple[torch.Tensor, torch.Tensor]) -> LossOutputs:
    """LossOutputs with each pair's value on its chosen row, and the metrics of the implied (chosen, rejected) rewards."""
    chosen_tokens_S, rejected_tokens_S = of_pair(token_counts(x), x)
    whole_S = (x.label_S > 0) & (chosen_tokens_S > 0) & (rejected_tokens_S > 0)
    chosen_S, rejected_S = (r.detach() for r in rewards)
    metrics = {"rewards/chosen": chosen_S, "rewards/rejected": rejected_S, "rewards/margins": chosen_S - rejected_S,
               "rewards/accuracies": (chosen_S > rejected_S).to(values_S.dtype)}
    return LossOutputs(torch.where(whole_S, values_S, 0.0), False, {name: (v, whole_S) for name, v in metrics.items()})


def logps_metrics(x: LossInputs) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """logps/chosen and logps/rejected: sums over the trained tokens, not means."""
    sums_S, live_S = sequence_sum(x.logprobs_T.detach(), x), token_counts(x) > 0
    return {"logps/chosen": (sums_S, live_S & (x.label_S > 0)), "logps/rejected": (sums_S, live_S & (x.label_S < 0))}


def logistic(margin_S: torch.Tensor) -> torch.Tensor:
    """-log sigmoid(margin), stable at both ends."""
    return -logsigmoid(margin_S)
