"""SFT: maximum likelihood of the answer's tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from verl.algorithms.base import Algorithm, LossInputs, LossOutputs
from verl.algorithms.reduce import REDUCTIONS
from verl.algorithms.settings import check_choice


@dataclass(frozen=True, kw_only=True)
class SFT(Algorithm):
    """-log pi of every trained token."""

    name: ClassVar[str] = "sft"
    online: ClassVar[bool] = False

    reduction: str = "token_mean"  # how token losses become one number: see reduce.REDUCTIONS

    def __post_init__(self):
        check_choice(self, "reduction", [name for name in REDUCTIONS if name not in ("pair_mean", "constant")])

    def loss(self, x: LossInputs) -> LossOutputs:
        """[T], nats."""
        values_T = torch.where(x.mask_T, -x.logprobs_T, 0.0)
        metrics = {"nll": (values_T.detach(), x.mask_T)}
        if x.entropy_T is not None:
            metrics["entropy"] = (torch.where(x.mask_T, x.entropy_T.detach(), 0.0), x.mask_T)
        return LossOutputs(values_T, True, metrics)
