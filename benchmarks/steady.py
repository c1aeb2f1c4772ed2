"""No decay over a thousand steps: python benchmarks/steady.py [--steps 1000] [--tiny]

PPO on a 0.5B shape with a critic (value head on the trunk) and a reward model of the same shape; 32 sequences a step, prompts
of 16 - 64 tokens, response lengths geometric with mean 24, cut at 128: a long tail, other sizes in every micro-batch of
every step, so that an allocator that leaves holes or a cache that grows shows. The learning rate is not zero. Steps 900 - 1000
are compared with steps 100 - 200 (of fewer steps: the last tenth with the second): tokens/s, allocated and reserved memory.
Prompts, random numbers and end ids repeat every tenth of the run, so that both windows get (nearly) the same lengths: the
comparison is of the machine, not of luck.
Appends to results/step.h200.jsonl, keeps the curve of every step in results/steady.json and draws docs/steady.png.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import psutil
import torch
from measure import CASES, FILE, Options, Watch, Work, free, sync
from shapes import RESULTS, record
from step_online import OPTIM, build, scores

from verl.algorithms.ppo import PPO
from verl.core.batch import from_groups
from verl.core.types import Group, Request, Sampling, Task, derive_seed
from verl.trainer.rl import apply_credit, update

WORK = Work(32, 1, 64, 128)
MEAN = 24  # tokens of a response


def requests(place: int, work: Work, vocabulary: int) -> list[Request]:
    rng = np.random.default_rng([1, place])
    return [Request(str(i), rng.integers(0, vocabulary, rng.integers(work.prompt // 4, work.prompt)).astype(np.int32),
                    (derive_seed(place, i),)) for i in range(work.prompts)]


def ends(place: int, vocabulary: int) -> tuple[int, ...]:
    """A block of neighbouring ids that ends responses here: a token is found by inverting the cumulative distribution, so one in a
    block depends on the block's probability (1 / MEAN under random weights), which training hardly moves: no two steps of a
    tenth have the same block."""
    size = vocabulary // MEAN
    start = int(np.random.default_rng([2, place]).integers(0, vocabulary - size))
    return tuple(range(start, start + size))


def one_step(place: int, parts, work: Work) -> int:
    """A PPO step; returns its tokens: sampled, seen by the critic, and trained on."""
    loop = SimpleNamespace(config=SimpleNamespace(train_batch_size=None, update_epochs=1, updates_per_step=1),
                           sampling=SimpleNamespace(max_tokens=work.response))
    vocabulary = parts.policy.lm.head.rows
    parts.rollout.load_weights(parts.policy.weights())
    asked = requests(place, work, vocabulary)
    samples = parts.rollout.generate(asked, Sampling(max_tokens=work.response, stop_ids=ends(place, vocabulary)))
    parts.rollout.sleep()
    batch = from_groups([Group(Task(r.key, "p"), r.prompt_ids, s) for r, s in zip(asked, samples)])
    batch.rewards_S = scores(parts.reward, batch)
    batch.values_T = parts.critic.values(batch)
    credit = parts.algo.credit(batch)
    apply_credit(batch, credit)
    update(loop, batch, credit, parts.algo, parts.policy, parts.critic)
    return int(batch.lengths_S.sum()) + 2 * batch.tokens


def memory(device: str) -> tuple[float, float]:
    """(allocated, reserved) GiB of torch's allocator; on a CPU both are this process's memory."""
    if device == "cuda":
        return torch.cuda.memory_allocated() / 2**30, torch.cuda.memory_reserved() / 2**30
    return (psutil.Process().memory_info().rss / 2**30,) * 2


def windows(steps: int) -> tuple[slice, slice]:
    tenth = max(1, steps // 10)
    return slice(tenth, 2 * tenth), slice(steps - tenth, steps)


def compare(rows: np.ndarray) -> dict[str, float]:
    """rows [steps, 4]: seconds, tokens, allocated, reserved. Ratios of the late window to the early one."""
    early, late = (rows[w] for w in windows(len(rows)))
    speed = [w[:, 1].sum() / w[:, 0].sum() for w in (early, late)]
    return {"steady_tokens_per_s": speed[1] / speed[0], "steady_allocated": late[:, 2].mean() / early[:, 2].mean(),
            "steady_reserved": late[:, 3].mean() / early[:, 3].mean(), "tokens_per_s": speed[1],
            "steady_tokens": late[:, 1].sum() / early[:, 1].sum(),
            "step_s": float(np.median(late[:, 0])), "step_max_s": float(rows[len(rows) // 10:, 0].max())}


def draw(rows: np.ndarray, path) -> None:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 5), sharex=True)
    width = max(1, len(rows) // 50)
    kernel = np.ones(width)
    speed = np.convolve(rows[:, 1], kernel, "valid") / np.convolve(rows[:, 0], kernel, "valid")
    top.plot(np.arange(width - 1, len(rows)), speed, lw=1)
    top.set_ylabel(f"tokens/s (mean of {width} steps)")
    top.set_ylim(0)
    bottom.plot(rows[:, 3], lw=1, label="reserved")
    bottom.plot(rows[:, 2], lw=1, label="allocated")
    bottom.set_ylabel("GiB after the step")
    bottom.set_ylim(0)
    bottom.legend()
    bottom.set_xlabel("step")
    for axis in (top, bottom):
        for window in windows(len(rows)):
            axis.axvspan(window.start, window.stop, alpha=0.12, color="gray")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=1000)
    p.add_argument("--limit", type=float, help="stop after so many seconds and compare what there is")
    p.add_argument("--tiny", action="store_true", help="a CPU and a tiny model; nothing is recorded")
    args = p.parse_args()
    work = Work(4, 1, 16, 24) if args.tiny else WORK
    o = replace(Options(work={"ppo": work}), device="cpu" if args.tiny else "cuda")
    case = CASES["tiny" if args.tiny else "q05"]
    free(o.device)
    parts = build("ppo", replace(case, lora=0), o, shared_critic=True)
    parts.algo, parts.reference = PPO(kl_coef=0.0), None
    rows, begun = [], time.perf_counter()
    with Watch(o.device) as watch:
        for step in range(args.steps):
            sync(o.device)
            start = time.perf_counter()
            tokens = one_step(step % max(1, args.steps // 10), parts, work)
            sync(o.device)
            rows.append((time.perf_counter() - start, tokens, *memory(o.device)))
            if step % 100 == 0 or step < 3:
                print(f"step {step}: {rows[-1][0]:.3f} s, {tokens} tokens, {rows[-1][2]:.2f} GiB allocated, {rows[-1][3]:.2f} "
                      f"reserved, at {time.perf_counter() - begun:.0f} s", flush=True)
            if args.limit and time.perf_counter() - begun > args.limit:
                break
    table = np.array(rows)
    result = compare(table) | {"peak_gib": watch.peak}
    print(json.dumps({k: round(v, 4) for k, v in result.items()}))
    if args.tiny:
        return
    units = {"tokens_per_s": "logical tokens/s", "step_s": "s", "step_max_s": "s", "peak_gib": "GiB"}
    for metric, value in result.items():
        unit = units.get(metric, "last tenth of the steps over the second")
        record("steady", case.name, "verl", metric, value, unit, FILE, steps=len(rows), lr=OPTIM.lr)
    (RESULTS / "steady.json").write_text(json.dumps([[round(x, 4) for x in row] for row in rows]))
    draw(table, RESULTS.parents[1] / "docs" / "steady.png")


if __name__ == "__main__":
    main()
