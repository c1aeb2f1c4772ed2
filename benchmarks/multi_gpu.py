"""Several GPUs of one host: python benchmarks/multi_gpu.py [fsdp transfer layouts megatron kill] [--case q05]

fsdp      FSDP2 over all GPUs against one: losses and weights after three steps, tokens/s (weak and strong scaling), peak memory
transfer  trainer on GPU 0 -> sampler on GPU 1: all weights, a tenth of the layers, adapters only; ms, bytes, GB/s
layouts   the main loop with both roles on all GPUs, and with the trainer on GPU 0 and the sampler on GPU 1 under
          step, ahead and stale(1): step time, utilisation of each GPU, lag of the sampled tokens
megatron  log-probs under tensor parallel 2 against one GPU
kill      a rollout process killed in mid-generation: the step ends, nothing is lost; seconds it costs
Each part runs in processes of its own and appends to results/multi.<gpus>.jsonl; NVLink multicast stays off.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from shapes import random_lm, record, save_tokenizer

from verl.algorithms.grpo import GRPO
from verl.algorithms.reduce import coefficients
from verl.core.batch import Batch
from verl.engine.optimizer import OptimConfig

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
GPUS = torch.cuda.device_count()
FILE = f"multi.h200x{GPUS}.jsonl"
PARTS = ("transfer", "fsdp", "layouts", "kill", "megatron")


def spawn(work, world: int, *args, limit_s: float = 400) -> list:
    """Run work(rank, queue, *args) in `world` processes of one NCCL group; what rank 0 put into the queue."""
    context = multiprocessing.get_context("spawn")
    queue, store = context.Queue(), tempfile.mktemp(prefix="verl-store-")
    ranks = [context.Process(target=_rank, args=(work, rank, world, store, queue, args)) for rank in range(world)]
    for process in ranks:
        process.start()
    until = time.monotonic() + limit_s
    while any(p.is_alive() for p in ranks) and time.monotonic() < until and not any(p.exitcode for p in ranks):
        time.sleep(0.2)
    out = []
    while not queue.empty():
        out.append(queue.get())
    for p in ranks:
        if p.is_alive():
            p.kill()
        p.join()
    if any(p.exitcode for p in ranks):
        raise SystemExit(f"{work.__name__}: exit codes {[p.exitcode for p in ranks]}")
    return out


def _rank(work, rank: int, world: int, store: str, queue, args) -> None:
    torch.cuda.set_device(rank)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=rank, world_size=world,
                            device_id=torch.device("cuda", rank))
    work(rank, queue, *args)
    queue.close()
    queue.join_thread()
    dist.barrier()
    dist.destroy_process_group()


def note(case: str, metric: str, value: float, unit: str, **more) -> None:
    record("multi", case, "verl", metric, value, unit, FILE, gpus=GPUS, **more)
    print(f"{case:12} {metric:34} {value:12.5g} {unit}  {more or ''}", flush=True)


# -- fsdp ----------------------------------------------------------------------------------------------------------------

def step_batch(prompts: int, group: int, prompt: int, response: int, vocabulary: int, seed: int = 0) -> Batch:
    """A GRPO optimizer batch of random tokens, uneven lengths, with its coefficients."""
    rng = np.random.default_rng(seed)
    lengths_S = rng.integers(response // 2, response + 1, prompts * group)
    total = int(lengths_S.sum())
    batch = Batch(prompts=[rng.integers(0, vocabulary, prompt).astype(np.int32) for _ in range(prompts)],
                  prompt_S=np.repeat(np.arange(prompts), group), lengths_S=lengths_S, mask_T=np.ones(total, bool),
                  ids_T=rng.integers(0, vocabulary, total).astype(np.int32), row_S=np.arange(prompts * group),
                  group_S=np.repeat(np.arange(prompts), group), rollout_logprobs_T=np.full(total, -10, np.float32))
    batch.advantages_T = rng.normal(size=total).astype(np.float32)
    batch.weights_T, batch.weights_S = coefficients(GRPO().reduction, batch, constant=response)
    return batch


def plain_loss(x):
    """Advantage-weighted log-probs: the policy gradient itself, so that the comparison sees every token."""
    from verl.algorithms.base import LossOutputs
    return LossOutputs(-x.advantages_T * x.logprobs_T, per_token=True)


def train_steps(engine, batch: Batch, steps: int) -> tuple[list[float], list[float]]:
    """Losses and seconds of each step."""
    losses, seconds = [], []
    for _ in range(steps):
        dist.is_initialized() and dist.barrier()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        metrics = engine.forward_backward(batch, plain_loss)
        engine.step()
        torch.cuda.synchronize()
        losses.append(metrics["loss"])
        seconds.append(time.perf_counter() - begun)
    return losses, seconds


def engine_of(case: str, dtype: torch.dtype, strategy: str | None, layers: int | None = None, compiled: bool = False):
    from verl.engine.fsdp import FsdpEngine
    from verl.engine.train import TrainEngine
    from verl.models.compile import compile_for_training
    lm = random_lm(case, f"cuda:{torch.cuda.current_device()}", dtype, layers)
    if compiled:
        compile_for_training(lm)
    budget, optim = 8192, OptimConfig(lr=1e-4)
    if strategy is None:
        return TrainEngine(lm, 1.0, optim, 100, budget)
    return FsdpEngine(lm, 1.0, optim, 100, budget, strategy=strategy)


def exact(rank: int, queue) -> None:
    """Three fp32 steps of a 4-layer 0.5B shape: FSDP against one GPU."""
    batch = step_batch(6, 5, 64, 200, 150_000)
    torch.backends.cuda.matmul.allow_tf32 = False
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        engine = engine_of("q05", torch.float32, strategy, layers=4)
        losses, _ = train_steps(engine, batch, 3)
        weights = {n: t.cpu() for n, t in engine.weights()}
        del engine
        gc.collect()
        torch.cuda.empty_cache()
        if rank == 0:
            alone = engine_of("q05", torch.float32, None, layers=4)
            start = {n: t.clone() for n, t in alone.weights()}
            want, _ = train_steps_alone(alone, batch, 3)
            moved = {n: (t - start[n]).abs().max().item() for n, t in alone.weights()}
            error = max((weights[n] - t.cpu()).abs().max().item() for n, t in alone.weights())
            queue.put((strategy, max(abs(a - b) / abs(b) for a, b in zip(losses, want)), error, max(moved.values())))
            del alone, start
        dist.barrier()


def train_steps_alone(engine, batch, steps):
    losses = []
    for _ in range(steps):
        losses.append(engine.forward_backward(batch, plain_loss)["loss"])
        engine.step()
    return losses, []


def speed(rank: int, queue, case: str, strategy: str | None, prompts: int) -> None:
    """Median step of a bf16 run; the device's peak in use."""
    batch = step_batch(prompts, 8, 256, 1024, 128_000)
    engine = engine_of(case, torch.bfloat16, strategy, compiled=True)
    train_steps(engine, batch, 1)
    torch.cuda.reset_peak_memory_stats()
    _, seconds = train_steps(engine, batch, 3)
    if rank == 0:
        queue.put((batch.tokens / float(np.median(seconds)), torch.cuda.max_memory_allocated() / 2**30))


def fsdp(case: str) -> None:
    for strategy, loss, weights, moved in spawn(exact, GPUS):
        note("q05-4layers", f"{strategy}_loss_error", loss, "relative, fp32, 3 steps")
        note("q05-4layers", f"{strategy}_weight_error", weights, "absolute, fp32, 3 steps", moved=moved)
    (one, memory), = spawn(speed, 1, case, None, 16)
    note(case, "one_gpu_tokens_per_s", one, "tokens/s", prompts=16)
    note(case, "one_gpu_allocated_gib", memory, "GiB")
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        (weak, memory), = spawn(speed, GPUS, case, strategy, 16 * GPUS)
        note(case, f"{strategy}_tokens_per_s", weak, "tokens/s, weak scaling", scaling=round(weak / one / GPUS, 3))
        note(case, f"{strategy}_allocated_gib", memory, "GiB a GPU")
    (strong, _), = spawn(speed, GPUS, case, "FULL_SHARD", 16)
    note(case, "FULL_SHARD_strong_tokens_per_s", strong, "tokens/s, strong scaling", scaling=round(strong / one / GPUS, 3))


# -- transfer ------------------------------------------------------------------------------------------------------------

def moves(rank: int, queue, case: str) -> None:
    """GPU 0 sends, GPU 1 receives; median of 5 after a first one that connects."""
    from transfer import table as shapes_of

    from verl.flow.layout import only, whole
    from verl.flow.reshard import plan
    from verl.flow.transfer import Target, transfer
    from verl.flow.transport import TorchTransport
    named = shapes_of(case, 1)
    device = torch.device("cuda", rank)
    arrays = {n: torch.empty(s.shape, dtype=s.dtype, device=device).normal_() for n, s in named.items()}
    last = [n for n in named if any(f".layers.{i}." in n for i in (0, 1))]
    changed = {"full": only(named, "*.weight", "*.bias"), "changed_only": last, "lora": only(named, "*.lora_A", "*.lora_B")}
    for what, names in changed.items():
        versions = dict.fromkeys(named, 0) | dict.fromkeys(names, 1)
        made = plan(whole(named, [0]), whole(named, [1]), versions, {1: 0}, bucket_bytes=64 << 20)
        transport = TorchTransport(f"{case}/{what}", device=device)
        target = Target(arrays, version=0) if rank else None
        seconds, report = [], None
        for version in range(1, 7):
            dist.barrier()
            torch.cuda.synchronize()
            begun = time.perf_counter()
            report = transfer(made, transport, version=None if rank else version, arrays=None if rank else arrays, target=target)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
        if rank == 0:
            queue.put((what, float(np.median(seconds[1:])), report.sent_bytes, made.wire_bytes, sum(made.lacking.values())))


def link(rank: int, queue) -> None:
    """What NCCL reaches from GPU 0 to GPU 1 with 1 GiB messages."""
    data = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(6):
        dist.barrier()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        dist.send(data, 1) if rank == 0 else dist.recv(data, 0)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    if rank == 0:
        queue.put(len(data) / min(times) / 1e9)


def transfer_part(cases: list[str]) -> None:
    best, = spawn(link, 2)
    note("link", "nccl_gb_per_s", best, "GB/s")
    for case in cases:
        for what, seconds, sent, wire, least in spawn(moves, 2, case):
            name = "transfer_ms" if what == "full" else f"transfer_{what}_ms"
            note(case, name, 1e3 * seconds, "ms", bytes=sent, planned=wire, minimum=least,
                 gb_per_s=round(sent / seconds / 1e9, 1), of_link=round(sent / seconds / 1e9 / best, 3))


# -- kill ----------------------------------------------------------------------------------------------------------------

def make_native(path: str, device: torch.device):
    """In a worker's process: the built-in engine on its own model."""
    from verl.engine.native.config import NativeConfig
    from verl.engine.native.engine import NativeEngine
    from verl.models.load import load_lm
    return NativeEngine(load_lm(path, "bfloat16", device), NativeConfig(max_total_tokens=1280, max_sequences=256, compile=False))


def model_dir(case: str, folder: Path) -> str:
    """A directory with random weights and a tokenizer that knows every row."""
    lm = random_lm(case)
    lm.module.save_pretrained(folder)
    save_tokenizer(lm.head.rows, str(folder))
    del lm
    gc.collect()
    torch.cuda.empty_cache()
    return str(folder)


def kill(case: str) -> None:
    from verl.core.types import Request, Sampling
    from verl.engine.pool import RolloutPool
    from verl.flow.actors import Cluster
    from verl.flow.devices import device_group
    from verl.flow.link import Meeting
    rng = np.random.default_rng(0)
    asked = [Request(str(i), rng.integers(0, 128_000, 256).astype(np.int32), tuple(range(8 * i, 8 * i + 8))) for i in range(32)]
    sampling, notes = Sampling(max_tokens=1024, ignore_eos=True), []
    with tempfile.TemporaryDirectory() as folder:
        path, cluster = model_dir(case, Path(folder)), Cluster()
        slots = cluster.place({"rollout": device_group(f"cuda:0-{GPUS - 1}", "rollout")})["rollout"]
        pool = RolloutPool(slots, functools.partial(make_native, path), Meeting(cluster.address), notes.append).ready()
        pool.generate(asked, Sampling(max_tokens=16, ignore_eos=True))
        begun = time.perf_counter()
        pool.generate(asked, sampling)
        whole_s, victim = time.perf_counter() - begun, next(iter(pool.pids.values()))
        threading.Timer(whole_s / 2, os.kill, (victim, signal.SIGKILL)).start()
        begun = time.perf_counter()
        answers = pool.generate(asked, sampling)
        hurt_s = time.perf_counter() - begun
        pool.close()
        cluster.close()
    print(*notes, sep="\n")
    assert sum(len(s) for a in answers for s in a) == 32 * 8 * 1024 and victim not in pool.pids.values(), "samples were lost"
    note(case, "kill_whole_s", whole_s, "s, 256 answers of 1024 tokens, nothing killed")
    note(case, "kill_hurt_s", hurt_s, "s, a worker killed half-way; nothing lost")


# -- layouts -------------------------------------------------------------------------------------------------------------

REWARD = """def parity(completions, **_):
    return [sum(int(w) % 2 for w in c.split()) / max(len(c.split()), 1) for c in completions]
"""


def watch_gpus(stop: threading.Event, busy: list[list[float]]) -> None:
    query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    while not stop.wait(0.2):
        busy.append([float(x) for x in subprocess.run(query, capture_output=True, text=True).stdout.split()])


def one_layout(case: str, folder: Path, name: str, settings: dict) -> None:
    out = folder / name
    trainer = {"algorithm": "grpo", "rollout_batch_size": 64, "group_size": 8, "steps": 7, "output_dir": str(out), "report_to": [],
               "samples_every": 0, "compile": False, "rewards": [{"function": "reward.py:parity"}],
               "sampling": {"max_tokens": 512, "min_tokens": 512}, "optim": {"lr": 1e-6}, **settings.get("trainer", {})}
    actor = {"model_name_or_path": str(folder / "model"), **settings.get("actor", {})}
    config = folder / f"{name}.yaml"
    config.write_text(json.dumps({"trainer": trainer, "model": {"actor": actor}, "data": {"train": str(folder / "prompts.jsonl")}}))
    stop, busy = threading.Event(), []
    threading.Thread(target=watch_gpus, args=(stop, busy), daemon=True).start()
    begun = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "verl.cli.main", "train", str(config)], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=180)
    stop.set()
    if done.returncode:
        print(f"{name} FAILED:\n{done.stdout[-3000:]}", flush=True)
        return
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rows = [r for r in rows if "step_time" in r][3:]
    middle = {k: float(np.median([r[k] for r in rows if k in r])) for k in rows[0]}
    working = int(sum(r["step_time"] for r in rows) / 0.2)
    shares = np.mean(busy[-working - 5:-5], axis=0).round(1).tolist()
    parts = {k.split("/")[-1]: round(v, 3) for k, v in middle.items() if k.startswith("timing/")}
    lag = {k: v for k, v in middle.items() if "lag" in k or "stale" in k}
    note(f"{case}/{name}", "step_s", middle["step_time"], "s", parts=parts, busy=shares, **lag)
    print(f"   {name}: {time.perf_counter() - begun:.0f} s in all; |dlogp| "
          f"{middle.get('sampling/sampling_logp_difference/mean', float('nan')):.1e}", flush=True)
    shown = subprocess.run([sys.executable, "-m", "verl.cli.main", "show", "timeline", str(out)], capture_output=True, text=True)
    print(shown.stdout)
    if "OUT" in os.environ and (out / "timeline.png").exists():
        shutil.copy(out / "timeline.png", Path(os.environ["OUT"]) / f"timeline-{name.replace('(', '').replace(')', '')}.png")


def layouts(case: str) -> None:
    everywhere, apart = f"cuda:0-{GPUS - 1}", {"actor": "cuda:0", "rollout": "cuda:1"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model_dir(case, folder / "model")
        rng = np.random.default_rng(0)
        prompts = [" ".join(map(str, rng.integers(0, 128_000, 256))) for _ in range(512)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
        (folder / "reward.py").write_text(REWARD)
        for pipeline in ("step", "ahead", "stale(1)"):
            one_layout(case, folder, pipeline, {"trainer": {"placement": apart, "pipeline": pipeline}})
        one_layout(case, folder, "colocated", {"trainer": {"placement": {"actor": everywhere, "rollout": everywhere}},
                                               "actor": {"use_fsdp": True}})


# -- megatron ------------------------------------------------------------------------------------------------------------

def tensor_parallel(rank: int, queue, path: str) -> None:
    """Log-probs of the same batch under tensor parallel 2, under FSDP, and on one GPU (fp32)."""
    from verl.engine.fsdp import FsdpEngine
    from verl.engine.megatron import MegatronEngine
    from verl.engine.train import TrainEngine
    from verl.models.load import load_lm
    torch.backends.cuda.matmul.allow_tf32 = False
    device, batch = torch.device("cuda", rank), step_batch(4, 4, 64, 200, 128_000)
    found = {"one": TrainEngine(load_lm(path, "float32", device)).logprobs(batch)}
    found["fsdp"] = FsdpEngine(load_lm(path, "float32", device), strategy="FULL_SHARD").logprobs(batch)
    found["megatron"] = MegatronEngine(load_lm(path, "float32", device), sizes={"tensor": 2}).logprobs(batch)
    if rank == 0:
        queue.put({k: float(np.abs(v - found["one"]).max()) for k, v in found.items()})


def megatron() -> None:
    with tempfile.TemporaryDirectory() as folder:
        lm = random_lm("q05", layers=4, dtype=torch.float32)
        lm.module.save_pretrained(folder)
        save_tokenizer(lm.head.rows, folder)
        del lm
        errors, = spawn(tensor_parallel, 2, folder)
        for name, error in errors.items():
            note("q05-4layers", f"{name}_logprob_error_max", error, "nats, fp32, against one GPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(PARTS), choices=[*PARTS, []])
    parser.add_argument("--case", default="q05")
    parser.add_argument("--transfers", nargs="*", default=["q05", "q15", "l8"])
    args = parser.parse_args()
    if GPUS < 2:
        raise SystemExit(f"this benchmark needs at least two GPUs, here are {GPUS}")
    work = {"transfer": lambda: transfer_part(args.transfers), "fsdp": lambda: fsdp(args.case), "kill": lambda: kill(args.case),
            "layouts": lambda: layouts(args.case), "megatron": megatron}
    for part in args.parts:
        begun = time.perf_counter()
        try:
            work[part]()
        except (Exception, SystemExit) as error:  # the other parts are still worth their time
            print(f"{part} FAILED: {type(error).__name__}: {error}", flush=True)
        print(f"-- {part}: {time.perf_counter() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
