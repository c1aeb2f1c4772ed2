"""Reductions: how the values of one optimizer batch become one number, as coefficients computed once.

A loss is sum(values * weights); the weights depend only on the whole optimizer batch and its final mask, so the
gradient cannot depend on micro-batches, packing, accumulation or ranks. When several ranks hold parts of the batch,
`count` each part, sum the Counts, and pass the sum to `coefficients`; the engine then *sums* gradients over ranks
(with averaging collectives the local loss is multiplied by the world size).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from verl.core.batch import Batch
from verl.core.errors import ConfigError, DataError, nearest

REDUCTIONS: Mapping[str, str] = {
    "token_mean": "mean over the trained tokens of the optimizer batch (DAPO, arXiv 2503.14476)",
    "sequence_mean": "mean over sequences of the mean over each one's tokens (GRPO, arXiv 2402.03300)",
    "prompt_mean": "mean over prompts of the mean over all tokens of the prompt's group",
    "constant": "sum over tokens / (sequences * constant), constant = max response tokens (Dr.GRPO, arXiv 2503.20783)",
    "pair_mean": "mean over pairs of one chosen and one rejected sequence, on the chosen row",
}


@dataclass(frozen=True, slots=True)
class Counts:
    """What a part of an optimizer batch holds under its final mask; parts add up."""

    tokens: int = 0  # trained tokens
    sequences: int = 0  # kept sequences with at least one trained token
    pairs: int = 0  # groups with exactly one chosen and one rejected such sequence
    group_tokens: Mapping[int, int] = field(default_factory=dict)  # group id -> trained tokens

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.tokens + other.tokens, self.sequences + other.sequences, self.pairs + other.pairs,
                      dict(Counter(self.group_tokens) + Counter(other.group_tokens)))


def count(batch: Batch, keep_S: np.ndarray | None = None) -> Counts:
    """Counts of one part of the optimizer batch. keep_S: bool, rows that take part (None: all).

    Rows without a trained token never count, nor do rows with label 0 (KTO's mismatched answers).
    """
    tokens_S = _trained_tokens(batch, keep_S)
    live_S = tokens_S > 0
    groups, inverse_S = np.unique(batch.group_S[live_S], return_inverse=True)
    per_group = np.bincount(inverse_S, tokens_S[live_S], len(groups)).astype(np.int64)
    pairs = int(_chosen_of_pairs(batch, live_S).sum()) if batch.label_S is not None else 0
    return Counts(int(tokens_S.sum()), int(live_S.sum()), pairs, dict(zip(groups.tolist(), per_group.tolist())))


def coefficients(reduction: str, batch: Batch, keep_S: np.ndarray | None = None, constant: float | None = None,
                 counts: Counts | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(weights_T, weights_S), float64: a per-token loss is sum(values_T * weights_T), a per-sequence one the same on S.

    keep_S: bool, rows that take part (None: all). constant: max response tokens, for reduction "constant" only.
    counts: of the whole optimizer batch when `batch` is one rank's part of it. A batch without a trained token gets
    zeros. Raises ConfigError for an unknown reduction or a missing constant, DataError for a group that is no pair.
    """
    if reduction not in REDUCTIONS:
        raise ConfigError(f"reduction: {reduction!r} is not known; {nearest(reduction, REDUCTIONS)}")
    if reduction == "constant" and not (constant and constant > 0):
        raise ConfigError(f"reduction: constant needs the response limit in tokens, got {constant!r}; pass max_tokens")
    if reduction == "pair_mean":
        _check_pairs(batch)
    counts = count(batch, keep_S) if counts is None else counts
    tokens_S = _trained_tokens(batch, keep_S)
    live_S = tokens_S > 0
    rows_S = live_S.astype(np.float64) / max(counts.sequences, 1)
    if reduction == "token_mean":
        each_S = live_S / max(counts.tokens, 1)
    elif reduction == "sequence_mean":
        each_S = rows_S / np.maximum(tokens_S, 1)
    elif reduction == "prompt_mean":
        group_tokens_S = np.array([counts.group_tokens.get(g, 0) for g in batch.group_S.tolist()], np.float64)
        each_S = live_S / np.maximum(group_tokens_S, 1) / max(len(counts.group_tokens), 1)
    elif reduction == "constant":
        each_S = rows_S / constant
    else:
        rows_S = _chosen_of_pairs(batch, live_S) / max(counts.pairs, 1)
        each_S = rows_S / np.maximum(tokens_S, 1)
    return np.where(batch.mask_T, each_S[batch.sequence_T], 0.0), rows_S


def _trained_tokens(batch: Batch, keep_S: np.ndarray | None) -> np.ndarray:
    """int64 [S]: tokens of each row under the final mask."""
    tokens_S = np.bincount(batch.sequence_T[batch.mask_T], minlength=len(batch))
    keep_S = np.ones(len(batch), bool) if keep_S is None else keep_S
    if batch.label_S is not None:
        keep_S = keep_S & (batch.label_S != 0)
    return np.where(keep_S, tokens_S, 0)


def _sides(batch: Batch, rows_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int64 [S] each: how many chosen and how many rejected rows of `rows_S` the row's group has."""
    groups, index_S = np.unique(batch.group_S, return_inverse=True)
    chosen_S, rejected_S = rows_S & (batch.label_S > 0), rows_S & (batch.label_S < 0)
    return (np.bincount(index_S[chosen_S], minlength=len(groups))[index_S],
            np.bincount(index_S[rejected_S], minlength=len(groups))[index_S])


def _chosen_of_pairs(batch: Batch, live_S: np.ndarray) -> np.ndarray:
    """bool [S]: chosen rows whose pair is whole (the completion of neither side was cut away)."""
    chosen_S, rejected_S = _sides(batch, live_S)
    return live_S & (batch.label_S > 0) & (chosen_S == 1) & (rejected_S == 1)


def _check_pairs(batch: Batch) -> None:
    if batch.label_S is None:
        raise DataError("reduction pair_mean needs label_S: +1 on the chosen and -1 on the rejected row of each group")
    chosen_S, rejected_S = _sides(batch, np.ones(len(batch), bool))
    wrong_N = np.flatnonzero((chosen_S != 1) | (rejected_S != 1))
    if len(wrong_N):
        s = wrong_N[0]
        raise DataError(f"group {batch.group_S[s]} holds {chosen_S[s]} chosen and {rejected_S[s]} rejected rows; a pair "
                        "is one of each: give every pair a group id of its own")
