"""Batches for the algorithm tests, the view of them that a loss receives, and the reduced loss with its gradients."""

from dataclasses import fields, replace

import numpy as np
import torch

from verl.algorithms import ALGORITHMS
from verl.algorithms.base import LossInputs
from verl.algorithms.reduce import coefficients
from verl.core.batch import Batch
from verl.core.errors import ConfigError

MAX_TOKENS = 7  # the constant of reduction "constant"
NAN = float("nan")
# settings to draw from, by field name, whichever algorithm has the field
SETTINGS = {
    "reduction": ["token_mean", "sequence_mean", "prompt_mean", "constant"], "kl_coef": [0.0, 0.3],
    "kl_in": ["loss", "reward"], "kl_estimator": ["k1", "k2", "k3", "k1_ratio", "k3_ratio"],
    "entropy_coef": [0.0, 0.2], "mask_truncated": [False, True], "correction_cap": [1.1, 2.0],
    "correction_floor": [0.0, 0.9], "dual_clip": [None, 1.3], "clip_low": [0.05, 0.1, 1.0], "clip_high": [0.1, 0.3],
    "correction": ["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"], "gamma": [0.7, 1.0],
    "lam": [0.0, 0.95, 1.0], "vf_coef": [0.0, 0.5], "clip_value": [None, 0.1], "baseline": ["mean", "none"],
    "overlong_free": [None, 1], "overlong_buffer": [3], "beta": [0.1, 0.5], "label_smoothing": [0.0, 0.2],
    "variant": ["sigmoid", "hinge", "ipo", "ipo_sum", "cdpo", "robust"], "desirable_weight": [1.3],
    "undesirable_weight": [0.6], "center_coef": [0.0, 0.1],
}


def make_batch(lengths, group=None, mask_T=None, **columns):
    """A batch of rows with these lengths; groups default to one for all, and each group is one prompt of two tokens."""
    lengths_S = np.array(lengths, np.int64)
    group_S = np.zeros(len(lengths_S), np.int64) if group is None else np.array(group, np.int64)
    tokens = int(lengths_S.sum())
    used, prompt_S = np.unique(group_S, return_inverse=True)
    return Batch(prompts=[np.arange(2, dtype=np.int32) for _ in used], prompt_S=prompt_S, lengths_S=lengths_S,
                 ids_T=np.arange(tokens, dtype=np.int32), mask_T=np.ones(tokens, bool) if mask_T is None else mask_T,
                 row_S=np.arange(len(lengths_S)), group_S=group_S, **columns)


def random_settings(name, rng):
    """The algorithm with settings drawn at random; draws that the algorithm refuses are drawn again."""
    cls = ALGORITHMS[name]
    while True:
        drawn = {f.name: SETTINGS[f.name][rng.integers(len(SETTINGS[f.name]))]
                 for f in fields(cls) if f.name in SETTINGS and rng.random() < 0.6}
        try:
            return cls(**drawn)
        except ConfigError:
            continue


def random_case(rng, groups=4, scored=0.9, lengths=None):
    """(batch, leaves): pairs of rows, ids_T numbering the tokens, some rows empty, cut, unscored or partly masked."""
    lengths = rng.integers(0, 6, 2 * groups) if lengths is None else np.array(lengths)
    tokens = int(lengths.sum())

    def logprobs(spread):
        return logp_T + spread * rng.standard_normal(tokens)

    logp_T = -rng.exponential(1.0, tokens) - 0.05
    rewards_S = np.where(rng.random(2 * groups) < scored, rng.integers(0, 3, 2 * groups), NAN)
    batch = make_batch(
        lengths, group=np.repeat(rng.permutation(groups) * 3, 2), mask_T=rng.random(tokens) < 0.8,
        old_logprobs_T=logprobs(0.4) if rng.random() < 0.8 else None, rollout_logprobs_T=logprobs(0.3),
        ref_logprobs_T=logprobs(0.5), values_T=rng.standard_normal(tokens), rewards_S=rewards_S,
        baselines_S=np.repeat(rng.random(groups), 2), truncated_S=rng.random(2 * groups) < 0.2,
        label_S=np.tile(np.array([1, -1], np.int8), groups), margin_S=rng.random(2 * groups))
    leaves = {"logprobs_T": logp_T, "entropy_T": rng.random(tokens), "values_T": rng.standard_normal(tokens),
              "scores_S": rng.standard_normal(2 * groups)}
    return batch, leaves


def credited(algo, batch):
    """(the batch with its advantages and returns, keep_S)."""
    if not algo.online:
        return batch, None
    result = algo.credit(batch)
    return replace(batch, advantages_T=result.advantages_T, returns_T=result.returns_T), result.keep_S


def weighted(algo, batch, keep_S):
    """The batch with the reduction's coefficients as columns."""
    weights_T, weights_S = coefficients(algo.reduction, batch, keep_S, MAX_TOKENS)
    return replace(batch, weights_T=weights_T, weights_S=weights_S)


def context_of(algo, batch, leaves):
    """What `prepare` says about the whole optimizer batch."""
    masked_T = np.where(batch.mask_T, leaves["logprobs_T"], 0.0)
    return algo.prepare(batch, np.bincount(batch.sequence_T, masked_T, len(batch)))


def loss_inputs(batch, leaves, context=None):
    """LossInputs of a (micro-)batch in float64; `leaves` are tensors already cut like the batch."""
    def column(value):
        return None if value is None else torch.from_numpy(np.asarray(value, np.float64))

    return LossInputs(
        mask_T=torch.from_numpy(batch.mask_T), sequence_T=torch.from_numpy(batch.sequence_T), sequences=len(batch),
        group_S=torch.from_numpy(batch.group_S), rollout_logprobs_T=column(batch.rollout_logprobs_T),
        old_logprobs_T=column(batch.old_logprobs_T), ref_logprobs_T=column(batch.ref_logprobs_T),
        advantages_T=column(batch.advantages_T), returns_T=column(batch.returns_T),
        old_values_T=column(batch.values_T), label_S=column(batch.label_S), margin_S=column(batch.margin_S),
        ref_sums_S=column(batch.ref_sums_S), context=context or {}, **leaves)


def total_loss(algo, pieces, leaves, context):
    """(loss, gradient of every leaf) summed over pieces of a weighted batch, whatever order or cut they come in."""
    full = {name: torch.tensor(value, dtype=torch.float64, requires_grad=True) for name, value in leaves.items()}
    total = 0.0
    for piece in pieces:
        cut = {name: leaf[torch.from_numpy(np.asarray(piece.ids_T if name.endswith("_T") else piece.row_S, np.int64))]
               for name, leaf in full.items()}
        outputs = algo.loss(loss_inputs(piece, cut, context))
        weights = torch.from_numpy(piece.weights_T if outputs.per_token else piece.weights_S)
        value = (outputs.values * weights).sum()
        if value.requires_grad:
            value.backward()
        total += float(value.detach())
        for metric, (values, selection) in outputs.metrics.items():
            assert values.shape == selection.shape and selection.dtype == torch.bool and not values.requires_grad, metric
            assert torch.isfinite(values[selection]).all(), metric
    return total, {name: np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.numpy() for name, leaf in full.items()}
