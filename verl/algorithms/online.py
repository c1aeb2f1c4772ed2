"""What all online algorithms share: reward shaping, KL, off-policy correction, entropy, and which rows take part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

from verl.algorithms import kl, policy
from verl.algorithms.base import Algorithm, Credit, LossInputs, LossOutputs
from verl.algorithms.groups import group_stats
from verl.algorithms.reduce import REDUCTIONS
from verl.algorithms.settings import check_choice, check_range
from verl.core.batch import Batch
from verl.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(Algorithm):
    """Score-function loss -A w log pi, w = sg(pi / old); a subclass says what A is, and may say what the term is.

    With mask_truncated a sample cut by the length limit keeps its place in the statistics but is not trained on.
    """

    reduction: str = "token_mean"  # how token losses become one number: see reduce.REDUCTIONS
    kl_coef: float = 0.0  # weight of KL(policy || reference) per token; 0: no reference is loaded
    kl_in: str = "loss"  # "reward": subtracted from the rewards, without gradient; "loss": added to the loss
    kl_estimator: str = "k3_ratio"  # see kl.py; in the reward k1, k2 or k3
    kl_target: float | None = None  # nats per token: steers kl_coef; with kl_coef 0, ends the updates on a batch early
    entropy_coef: float = 0.0  # weight of the entropy bonus (nats per token)
    mask_truncated: bool = False  # leave samples cut by the length limit out of the loss
    correction: str = "token_truncate"  # of tokens that other weights or kernels sampled: see policy.CORRECTIONS
    correction_floor: float = 0.0  # lower end of the allowed importance ratio old / rollout
    correction_cap: float = 2.0  # upper end of it

    def __post_init__(self):
        check_choice(self, "reduction", [name for name in REDUCTIONS if name != "pair_mean"])
        check_choice(self, "kl_in", ("reward", "loss"))
        check_choice(self, "kl_estimator", kl.ESTIMATORS)
        check_choice(self, "correction", policy.CORRECTIONS)
        for name in ("kl_coef", "entropy_coef"):
            check_range(self, name, 0)
        check_range(self, "kl_target", 0, above=True)
        check_range(self, "correction_floor", 0, 1)
        check_range(self, "correction_cap", 1)
        if self.kl_in == "loss" and self.kl_estimator == "k1":
            raise ConfigError("trainer.algo.kl_estimator: k1 as a loss has an expected gradient of zero; "
                              "set k1_ratio or k3_ratio, or kl_in: reward")
        if self.kl_in == "reward" and self.kl_estimator.endswith("_ratio"):
            raise ConfigError(f"trainer.algo.kl_estimator: {self.kl_estimator} is for kl_in: loss (a reward carries no "
                              "gradient and its ratio is 1); set k1, k2 or k3")

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def needs_entropy_grad(self) -> bool:
        return self.entropy_coef > 0

    def steered(self, observed_kl: float, samples: int) -> Self:
        """This algorithm with the next step's kl_coef (kl.steer); itself when there is no target.

        observed_kl: the metric "kl" of the step (nats per token); samples: sequences of the step.
        """
        coefficient = kl.steer(self.kl_coef, observed_kl, self.kl_target, samples)
        return self if coefficient == self.kl_coef else replace(self, kl_coef=coefficient)

    def should_stop(self, approx_kl: float) -> bool:
        """True when the updates on this batch should end: no reference, and KL(old || policy) passed kl_target."""
        return self.kl_target is not None and self.kl_coef == 0 and approx_kl > self.kl_target

    def kl_penalty(self, batch: Batch) -> np.ndarray:
        """float64 [T]: kl_coef * KL estimate to subtract from token rewards; 0 unless kl_in is "reward"."""
        penalty_T = np.zeros(len(batch.mask_T))
        if self.kl_coef == 0 or self.kl_in != "reward":
            return penalty_T
        old_T = batch.rollout_logprobs_T if batch.old_logprobs_T is None else batch.old_logprobs_T
        for column, what in ((old_T, "policy"), (batch.ref_logprobs_T, "reference")):
            if column is None:
                raise ConfigError(f"{self.name} with kl_in: reward needs the {what} log-probs before credit is given; "
                                  "fill them first, or set trainer.algo.kl_in: loss")
        mask_T = batch.mask_T
        log_ratio_N = old_T[mask_T].astype(np.float64) - batch.ref_logprobs_T[mask_T].astype(np.float64)
        penalty_T[mask_T] = self.kl_coef * kl.estimate(self.kl_estimator, torch.from_numpy(log_ratio_N)).numpy()
        return penalty_T

    def advantages(self, rewards_S: np.ndarray, batch: Batch) -> np.ndarray:
        """float64 [S] from rewards with the KL penalty subtracted; NaN in: not scored; NaN out: not trained on."""
        raise NotImplementedError

    def credit(self, batch: Batch) -> Credit:
        """One advantage per sequence, spread over its trained tokens."""
        penalty_S = np.bincount(batch.sequence_T, self.kl_penalty(batch), len(batch))
        advantages_S = self.advantages(batch.rewards_S.astype(np.float64) - penalty_S, batch)
        return self.finish(batch, advantages_S[batch.sequence_T], np.isfinite(advantages_S))

    def keep(self, batch: Batch) -> np.ndarray:
        """bool [S]: scored rows, without truncated ones under mask_truncated."""
        keep_S = np.isfinite(batch.rewards_S)
        if self.mask_truncated and batch.truncated_S is not None:
            keep_S &= ~batch.truncated_S
        return keep_S

    def finish(self, batch: Batch, advantages_T: np.ndarray, defined_S: np.ndarray | None = None,
               returns_T: np.ndarray | None = None) -> Credit:
        """Credit from float64 columns: zeros outside the mask and in rows that do not take part, float32, metrics."""
        keep_S = self.keep(batch) if defined_S is None else self.keep(batch) & defined_S
        live_T = batch.mask_T & keep_S[batch.sequence_T]
        rewards_S = batch.rewards_S[np.isfinite(batch.rewards_S)]
        metrics = {}
        if len(rewards_S):
            stats = group_stats(batch.rewards_S, batch.group_S)
            _, first_G = np.unique(batch.group_S, return_index=True)
            scored_G = first_G[stats.count_S[first_G] > 0]
            metrics = {"reward": float(rewards_S.mean()), "reward_std": float(stats.std_S[scored_G].mean()),
                       "frac_reward_zero_std": float(stats.constant_S[scored_G].mean())}
        zeroed = [None if column is None else np.where(live_T, column, 0.0).astype(np.float32)
                  for column in (advantages_T, returns_T)]
        return Credit(zeroed[0], zeroed[1], keep_S, metrics)

    def policy_term(self, x: LossInputs, log_ratio_T: torch.Tensor, advantages_T: torch.Tensor):
        """([T] loss, metrics) of the policy alone; both inputs are 0 outside the mask, and so must the loss be."""
        return policy.score_function(x, kl.ratio(log_ratio_T) * advantages_T), {}

    def loss(self, x: LossInputs) -> LossOutputs:
        """Policy term * off-policy weight + kl_coef * KL - entropy_coef * entropy, per token."""
        log_ratio_T = policy.difference(x.logprobs_T, policy.old_logprobs(x), x.mask_T)
        values_T, metrics = self.policy_term(x, log_ratio_T, torch.where(x.mask_T, x.advantages_T, 0.0))
        if x.rollout_logprobs_T is not None:
            weight_T, more = policy.off_policy_weights(x, self.correction, self.correction_floor, self.correction_cap)
            values_T = values_T * weight_T
            metrics.update(more)
        metrics["policy_loss"] = (values_T.detach(), x.mask_T)
        metrics["approx_kl"] = (kl.estimate("k3", -log_ratio_T.detach()), x.mask_T)
        if x.ref_logprobs_T is not None:
            ref_gap_T = policy.difference(x.logprobs_T, x.ref_logprobs_T, x.mask_T)
            metrics["kl"] = (kl.estimate("k3", ref_gap_T.detach()), x.mask_T)
            if self.kl_coef > 0 and self.kl_in == "loss":
                values_T = values_T + self.kl_coef * kl.estimate(self.kl_estimator, ref_gap_T, log_ratio_T)
        if x.entropy_T is not None:
            entropy_T = torch.where(x.mask_T, x.entropy_T, 0.0)
            metrics["entropy"] = (entropy_T.detach(), x.mask_T)
            values_T = values_T - self.entropy_coef * entropy_T
        return LossOutputs(values_T, True, metrics)


@dataclass(frozen=True, kw_only=True)
class Clipped(PolicyGradient):
    """PPO's clipped surrogate in place of the score function."""

    clip_low: float = 0.2  # the ratio pi / old is clipped below at 1 - clip_low
    clip_high: float | None = None  # and above at 1 + clip_high; None: the same as clip_low
    dual_clip: float | None = None  # c > 1 bounds the loss at -c A for negative advantages; None: off

    def __post_init__(self):
        super().__post_init__()
        check_range(self, "clip_low", 0, 1)
        check_range(self, "clip_high", 0)
        check_range(self, "dual_clip", 1, above=True)

    @property
    def clip_range(self) -> tuple[float, float]:
        """(lowest, highest) ratio."""
        return 1.0 - self.clip_low, 1.0 + (self.clip_low if self.clip_high is None else self.clip_high)

    def policy_term(self, x: LossInputs, log_ratio_T: torch.Tensor, advantages_T: torch.Tensor):
        values_T, low_T, high_T = policy.clipped_surrogate(log_ratio_T, advantages_T, *self.clip_range, self.dual_clip)
        clips = {"low_mean": low_T, "high_mean": high_T, "region_mean": low_T | high_T}
        return values_T, {f"clip_ratio/{name}": (hit_T.to(values_T.dtype), x.mask_T) for name, hit_T in clips.items()}
