"""PPO (arXiv 1707.06347) as used for language models (arXiv 1909.08593, 2203.02155): GAE, KL in the reward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from verl.algorithms.base import Credit, LossInputs, LossOutputs
from verl.algorithms.gae import discounted_returns, gae, place_scores, whiten
from verl.algorithms.online import Clipped
from verl.algorithms.settings import check_range
from verl.core.batch import Batch
from verl.core.errors import DataError


@dataclass(frozen=True, kw_only=True)
class PPO(Clipped):
    """Clipped surrogate of whitened GAE advantages plus vf_coef * clipped value loss.

    Token rewards are -kl_coef * k1(policy || reference), plus the score on the last trained token. With vf_coef 0 there
    is no critic and the advantage is the whitened discounted return. Whitening runs over the trained tokens of the
    step, std with n - 1; the critic's targets are not whitened.
    """

    name: ClassVar[str] = "ppo"

    kl_coef: float = 0.05  # TRL's
    kl_in: str = "reward"  # as in both papers
    kl_estimator: str = "k1"  # as in both papers
    gamma: float = 1.0  # discount per trained token
    lam: float = 0.95  # GAE's lambda
    vf_coef: float = 0.1  # weight of the value loss on a shared trunk; 0: no critic
    clip_value: float | None = 0.2  # values may move this far from the old ones before their gradient stops; None: off

    def __post_init__(self):
        super().__post_init__()
        check_range(self, "gamma", 0, 1)
        check_range(self, "lam", 0, 1)
        check_range(self, "vf_coef", 0)
        if self.clip_value is not None:
            check_range(self, "clip_value", 0, above=True)

    @property
    def needs_critic(self) -> bool:
        return self.vf_coef > 0

    def credit(self, batch: Batch) -> Credit:
        mask_T, sequence_T = batch.mask_T, batch.sequence_T
        rewards_T = place_scores(batch.rewards_S, mask_T, sequence_T) - self.kl_penalty(batch)
        if not self.needs_critic:
            returns_T = discounted_returns(rewards_T, mask_T, sequence_T, self.gamma)
            advantages_T = returns_T.copy()
        elif batch.values_T is None:
            raise DataError("ppo: the batch has no values_T; evaluate the critic first, or set trainer.algo.vf_coef: 0")
        else:
            advantages_T, returns_T = gae(rewards_T, batch.values_T, mask_T, sequence_T, self.gamma, self.lam)
        live_T = mask_T & self.keep(batch)[sequence_T]
        advantages_T[live_T] = whiten(advantages_T[live_T])
        return self.finish(batch, advantages_T, returns_T=returns_T)

    def loss(self, x: LossInputs) -> LossOutputs:
        """The policy loss; on a shared trunk (x.values_T is there) plus vf_coef * value loss."""
        outputs = super().loss(x)
        if x.values_T is None or not self.needs_critic:
            return outputs
        value = self.value_loss(x)
        outputs.values = outputs.values + self.vf_coef * value.values
        outputs.metrics.update(value.metrics)
        return outputs

    def value_loss(self, x: LossInputs) -> LossOutputs:
        """max((V - R)^2, (V_clipped - R)^2) / 2 per token, V clipped to the old value +- clip_value."""
        values_T = torch.where(x.mask_T, x.values_T, 0.0)
        returns_T = torch.where(x.mask_T, x.returns_T, 0.0)
        loss_T, clipped_T = (values_T - returns_T).square(), torch.zeros_like(x.mask_T)
        if self.clip_value is not None:
            old_T = torch.where(x.mask_T, x.old_values_T, 0.0)
            moved_T = old_T + (values_T - old_T).clamp(-self.clip_value, self.clip_value)
            bounded_T = (moved_T - returns_T).square()
            clipped_T = bounded_T > loss_T
            loss_T = torch.maximum(loss_T, bounded_T)
        metrics = {"value_loss": (loss_T.detach() / 2, x.mask_T), "value_mean": (values_T.detach(), x.mask_T),
                   "value_clip_ratio": (clipped_T.to(values_T.dtype), x.mask_T)}
        return LossOutputs(loss_T / 2, True, metrics)
