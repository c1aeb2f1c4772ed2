"""Batches for the algorithm tests, and the view of them that a loss receives."""

import numpy as np
import torch

from verl.algorithms.base import LossInputs
from verl.core.batch import Batch

LEAVES = ("logprobs_T", "entropy_T", "values_T", "scores_S")  # what a loss may differentiate


def make_batch(lengths, group=None, mask_T=None, **columns):
    """A batch of rows with these lengths; groups default to one for all, and each group is one prompt of two tokens."""
    lengths_S = np.array(lengths, np.int64)
    group_S = np.zeros(len(lengths_S), np.int64) if group is None else np.array(group, np.int64)
    tokens = int(lengths_S.sum())
    used, prompt_S = np.unique(group_S, return_inverse=True)
    return Batch(prompts=[np.arange(2, dtype=np.int32) for _ in used], prompt_S=prompt_S, lengths_S=lengths_S,
                 ids_T=np.zeros(tokens, np.int32), mask_T=np.ones(tokens, bool) if mask_T is None else mask_T,
                 row_S=np.arange(len(lengths_S)), group_S=group_S, **columns)


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
