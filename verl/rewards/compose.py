"""Composition: which sources score a task, and how their values become one raw score a sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from verl.core.errors import ConfigError, RewardError
from verl.core.types import Failed, Finish, Group, Sample, Scored, Task, derive_seed
from verl.rewards.base import Source, results

Aggregate = Callable[[np.ndarray, np.ndarray], np.ndarray]


def weighted_sum(values_KG: np.ndarray, weights_K: np.ndarray) -> np.ndarray:
    """Sum of weight x value over the sources that have an opinion; NaN where none has.

    values_KG: float64, K sources x G samples of one task, NaN for abstained. Returns float64 [G].
    """
    present_KG = ~np.isnan(values_KG)
    total_G = (np.where(present_KG, values_KG, 0.0) * weights_K[:, None]).sum(0)
    return np.where(present_KG.any(0), total_G, np.nan)


def normalised_sum(values_KG: np.ndarray, weights_K: np.ndarray) -> np.ndarray:
    """Each source centred and divided by its std (n - 1, plus 1e-4) within the group, then summed with weights.

    A source whose values are all equal in the group, or that scored one sample only, contributes 0 (arXiv 2601.05242).
    """
    normalised_KG = np.full_like(values_KG, np.nan)
    for row, out in zip(values_KG, normalised_KG):
        here = ~np.isnan(row)
        if not here.any():
            continue
        seen = row[here]
        flat = seen.max() == seen.min()
        out[here] = 0.0 if flat else (seen - seen.mean()) / (seen.std(ddof=1) + 1e-4)
    return weighted_sum(normalised_KG, weights_K)


AGGREGATES: dict[str, Aggregate] = {"sum": weighted_sum, "normalise_then_sum": normalised_sum}


def user_aggregate(function: Callable) -> Callable[[np.ndarray, np.ndarray, list[str]], np.ndarray]:
    """`function(rewards, weights)` of a user: {source: [float | None] * G}, {source: float} -> [float | None] * G."""
    who = f"aggregate function {getattr(function, '__name__', 'aggregate')!r}"

    def aggregate(values_KG: np.ndarray, weights_K: np.ndarray, used: list[str]) -> np.ndarray:
        rewards = {name: [None if np.isnan(v) else float(v) for v in row] for name, row in zip(used, values_KG)}
        returned = results(function(rewards, dict(zip(used, weights_K.tolist()))), values_KG.shape[1], who)
        return np.array([r.value if isinstance(r, Scored) else np.nan for r in returned])

    return aggregate


@dataclass(frozen=True, slots=True)
class Entry:
    """A source in a composition. `arms`: the A/B arms that use it (empty: all)."""

    source: Source
    weight: float = 1.0
    failure_budget: float = 0.0
    arms: tuple[str, ...] = ()


class Composition:
    """Sources with weights, one aggregation, and the A/B arms that the sources name.

    aggregate: "sum" (weighted), "normalise_then_sum" (each source per group, then the weighted sum), or a function, see
    `user_aggregate`. Raises ConfigError for an empty list, doubled names or an unknown aggregate.
    """

    def __init__(self, entries: Sequence[Entry], aggregate: str | Callable = "sum"):
        names = [entry.source.name for entry in entries]
        if not entries:
            raise ConfigError("trainer.rewards is empty; name at least one source, e.g. `- verifier: math`")
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ConfigError(f"trainer.rewards: {len(doubled)} name(s) occur twice: {', '.join(doubled)}; "
                              "metrics go by name, give each source its own `name`")
        if isinstance(aggregate, str) and aggregate not in AGGREGATES:
            raise ConfigError(f"trainer.aggregate is {aggregate!r}; allowed: {', '.join(AGGREGATES)}, "
                              "or file.py:function")
        self.entries = list(entries)
        self.arms = sorted({arm for entry in entries for arm in entry.arms})
        self._aggregate = (lambda v, w, used: AGGREGATES[aggregate](v, w)) if isinstance(aggregate, str) else (
            user_aggregate(aggregate))

    def describe(self) -> str:
        """One line naming every source with weight, arms and mode; printed when a run starts."""
        parts = []
        for entry in self.entries:
            notes = [f"weight {entry.weight:g}", *([f"arms {'+'.join(entry.arms)}"] if entry.arms else []),
                     *([entry.source.describe()] if entry.source.describe() else [])]
            parts.append(f"{entry.source.name} ({', '.join(notes)})")
        return "rewards: " + "; ".join(parts)

    def check(self, tasks: Sequence[Task]) -> None:
        """Let every source refuse, before anything runs, tasks it could never score. Raises DataError or ConfigError."""
        for entry in self.entries:
            entry.source.check([task for task in tasks if entry in self.entries_of(task)] if self.arms else tasks)

    def arm(self, task: Task) -> str | None:
        """The A/B arm of a task: a pure function of its id; None without arms."""
        return self.arms[derive_seed("arm", task.id) % len(self.arms)] if self.arms else None

    def entries_of(self, task: Task) -> list[Entry]:
        """The entries that score this task."""
        arm = self.arm(task)
        return [entry for entry in self.entries if not entry.arms or arm in entry.arms]

    def finish(self, group: Group) -> None:
        """Fill Sample.score of every scored sample of the group from its Sample.rewards.

        A sample that any weighted source failed on has no score: the rest of the sum would count the failure as 0.
        Aborted samples have none either.
        """
        samples = [s for s in group.samples if s.finish is not Finish.ABORT]
        used = self.entries_of(group.task)
        if not samples or not used:
            return
        values_KG = np.array([[_value(s, entry) for s in samples] for entry in used], np.float64)
        weights_K = np.array([entry.weight for entry in used], np.float64)
        totals_G = self._aggregate(values_KG, weights_K, [entry.source.name for entry in used])
        for sample, total in zip(samples, totals_G.tolist()):
            broken = any(e.weight and isinstance(sample.rewards.get(e.source.name), Failed) for e in used)
            sample.score = None if broken or np.isnan(total) else total

    def close(self) -> None:
        """End the processes and connections of every source."""
        for entry in self.entries:
            entry.source.close()


def _value(sample: Sample, entry: Entry) -> float:
    result = sample.rewards.get(entry.source.name)
    return result.value if isinstance(result, Scored) else np.nan


def measure(composition: Composition, groups: Sequence[Group]) -> dict[str, float]:
    """Metrics over collected groups: plain finite floats, absent where nothing was measured.

    `reward` mean score, `reward_std` mean std (n - 1) within groups, `rewards/unscored` samples without a score,
    `rewards/{name}/mean|std|failure_rate|abstain_rate`; with arms, `arms/{arm}/reward|reward_std|samples|...`.
    """
    metrics = _group_metrics(groups)
    for entry in composition.entries:
        metrics |= _source_metrics(entry, groups)
    for arm in composition.arms:
        mine = [g for g in groups if composition.arm(g.task) == arm]
        part = _group_metrics(mine)
        for entry in composition.entries:
            part |= _source_metrics(entry, mine)
        metrics |= {f"arms/{arm}/{name}": value for name, value in part.items()}
        metrics[f"arms/{arm}/samples"] = float(sum(len(g.samples) for g in mine))
    return metrics


def _group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    scores = [[s.score for s in g.samples if s.score is not None] for g in groups]
    flat = [score for group in scores for score in group]
    stds = [float(np.std(group, ddof=1)) for group in scores if len(group) > 1]
    metrics = {"rewards/unscored": float(sum(len(g.samples) for g in groups) - len(flat))}
    if flat:
        metrics["reward"] = float(np.mean(flat))
    if stds:
        metrics["reward_std"] = float(np.mean(stds))
        metrics["frac_reward_zero_std"] = float(np.mean([max(g) == min(g) for g in scores if len(g) > 1]))
    return metrics


def _source_metrics(entry: Entry, groups: Sequence[Group]) -> dict[str, float]:
    name = entry.source.name
    found = [s.rewards[name] for g in groups for s in g.samples if name in s.rewards]
    if not found:
        return {}
    values = [r.value for r in found if isinstance(r, Scored)]
    failed = sum(isinstance(r, Failed) for r in found)
    metrics = {f"rewards/{name}/failure_rate": failed / len(found),
               f"rewards/{name}/abstain_rate": (len(found) - failed - len(values)) / len(found)}
    if values:
        metrics[f"rewards/{name}/mean"] = float(np.mean(values))
        metrics[f"rewards/{name}/std"] = float(np.std(values))
    return metrics


def check_budgets(composition: Composition, groups: Sequence[Group]) -> None:
    """Raise RewardError when a source failed on more than its budget of these samples, or on all of them.

    The message names the source, the first failed sample, and shows the first real traceback.
    """
    for entry in composition.entries:
        name, budget = entry.source.name, entry.failure_budget
        found = [(g, i, s.rewards[name]) for g in groups for i, s in enumerate(g.samples) if name in s.rewards]
        failed = [row for row in found if isinstance(row[2], Failed)]
        if not failed or (len(failed) / len(found) <= budget and len(failed) < len(found)):
            continue
        group, index, result = failed[0]
        advice = ("all of them failed, which always stops the run" if len(failed) == len(found) else
                  f"set failure_budget above {len(failed) / len(found):.3g} to leave such samples out and go on")
        raise RewardError(f"reward {name!r} failed on {len(failed)} of {len(found)} samples (failure_budget {budget:g}); "
                          f"{advice}. First failure: sample {index} of task {group.task.id!r}: {result.reason}")
