"""The loop of every online algorithm, and the verbs it is made of.

Timing, placement and overlap live on the verbs; sharding, packing and micro-batches in the engines; maths in the
algorithm. What a step did is traced while it runs (`verl show graph RUN`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from verl.algorithms.base import Algorithm, Credit
from verl.algorithms.reduce import coefficients
from verl.core.batch import Batch, from_groups
from verl.core.types import Finish, Group
from verl.engine.train import StepInfo, TrainEngine
from verl.rewards.compose import measure
from verl.trainer.roles import Reference
from verl.trainer.run import Run
from verl.trainer.sampler import Sampler, completion_metrics

if TYPE_CHECKING:
    from verl.trainer.ahead import Source

MAX_ROUNDS = 10  # of dynamic sampling in one step


def train(run: Run, tasks, source: Source, algo: Algorithm, policy: TrainEngine, ref: Reference | None,
          critic: TrainEngine | None) -> None:
    """Run every step that is left. `critic` is the policy itself when the value head sits on its trunk."""
    run.evaluate_if_due(source, policy)
    for step in run.steps(tasks):
        groups, batch, metrics = source.next(policy.weights())               # pi_old <- pi_theta; y ~ pi_old, r = R(x, y)
        if run.stopped:
            break
        if ref is not None:
            batch.ref_logprobs_T = run.verb("reference", ref.logprobs, batch)
        if critic is not None:
            batch.values_T = run.verb("values", critic.values, batch)        # V(s_t)
        if source.needs_old:
            batch.old_logprobs_T = run.verb("old_logprobs", policy.logprobs, batch)
        credit = run.verb("credit", algo.credit, batch)                      # A_t
        apply_credit(batch, credit)
        metrics = credit.metrics | metrics | run.verb("update", update, run, batch, credit, algo, policy, critic)
        algo = steer(algo, metrics, len(batch))
        run.report_step(step, groups, batch, metrics, policy)
        run.evaluate_if_due(source, policy, step)
        run.save_if_due(step, tasks, policy, critic, algo)
    run.finish(tasks, policy, critic, algo)


def collect(run: Run, tasks, sampler: Sampler, algo: Algorithm,
            step: int | None = None) -> tuple[list[Group], dict[str, float], list[int]]:
    """Sample and score groups for one step; with dynamic sampling, further prompts in bounded rounds.

    The third value names the places of the data that were issued; they are consumed when the caller says so (`tasks.done`).
    Metrics describe everything that was sampled. Groups beyond the target are dropped and counted; prompts consumed are
    counted by the loader, so totals do not depend on how many groups were usable. `step`: the last one before that of the
    groups, when it is not the last whole one.
    """
    config, kept, everything, places = run.config, [], [], []
    sampler.scorer.trainer_state = run.state(step)
    target, metrics = config.rollout_batch_size, {}
    for _ in range(MAX_ROUNDS):
        issued = tasks.issue(target)
        if not issued:
            break
        slots, prompts = zip(*issued)
        places += slots
        fresh = run.verb("generate", sampler.sample, prompts, slots, config.samples_per_prompt, run.sampling)
        if sampler.stopped:
            return [], {}, places
        for group in fresh:
            group.samples = [s for s in group.samples if s.finish is not Finish.ABORT]
        metrics = run.verb("score", sampler.scorer.collect, fresh)
        everything += fresh
        batch = from_groups(fresh)
        usable_S = algo.usable(batch)
        kept += fresh if usable_S is None else [g for i, g in enumerate(fresh) if usable_S[batch.group_S == i].any()]
        if usable_S is None or len(kept) >= target:
            break
    if len(everything) > len(fresh):
        metrics |= measure(sampler.scorer.composition, everything)
    metrics |= completion_metrics(everything)
    if len(everything) != len(kept[:target]):
        metrics |= {"sampling/groups_sampled": len(everything), "sampling/groups_dropped": len(everything) - len(kept[:target])}
    return kept[:target], metrics, places


def pack(run: Run, groups: list[Group], sampler: Sampler, algo: Algorithm) -> Batch:
    """The step's batch; with the reward of one greedy answer per prompt as baseline where the method asks for it."""
    batch = from_groups(groups)
    if algo.needs_greedy:
        greedy = replace(run.sampling, temperature=0.0)
        answers = run.verb("greedy", sampler.sample, [g.task for g in groups], range(len(groups)), 1, greedy, "greedy")
        run.verb("score", sampler.scorer.collect, answers)
        scores_P = np.array([np.nan if g.samples[0].score is None else g.samples[0].score for g in answers])
        batch.baselines_S = scores_P[batch.group_S]
    return batch


def apply_credit(batch: Batch, credit: Credit) -> None:
    """Put the advantages (and returns) of the whole step into its batch."""
    batch.advantages_T, batch.returns_T = credit.advantages_T, credit.returns_T


def update(run: Run, batch: Batch, credit: Credit, algo: Algorithm, policy: TrainEngine,
           critic: TrainEngine | None) -> dict[str, float]:
    """Every optimizer update of one step: coefficients over the whole optimizer batch, then gradients, then a step."""
    log = UpdateLog()
    if credit.keep_S is not None:
        batch = batch.select(np.flatnonzero(credit.keep_S))
    if not len(batch):
        return {"updates_skipped": 1.0}
    per_epoch = -(-len(batch) // (run.config.train_batch_size or len(batch)))
    for epoch in range(run.config.update_epochs):
        order = run.shuffled(len(batch), epoch) if run.config.updates_per_step > 1 else np.arange(len(batch))
        for mini in batch.select(order).split(per_epoch):
            reduce_into(mini, algo, run.sampling.max_tokens)
            metrics = policy.forward_backward(mini, algo.loss, algo.unit, entropy_grad=algo.needs_entropy_grad)
            log.add(metrics, policy.step())
            if critic is not None and critic is not policy:
                values = critic.forward_backward(mini, algo.value_loss, logprobs=False)
                log.add({f"critic/{k}" if k == "loss" else k: v for k, v in values.items()}, critic.step(), "critic/")
            if algo.should_stop(metrics.get("approx_kl", 0.0)):
                return log.result() | {"early_stop": 1.0}
    return log.result()


def reduce_into(mini: Batch, algo: Algorithm, max_tokens: int) -> None:
    """Coefficients of one optimizer batch, from its final mask."""
    mini.weights_T, mini.weights_S = coefficients(algo.reduction, mini, constant=max_tokens)


class UpdateLog:
    """Means of metrics over the updates of a step; the agreement of sampler and trainer is that of the first one."""

    def __init__(self):
        self.rows: list[dict[str, float]] = []

    def add(self, metrics: dict[str, float], info: StepInfo | None = None, prefix: str = "") -> None:
        """Metrics of one update, and of the optimizer's step when it is this one's own."""
        if any(r for r in self.rows):
            metrics = {k: v for k, v in metrics.items() if not k.startswith("sampling/")}
        own = {} if info is None else {f"{prefix}lr": info.lr, f"{prefix}grad_norm": info.grad_norm,
                                       f"{prefix}updates_skipped": float(bool(info.skipped))}
        self.rows.append(metrics | own)

    def result(self) -> dict[str, float]:
        out: dict[str, float] = {}
        for name in dict.fromkeys(k for row in self.rows for k in row):
            values = [row[name] for row in self.rows if name in row and np.isfinite(row[name])]
            if values:
                out[name] = sum(values) if name.endswith("updates_skipped") else float(np.mean(values))
        return out


def steer(algo: Algorithm, metrics: dict[str, float], samples: int) -> Algorithm:
    """The algorithm of the next step: its KL coefficient moved towards kl_target, when it has one."""
    if "kl" not in metrics:
        return algo
    metrics["kl_coef"] = algo.kl_coef
    return algo.steered(metrics["kl"], samples)
