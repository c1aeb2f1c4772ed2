"""KTO: unpaired desirable and undesirable answers (arXiv 2402.01306)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from verl.algorithms.base import Algorithm, LossInputs, LossOutputs
from verl.algorithms.pairs import logps_metrics, reference_sums
from verl.algorithms.policy import sequence_sum, token_counts
from verl.algorithms.settings import check_range
from verl.core.batch import Batch
from verl.core.errors import DataError


@dataclass(frozen=True, kw_only=True)
class KTO(Algorithm):
    """w_d (1 - sigmoid(beta (r - z0))) for label +1, w_u (1 - sigmoid(beta (z0 - r))) for -1, r = log pi / ref.

    z0 = max(0, mean r) without gradient, over the optimizer batch's rows with label 0: answers under another row's
    prompt, which are never trained on. Without such rows it is the mean over all rows, which is the KL itself when the
    policy sampled them. A batch without one of the labels is fine.
    """

    name: ClassVar[str] = "kto"
    online: ClassVar[bool] = False
    needs_logprob_sums: ClassVar[bool] = True

    beta: float = 0.1  # strength of the pull towards the reference
    desirable_weight: float = 1.0  # raise it when desirable answers are rare (the paper: n_d w_d / n_u w_u in 1 .. 4/3)
    undesirable_weight: float = 1.0  # the same for undesirable ones

    def __post_init__(self):
        check_range(self, "beta", 0, above=True)
        check_range(self, "desirable_weight", 0)
        check_range(self, "undesirable_weight", 0)

    @property
    def needs_reference(self) -> bool:
        return True

    @property
    def reduction(self) -> str:
        return "sequence_mean"

    def prepare(self, batch: Batch, logprob_sums_S: np.ndarray | None = None) -> dict[str, float]:
        """{"kl": z0} from the policy's log-prob sums (nats, [S]) of the whole optimizer batch, over all ranks."""
        ref_S = batch.ref_sums_S
        if ref_S is None and batch.ref_logprobs_T is not None:
            ref_T = np.where(batch.mask_T, batch.ref_logprobs_T, 0.0).astype(np.float64)
            ref_S = np.bincount(batch.sequence_T, ref_T, len(batch))
        if logprob_sums_S is None or ref_S is None:
            raise DataError("kto needs the log-prob sums of policy and reference over the optimizer batch for its "
                            "reference point; pass logprob_sums_S and fill ref_sums_S or ref_logprobs_T")
        live_S = np.bincount(batch.sequence_T[batch.mask_T], minlength=len(batch)) > 0
        mismatched_S = live_S & (batch.label_S == 0)
        rows_S = mismatched_S if mismatched_S.any() else live_S
        gaps_N = np.asarray(logprob_sums_S, np.float64)[rows_S] - ref_S[rows_S]
        return {"kl": max(float(gaps_N.mean()), 0.0) if len(gaps_N) else 0.0}

    def loss(self, x: LossInputs) -> LossOutputs:
        """[S]; 0 on rows with label 0."""
        log_ratio_S = sequence_sum(x.logprobs_T, x) - reference_sums(x)
        sign_S = x.label_S.sign().to(log_ratio_S.dtype)
        values_S = torch.sigmoid(-self.beta * sign_S * (log_ratio_S - x.context["kl"]))
        values_S = torch.where(sign_S > 0, self.desirable_weight * values_S, self.undesirable_weight * values_S)
        live_S = token_counts(x) > 0
        reward_S = self.beta * log_ratio_S.detach()
        metrics = {"rewards/chosen": (reward_S, live_S & (sign_S > 0)),
                   "rewards/rejected": (reward_S, live_S & (sign_S < 0)), **logps_metrics(x)}
        return LossOutputs(torch.where(live_S & (sign_S != 0), values_S, 0.0), False, metrics)
