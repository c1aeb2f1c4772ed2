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
from verl.trainer.reward_training import encode_pair
from verl.trainer.rl import UpdateLog, reduce_into
from verl.trainer.roles import Reference
from verl.trainer.run import Run

# What each method learns from (data.kind_of): by name, else by what its batches are made of.
KINDS = {"sft": ("completion", "language", "preference"), "kto": ("unpaired", "preference"), "group": ("preference",),
         "row": ("completion", "language", "unpaired", "preference")}


def train(run: Run, tasks, algo: Algorithm, policy: TrainEngine, ref: Reference | None) -> None:
    """Run every step that is left; a step is rollout_batch_size rows, cut into optimizer batches of train_batch_size."""
    evaluate(run, tasks, algo, policy, ref, step=0)
    for step in run.steps(tasks):
        rows = tasks.take(run.config.rollout_batch_size)
        batch = run.verb("encode", pack_answers, rows, policy.lm.tokenizer, tasks.config, algo, policy.lm.context)
        if ref is not None:
            batch.ref_logprobs_T = run.verb("reference", ref.logprobs, batch)
        metrics = run.verb("update", update, run, batch, algo, policy, ref)
        metrics["rows_dropped"] = rows_of(algo, rows) - len(batch)
        run.report_step(step, [], batch, metrics, policy)
        evaluate(run, tasks, algo, policy, ref, step)
        run.save_if_due(step, tasks, policy, None, algo)
    run.finish(tasks, policy, None, algo)


def update(run: Run, batch: Batch, algo: Algorithm, policy: TrainEngine, ref: Reference | None) -> dict[str, float]:
    """Optimizer updates of one step, each over whole units (a pair is never cut)."""
    log = UpdateLog()
    for _ in range(run.config.update_epochs):
        for mini in batch.split(run.config.updates_per_step // run.config.update_epochs, unit=algo.unit):
            reduce_into(mini, algo, run.sampling.max_tokens)
            numbers = context(mini, algo, policy, ref)
            metrics = policy.forward_backward(mini, algo.loss, algo.unit, numbers, scores=algo.needs_scores)
            log.add(metrics, policy.step())
    return log.result()


def context(batch: Batch, algo: Algorithm, policy: TrainEngine, ref: Reference | None) -> dict[str, float]:
    """What the loss needs to know about the whole optimizer batch: KTO's reference point, from mismatched answers, or
    from the batch itself when the policy sampled it."""
    if not algo.needs_logprob_sums:
        return algo.prepare(batch)
    others = batch if algo.online else mismatched(batch)
    if others.ref_logprobs_T is None:
        others.ref_logprobs_T = ref.logprobs(others)
    logprobs_T = np.where(others.mask_T, policy.logprobs(others), 0.0)
    return algo.prepare(others, np.bincount(others.sequence_T, logprobs_T, len(others)))


def mismatched(batch: Batch) -> Batch:
    """Every answer under the next other prompt, with label 0: never trained on, only compared with the reference.

    Prompts are told apart by their tokens, since both answers of a pair have the same one. A batch with one prompt has
    no other.
    """
    keys = [prompt.tobytes() for prompt in batch.prompts]
    n = len(keys)
    other_P = np.array([next((p + s) % n for s in range(1, n + 1) if keys[(p + s) % n] != keys[p] or s == n) for p in range(n)])
    return replace(batch, prompt_S=other_P[batch.prompt_S], label_S=np.zeros(len(batch), np.int8), ref_logprobs_T=None)


def evaluate(run: Run, tasks, algo: Algorithm, policy: TrainEngine, ref: Reference | None, step: int) -> None:
    """The loss and metrics on held-out rows, when due."""
    if run.eval_tasks and run.eval_due(step):
        run.report.log(step, eval_metrics(run.eval_tasks, tasks.config, algo, policy, ref, run.sampling.max_tokens))


@torch.no_grad()
def eval_metrics(rows: Sequence[Task], data: DataConfig, algo: Algorithm, policy: TrainEngine, ref: Reference | None,
                 max_tokens: int) -> dict[str, float]:
    """The loss and its metrics on these rows under the present weights, with prefix eval_."""
    batch = pack_answers(rows, policy.lm.tokenizer, data, algo, policy.lm.context)
    if ref is not None:
        batch.ref_logprobs_T = ref.logprobs(batch)
    reduce_into(batch, algo, max_tokens)
    metrics = policy.forward_backward(batch, algo.loss, algo.unit, context(batch, algo, policy, ref), scores=algo.needs_scores)
    return {f"eval_{k}": v for k, v in metrics.items()}


def rows_of(algo: Algorithm, tasks: Sequence[Task]) -> int:
    """Sequences that these tasks contribute when none is dropped."""
    return sum(len(_answers(task, algo)) for task in tasks)


def pack_answers(tasks: Sequence[Task], tokenizer, data: DataConfig, algo: Algorithm, context: int) -> Batch:
    """Recorded answers as a batch: one sequence a row, two (chosen, rejected) a pair, prompts shared.

    Units with a sequence longer than `context` tokens are dropped whole. Raises DataError when nothing is left.
    """
    prompts, ids, masks, owner, labels, margins = [], [], [], [], [], []
    for task in tasks:
        prompt_ids, answers = (encode_pair(tokenizer, task) if algo.needs_scores
                               else _encode(tokenizer, task, _answers(task, algo), data))
        if any(len(prompt_ids) + len(a) > context for a, _, _ in answers):
            continue
        prompts.append(prompt_ids)
        for answer_ids, mask, label in answers:
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
    """(answer, label) of every sequence the task contributes; likelihood methods learn the chosen answer of a pair."""
    if task.chosen is not None:
        labelled = algo.unit == "group" or algo.name == "kto"
        return [(task.chosen, 1), (task.rejected, -1)] if labelled else [(task.chosen, None)]
    if task.completion is None:
        raise DataError(f"task {task.id}: {algo.name} learns from answers, but the row has none")
    return [(task.completion, (1 if task.label else -1) if algo.name == "kto" else None)]


def _encode(tokenizer, task: Task, answers, data: DataConfig) -> tuple[np.ndarray, list]:
    """(prompt ids, [(answer ids, mask, label)])."""
    encoded = [(encode_answer(tokenizer, task, answer, data), label) for answer, label in answers]
    return encoded[0][0][0], [(ids, mask, label) for (_, ids, mask), label in encoded]
