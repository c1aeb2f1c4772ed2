"""Batch: packed ragged columns. Nothing is padded; it is the only thing an engine eats.

A batch holds P prompts and S sequences; sequence s answers prompt `prompt_S[s]`. Token columns are flat over the
sequences' own tokens (prompts are not in T): sequence s owns T[offsets[s]:offsets[s+1]]. A prompt may be empty only
for rows that have none (plain language modelling); such a row's first token has no predecessor and cannot be trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from verl.core.types import Group


@dataclass(slots=True)
class Batch:
    """Columns of S sequences over P prompts. Token columns are float32 unless said otherwise; None means absent."""

    prompts: list[np.ndarray]  # P int32 arrays
    prompt_S: np.ndarray  # int64, index into prompts
    lengths_S: np.ndarray  # int64, tokens of each sequence
    ids_T: np.ndarray  # int32
    mask_T: np.ndarray  # bool: the tokens that are trained (chosen by the policy, or part of the answer)
    row_S: np.ndarray  # int64, stable id of the sequence within its step
    group_S: np.ndarray  # int64, which sequences are compared with each other
    rollout_logprobs_T: np.ndarray | None = None  # of the sampler, at sampling time
    versions_T: np.ndarray | None = None  # int32
    experts_T: np.ndarray | None = None  # int16 [T, layers, k], chosen at sampling; -1: the router's own choice
    prompt_experts: list[np.ndarray] | None = None  # the same for each prompt's tokens
    old_logprobs_T: np.ndarray | None = None  # of the policy before this batch's first update
    ref_logprobs_T: np.ndarray | None = None
    values_T: np.ndarray | None = None  # critic, before the update
    advantages_T: np.ndarray | None = None
    returns_T: np.ndarray | None = None
    weights_T: np.ndarray | None = None  # reduction coefficients; a loss is sum(values * weights)
    weights_S: np.ndarray | None = None  # the same for losses with one value a sequence (or a pair: on its chosen row)
    rewards_S: np.ndarray | None = None  # float64; NaN where nobody scored
    baselines_S: np.ndarray | None = None  # float64; reward of a greedy answer to the same prompt (ReMax)
    truncated_S: np.ndarray | None = None  # bool
    label_S: np.ndarray | None = None  # int8: +1 chosen or desirable, -1 rejected or undesirable; 0 mismatched (KTO)
    margin_S: np.ndarray | None = None  # float64, preference margin
    ref_sums_S: np.ndarray | None = None  # float64, reference log-prob of the whole sequence

    @property
    def offsets(self) -> np.ndarray:
        """int64 [S+1]: sequence s owns tokens offsets[s]:offsets[s+1]."""
        return np.concatenate([[0], np.cumsum(self.lengths_S)])

    @property
    def sequence_T(self) -> np.ndarray:
        """int64 [T]: the sequence that owns each token."""
        return np.repeat(np.arange(len(self.lengths_S)), self.lengths_S)

    def __len__(self) -> int:
        return len(self.lengths_S)

    @property
    def tokens(self) -> int:
        """Tokens an engine computes for this batch: each prompt once, each sequence once."""
        return int(sum(len(p) for p in self.prompts) + self.lengths_S.sum())

    def select(self, rows: Sequence[int] | np.ndarray) -> Batch:
        """The sub-batch of these sequences, in this order, with only the prompts they use."""
        rows = np.asarray(rows, np.int64)
        used, prompt_S = np.unique(self.prompt_S[rows], return_inverse=True)
        offsets = self.offsets
        pieces = [np.arange(offsets[r], offsets[r + 1]) for r in rows]
        tokens = np.concatenate(pieces) if pieces else np.zeros(0, np.int64)
        columns = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in ("prompts", "prompt_S") or value is None:
                continue
            if f.name == "prompt_experts":
                columns[f.name] = [value[p] for p in used]
                continue
            columns[f.name] = value[tokens] if f.name.endswith("_T") else value[rows]
        return replace(self, prompts=[self.prompts[p] for p in used], prompt_S=prompt_S.astype(np.int64), **columns)

    def split(self, n: int, unit: str = "row") -> list[Batch]:
        """n mini-batches of whole units ("row" or "group"), as even in units as possible, in order; none is empty."""
        keys = self.group_S if unit == "group" else np.arange(len(self))
        order = {key: i for i, key in enumerate(dict.fromkeys(keys.tolist()))}
        rank = np.array([order[k] for k in keys.tolist()])
        bounds = np.linspace(0, len(order), min(n, len(order)) + 1).round().astype(int)
        return [self.select(np.flatnonzero((rank >= a) & (rank < b))) for a, b in zip(bounds[:-1], bounds[1:])]

    def micro_batches(self, token_budget: int, unit: str = "row") -> list[Batch]:
        """Cut into pieces of at most `token_budget` computed tokens (one unit may exceed it alone).

        Sequences of one prompt stay together where they fit, since the prompt is computed once per piece.
        """
        return [self.select(piece) for piece in self.pieces(token_budget, unit)]

    def pieces(self, token_budget: int, unit: str = "row") -> list[list[int]]:
        """The rows of each micro-batch."""
        order = np.argsort(self.group_S if unit == "group" else self.prompt_S, kind="stable")
        pieces: list[list[int]] = []
        current: list[int] = []
        cost, seen = 0, set()
        for unit_rows in _units(order, self.group_S if unit == "group" else None):
            new = {int(self.prompt_S[r]) for r in unit_rows}
            own = int(self.lengths_S[unit_rows].sum())
            extra = own + sum(len(self.prompts[p]) for p in new - seen)
            if current and cost + extra > token_budget:
                pieces.append(current)
                current, seen, cost = [], set(), 0
                extra = own + sum(len(self.prompts[p]) for p in new)
            current.extend(unit_rows)
            seen |= new
            cost += extra
        if current:
            pieces.append(current)
        return [sorted(piece) for piece in pieces]


def _units(order: np.ndarray, group_S: np.ndarray | None) -> Iterable[list[int]]:
    """Rows in `order`, one by one or gathered by group."""
    if group_S is None:
        yield from ([int(r)] for r in order)
        return
    start = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or group_S[order[end]] != group_S[order[start]]:
            yield [int(r) for r in order[start:end]]
            start = end


def from_groups(groups: Sequence[Group]) -> Batch:
    """Pack sampled groups: one prompt a group, its samples as sequences, rewards and truncation as columns."""
    samples = [s for g in groups for s in g.samples]
    counts = [len(g.samples) for g in groups]

    def cat(parts, dtype):
        return np.concatenate([np.asarray(p, dtype) for p in parts]) if parts else np.zeros(0, dtype)

    owner = np.repeat(np.arange(len(groups)), counts).astype(np.int64)
    experts_T, prompt_experts = _experts(groups)
    return Batch(
        prompts=[np.asarray(g.prompt_ids, np.int32) for g in groups],
        prompt_S=owner,
        lengths_S=np.array([len(s) for s in samples], np.int64),
        ids_T=cat([s.ids_L for s in samples], np.int32),
        mask_T=cat([s.mask_L for s in samples], bool),
        row_S=np.arange(len(samples), dtype=np.int64),
        group_S=owner.copy(),
        rollout_logprobs_T=cat([s.logprobs_L for s in samples], np.float32),
        versions_T=cat([s.versions_L for s in samples], np.int32),
        experts_T=experts_T, prompt_experts=prompt_experts,
        rewards_S=np.array([np.nan if s.score is None else s.score for s in samples], np.float64),
        truncated_S=np.array([s.truncated for s in samples], bool),
    )


def _experts(groups: Sequence[Group]) -> tuple[np.ndarray | None, list[np.ndarray] | None]:
    """Recorded experts of the samples' tokens and of the prompts', -1 where they are not known; None when nowhere."""
    known = next((s.experts for g in groups for s in g.samples if s.experts is not None), None)
    if known is None:
        return None, None
    own, prompts = [], []
    for group in groups:
        n = len(group.prompt_ids)
        nothing = np.full((n + max((len(s) for s in group.samples), default=0), *known.shape[1:]), -1, np.int16)
        rows = [nothing[:n + len(s)] if s.experts is None else s.experts for s in group.samples]
        own += [row[n:] for row in rows]
        prompts.append(next((s.experts[:n] for s in group.samples if s.experts is not None), nothing[:n]))
    return np.concatenate(own), prompts
