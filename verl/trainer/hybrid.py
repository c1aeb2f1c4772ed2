"""The loop of a mixture: every task makes a batch in its own way, then all of them share each optimizer update."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from verl.algorithms.base import Algorithm
from verl.core.batch import Batch, from_groups
from verl.core.types import Group
from verl.core.weights import Weights
from verl.data import DataConfig, RLDataLoader
from verl.engine.optimizer import MasterAdamW
from verl.engine.train import TrainEngine
from verl.trainer import offline, rl
from verl.trainer.config import TrainerConfig
from verl.trainer.online_preference import FromSamples
from verl.trainer.roles import Reference
from verl.trainer.run import Run, steered
from verl.trainer.sampler import Sampler
from verl.trainer.tasks import Hybrid


@dataclass(slots=True)
class Task:
    """One task at work: its settings (with its method as it is now), its data, and its sampler if it samples."""

    name: str
    weight: float
    config: TrainerConfig
    loader: RLDataLoader
    sampler: Sampler | None = None


class Tasks:
    """All tasks of a run; to the run they look like one loader. `config` are the data settings of the run itself."""

    eval_prompts = None  # every task has its own

    def __init__(self, trainer: TrainerConfig, loader: RLDataLoader | None):
        self.trainer, self.config = trainer, DataConfig() if loader is None else loader.config
        self.all = [Task(task.name, task.weight, part, RLDataLoader(task.data or self.config) if task.data or loader is None
                         else _own(loader)) for task, part in zip(trainer.algo.tasks, trainer.parts, strict=True)]

    def __iter__(self) -> Iterator[Task]:
        return iter(self.all)

    def __len__(self) -> int:
        """Rows, at the run's rollout_batch_size, until the longest task has seen its data once."""
        steps = max(-(-len(t.loader) // t.config.rollout_batch_size) for t in self)
        return steps * self.trainer.rollout_batch_size

    def part(self, name: str) -> tuple[TrainerConfig, RLDataLoader]:
        """Settings and data of one task."""
        return next((t.config, t.loader) for t in self if t.name == name)

    def sampling_with(self, samplers: Mapping[str, Sampler]) -> Tasks:
        """These tasks, each with its sampler."""
        for t in self:
            t.sampler = samplers.get(t.name)
        return self

    @property
    def longest_prompt(self) -> int:
        """Tokens; of every task that samples."""
        return max((t.loader.longest_prompt for t in self if t.config.algo.online), default=1)

    @property
    def fingerprint(self) -> str:
        return " ".join(f"{t.name}:{t.loader.fingerprint}" for t in self)

    def load(self, weights: Weights) -> None:
        """Put these weights in force for every task that samples; they share one engine."""
        samplers = [t.sampler for t in self if t.sampler is not None]
        for sampler in samplers[:1]:
            sampler.load(weights)
        for sampler in samplers[1:]:
            sampler.told(weights.version)

    def sleep(self) -> None:
        """The samplers' cache is the trainer's memory now."""
        for t in self:
            if t.sampler is not None:
                t.sampler.engine.sleep()

    def state(self) -> dict[str, Any]:
        """Every task's place in its data, and what its method has steered."""
        return {t.name: {"data": t.loader.state(), "algorithm": steered(t.config.algo)} for t in self}

    def load_state(self, state: dict[str, Any]) -> None:
        for t in self:
            t.loader.load_state(state[t.name]["data"])
            t.config.algo = replace(t.config.algo, **state[t.name]["algorithm"])


def _own(loader: RLDataLoader) -> RLDataLoader:
    """The run's data with a position of its own."""
    own = copy.copy(loader)
    own.position, own.failed = 0, []
    return own


class _View:
    """The run as the verbs of one task see it: with the task's settings, and its name before the names of verbs."""

    def __init__(self, run: Run, task: Task):
        self._run, self._name, self.config, self.updates = run, task.name, task.config, run.config.updates_per_step

    def verb(self, name: str, function, *args, **kwargs):
        return self._run.verb(f"{self._name}/{name}", function, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)


@dataclass(slots=True)
class Part:
    """What one task brings to a step: rows that take part, ready for the loss."""

    task: Task
    batch: Batch
    metrics: dict[str, float]
    groups: list[Group] = field(default_factory=list)

    @property
    def algo(self) -> Algorithm:
        return self.task.config.algo


class Parts(list[Part]):
    """The parts of one step."""

    @property
    def tokens(self) -> int:
        return sum(part.batch.tokens for part in self)


def train(run: Run, tasks: Tasks, algo: Hybrid, policy: TrainEngine, ref: Reference | None, critic: TrainEngine | None) -> None:
    """Run every step that is left. A step is rollout_batch_size prompts or rows of each task."""
    evaluate(run, tasks, policy, ref, 0)
    for step in run.steps(tasks):
        tasks.load(policy.weights())
        parts = Parts(make_part(_View(run, t), t, policy, ref, critic) for t in tasks if not run.stopped)
        if run.stopped:
            break
        tasks.sleep()
        metrics = run.verb("update", update, run, parts, algo, policy, ref, critic)
        for part in parts:
            own = {k.removeprefix(f"{part.task.name}/"): v for k, v in metrics.items() if k.startswith(f"{part.task.name}/")}
            part.task.config.algo = rl.steer(part.algo, own, len(part.batch))
            metrics |= _named(part.task, own | part.metrics)
        run.report_step(step, [g for part in parts for g in part.groups], parts, metrics, policy)
        evaluate(run, tasks, policy, ref, step)
        run.save_if_due(step, tasks, policy, critic, algo)
    run.finish(tasks, policy, critic, algo)


def make_part(run: _View, task: Task, policy: TrainEngine, ref: Reference | None, critic: TrainEngine | None) -> Part | None:
    """A task's batch of this step; None when a signal stopped it."""
    algo = task.config.algo
    if not algo.online:
        rows = task.loader.take(task.config.rollout_batch_size)
        batch = run.verb("encode", offline.pack_answers, rows, policy.lm.tokenizer, task.loader.config, algo, policy.lm.context)
        part = Part(task, batch, {"rows_dropped": offline.rows_of(algo, rows) - len(batch)})
    else:
        task.sampler.forget(task.loader.state())
        groups, metrics, places = rl.collect(run, task.loader, task.sampler, algo)
        if run.stopped:
            return None
        task.loader.done(places)
        if isinstance(algo, FromSamples):
            batch, more = run.verb("choose", algo.choose, from_groups(groups))
            part = Part(task, batch, metrics | more, groups)
        else:
            part = Part(task, rl.pack(run, groups, task.sampler, algo), metrics, groups)
    if algo.needs_reference and len(part.batch):
        part.batch.ref_logprobs_T = run.verb("reference", ref.logprobs, part.batch)
    if algo.online and not isinstance(algo, FromSamples):
        _credit(run, part, policy, critic)
    return part


def _credit(run: _View, part: Part, policy: TrainEngine, critic: TrainEngine | None) -> None:
    """Values, old log-probs and advantages of sampled rows; those that take no part are left out."""
    batch, algo = part.batch, part.algo
    if algo.needs_critic:
        batch.values_T = run.verb("values", critic.values, batch)
    if run.updates > 1:
        batch.old_logprobs_T = run.verb("old_logprobs", policy.logprobs, batch)
    credit = run.verb("credit", algo.credit, batch)
    rl.apply_credit(batch, credit)
    part.metrics |= credit.metrics
    if credit.keep_S is not None:
        part.batch = batch.select(np.flatnonzero(credit.keep_S))


def update(run: Run, parts: Parts, algo: Hybrid, policy: TrainEngine, ref: Reference | None,
           critic: TrainEngine | None) -> dict[str, float]:
    """Every optimizer update of one step: each task's mini-batch adds its weighted gradient, then one step is made.

    `{task}/loss` and `{task}/grad_norm` are those of the task's own loss, before its weight; "loss" is the weighted sum.
    """
    total, logs = rl.UpdateLog(), {part.task.name: rl.UpdateLog() for part in parts}
    cuts = run.config.updates_per_step // run.config.update_epochs
    due = bool(algo.grad_norm_every) and (run.step + 1) % algo.grad_norm_every == 0
    measure = due and policy.optimizer is not None  # gradients of ranks elsewhere stay with them
    apart = critic if critic is not policy else None
    ended: set[str] = set()  # tasks that moved far enough from their samples
    for epoch in range(run.config.update_epochs):
        pieces = {part.task.name: _cut(run, part, cuts, epoch) for part in parts}
        for i in range(cuts):
            loss = 0.0
            for part in parts:
                name = part.task.name
                if i >= len(pieces[name]) or name in ended:
                    continue
                metrics = share(pieces[name][i], part, run.sampling.max_tokens, policy, ref, apart, measure)
                loss += part.task.weight * metrics["loss"]
                logs[name].add(metrics)
                if part.algo.should_stop(metrics.get("approx_kl", 0.0)):
                    ended.add(name)
            total.add({"loss": loss}, policy.step())
            if apart is not None:
                total.add({}, apart.step(), "critic/")
    return total.result() | {k: v for part in parts for k, v in _named(part.task, logs[part.task.name].result()).items()}


def share(mini: Batch, part: Part, max_tokens: int, policy: TrainEngine, ref: Reference | None, critic: TrainEngine | None,
          measure: bool) -> dict[str, float]:
    """A task's share of one update (`critic`: one with weights of its own); metrics of the task's own loss."""
    with own_gradient(policy.optimizer, measure) as norm:
        metrics = accumulate(mini, part, max_tokens, policy, ref)
    metrics["loss"] /= part.task.weight
    if norm:
        metrics["grad_norm"] = norm[0] / part.task.weight
    if critic is not None and part.algo.needs_critic:
        values = critic.forward_backward(mini, part.algo.value_loss, logprobs=False)
        metrics |= {"critic/loss" if k == "loss" else k: v for k, v in values.items()}
    return metrics


def accumulate(mini: Batch, part: Part, max_tokens: int, policy: TrainEngine, ref: Reference | None) -> dict[str, float]:
    """Add the gradient of weight * the task's own loss over this mini-batch."""
    algo = part.algo
    rl.reduce_into(mini, algo, max_tokens)
    mini.weights_T, mini.weights_S = mini.weights_T * part.task.weight, mini.weights_S * part.task.weight
    context = offline.context(mini, algo, policy, ref) if not algo.online or isinstance(algo, FromSamples) else None
    return policy.forward_backward(mini, algo.loss, algo.unit, context, entropy_grad=algo.needs_entropy_grad,
                                   scores=algo.needs_scores)


def _cut(run: Run, part: Part, cuts: int, epoch: int) -> list[Batch]:
    """The task's mini-batches of one update epoch; fewer than `cuts` when it has fewer units."""
    batch = part.batch
    if not len(batch):
        return []
    if cuts * run.config.update_epochs > 1 and part.algo.online and part.algo.unit == "row":
        batch = batch.select(run.shuffled(len(batch), epoch))
    return batch.split(cuts, part.algo.unit)


@contextmanager
def own_gradient(optimizer: MasterAdamW, measure: bool) -> Iterator[list[float]]:
    """What runs inside adds to the accumulated gradient; with `measure`, the norm of what it added stands in the list."""
    norms: list[float] = []
    before = [holder.grad for holder in optimizer.sums] if measure else []
    if measure:
        optimizer.clear()
    yield norms
    if measure:
        norms.append(float(optimizer.grad_norm()))
        for holder, grad in zip(optimizer.sums, before):
            if grad is not None:
                holder.grad = grad if holder.grad is None else grad.add_(holder.grad)


def evaluate(run: Run, tasks: Tasks, policy: TrainEngine, ref: Reference | None, step: int) -> None:
    """Held-out metrics of every task that has held-out rows, when due."""
    if not run.eval_due(step):
        return
    metrics: dict[str, float] = {}
    tasks.load(policy.weights())
    for task in (t for t in tasks if t.loader.eval_prompts):
        algo, rows = task.config.algo, list(task.loader.eval_prompts)
        if task.sampler is not None:
            own = run.verb(f"{task.name}/evaluate", run.evaluate, task.sampler, rows, f"{task.name}_eval")
        else:
            own = offline.eval_metrics(rows, task.loader.config, algo, policy, ref if algo.needs_reference else None,
                                       run.sampling.max_tokens)
        metrics |= _named(task, own)
    if metrics:
        run.report.log(step, metrics)


def _named(task: Task, metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{task.name}/{name}": value for name, value in metrics.items()}
