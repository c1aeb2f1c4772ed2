"""The losses of the same run with every acceleration on and with all of them off.

On: compiled layers, the fused output layer, fused attention over packed rows, prompts computed once for their group, micro-
batches by token budget. Off: plain layers, plain float32 logits with log_softmax, exact attention, every sequence behind
its own copy of the prompt, one sequence a micro-batch. Both start from the same weights and see the same samples.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
from measure import Case, Options, Rows, free
from shapes import random_lm
from step_online import ask, sampler

from verl.algorithms.grpo import GRPO
from verl.core.batch import Batch
from verl.core.types import Sampling
from verl.engine.optimizer import OptimConfig
from verl.engine.train import TrainEngine
from verl.models.compile import compile_for_training
from verl.trainer.rl import apply_credit, update


def plain_logprobs(hidden_TD, weight_VD, bias_V, targets_T, spec, temperature, chunk_bytes=None):
    """What the output layer means, in three lines: all logits in float32."""
    logits_TV = torch.nn.functional.linear(hidden_TD, weight_VD, bias_V)[:, :spec.rows].float() * spec.scale / temperature
    logp_TV = logits_TV.log_softmax(-1)
    return logp_TV.gather(-1, targets_T[:, None]).squeeze(-1), -(logp_TV.exp() * logp_TV).sum(-1)


@contextmanager
def nothing_fused():
    """The plain output layer and exact attention in place of the fused ones."""
    with ExitStack() as stack:
        stack.enter_context(patch("verl.models.lm.token_logprobs", plain_logprobs))
        stack.enter_context(patch("verl.models.packed.varlen_attn", None))
        yield


def batches(steps: int, vocabulary: int, tiny: bool) -> list[Batch]:
    """Fixed samples: random tokens of random lengths in groups of 4, with rewards."""
    out = []
    prompts, longest = (4, 24) if tiny else (16, 512)
    for step in range(steps):
        rng = np.random.default_rng(step)
        lengths_S = rng.integers(4, longest, 4 * prompts)
        owner_S = np.repeat(np.arange(prompts), 4)
        tokens = int(lengths_S.sum())
        out.append(Batch(prompts=[rng.integers(0, vocabulary, n).astype(np.int32) for n in rng.integers(4, longest // 2, prompts)],
                         prompt_S=owner_S, lengths_S=lengths_S, ids_T=rng.integers(0, vocabulary, tokens).astype(np.int32),
                         mask_T=np.ones(tokens, bool), row_S=np.arange(len(owner_S)), group_S=owner_S.copy(),
                         rewards_S=rng.normal(size=len(owner_S))))
    return out


def unshared(batch: Batch) -> Batch:
    """Every sequence behind a copy of its prompt of its own."""
    return replace(batch, prompts=[batch.prompts[p] for p in batch.prompt_S], prompt_S=np.arange(len(batch)))


def train(case: Case, o: Options, on: bool) -> np.ndarray:
    """float64 [steps, 3]: GRPO's loss (two updates a step, so that it moves), KL to the old policy and entropy."""
    lm = random_lm(case.shape, o.device, o.dtype)
    policy = TrainEngine(lm, 1.0, OptimConfig(lr=1e-4 if case.shape == "tiny" else 2e-6), 1000, token_budget=o.budget if on else 1)
    if on and o.device == "cuda":
        compile_for_training(lm)
    loop = SimpleNamespace(config=SimpleNamespace(train_batch_size=None, update_epochs=2, updates_per_step=2),
                           sampling=SimpleNamespace(max_tokens=1), shuffled=lambda n, epoch: np.arange(n))
    rows = Rows(f"losses {case.name} accelerations {'on' if on else 'off'}", o.device)
    curve = []
    for batch in batches(o.steps, lm.head.rows, case.shape == "tiny"):
        batch = batch if on else unshared(batch)
        algo = GRPO(correction="none")
        with rows.step(), rows.clock("train"):
            batch.old_logprobs_T = policy.logprobs(batch)
            credit = algo.credit(batch)
            apply_credit(batch, credit)
            metrics = update(loop, batch, credit, algo, policy, None)
        curve.append([metrics["loss"], metrics["approx_kl"], metrics["entropy"]])
    return np.array(curve)


def sampled_alike(case: Case, o: Options) -> str:
    """Agreement of the sampler with and without graphs and compiled layers: |log-prob difference| of the tokens that both drew
    after the same beginning."""
    lm, work = random_lm(case.shape, o.device, o.dtype), o.work["grpo"]
    sampling = Sampling(max_tokens=min(work.response, 128), ignore_eos=True)
    requests = ask(0, work, lm.head.rows)
    answers = [sampler(lm, work, replace(o, accelerations=on)).generate(requests, sampling) for on in (True, False)]
    gaps, same, total = [], 0, 0
    for a, b in zip(*([s for group in answer for s in group] for answer in answers)):
        equal = a.ids_L == b.ids_L
        first = len(equal) if equal.all() else int(np.argmin(equal))
        gaps.append(np.abs(a.logprobs_L[:first] - b.logprobs_L[:first]))
        same, total = same + first, total + len(equal)
    gap = np.concatenate(gaps)
    return f"sampling, graphs and compilation on against off: {same}/{total} tokens before the first difference, |dlogp| mean " \
           f"{gap.mean():.1e} max {gap.max():.1e}"


def run(case: Case, o: Options) -> str:
    """One line: how far the two curves are apart."""
    free(o.device)
    on = train(case, o, True)
    free(o.device)
    with nothing_fused():
        off = train(case, o, False)
    free(o.device)
    gap, size = np.abs(on - off).max(0), np.abs(off).max(0)
    for step, (a, b) in enumerate(zip(on, off)):
        print(f"step {step}: on {np.array2string(a, precision=7)}   off {np.array2string(b, precision=7)}", flush=True)
    alike = sampled_alike(case, o)
    return (f"{case.name}: {o.steps} steps, accelerations on against off: loss differs by at most {gap[0]:.2e} (size {size[0]:.2e})"
            f", KL by {gap[1]:.2e} ({size[1]:.2e}), entropy by {gap[2]:.2e} ({size[2]:.2e}); {alike}")
