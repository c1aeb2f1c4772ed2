"""A whole GRPO step on one GPU, split into its parts: python benchmarks/step.py [q05 q15] [--steps 3] [--no-compile]

64 prompts x 8 responses, prompt 256, response 1024 forced, one update a step, a reward function over token ids, random
weights, bf16 working weights with fp32 masters. Peak memory is device memory in use (sampled), not an allocator's count.
Appends to results/step.h200.jsonl.
"""

import argparse
import contextlib
import gc
import subprocess
import threading
import time
from types import SimpleNamespace

import numpy as np
import torch
from shapes import flops_per_token, random_lm, record

from verl.algorithms.grpo import GRPO
from verl.core.batch import from_groups
from verl.core.types import Group, Request, Sampling, Task, derive_seed
from verl.engine.native.config import NativeConfig
from verl.engine.native.engine import NativeEngine
from verl.engine.optimizer import OptimConfig
from verl.engine.train import TrainEngine
from verl.models.compile import compile_for_training
from verl.trainer.rl import apply_credit, update

PROMPTS, GROUP, PROMPT, RESPONSE = 64, 8, 256, 1024
PEAK_FLOPS = 790e12  # bf16 on this chip, measured


class Watch:
    """Samples device memory in use and utilisation until stopped."""

    def __enter__(self):
        self.peak, self.busy, self.on = 0, [], True
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        return self

    def _run(self):
        query = ["nvidia-smi", "--query-gpu=memory.used,utilization.gpu", "--format=csv,noheader,nounits", "-i", "0"]
        while self.on:
            used, busy = subprocess.run(query, capture_output=True, text=True).stdout.strip().split(", ")
            self.peak = max(self.peak, int(used) / 1024)
            self.busy.append(int(busy))
            time.sleep(0.2)

    def __exit__(self, *_):
        self.on = False
        self.thread.join()


def one_step(step, rollout, policy, run, sampling, clock, sleep):
    rng = np.random.default_rng(step)
    prompts = [rng.integers(0, 150000 if policy.lm.head.rows > 150000 else 128000, PROMPT).astype(np.int32) for _ in range(PROMPTS)]
    with clock("generate"):
        rollout.load_weights(policy.weights())
        requests = [Request(str(i), p, tuple(derive_seed(step, i, j) for j in range(GROUP))) for i, p in enumerate(prompts)]
        samples = rollout.generate(requests, sampling)
        if sleep:
            rollout.sleep()
    with clock("score"):
        groups = [Group(Task(str(i), "p"), p, s) for i, (p, s) in enumerate(zip(prompts, samples))]
        for group in groups:
            for sample in group.samples:
                assert len(sample) == RESPONSE, len(sample)
                sample.score = float(np.mean(sample.ids_L % 2))
    with clock("credit"):
        batch, algo = from_groups(groups), GRPO()
        credit = algo.credit(batch)
        apply_credit(batch, credit)
    with clock("train"):
        metrics = update(run, batch, credit, algo, policy, None)
        torch.cuda.synchronize()
    return batch.tokens, metrics


def case(name, steps, compiled, budget, sleep):
    gc.collect()
    torch.cuda.empty_cache()
    lm = random_lm(name)
    policy = TrainEngine(lm, 1.0, OptimConfig(lr=1e-6), 1000, token_budget=budget)
    if compiled:
        compile_for_training(lm)
    pages = PROMPTS * GROUP * -(-RESPONSE // 64) + PROMPTS * -(-PROMPT // 64)
    rollout = NativeEngine(lm, NativeConfig(max_total_tokens=PROMPT + RESPONSE, kv_tokens=64 * (pages + 8)))
    run = SimpleNamespace(config=SimpleNamespace(train_batch_size=None, update_epochs=1, updates_per_step=1),
                          sampling=SimpleNamespace(max_tokens=RESPONSE))
    sampling = Sampling(max_tokens=RESPONSE, ignore_eos=True)
    rows = []
    for step in range(steps + 1):  # the first compiles and captures
        times = {}

        @contextlib.contextmanager
        def clock(part, times=times):
            begun = time.perf_counter()
            yield
            torch.cuda.synchronize()
            times[part] = time.perf_counter() - begun

        with Watch() as watch:
            start = time.perf_counter()
            tokens, metrics = one_step(step, rollout, policy, run, sampling, clock, sleep)
            times["step"] = time.perf_counter() - start
        times |= {"peak": watch.peak, "busy": float(np.mean(watch.busy)), "tokens": tokens,
                  "gap": metrics.get("sampling/sampling_logp_difference/mean", float("nan")),
                  "gap_max": metrics.get("sampling/sampling_logp_difference/max", float("nan")), "grad": metrics["grad_norm"]}
        print(name, "step", step, {k: round(v, 4) for k, v in times.items()}, flush=True)
        rows.append(times)
    best = {k: float(np.median([r[k] for r in rows[1:]])) for k in rows[0]}
    best["first"] = rows[0]["step"]
    return best


def report(name, r):
    mean_context = (PROMPT * PROMPT / 2 * PROMPTS + PROMPTS * GROUP * RESPONSE * (PROMPT + RESPONSE / 2)) / r["tokens"]
    mfu = flops_per_token(name, mean_context) * r["tokens"] / r["train"] / PEAK_FLOPS
    logical = PROMPTS * GROUP * (RESPONSE + PROMPT + RESPONSE)  # generated + trained tokens, the usual definition
    for metric, value, unit in (("step_s", r["step"], "s"), ("generate_s", r["generate"], "s"), ("train_s", r["train"], "s"),
                                ("peak_gib", r["peak"], "GiB"), ("mfu", mfu, "of 790 TFLOP/s, computed FLOPs"),
                                ("tokens_per_s", logical / r["step"], "logical tokens/s"), ("utilization", r["busy"], "%"),
                                ("first_step_s", r["first"], "s, compilation and capture included")):
        record("step", name, "verl", metric, value, unit, "step.h200.jsonl")
    return (f"{name:4s} step {r['step']:6.2f} s = generate {r['generate']:.2f} + score {r['score']:.2f} + "
            f"credit {r['credit']:.2f} + train {r['train']:.2f}   peak {r['peak']:.1f} GiB   MFU {mfu:.1%}   "
            f"busy {r['busy']:.0f}%   |dlogp| mean {r['gap']:.1e} max {r['gap_max']:.1e}   first step {r['first']:.0f} s")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("cases", nargs="*", default=["q05", "q15"])
    p.add_argument("--steps", type=int, default=3)
    p.add_argument("--no-compile", action="store_true")
    p.add_argument("--budget", type=int, help="tokens per micro-batch")
    p.add_argument("--sleep", action="store_true", help="give the KV pool back while training")
    args = p.parse_args()
    table = [report(name, case(name, args.steps, not args.no_compile, args.budget, args.sleep)) for name in args.cases]
    print("\n".join(table))


if __name__ == "__main__":
    main()
