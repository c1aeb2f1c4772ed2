"""Every acceleration keeps the losses: the same run with all of them off has the same curve (a GPU's are compared by
benchmarks/step.py --compare-losses)."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_runs import tiny_model

from verl.algorithms.dpo import DPO
from verl.algorithms.grpo import GRPO
from verl.algorithms.ppo import PPO
from verl.core.batch import Batch, from_groups
from verl.core.types import Group, Request, Sampling, Task, derive_seed
from verl.engine.hf_engine import HFEngine
from verl.engine.native.config import NativeConfig
from verl.engine.native.engine import NativeEngine
from verl.engine.optimizer import OptimConfig
from verl.engine.train import TrainEngine
from verl.models import lm as lm_module
from verl.models import load_lm
from verl.trainer import offline
from verl.trainer.rl import apply_credit, update

STEPS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("accelerations"), context=128)


def plain_logprobs(hidden_TD, weight_VD, bias_V, targets_T, spec, temperature):
    """What the output layer means: all logits at once."""
    logp_TV = (torch.nn.functional.linear(hidden_TD, weight_VD, bias_V)[:, :spec.rows] / temperature).log_softmax(-1)
    return logp_TV.gather(-1, targets_T[:, None]).squeeze(-1), -(logp_TV.exp() * logp_TV).sum(-1)


def alone(batch: Batch) -> Batch:
    """Every sequence behind its own copy of its prompt."""
    return replace(batch, prompts=[batch.prompts[p] for p in batch.prompt_S], prompt_S=np.arange(len(batch)))


def samples(engine, step: int, sampling: Sampling) -> Batch:
    """Sampled groups of 3 with a reward that depends on the tokens; prompts of several lengths."""
    rng = np.random.default_rng(step)
    asked = [Request(str(i), rng.integers(0, 256, 3 + 4 * i).astype(np.int32), tuple(derive_seed(step, i, j) for j in range(3)))
             for i in range(3)]
    answers = engine.generate(asked, sampling)
    groups = [Group(Task(r.key, "p"), r.prompt_ids, a) for r, a in zip(asked, answers)]
    for group in groups:
        for sample in group.samples:
            sample.score = float(np.mean(sample.ids_L % 2)) + len(sample) / 100
    return from_groups(groups)


def online_curve(model, algo, fast: bool, monkeypatch) -> np.ndarray:
    """[steps, 3]: loss of two updates a step, approximate KL, entropy; sampled by the built-in engine, or by `generate`."""
    lm = load_lm(str(model), "float32")
    if algo.needs_critic:
        lm.add_value_head()
    policy = TrainEngine(lm, 1.0, OptimConfig(lr=3e-3), 100, token_budget=100 if fast else 1, train_values=algo.needs_critic)
    start = TrainEngine(load_lm(str(model), "float32"), token_budget=100 if fast else 1)
    rollout = NativeEngine(lm, NativeConfig(kv_tokens=2000)) if fast else HFEngine(lm)
    if not fast:
        monkeypatch.setattr(lm_module, "token_logprobs", plain_logprobs)
    sampling = Sampling(max_tokens=12, stop_ids=tuple(range(0, 264, 12)))
    loop = SimpleNamespace(config=SimpleNamespace(train_batch_size=None, update_epochs=2, updates_per_step=2), sampling=sampling,
                           shuffled=lambda n, epoch: np.arange(n))
    curve = []
    for step in range(STEPS):
        rollout.load_weights(policy.weights())
        batch = samples(rollout, step, sampling)
        batch = batch if fast else alone(batch)
        batch.ref_logprobs_T = start.logprobs(batch)
        if algo.needs_critic:
            batch.values_T = policy.values(batch)
        batch.old_logprobs_T = policy.logprobs(batch)
        credit = algo.credit(batch)
        apply_credit(batch, credit)
        metrics = update(loop, batch, credit, algo, policy, policy if algo.needs_critic else None)
        curve.append([metrics["loss"], metrics["approx_kl"], metrics["entropy"]])
    monkeypatch.undo()
    return np.array(curve)


@pytest.mark.parametrize("algo", [GRPO(kl_coef=0.1), PPO()], ids=lambda a: a.name)
def test_online_losses_are_the_same_without_accelerations(model, algo, monkeypatch):
    """Off: plain logits, one sequence a micro-batch behind its own prompt, transformers' generate. float32: within 1e-5 after
    six updates of a large learning rate; the sampled tokens are the same ones."""
    fast, plain = online_curve(model, algo, True, monkeypatch), online_curve(model, algo, False, monkeypatch)
    assert np.abs(fast[:, 0]).max() > 1e-3 and fast[:, 1].max() > 1e-5, "a curve that does not move compares nothing"
    np.testing.assert_allclose(fast, plain, rtol=1e-4, atol=1e-5)


def pairs(step: int) -> Batch:
    rng = np.random.default_rng(step)
    owner_S, lengths_S = np.repeat(np.arange(4), 2), rng.integers(2, 20, 8)
    tokens = int(lengths_S.sum())
    return Batch(prompts=[rng.integers(0, 256, n).astype(np.int32) for n in (3, 9, 14, 5)], prompt_S=owner_S, lengths_S=lengths_S,
                 ids_T=rng.integers(0, 256, tokens).astype(np.int32), mask_T=np.ones(tokens, bool), row_S=np.arange(8),
                 group_S=owner_S.copy(), label_S=np.tile(np.array([1, -1], np.int8), 4))


def pair_curve(model, fast: bool, monkeypatch) -> np.ndarray:
    lm = load_lm(str(model), "float32")
    policy = TrainEngine(lm, 1.0, OptimConfig(lr=3e-3), 100, token_budget=200 if fast else 1)
    start = TrainEngine(load_lm(str(model), "float32"), token_budget=200 if fast else 1)
    if not fast:
        monkeypatch.setattr(lm_module, "token_logprobs", plain_logprobs)
    loop = SimpleNamespace(config=SimpleNamespace(update_epochs=2, updates_per_step=2), sampling=SimpleNamespace(max_tokens=1))
    curve = []
    for step in range(STEPS):
        batch = pairs(step) if fast else alone(pairs(step))
        batch.ref_logprobs_T = start.logprobs(batch)
        metrics = offline.update(loop, batch, DPO(), policy, None)
        curve.append([metrics["loss"], metrics["rewards/margins"], metrics["logps/chosen"]])
    monkeypatch.undo()
    return np.array(curve)


def test_pair_losses_are_the_same_without_accelerations(model, monkeypatch):
    fast, plain = pair_curve(model, True, monkeypatch), pair_curve(model, False, monkeypatch)
    assert fast[-1, 0] != pytest.approx(fast[0, 0], abs=1e-3), "a curve that does not move compares nothing"
    np.testing.assert_allclose(fast, plain, rtol=1e-4, atol=1e-5)
