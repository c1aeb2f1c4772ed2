"""KL to the reference: estimators from one sample, and the coefficient that a target steers.

With d = log pi(y) - log ref(y), y sampled from the behaviour policy, and w = pi(y) / old(y) (Schulman, "Approximating
KL divergence", 2020; gradients: Tang & Munos, arXiv 2506.09477):

    name      value            expected value    expected gradient when used as a loss
    k1        d                KL                zero (only as a reward)
    k2        d^2 / 2          biased            of KL
    k3        exp(-d) - 1 + d  KL, never < 0     biased (of the forward KL)
    k1_ratio  w d              KL                of KL
    k3_ratio  w k3             KL                of KL (the default: exact in both)
"""

from __future__ import annotations

import torch

ESTIMATORS = ("k1", "k2", "k3", "k1_ratio", "k3_ratio")
LOG_RATIO_LIMIT = 20.0  # nats; exp() of more (a factor of 4.9e8) is cut there and carries no gradient


def ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(log_ratio), finite in float32: the log ratio is clamped to at most LOG_RATIO_LIMIT first."""
    return log_ratio.clamp(max=LOG_RATIO_LIMIT).exp()


def estimate(estimator: str, log_ratio: torch.Tensor, old_log_ratio: torch.Tensor | None = None) -> torch.Tensor:
    """One of ESTIMATORS for log_ratio = log pi - log ref (nats), any shape; 0 gives 0.

    old_log_ratio = log pi - log old, for the two *_ratio estimators; None means pi = old (ratio 1, no gradient).
    """
    if estimator.endswith("_ratio"):
        value = estimate(estimator.removesuffix("_ratio"), log_ratio)
        return value if old_log_ratio is None else ratio(old_log_ratio) * value
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    log_ratio = log_ratio.clamp(min=-LOG_RATIO_LIMIT)
    return torch.expm1(-log_ratio) + log_ratio


def steer(coefficient: float, observed: float, target: float | None, samples: int, horizon: int = 10_000) -> float:
    """The next KL coefficient: unchanged without a target, else Ziegler et al.'s controller (arXiv 1909.08593).

    observed and target: KL in nats of one definition; samples: sequences since the last call. The coefficient moves by
    at most 20% per `horizon` samples, up when observed exceeds target. A non-finite observation changes nothing.
    """
    if target is None or not abs(observed) < float("inf"):
        return coefficient
    error = min(max(observed / target - 1.0, -0.2), 0.2)
    return coefficient * max(1.0 + error * samples / horizon, 0.0)
