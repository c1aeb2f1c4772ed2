"""A DPO step of ours: the reference's log-probs and one update over pairs of random answers; reference of full fine-tuning: a
frozen copy, of adapters: the policy without them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from measure import Case, Options, Rows, Work, free
from shapes import random_lm
from step_online import frozen, trainer

from verl.algorithms.dpo import DPO
from verl.core.batch import Batch
from verl.engine.train import TrainEngine
from verl.models.compile import compile_for_training
from verl.models.load import LoraConfig
from verl.trainer.offline import update
from verl.trainer.roles import Reference


def pairs(step: int, work: Work, vocabulary: int) -> Batch:
    """One chosen and one rejected answer for every prompt."""
    rng = np.random.default_rng(step)
    owner_S = np.repeat(np.arange(work.prompts), 2)
    tokens = work.sequences * work.response
    return Batch(prompts=[rng.integers(0, vocabulary, work.prompt).astype(np.int32) for _ in range(work.prompts)], prompt_S=owner_S,
                 lengths_S=np.full(work.sequences, work.response), ids_T=rng.integers(0, vocabulary, tokens).astype(np.int32),
                 mask_T=np.ones(tokens, bool), row_S=np.arange(work.sequences), group_S=owner_S.copy(),
                 label_S=np.tile(np.array([1, -1], np.int8), work.prompts))


def run(method: str, case: Case, o: Options) -> dict[str, float]:
    """Medians of `o.steps` steps behind a first one that compiles."""
    free(o.device)
    actor = random_lm(case.shape, o.device, o.dtype, lora=LoraConfig(rank=case.lora))
    policy, algo, work = trainer(actor, o), DPO(), o.work[method]
    start = TrainEngine(actor if case.lora else frozen(case, o, 0), token_budget=o.budget)
    reference = Reference(start, adapters_off=bool(case.lora))
    if o.accelerations and o.device == "cuda":
        for lm in {id(actor): actor, id(reference.engine.lm): reference.engine.lm}.values():
            compile_for_training(lm)
    loop = SimpleNamespace(config=SimpleNamespace(update_epochs=1, updates_per_step=1), sampling=SimpleNamespace(max_tokens=1))
    rows = Rows(f"verl dpo {case.name}", o.device)
    for step in range(o.steps + 1):
        batch = pairs(step, work, actor.head.rows)
        with rows.step():
            with rows.clock("logprobs"):
                batch.ref_logprobs_T = reference.logprobs(batch)
            with rows.clock("train"):
                metrics = update(loop, batch, algo, policy, reference)
        print({k: round(metrics[k], 6) for k in ("loss", "grad_norm", "rewards/margins")}, flush=True)
    return rows.median()
