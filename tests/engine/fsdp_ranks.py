"""Runs every check of test_fsdp.py in worlds of 1, 2 and 4 real processes: python -m tests.engine.fsdp_ranks FOLDER

The parent imports everything once and forks the ranks. Each world's results lie in FOLDER/<ranks>.json: check -> a list of
what each rank returned.
"""

import ctypes
import json
import multiprocessing
import sys
from pathlib import Path

import numpy as np
import peft  # noqa: F401  what follows is imported before the ranks are forked, not by each of them
import torch
import torch._dynamo
import torch.distributed as dist

from tests.engine.test_train import poisoned, regress
from tests.flow import worlds
from tests.models.small_lms import ragged, small
from verl.algorithms.dpo import DPO
from verl.algorithms.grpo import GRPO
from verl.algorithms.ppo import PPO
from verl.algorithms.reduce import coefficients
from verl.core.errors import ConfigError, WeightsError
from verl.core.weights import Weights
from verl.engine.fsdp import FsdpEngine
from verl.engine.optimizer import OptimConfig
from verl.engine.train import TrainEngine
from verl.models import LoraConfig, bind

LR, STEPS = 1e-4, 3
PAIRS = dict(prompts=(3, 4, 2), answers=((5, 2), (4, 9), (7, 1)))
PROBE = ragged(9)
BASE = dict(kind="llama", dtype="float32", strategy="FULL_SHARD", values=False, lora=0, memory=(), loss="regress", budget=20,
            shard_ranks=None, tied=False, shape={})
CASES = {
    "full": {}, "grad_op": dict(strategy="SHARD_GRAD_OP", budget=10_000), "no_shard": dict(strategy="NO_SHARD", values=True),
    "hybrid": dict(strategy="HYBRID_SHARD"), "hybrid_zero2": dict(strategy="_HYBRID_SHARD_ZERO2", shard_ranks=1),
    "exact": dict(kind="gpt2", dtype="float64", values=True), "few_rows": dict(shape=dict(prompts=(3,), answers=((4,),))),
    "tied": dict(values=True, tied=True), "lora": dict(lora=2), "mixtral": dict(kind="mixtral"),
    "lean": dict(memory=("checkpoint", "offload"), values=True, kind="gemma2"),
    "lean_no_shard": dict(memory=("checkpoint", "offload"), strategy="NO_SHARD", lora=2),
    "grpo": dict(loss="grpo"), "ppo": dict(loss="ppo", values=True), "dpo": dict(loss="dpo", shape=PAIRS),
    "unpacked": dict(kind="lfm2", strategy="NO_SHARD"),
}
FOUR = {"hybrid": dict(shard_ranks=2), "hybrid_zero2": dict(shard_ranks=2)}
IN_FOUR, IN_ONE = ("full", "no_shard", "hybrid", "hybrid_zero2", "few_rows"), ("full",)


def build(make, kind, dtype, lora, values, tied, **optim):
    lm = bind(small(kind, getattr(torch, dtype), tie_word_embeddings=tied), None, lora=LoraConfig(rank=lora) if lora else None)
    if values:
        lm.add_value_head()
    return make(lm, 0.9, OptimConfig(**{"lr": LR, "max_grad_norm": 0.5, "weight_decay": 0.1} | optim), 10)


def engine(case, single=False, **optim):
    c = BASE | CASES[case]

    def make(lm, *settings):
        if single:
            return TrainEngine(lm, *settings, 10_000, c["values"])
        own = (FOUR.get(case, {}) | c if dist.get_world_size() != 4 else c | FOUR.get(case, {}))
        return FsdpEngine(lm, *settings, c["budget"], c["values"], c["memory"], c["strategy"], shard_ranks=own["shard_ranks"])

    return build(make, c["kind"], c["dtype"], c["lora"], c["values"], c["tied"], **optim)


def batch_for(case, e, seed):
    """An optimizer batch with everything that its loss reads; uneven rows, some empty, one without a prompt."""
    c = BASE | CASES[case]
    batch = ragged(seed, **c["shape"])
    if c["loss"] in ("grpo", "ppo"):
        algo = {"grpo": GRPO(), "ppo": PPO(clip_value=0.2)}[c["loss"]]
        rng = np.random.default_rng(seed)
        batch.old_logprobs_T = batch.rollout_logprobs_T = e.logprobs(batch)
        batch.ref_logprobs_T = batch.old_logprobs_T + rng.normal(0, 0.1, len(batch.ids_T)).astype(np.float32)
        batch.rewards_S, batch.truncated_S = rng.random(len(batch)), np.zeros(len(batch), bool)
        batch.values_T = e.values(batch) if c["values"] else None
        credit = algo.credit(batch)
        batch.advantages_T, batch.returns_T = credit.advantages_T, credit.returns_T
    if c["loss"] == "dpo":
        batch.label_S = np.tile(np.array([1, -1], np.int8), len(batch) // 2)
        batch.ref_sums_S = np.zeros(len(batch))
    batch.weights_T, batch.weights_S = coefficients("sequence_mean", batch)
    return batch


def train(case, e, seeds):
    """(metrics and step of each update, scores of a further batch)."""
    c = BASE | CASES[case]
    loss, unit, grad = {"regress": (regress, "row", True), "grpo": (GRPO().loss, "row", False),
                        "ppo": (PPO(clip_value=0.2).loss, "row", False), "dpo": (DPO().loss, "group", False)}[c["loss"]]
    history = []
    for seed in seeds:
        metrics = e.forward_backward(batch_for(case, e, seed), loss, unit, entropy_grad=grad)
        info = e.step()
        history.append(metrics | {"norm": info.grad_norm, "rate": info.lr, "skipped": float(info.skipped != "")})
    scores = [e.logprobs(PROBE), e.values(PROBE)] if c["values"] else [e.logprobs(PROBE)]
    return history, [column[PROBE.mask_T] for column in scores]


def references(rank, folder):
    """What one process says, for every case; and its checkpoint after two updates."""
    for case in CASES:
        e = engine(case, single=True)
        found = [*train(case, e, range(2))[:1], clones(e.state())]
        history, scores = train(case, e, range(2, STEPS))
        torch.save([found[0] + history, scores, clones(e.state()), found[1]], f"{folder}/{case}.pt")


def clones(state):
    return {n: t.clone() for n, t in state[0].items()}, state[1]


def apart(got, want):
    """Largest difference between two sets of named tensors or numbers; names and dtypes must agree."""
    assert got.keys() == want.keys(), sorted(set(got) ^ set(want))
    return max(float(np.abs(np.asarray(got[n], np.float64) - np.asarray(want[n], np.float64)).max(initial=0)) for n in want)


def same_training(rank, case, folder):
    """How far this world's metrics, scores and state are from one process'."""
    history, scores, (tensors, numbers), _ = torch.load(f"{folder}/{case}.pt", weights_only=False)
    e = engine(case)
    got, own = train(case, e, range(STEPS))
    state, counts = e.state()
    assert counts == numbers and (rank == 0 or case.endswith("no_shard") or case == "unpacked" or not state)
    return {"metrics": max(apart(g, w) / max(1, w["norm"]) for g, w in zip(got, history)),
            "scores": max(float(np.abs(g - w).max()) for g, w in zip(own, scores)),
            "state": apart(state, tensors) if state else 0.0, "norm": min(w["norm"] for w in history)}


def resumed(rank, case, folder, file):
    """A checkpoint of other ranks goes on as one process would have."""
    history, scores, (tensors, numbers), _ = torch.load(f"{folder}/{case}.pt", weights_only=False)
    saved = torch.load(f"{folder}/{case}.pt", weights_only=False)[3] if file is None else torch.load(f"{folder}/{file}")
    e = engine(case)
    e.load_state(*saved)
    kept = e.state()[0]
    again = apart(kept, saved[0]) if kept else 0.0
    got, own = train(case, e, range(2, STEPS))
    state, counts = e.state()
    assert counts == numbers
    return {"again": again, "metrics": apart(got[-1], history[-1]) / history[-1]["norm"],
            "state": apart(state, tensors) if state else 0.0}


def saved(rank, case, folder, file):
    e = engine(case)
    train(case, e, range(2))
    state = e.state()
    if rank == 0:
        torch.save(state, f"{folder}/{file}")
    return {}


def skips(rank, case):
    """One bad token on one rank: nobody updates. No gradient at all: nobody either."""
    e = engine(case)
    before = {n: t.clone() for n, t in e.weights()}
    batch = batch_for(case, e, 0)
    calls = []

    def bad(x):
        calls.append(1)
        return poisoned(x) if rank == 0 and len(calls) == 1 else regress(x)

    e.forward_backward(batch, bad, entropy_grad=True)
    first = e.step().skipped
    batch.weights_T = 0 * batch.weights_T
    e.forward_backward(batch, regress)
    second = e.step().skipped
    third = e.step().skipped
    after = dict(e.weights())
    return {"skipped": [first, second, third], "numbers": [e.version, e.attempts, e.skipped_total],
            "same": all(torch.equal(after[n], before[n]) for n in before)}


def starting_policy(rank):
    """With adapters off the start answers, before and after updates; adapters still train when that came first."""
    e, one = engine("lora"), engine("lora", single=True)
    scores = []
    for x in (e, one):
        with x.lm.adapters_off():
            first = x.logprobs(PROBE)[PROBE.mask_T]
        train("lora", x, range(2))
        with x.lm.adapters_off():
            last = x.logprobs(PROBE)[PROBE.mask_T]
        scores.append((first, last, x.logprobs(PROBE)[PROBE.mask_T]))
    (first, last, own), (want, _, trained) = scores
    return {"start": float(np.abs(first - want).max()), "stays": bool(np.array_equal(first, last)),
            "moved": float(np.abs(own - first).max()), "trained": float(np.abs(own - trained).max())}


def half(rank, case):
    """bfloat16: float32 shards move, layers are bfloat16; what comes out has one process' names and dtypes."""
    found = {}
    for single in (True, False):
        e = build((lambda lm, *a: TrainEngine(lm, *a, 20)) if single else
                  (lambda lm, *a: FsdpEngine(lm, *a, 20, strategy=CASES[case]["strategy"])), "llama", "bfloat16", 0, False, False)
        history, (logp,) = train("full", e, range(STEPS))
        tensors = {n: t.clone() for n, t in e.state()[0].items()}
        weights = {n: t.clone() for n, t in e.weights()}
        found[single] = (history, logp, tensors, weights)
    (one, logp1, tensors1, weights1), (many, logp2, tensors2, weights2) = found[True], found[False]
    assert all(weights2[n].dtype is t.dtype for n, t in weights1.items()) and weights1.keys() == weights2.keys()
    assert not tensors2 or {n: t.dtype for n, t in tensors1.items()} == {n: t.dtype for n, t in tensors2.items()}
    masters = [n for n in tensors2 if n.startswith("master.")]
    again = FsdpEngine(bind(small("llama", torch.bfloat16, seed=1), None), 0.9, OptimConfig(lr=LR), 10, 20,
                       strategy=CASES[case]["strategy"])
    file = [tensors2, e.state()[1]]
    dist.broadcast_object_list(file)
    again.load_state(*file)
    back = again.state()[0]
    return {"norm": abs(one[0]["norm"] / many[0]["norm"] - 1), "logp": float(np.abs(logp1 - logp2).max()),
            "masters": max((float((tensors2[n] - tensors1[n]).abs().max()) for n in masters), default=0.0),
            "equal": all(torch.equal(back[n], tensors2[n]) for n in tensors2)}


def delivery(rank, case):
    """Weights come and go: receipts, the layout's pieces, faults that change nothing."""
    e, one = engine(case), engine(case, single=True, lr=0.1)
    train(case, one, range(2))
    tensors = [(n, t.clone()) for n, t in one.weights()]
    words = []
    for wrong in (tensors[:-1], [(n, t[:1]) for n, t in tensors], [*tensors, ("extra", torch.zeros(1))]):
        try:
            e.load_weights(Weights(2, lambda wrong=wrong: iter(wrong)))
        except WeightsError as error:
            words.append(str(error))
    receipt, exported = e.load_weights(one.weights()), e.exported()
    everyone, boxes = [None] * dist.get_world_size(), e.layout([r + 5 for r in range(dist.get_world_size())])
    dist.all_gather_object(everyone, dict(e.arrays()))
    pieced = {n: torch.full(spec.shape, torch.nan, dtype=spec.dtype) for n, spec in boxes.table.items()}
    for r, arrays in enumerate(everyone):
        for piece in boxes.pieces[r + 5]:
            place = pieced[piece.tensor][tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop))]
            place.copy_(piece.view(arrays, piece.box))
    return {"faults": len(words), "receipt": receipt == one.weights().receipt() == e.weights().receipt(), "version": e.version,
            "pieces": all(torch.equal(pieced[n], t) for n, t in tensors),
            "exported": apart(exported, one.exported()) if exported else 0.0}


def refusals(rank):
    words = []
    lm = bind(small("lfm2"), None)
    for settings in (dict(strategy="HALF_SHARD"), dict(), dict(strategy="HYBRID_SHARD", shard_ranks=3)):
        try:
            FsdpEngine(lm if not settings else bind(small("llama"), None), **settings)
        except ConfigError as error:
            words.append(str(error))
    return words


def rewards(rank):
    """A reward model's scores."""
    found = []
    for make in (TrainEngine, FsdpEngine):
        lm = bind(small("llama"), None)
        lm.add_score_head()
        e = make(lm, 0.9, OptimConfig(lr=LR), token_budget=20)
        batch = ragged()
        batch.weights_T, batch.weights_S = coefficients("sequence_mean", batch)
        metrics = e.forward_backward(batch, square_scores, scores=True, logprobs=False)
        found.append((metrics["loss"], e.step().grad_norm, e.lm.score_head.weight.detach()))
    return [abs(found[0][0] - found[1][0]), abs(found[0][1] - found[1][1]), float((found[0][2] - found[1][2]).abs().max())]


def square_scores(x):
    from verl.algorithms.base import LossOutputs
    return LossOutputs((x.scores_S - 1).square(), False)


def everything(rank, folder):
    """All checks of a world, one after another; a check that raises says so on the rank that did."""
    if sys.platform == "linux":  # a rank ends with the process that forked it (PR_SET_PDEATHSIG, SIGKILL)
        ctypes.CDLL(None).prctl(1, 9)
    ranks = dist.get_world_size()
    plan = {case: (same_training, case, folder) for case in {1: IN_ONE, 2: CASES, 4: IN_FOUR}[ranks]}
    if ranks == 1:
        plan |= {"resumed from two": (resumed, "exact", folder, "exact.two")}
    if ranks == 2:
        plan |= {"saved": (saved, "exact", folder, "exact.two"), "resumed from one": (resumed, "exact", folder, None),
                 "skips": (skips, "full"), "skips no_shard": (skips, "no_shard"), "starting policy": (starting_policy,),
                 "half": (half, "grad_op"), "half no_shard": (half, "no_shard"), "delivery": (delivery, "tied"),
                 "delivery no_shard": (delivery, "no_shard"),
                 "refusals": (refusals,), "rewards": (rewards,), "lean resumed": (resumed, "lean", folder, None)}
    if ranks == 4:
        plan |= {"resumed from two": (resumed, "exact", folder, "exact.two"),
                 "delivery hybrid": (delivery, "hybrid")}
    found = {}
    for name, (check, *args) in plan.items():
        try:
            found[name] = check(rank, *args)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
    return found


def main():
    folder = sys.argv[1]
    torch.set_num_threads(1)
    for kind in {(BASE | c)["kind"] for c in CASES.values()}:
        small(kind)
    worlds.CONTEXT = multiprocessing.get_context("fork")
    for ranks, check in ((1, references), (2, everything), (4, everything), (1, everything)):
        results = worlds.run_world(ranks, check, folder, limit_s=300)
        errors = [error for _, error in results if error]
        if errors or check is everything and any(r is None for r, _ in results):
            sys.exit(f"{ranks} ranks: {errors[0] if errors else 'one died'}")
        if check is everything:
            names = list(results[0][0])
            Path(folder, f"{ranks}.json").write_text(json.dumps({n: [r[n] for r, _ in results] for n in names}))


if __name__ == "__main__":
    main()
