"""What the step benchmarks share: the work of a step, its clock, samples of the device, and the rows that come out."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import threading
import time
from dataclasses import dataclass, field, replace

import numpy as np
import psutil
import torch
from shapes import flops_per_token, record

PEAK_FLOPS = 790e12  # bf16 of one H200, measured
FILE = "step.h200.jsonl"
PARTS = ("sync", "generate", "score", "logprobs", "credit", "train")  # logprobs: every scoring pass of policy, reference and critic


@dataclass(frozen=True)
class Case:
    """A model shape and how it is trained."""

    name: str
    shape: str
    lora: int = 0


CASES = {c.name: c for c in (Case("q05", "q05"), Case("q15", "q15"), Case("l8lora", "l8", 16), Case("tiny", "tiny"),
                             Case("tinylora", "tiny", 4))}


@dataclass(frozen=True)
class Work:
    """Prompts of a step, samples of each, and their forced lengths in tokens."""

    prompts: int
    group: int
    prompt: int
    response: int

    @property
    def sequences(self) -> int:
        return self.prompts * self.group

    @property
    def length(self) -> int:
        return self.prompt + self.response

    def context(self, shared: bool = True) -> tuple[float, float]:
        """(computed tokens of one pass, their mean attention context); with `shared` a group's prompt is computed once."""
        prompts = self.prompts if shared else self.sequences
        tokens = prompts * self.prompt + self.sequences * self.response
        seen = prompts * self.prompt ** 2 / 2 + self.sequences * self.response * (self.prompt + self.response / 2)
        return tokens, seen / tokens


WORK = {"grpo": Work(64, 8, 256, 1024), "ppo": Work(128, 1, 512, 1536), "dpo": Work(64, 2, 512, 512)}
TINY_WORK = {"grpo": Work(3, 4, 12, 16), "ppo": Work(6, 1, 12, 16), "dpo": Work(4, 2, 12, 16)}


@dataclass
class Options:
    """How a step is run; what does not apply to a system is not read by it."""

    device: str = "cuda"
    steps: int = 3
    budget: int | None = None
    memory: tuple[str, ...] = ()
    accelerations: bool = True
    sleep: bool = True
    micro: int | None = None
    work: dict[str, Work] = field(default_factory=lambda: dict(WORK))

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def tiny(self) -> Options:
        return replace(self, device="cpu", work=dict(TINY_WORK))


def sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def free(device: str) -> None:
    """Drop what the last model left behind."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


class Watch:
    """Samples device memory in use (GiB, all processes) and utilisation (%) until stopped; on a CPU this process's own."""

    def __init__(self, device: str):
        self.device, self.peak, self.busy, self.on = device, 0.0, [], True

    def __enter__(self) -> Watch:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        return self

    def _run(self) -> None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        query = ["nvidia-smi", "--query-gpu=memory.used,utilization.gpu", "--format=csv,noheader,nounits", "-i", visible]
        process = psutil.Process()
        while self.on:
            if self.device == "cuda":
                used, busy = subprocess.run(query, capture_output=True, text=True).stdout.strip().split(", ")
                used = int(used) / 1024
            else:
                used, busy = process.memory_info().rss / 2**30, psutil.cpu_percent()
            self.peak = max(self.peak, used)
            self.busy.append(float(busy))
            time.sleep(0.2)

    def __exit__(self, *_) -> None:
        self.on = False
        self.thread.join()


class Rows:
    """One dict a step: seconds of each part, of the whole step, and what was sampled meanwhile."""

    def __init__(self, title: str, device: str):
        self.title, self.device, self.rows = title, device, []

    @contextlib.contextmanager
    def step(self):
        """Yields the step's row; call `clock(part)` inside."""
        row: dict[str, float] = {}
        self.rows.append(row)
        with Watch(self.device) as watch:
            sync(self.device)
            begun = time.perf_counter()
            yield row
            sync(self.device)
            row["step"] = time.perf_counter() - begun
        row |= {"peak": watch.peak, "busy": float(np.mean(watch.busy))}
        row["rest"] = row["step"] - sum(row.get(part, 0.0) for part in PARTS)
        print(self.title, "step", len(self.rows) - 1, {k: round(v, 4) for k, v in row.items()}, flush=True)

    @contextlib.contextmanager
    def clock(self, part: str):
        begun = time.perf_counter()
        yield
        sync(self.device)
        row = self.rows[-1]
        row[part] = row.get(part, 0.0) + time.perf_counter() - begun

    def median(self, warm: int = 1) -> dict[str, float]:
        """Medians of the steps behind the first `warm`, which compile and capture."""
        rest = self.rows[warm:] or self.rows
        out = {k: float(np.median([r[k] for r in rest if k in r])) for k in dict.fromkeys(k for r in rest for k in r)}
        return out | {"first": self.rows[0]["step"], "peak": max(r["peak"] for r in rest)}


def logical_tokens(method: str, work: Work) -> int:
    """Tokens of a step by the usual definition: sampled tokens + critic forward tokens + actor gradient tokens. Prompts count
    once for every sequence, whoever computes them only once; passes of reference and reward model do not count."""
    rows = work.sequences
    sampled = 0 if method == "dpo" else rows * work.response
    critic = rows * work.length if method == "ppo" else 0
    return sampled + critic + rows * work.length


def train_flops(case: Case, method: str, work: Work, shared: bool) -> float:
    """Matrix FLOPs of the update that are computed at least once: the actor's, and an independent critic's (no output layer).
    With adapters frozen weights get no gradient: twice the forward instead of three times."""
    tokens, context = work.context(shared)
    factor = 2 if case.lora else 3
    flops = factor * flops_per_token(case.shape, context, backward=False)
    if method == "ppo" and not case.lora:
        flops += factor * flops_per_token(case.shape, context, backward=False, head=False)
    return tokens * flops


def report(method: str, case: Case, system: str, r: dict[str, float], o: Options, shared: bool = True, **more) -> str:
    """Record the medians of a case (on a GPU only) and return its line of the table."""
    work = o.work[method]
    mfu = train_flops(case, method, work, shared) / r["train"] / PEAK_FLOPS if "train" in r else float("nan")
    rate = logical_tokens(method, work) / r["step"]
    extra = ("reference", "values", "rest", "latency_on", "latency_off", "forward_on", "forward_off")
    values = {"step_s": r["step"], **{f"{p}_s": r[p] for p in (*PARTS, *extra) if p in r}, "peak_gib": r["peak"], "mfu": mfu,
              "tokens_per_s": rate, "tokens_per_s_per_gpu": rate, "utilization": r["busy"], "first_step_s": r["first"]}
    units = {"peak_gib": "GiB", "mfu": "of 790 TFLOP/s, computed FLOPs of the update", "tokens_per_s": "logical tokens/s",
             "tokens_per_s_per_gpu": "logical tokens/s", "utilization": "%", "first_step_s": "s, compilation and capture included"}
    if "planned" in r:
        values["planned_gib"], units["planned_gib"] = r["planned"], "GiB, foretold before the first step"
    if "graph_latency_saved" in r:
        values["graph_latency_saved"] = r["graph_latency_saved"]
        units["graph_latency_saved"] = "of the seconds of short forwards of reward model, critic and reference"
    bench = "step" if method == "grpo" else f"step_{method}"
    name = case.name if work in (WORK[method], TINY_WORK[method]) else f"{case.name}-{work.sequences}x{work.length}"
    if o.device == "cuda":
        settings = {"method": method, "memory": list(o.memory), "accelerations": o.accelerations, "sleep": o.sleep,
                    "work": [work.prompts, work.group, work.prompt, work.response], **more}
        for metric, value in values.items():
            if value == value:
                record(bench, name, system, metric, value, units.get(metric, "s"), FILE, **settings)
    planned = f" (planned {r['planned']:.1f})" if "planned" in r else ""
    saved = f"   compiled short forwards save {r['graph_latency_saved']:.0%}" if "graph_latency_saved" in r else ""
    split = " + ".join(f"{p} {r[p]:.2f}" for p in (*PARTS, "rest") if p in r)
    return (f"{method:5s}{name:9s}{system:11s} step {r['step']:7.2f} s = {split}   peak {r['peak']:.1f} GiB{planned}   "
            f"MFU {mfu:.1%}   {rate:,.0f} tokens/s   busy {r['busy']:.0f}%   first step {r['first']:.0f} s{saved}")
