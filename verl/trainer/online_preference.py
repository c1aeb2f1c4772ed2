"""Preference methods on prompts: the policy answers, rewards compare the answers, the method learns from the comparison.

Online DPO (arXiv 2402.04792) and its like for KTO, ORPO and SimPO. Given recorded answers the same methods learn offline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from verl.algorithms.base import Algorithm, LossInputs, LossOutputs
from verl.algorithms.groups import group_stats
from verl.core.batch import Batch
from verl.core.errors import DataError
from verl.core.types import Task
from verl.data import kind_of
from verl.engine.train import TrainEngine
from verl.trainer.offline import KINDS, update
from verl.trainer.roles import Reference
from verl.trainer.run import Run

if TYPE_CHECKING:
    from verl.trainer.ahead import Source


@dataclass(frozen=True)
class FromSamples(Algorithm):
    """A preference method that learns from the policy's own scored samples.

    Pairs: the best against the worst answer of a prompt. Labels (KTO): +1 above the mean score of the prompt's group, -1
    below. Answers nobody scored take no part; a prompt whose scores are all equal, or whose best and worst answer are
    the same tokens, gives nothing and is counted.
    """

    method: Algorithm
    online: ClassVar[bool] = True
    min_group: ClassVar[int] = 2

    @property
    def name(self) -> str:
        return self.method.name

    @property
    def unit(self) -> str:
        return self.method.unit

    @property
    def needs_reference(self) -> bool:
        return self.method.needs_reference

    @property
    def needs_logprob_sums(self) -> bool:
        return self.method.needs_logprob_sums

    @property
    def reduction(self) -> str:
        return self.method.reduction

    def prepare(self, batch: Batch, logprob_sums_S: np.ndarray | None = None) -> Mapping[str, float]:
        return self.method.prepare(batch, logprob_sums_S)

    def loss(self, x: LossInputs) -> LossOutputs:
        return self.method.loss(x)

    def choose(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """(the rows that are learnt from, with label_S and one group a unit; metrics of all that was sampled)."""
        stats = group_stats(batch.rewards_S, batch.group_S)
        _, first_G = np.unique(batch.group_S, return_index=True)
        scored_G = first_G[stats.count_S[first_G] > 0]
        metrics = {"groups_unscored": float((stats.count_S[first_G] < 2).sum()),
                   "groups_tied": float((stats.constant_S & (stats.count_S >= 2))[first_G].sum())}
        if len(scored_G):
            metrics |= {"reward": float(np.nanmean(batch.rewards_S)), "reward_std": float(stats.std_S[scored_G].mean()),
                        "frac_reward_zero_std": float(stats.constant_S[scored_G].mean())}
        usable_S = np.isfinite(batch.rewards_S) & ~stats.constant_S
        if self.unit == "row":
            label_S = np.where(usable_S, np.sign(batch.rewards_S - stats.mean_S), 0).astype(np.int8)
            chosen = batch.select(np.flatnonzero(label_S))
            chosen.label_S = label_S[label_S != 0]
        else:
            rows, identical = _pairs(batch, usable_S)
            metrics["groups_tied"] += identical
            chosen = batch.select(rows)
            chosen.label_S = np.tile(np.array([1, -1], np.int8), len(rows) // 2)
            metrics["pairs"] = len(rows) / 2
        return chosen, metrics


def _pairs(batch: Batch, usable_S: np.ndarray) -> tuple[list[int], int]:
    """([best, worst, best, worst, ...] rows, prompts whose two are the same tokens); the first of equal scores counts."""
    rows, identical, offsets = [], 0, batch.offsets
    for group in np.unique(batch.group_S[usable_S]):
        own = np.flatnonzero(usable_S & (batch.group_S == group))
        best, worst = own[np.argmax(batch.rewards_S[own])], own[np.argmin(batch.rewards_S[own])]
        answers = [batch.ids_T[offsets[r]:offsets[r + 1]] for r in (best, worst)]
        if np.array_equal(*answers):
            identical += 1
        else:
            rows += [int(best), int(worst)]
    return rows, identical


def by_data(algo: Algorithm, tasks: Sequence[Task]) -> tuple[Algorithm, str]:
    """(how the method learns from these rows, a line that says it): the one place where that is decided.

    Raises DataError when the method can learn nothing from them.
    """
    kinds = sorted({kind_of(task) for task in tasks})
    name, rows = algo.name, f"{len(tasks)} {'/'.join(kinds)} rows"
    if algo.online:
        return algo, f"{name} samples answers to {rows}"
    known = KINDS[name] if name in KINDS else KINDS[algo.unit]
    if set(kinds) <= set(known):
        return algo, f"{name} learns offline from {rows}"
    compares = algo.unit == "group" and not algo.needs_scores or name == "kto"
    if compares and kinds == ["prompt"]:
        how = "the best against the worst answer" if algo.unit == "group" else "answers above against below the mean"
        return FromSamples(algo), f"{name} learns online from {rows}: samples are scored, {how} of each prompt"
    wrong = next(task for task in tasks if kind_of(task) not in known)
    allowed = " or ".join(known) + " rows" + (", or from prompts alone" if compares else "")
    raise DataError(f"task {wrong.id}: {name} learns from {allowed}; this is a {kind_of(wrong)} row (docs/data.md shows the "
                    "columns of each kind)")


def train(run: Run, tasks, source: Source, algo: FromSamples, policy: TrainEngine, ref: Reference | None) -> None:
    """Run every step that is left: sample, score, choose, update."""
    run.evaluate_if_due(source, policy)
    for step in run.steps(tasks):
        groups, batch, metrics = source.next(policy.weights())
        if run.stopped:
            break
        batch, chosen = run.verb("choose", algo.choose, batch)
        if len(batch):
            if ref is not None:
                batch.ref_logprobs_T = run.verb("reference", ref.logprobs, batch)
            metrics |= run.verb("update", update, run, batch, algo, policy, ref)
        run.report_step(step, groups, batch, metrics | chosen, policy)
        run.evaluate_if_due(source, policy, step)
        run.save_if_due(step, tasks, policy, None, algo)
    run.finish(tasks, policy, None, algo)
