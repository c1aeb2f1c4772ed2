"""Steps of ours: GRPO with a reward function, and PPO with actor, critic, reward model and reference in one process.

Policies train in bf16 with fp32 masters. Full fine-tuning has four models of one shape: the critic is an independent one
with a value head, the reward model a trunk with a score head, the reference a frozen copy's worth of weights. With
adapters (l8lora) the critic is a value head on the trunk and the reference is the policy without its adapters, so that two
trunks are held: 8B + 8B weights, 32 GiB of keys and values while sampling.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from measure import Case, Options, Rows, Work, free
from shapes import config_of, random_lm

from verl.algorithms.grpo import GRPO
from verl.algorithms.ppo import PPO
from verl.core.batch import Batch, from_groups
from verl.core.types import Group, Request, Sampling, Task, derive_seed
from verl.engine.native.config import NativeConfig
from verl.engine.native.engine import NativeEngine
from verl.engine.optimizer import OptimConfig
from verl.engine.train import TrainEngine
from verl.models.compile import compile_for_training, decoder_layers
from verl.models.load import LoraConfig
from verl.models.packed import Packed
from verl.trainer.cost import Job, Parallel, in_use, rollout_parts, train_parts
from verl.trainer.rl import apply_credit, update
from verl.trainer.roles import Reference
from verl.trainer.shape import shape_of

OPTIM = OptimConfig(lr=1e-6)


@dataclass
class Parts:
    """The engines of one training."""

    algo: object
    policy: TrainEngine
    rollout: NativeEngine
    reference: Reference | None = None
    critic: TrainEngine | None = None
    reward: TrainEngine | None = None

    @property
    def trunks(self) -> list:
        engines = (self.policy, self.critic, self.reward, self.reference.engine if self.reference else None)
        return list({id(e.lm.module): e.lm for e in engines if e is not None}.values())


def trainer(lm, o: Options, **settings) -> TrainEngine:
    """A training engine with the memory options that were asked for."""
    return TrainEngine(lm, 1.0, OPTIM, 1000, token_budget=o.budget, **settings, **({"memory": o.memory} if o.memory else {}))


def sampler(lm, work: Work, o: Options) -> NativeEngine:
    """The built-in engine with a cache that one step fills exactly."""
    page = 64 if o.device == "cuda" else 16
    pages = work.sequences * -(-work.response // page) + work.prompts * -(-work.prompt // page)
    return NativeEngine(lm, NativeConfig(max_total_tokens=work.length, kv_tokens=page * (pages + 8), max_sequences=work.sequences,
                                         cuda_graphs=o.accelerations, compile=o.accelerations))


def frozen(case: Case, o: Options, seed: int):
    lm = random_lm(case.shape, o.device, o.dtype, seed=seed)
    for parameter in lm.module.parameters():
        parameter.requires_grad_(False)
    return lm


def build(method: str, case: Case, o: Options, shared_critic: bool = False) -> Parts:
    """Every model of the method on the device. The critic is a value head on the trunk with adapters, or when asked for."""
    shared_critic = shared_critic or bool(case.lora)
    actor = random_lm(case.shape, o.device, o.dtype, lora=LoraConfig(rank=case.lora))
    if method == "grpo":
        policy = trainer(actor, o)
        parts = Parts(GRPO(), policy, sampler(actor, o.work[method], o))
    else:
        if shared_critic:
            actor.add_value_head()
        policy = trainer(actor, o, train_values=shared_critic)
        reference = TrainEngine(actor if case.lora else frozen(case, o, 0), token_budget=o.budget)
        critic = policy
        if not shared_critic:
            lm = random_lm(case.shape, o.device, o.dtype, seed=1)
            lm.add_value_head()
            critic = trainer(lm, o, train_values=True)
        judge = frozen(case, o, 2)
        judge.add_score_head()
        parts = Parts(PPO(), policy, sampler(actor, o.work[method], o), Reference(reference, adapters_off=bool(case.lora)), critic,
                      TrainEngine(judge, token_budget=o.budget))
    if o.accelerations and o.device == "cuda":
        for lm in parts.trunks:
            compile_for_training(lm)
    return parts


def planned_gib(method: str, case: Case, o: Options, parts: Parts) -> float:
    """Device memory in use at the peak, as the plan foretells it from sizes alone."""
    shape, work = shape_of(config_of(case.shape)), o.work[method]
    ppo, copies = method == "ppo", method == "ppo" and not case.lora
    cache = parts.rollout.pages * parts.rollout.page_size
    job = Job(actor=shape, trained=shape.lora(case.lora) if case.lora else shape.parameters, prompts=work.prompts, group=work.group,
              prompt=work.prompt, response=work.response, micro=parts.policy.token_budget,
              score=parts.reference.engine.token_budget if ppo else 0, critic=shape if copies else None, values=ppo,
              reference=shape if copies else None, referenced=ppo, reward=shape if ppo else None, width=o.dtype.itemsize,
              kv_width=o.dtype.itemsize, kv_tokens=cache, sequences=work.sequences, compiled=o.accelerations,
              checkpoint="checkpoint" in o.memory, offload="offload" in o.memory, gpu=o.device == "cuda")
    return in_use([*train_parts(job, Parallel()), *rollout_parts(job, 0)]) / 2**30


@torch.no_grad()
def scores(engine: TrainEngine, batch: Batch) -> np.ndarray:
    """The reward model's number for every sequence, float64 [S]; the batch must be in prompt order."""
    out = [engine.lm.forward(Packed(micro, engine.lm.device, keep_last=True), 1.0, scores=True).scores_S
           for micro in batch.micro_batches(engine.token_budget)]
    return torch.cat(out).double().cpu().numpy()


def ask(step: int, work: Work, vocabulary: int) -> list[Request]:
    """Random prompts and one seed a sample, both a function of the step."""
    rng = np.random.default_rng(step)
    return [Request(str(i), rng.integers(0, vocabulary, work.prompt).astype(np.int32),
                    tuple(derive_seed(step, i, j) for j in range(work.group))) for i in range(work.prompts)]


def reward_and_score(groups: list[Group], reward: TrainEngine | None) -> Batch:
    """The step's batch with its rewards: from the reward model, else from a function of the token ids."""
    if reward is None:
        for group in groups:
            for sample in group.samples:
                sample.score = float(np.mean(sample.ids_L % 2))
        return from_groups(groups)
    batch = from_groups(groups)
    batch.rewards_S = scores(reward, batch)
    return batch


def one_step(step: int, parts: Parts, work: Work, sampling: Sampling, rows: Rows, sleep: bool) -> dict[str, float]:
    """One step as the trainer's loop makes it, each verb under the clock."""
    run = SimpleNamespace(config=SimpleNamespace(train_batch_size=None, update_epochs=1, updates_per_step=1), sampling=sampling)
    requests = ask(step, work, parts.policy.lm.head.rows)
    with rows.clock("sync"):
        parts.rollout.load_weights(parts.policy.weights())
    with rows.clock("generate"):
        samples = parts.rollout.generate(requests, sampling)
        if sleep:
            parts.rollout.sleep()
    with rows.clock("score"):
        groups = [Group(Task(r.key, "p"), r.prompt_ids, s) for r, s in zip(requests, samples)]
        assert not sampling.ignore_eos or all(len(s) == work.response for g in groups for s in g.samples)
        batch = reward_and_score(groups, parts.reward)
    with rows.clock("logprobs"):
        if parts.reference is not None:
            with rows.clock("reference"):
                batch.ref_logprobs_T = parts.reference.logprobs(batch)
        if parts.critic is not None:
            with rows.clock("values"):
                batch.values_T = parts.critic.values(batch)
    with rows.clock("credit"):
        credit = parts.algo.credit(batch)
        apply_credit(batch, credit)
    with rows.clock("train"):
        return update(run, batch, credit, parts.algo, parts.policy, parts.critic)


def run(method: str, case: Case, o: Options) -> dict[str, float]:
    """Medians of `o.steps` steps behind a first one that compiles and captures."""
    free(o.device)
    work = o.work[method]
    parts = build(method, case, o)
    sampling = Sampling(max_tokens=work.response, ignore_eos=True)
    planned = planned_gib(method, case, o, parts)
    print(f"planned: {planned:.1f} GiB of device memory in use at the peak; micro-batches of {parts.policy.token_budget} tokens",
          flush=True)
    rows = Rows(f"verl {method} {case.name}", o.device)
    for step in range(o.steps + 1):
        with rows.step():
            metrics = one_step(step, parts, work, sampling, rows, o.sleep)
        shown = [k for k in sorted(metrics) if "difference" in k or k in ("grad_norm", "loss", "kl")]
        print({k: round(metrics[k], 6) for k in shown}, flush=True)
    result = rows.median() | {"planned": planned}
    if method == "ppo" and o.accelerations:
        result |= forward_seconds(parts, work)
    return result


@contextmanager
def uncompiled(lms: list) -> Iterator[None]:
    """These models' layers as Python runs them, kernel by kernel."""
    layers = [layer for lm in lms for layer in decoder_layers(lm)]
    saved = [layer._compiled_call_impl for layer in layers]
    for layer in layers:
        layer._compiled_call_impl = None
    try:
        yield
    finally:
        for layer, call in zip(layers, saved):
            layer._compiled_call_impl = call


def forward_seconds(parts: Parts, work: Work) -> dict[str, float]:
    """Seconds that reward model, critic and reference take together, for 8 short sequences (latency) and for 16 whole ones,
    with compiled layers and without; and the share of the latency that compilation saves."""
    out = {}
    for name, rows, response in (("latency", 8, work.response // 16), ("forward", 16, work.response)):
        rng = np.random.default_rng(0)
        prompts = rng.integers(0, parts.policy.lm.head.rows, (rows, work.prompt // 16 + 1)).astype(np.int32)
        batch = Batch(prompts=list(prompts), prompt_S=np.arange(rows), lengths_S=np.full(rows, response),
                      ids_T=rng.integers(0, parts.policy.lm.head.rows, rows * response).astype(np.int32),
                      mask_T=np.ones(rows * response, bool), row_S=np.arange(rows), group_S=np.arange(rows))
        for way, context in (("on", nullcontext()), ("off", uncompiled(parts.trunks))):
            with context:
                times = []
                for _ in range(4):
                    begun = time.perf_counter()
                    scores(parts.reward, batch), parts.critic.values(batch), parts.reference.logprobs(batch)
                    times.append(time.perf_counter() - begun)
                out[f"{name}_{way}"] = float(np.median(times[1:]))
    return out | {"graph_latency_saved": 1 - out["latency_on"] / out["latency_off"]}
