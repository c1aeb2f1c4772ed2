"""What is sampled while the policy trains: `trainer.pipeline`, as sources of a step's groups around one Sampler.

    step             a step's answers are sampled, then trained; tokens are of the weights that are trained
    ahead            the next step's answers are sampled and scored while this step trains: one step old
    stale(k)         sampling never rests; new weights enter in mid-answer; no token is trained more than k steps late
    stale(k, keep)   the same, but keys and values of earlier tokens are not computed again under the new weights

The loop is the same for all. Off-policy data are corrected by the algorithm's own importance weights (`trainer.algo.correction`),
with log-probs of the weights before the step's first update. Bounded staleness: AReaL (arXiv 2505.24298).
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np

from verl.algorithms.base import Algorithm
from verl.core.errors import ConfigError
from verl.core.types import Request, Sampling
from verl.trainer.ahead import Ahead, Source
from verl.trainer.config import TrainerConfig
from verl.trainer.run import Run
from verl.trainer.sampler import Sampler
from verl.trainer.stale import Stale
from verl.trainer.tasks import Hybrid

_FORM = re.compile(r"(step|ahead)|stale\(\s*([1-9]\d*)\s*(,\s*keep\s*)?\)")


class Plan(NamedTuple):
    """`trainer.pipeline`, read. lag: steps that a trained token may be late."""

    kind: str
    lag: int
    keep_kv: bool


def parse(text: str) -> Plan:
    """Read `trainer.pipeline`. Raises ConfigError naming what is allowed."""
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"trainer.pipeline: {text!r} is not known; allowed: step (sample, then train), ahead (the next step is "
                          "sampled while this one trains), stale(k) with k of 1 or more (sampling never rests), stale(k, keep). "
                          "Type e.g. 'trainer.pipeline=stale(1)'")
    if found[1]:
        return Plan(found[1], int(found[1] == "ahead"), False)
    return Plan("stale", int(found[2]), found[3] is not None)


def check(trainer: TrainerConfig) -> None:
    """Raise ConfigError, before anything is loaded, for a method that this pipeline cannot serve."""
    plan, algo, wrong = parse(trainer.pipeline), trainer.algo, ""
    if plan.kind == "step":
        return
    if isinstance(algo, Hybrid):
        wrong = "the tasks of a mixture take turns at one sampler; set it to step"
    elif not algo.online:
        wrong = f"{algo.name} samples nothing that could overlap; leave it out"
    elif plan.kind == "stale" and algo.needs_greedy:
        wrong = f"{algo.name} samples a greedy answer to each prompt under the same weights; set it to step or ahead"
    elif plan.kind == "stale" and type(algo).usable is not Algorithm.usable:
        wrong = f"{algo.name} replaces groups without a signal (dynamic sampling); set it to step or ahead"
    if wrong:
        raise ConfigError(f"trainer.pipeline: {trainer.pipeline}: {wrong}")


def open_source(run: Run, tasks, sampler: Sampler, algo: Algorithm, policy: Any) -> Source:
    """The source of a run's groups; lines say what overlaps. Raises ConfigError where that cannot be."""
    check(run.config)
    plan = parse(run.config.pipeline)
    if plan.kind == "step":
        return Source(run, tasks, sampler, algo)
    if plan.kind == "stale" and run.start is not None:
        raise ConfigError(f"trainer.pipeline: {run.config.pipeline} does not stop at the end of an epoch, as train_epoch does; "
                          "set it to step or ahead, or train with RLTrainer")
    where = _part(run, plan, sampler, policy)
    run.report.note(f"verl: trainer.pipeline: {run.config.pipeline}: the sampler works {where} while the policy trains; tokens are "
                    f"at most {plan.lag} step{'s' * (plan.lag > 1)} late")
    if not hasattr(algo, "correction"):
        line = f"{algo.name} weighs no tokens by their age: it compares answers"
    elif algo.correction == "none":
        line = "trainer.algo.correction: none: late tokens are trained as if the policy of now had made them"
    else:
        line = (f"late tokens are weighed by importance: trainer.algo.correction {algo.correction}, ratios "
                f"{algo.correction_floor:g} to {algo.correction_cap:g}")
    run.report.note(f"verl: {line}")
    return (Ahead if plan.kind == "ahead" else Stale)(run, tasks, sampler, algo, plan.lag)


def _part(run: Run, plan: Plan, sampler: Sampler, policy: Any) -> str:
    """See to it that the sampler has weights of its own; where they are, in words."""
    engine, trained = sampler.engine, getattr(policy, "lm", None)
    setting = f"trainer.pipeline: {run.config.pipeline}"
    if plan.kind == "stale" and not engine.in_flight:
        raise ConfigError(f"{setting} needs an engine that takes weights in mid-answer, and {type(engine).__name__} does not; set "
                          "trainer.rollout.engine: native in this process, or trainer.pipeline: ahead")
    lm = getattr(engine, "lm", None)
    shared = lm is not None and trained is not None and lm.module is trained.module
    if not shared:
        if plan.keep_kv:
            engine.config.keep_kv = True
        return "on weights of its own"
    if not hasattr(engine, "apart"):
        raise ConfigError(f"{setting}: {type(engine).__name__} samples from the very module that trains and cannot make a copy; "
                          "set trainer.pipeline: step, or use the engine native or hf")
    sampler.engine = engine.apart(keep_kv=True) if plan.keep_kv else engine.apart()
    engine.close()
    if lm.device.type == "cuda":  # the first capture of a graph forbids the process to wait, so it comes before any training
        sampler.engine.generate([Request("warm", np.zeros(1, np.int32), (0,))], Sampling(max_tokens=2, ignore_eos=True))
    size = sum(p.numel() * p.element_size() for p in lm.module.parameters())
    return f"on its own copy of the weights ({size / 2**20:,.0f} MiB on {lm.device})"
