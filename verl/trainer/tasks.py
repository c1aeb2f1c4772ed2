"""The settings of a mixture: `trainer.algorithm: hybrid`, its tasks and their weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from verl.algorithms import ALGORITHMS
from verl.algorithms.base import Algorithm
from verl.core.config import option
from verl.core.errors import ConfigError, nearest
from verl.core.types import derive_seed
from verl.data.config import DataConfig
from verl.rewards.config import RewardSource
from verl.trainer.config import TrainerConfig


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """One task of a mixture. Whatever is left out is the run's own: data, rewards, batch and group size."""

    algorithm: str = option(help="the method's name, or module:Class; not hybrid")
    name: str | None = option(None, "name in metrics; none: the algorithm's")
    weight: float | None = option(None, "factor of the task's own loss; none: 1, or from task_weights")
    algo: Any = option(None, "the method's own settings", schema_from=lambda section: ALGORITHMS[section.get("algorithm", "sft")])
    data: DataConfig | None = option(None, "the task's own data; none: the run's")
    rewards: list[RewardSource] = option([], "the task's own reward sources; empty: the run's")
    rollout_batch_size: int | None = option(None, "prompts or rows of this task a step; none: the run's")
    group_size: int | None = option(None, "samples per prompt; none: the run's")

    def __post_init__(self):
        if self.algo is None:
            object.__setattr__(self, "algo", ALGORITHMS[self.algorithm]())
        if self.name is None:
            object.__setattr__(self, "name", self.algorithm.rpartition(":")[2])
        if self.weight is not None and not 0 < self.weight < math.inf:
            raise ConfigError(f"weight: {self.weight} of task {self.name!r}; a weight is a number above 0")


@dataclass(frozen=True, kw_only=True)
class Hybrid(Algorithm):
    """Several methods over one policy and one optimizer; an update's loss is sum(weight * the task's own loss).

    Each task's loss is reduced over its own batch, so batch sizes have no influence on the shares. Tasks are names, or
    mappings (TaskConfig); `task_weights` is a mapping of names or a list in the order of the tasks.
    """

    name: ClassVar[str] = "hybrid"

    tasks: list[TaskConfig | str] = option(["sft", "ppo", "dpo"], "names of methods, or mappings with their own data")
    task_weights: list[float] | dict[str, float] | None = option(None, "by name, or in the order of tasks; none: as the tasks say")
    grad_norm_every: int = option(10, "measure each task's own gradient norm every so many steps; 0: never")

    def __post_init__(self):
        tasks = [TaskConfig(algorithm=t) if isinstance(t, str) else t for t in self.tasks]
        names = [t.name for t in tasks]
        if not tasks or len(set(names)) < len(names):
            raise ConfigError(f"tasks: {', '.join(names) or 'empty'}; give at least one, and two of one algorithm a `name` each")
        tasks = [replace(t, weight=w) for t, w in zip(tasks, self._weights(tasks))]
        object.__setattr__(self, "tasks", tasks)
        object.__setattr__(self, "task_weights", None)  # they stand in the tasks now

    def _weights(self, tasks: list[TaskConfig]) -> list[float]:
        given, names = self.task_weights, [t.name for t in tasks]
        if given is None:
            return [1.0 if t.weight is None else t.weight for t in tasks]
        if any(t.weight is not None for t in tasks):
            raise ConfigError("task_weights: tasks have a `weight` of their own as well; keep one of the two")
        if isinstance(given, dict):
            wrong = sorted(given.keys() - set(names)) + [n for n in names if n not in given]
            if wrong:
                raise ConfigError(f"task_weights: {wrong[0]!r} is " + (f"no task; {nearest(wrong[0], names)}" if wrong[0] in given
                                  else "a task without a weight") + f". Give one for each of {', '.join(names)}")
            return [float(given[n]) for n in names]
        if len(given) != len(tasks):
            raise ConfigError(f"task_weights: {len(given)} numbers for {len(tasks)} tasks ({', '.join(names)}); give one each, "
                              "in that order")
        return [float(w) for w in given]

    @property
    def online(self) -> bool:
        return any(t.algo.online for t in self.tasks)

    @property
    def needs_critic(self) -> bool:
        return any(t.algo.needs_critic for t in self.tasks)

    @property
    def needs_reference(self) -> bool:
        return any(t.algo.needs_reference for t in self.tasks)

    def learning(self, parts: Iterable[Any]) -> Hybrid:
        """This mixture with each task's method as it learns from the task's data (`parts`: with a `config` each)."""
        return replace(self, tasks=[replace(t, algo=part.config.algo) for t, part in zip(self.tasks, parts)])

    def split(self, trainer: TrainerConfig) -> list[TrainerConfig]:
        """The run's settings with each task's own values; seeds differ, so that two tasks on one file see other rows."""
        out = []
        for task in self.tasks:
            part = copy.copy(trainer)
            part.algorithm, part.algo = task.algorithm, task.algo
            part.seed = derive_seed(trainer.seed, "task", task.name)
            part.rewards = task.rewards or trainer.rewards
            part.rollout_batch_size = task.rollout_batch_size or trainer.rollout_batch_size
            part.group_size = task.group_size or trainer.group_size
            out.append(part)
        return out
