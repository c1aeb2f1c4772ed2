"""Statistics of groups of sequences: by group id, never by position, over scored rows only, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Per-row statistics of the row's group; values of unscored rows take no part."""

    count_S: np.ndarray  # int64: scored rows of the group
    mean_S: np.ndarray  # NaN when the group has no scored row
    std_S: np.ndarray  # sample std (n - 1); 0 for fewer than two scored rows
    constant_S: np.ndarray  # bool: no two scored rows differ, decided by max == min and not by a rounded std


def group_stats(values_S: np.ndarray, group_S: np.ndarray) -> GroupStats:
    """Statistics of values_S (NaN: not scored) within the groups named by group_S."""
    groups, group_of_S = np.unique(group_S, return_inverse=True)
    scored_S = np.isfinite(values_S)
    index_N, values_N = group_of_S[scored_S], values_S[scored_S].astype(np.float64)
    count_G = np.bincount(index_N, minlength=len(groups))
    mean_G = np.where(count_G > 0, np.bincount(index_N, values_N, len(groups)) / np.maximum(count_G, 1), np.nan)
    square_G = np.bincount(index_N, (values_N - mean_G[index_N]) ** 2, len(groups))
    std_G = np.sqrt(square_G / np.maximum(count_G - 1, 1))
    low_G, high_G = np.full(len(groups), np.inf), np.full(len(groups), -np.inf)
    np.minimum.at(low_G, index_N, values_N)
    np.maximum.at(high_G, index_N, values_N)
    return GroupStats(count_G[group_of_S], mean_G[group_of_S], std_G[group_of_S], (high_G <= low_G)[group_of_S])
