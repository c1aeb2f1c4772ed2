"""The loop of algorithms that learn from recorded answers: SFT, preference pairs, unpaired labels, reward models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from verl.algorithms.base import Algorithm
from verl.core.batch import Batch
from verl.core.errors import DataError
from verl.core.types import Task
from verl.data.chat import encode_answer
from verl.data.config import DataConfig
from verl.engine.train import TrainEngine
from verl.trainer.rl import UpdateLog, reduce_into
from verl.trainer.roles import Reference
from verl.trainer.run import Run


def train(run: Run, tasks, algo: Algorithm, policy: TrainEngine, ref: Reference | None) -> None:
    """Run every step that is left; a step is rollout_batch_size rows, cut into optimizer batches of train_batch_size."""
    evaluate(run, tasks, algo, policy, ref, step=0)
    for step in run.steps(tasks):
        rows = tasks.take(run.config.rollout_batch_size)
        batch = run.verb("encode", pack_answers, rows, policy.lm.tokenizer, tasks.config, algo, policy.lm.context)
        if ref is not None:
            batch.ref_logprobs_T = run.verb("reference", ref.logprobs, batch)
        metrics = run.verb("update", update, run, batch, algo, policy, ref)
        metrics["rows_dropped"] = len(rows) * rows_per_task(algo, rows) - len(batch)
        run.report_step(step, [], batch, metrics, policy)
        evaluate(run, tasks, algo, policy, ref, step)
        run.save_if_due(step, tasks, policy, None, algo)
    run.finish(tasks, policy, None, algo)


def update(run: Run, batch: Batch, algo: Algorithm, policy: TrainEngine, ref: Reference | None) -> dict[str, float]:
    """Optimizer updates of one step, each over whole units (a pair is never cut)."""
    log = UpdateLog()
    size = run.config.train_batch_size or run.config.rollout_batch_size
    for mini in batch.split(-(-run.config.rollout_batch_size // size), unit=algo.unit):
        reduce_into(mini, algo, run.sampling.max_tokens)
        metrics = policy.forward_backward(mini, algo.loss, algo.unit, context(mini, algo, policy, ref), scores=algo.needs_scores)
        log.add(metrics, policy.step())
    return log.result()


def context(batch: Batch, algo: Algorithm, policy: TrainEngine, ref: Reference | None) -> dict[str, float]:
    """What the loss needs to know about the whole optimizer batch: KTO's reference point, from mismatched answers."""
    if not getattr(algo, "needs_logprob_sums", False):
        return algo.prepare(batch)
    others = mismatched(batch)
    others.ref_logprobs_T = ref.logprobs(others)
    logprobs_T = np.where(others.mask_T, policy.logprobs(others), 0.0)
    return algo.prepare(others, np.bincount(others.sequence_T, logprobs_T, len(others)))


def mismatched(batch: Batch) -> Batch:
    """Every answer under the next row's prompt, with label 0: never trained on, only compared with the reference."""
    return replace(batch, prompt_S=np.roll(batch.prompt_S, -1), label_S=np.zeros(len(batch), np.int8), ref_logprobs_T=None)


@torch.no_grad()
def evaluate(run: Run, tasks, algo: Algorithm, policy: TrainEngine, ref: Reference | None, step: int) -> None:
    """The loss and metrics on held-out rows, when due."""
    every = run.config.eval.every
    due = (step == 0 and run.step == 0) or (step and every and step % every == 0) or step == run.total
    if not run.eval_tasks or not due or run.stopped:
        return
    batch = pack_answers(run.eval_tasks, policy.lm.tokenizer, tasks.config, algo, policy.lm.context)
    if ref is not None:
        batch.ref_logprobs_T = ref.logprobs(batch)
    reduce_into(batch, algo, run.sampling.max_tokens)
    metrics = policy.forward_backward(batch, algo.loss, algo.unit, context(batch, algo, policy, ref), scores=algo.needs_scores)
    run.report.log(step, {f"eval_{k}": v for k, v in metrics.items()})


def rows_per_task(algo: Algorithm, tasks: Sequence[Task]) -> int:
    return 2 if algo.unit == "group" else 1


def pack_answers(tasks: Sequence[Task], tokenizer, data: DataConfig, algo: Algorithm, context: int) -> Batch:
    """Recorded answers as a batch: one sequence a row, two (chosen, rejected) a pair, prompts shared.

    Units with a sequence longer than `context` tokens are dropped whole. Raises DataError when a task is of the wrong
    kind for the algorithm, or nothing is left.
    """
    prompts, ids, masks, owner, labels, margins = [], [], [], [], [], []
    for task in tasks:
        answers = _answers(task, algo)
        encoded = [encode_answer(tokenizer, task, answer, data) for answer, _ in answers]
        if any(len(p) + len(a) > context for p, a, _ in encoded):
            continue
        prompts.append(encoded[0][0])
        for (_, answer_ids, mask), (_, label) in zip(encoded, answers):
            ids.append(answer_ids)
            masks.append(mask)
            labels.append(label)
            owner.append(len(prompts) - 1)
            margins.append(float(task.columns["margin"]) if "margin" in task.columns else 0.0)
    if not ids:
        raise DataError(f"every one of {len(tasks)} rows is longer than the model's {context} tokens; shorten them, "
                        "or use a model with a longer context")
    owner_S = np.array(owner, np.int64)
    return Batch(prompts=[np.asarray(p, np.int32) for p in prompts], prompt_S=owner_S,
                 lengths_S=np.array([len(i) for i in ids], np.int64), ids_T=np.concatenate(ids).astype(np.int32),
                 mask_T=np.concatenate(masks).astype(bool), row_S=np.arange(len(ids), dtype=np.int64), group_S=owner_S.copy(),
                 label_S=None if labels[0] is None else np.array(labels, np.int8),
                 margin_S=np.array(margins) if any(margins) else None)


def _answers(task: Task, algo: Algorithm) -> list[tuple[object, int | None]]:
    """(answer, label) of every sequence the task contributes."""
    if algo.unit == "group":
        if task.chosen is None or task.rejected is None:
            raise DataError(f"task {task.id}: {algo.name} learns from pairs, but the row has no chosen and rejected answer")
        return [(task.chosen, 1), (task.rejected, -1)]
    if task.completion is None:
        raise DataError(f"task {task.id}: {algo.name} learns from answers, but the row has no completion")
    if algo.name == "kto":
        if task.label is None:
            raise DataError(f"task {task.id}: kto learns from labelled answers, but the row has no label")
        return [(task.completion, 1 if task.label else -1)]
    return [(task.completion, None)]
