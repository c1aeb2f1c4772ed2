"""Returns and advantages over the trainable tokens of ragged flat columns, in float64.

Tokens the policy did not choose (tool output) are no actions: they carry no reward, no value and no discount step.
Every function takes [T] columns with whole sequences laid end to end and returns 0 outside the mask; what stands in
masked slots is never read.
"""

from __future__ import annotations

import numpy as np


def place_scores(scores_S: np.ndarray, mask_T: np.ndarray, sequence_T: np.ndarray) -> np.ndarray:
    """float64 [T]: each sequence's score on its last trainable token (nowhere when it has none)."""
    token_N = np.flatnonzero(mask_T)
    last_N = token_N[_is_last(sequence_T[token_N])]
    rewards_T = np.zeros(len(mask_T))
    rewards_T[last_N] = scores_S[sequence_T[last_N]]
    return rewards_T


def discounted_returns(rewards_T: np.ndarray, mask_T: np.ndarray, sequence_T: np.ndarray, gamma: float) -> np.ndarray:
    """G_t = r_t + gamma G_{t+1} over the trainable tokens of each sequence; float64 [T]."""
    token_N = np.flatnonzero(mask_T)
    returns_T = np.zeros(len(mask_T))
    returns_T[token_N] = _scan(rewards_T[token_N].astype(np.float64), sequence_T[token_N], gamma)
    return returns_T


def gae(rewards_T: np.ndarray, values_T: np.ndarray, mask_T: np.ndarray, sequence_T: np.ndarray, gamma: float,
        lam: float) -> tuple[np.ndarray, np.ndarray]:
    """Generalised advantages and returns (Schulman et al., arXiv 1506.02438); float64 [T] each.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1} over trainable tokens, V = 0 after the
    last one (truncated sequences included); returns = A + V.
    """
    token_N = np.flatnonzero(mask_T)
    values_N = values_T[token_N].astype(np.float64)
    next_N = np.append(values_N[1:], 0.0)[:len(values_N)]
    next_N[_is_last(sequence_T[token_N])] = 0.0
    delta_N = rewards_T[token_N] + gamma * next_N - values_N
    advantages_N = _scan(delta_N, sequence_T[token_N], gamma * lam)
    advantages_T, returns_T = np.zeros(len(mask_T)), np.zeros(len(mask_T))
    advantages_T[token_N] = advantages_N
    returns_T[token_N] = advantages_N + values_N
    return advantages_T, returns_T


def whiten(values_N: np.ndarray, epsilon: float = 1e-8) -> np.ndarray:
    """(x - mean) / (std + epsilon) with the sample std (n - 1), float64.

    Fewer than two values stay as they are (there is nothing to compare them with); equal values become 0.
    """
    if len(values_N) < 2:
        return values_N.astype(np.float64)
    if values_N.max() == values_N.min():
        return np.zeros(len(values_N))
    return (values_N - values_N.mean()) / (values_N.std(ddof=1) + epsilon)


def _is_last(sequence_N: np.ndarray) -> np.ndarray:
    """bool [N]: the last of each run of equal ids."""
    return np.append(sequence_N[1:] != sequence_N[:-1], True)[:len(sequence_N)]


def _scan(x_N: np.ndarray, sequence_N: np.ndarray, factor: float) -> np.ndarray:
    """y_t = x_t + factor * y_{t+1} within each run of equal ids, in log2(longest run) passes.

    After the pass with stride k, y_t holds the discounted sum of the next 2k terms.
    """
    y_N, stride = x_N, 1
    longest = int(np.diff(np.flatnonzero(np.append(True, _is_last(sequence_N)))).max(initial=0))
    while stride < longest:
        same_N = sequence_N[stride:] == sequence_N[:-stride]
        y_N = y_N + np.append(np.where(same_N, factor ** stride * y_N[stride:], 0.0), np.zeros(stride))
        stride *= 2
    return y_N
