"""A slow reward on CPU processes: `step`, `ahead` and `stale(1)` in turn, seconds a step; and what new weights in mid-answer cost.

    python benchmarks/overlap.py [ROUNDS]

A tiny Llama samples 8 prompts x 8 answers of 32 forced tokens a step and trains on them 16 times. The reward sleeps in processes
of its own: its time is set, after a short run, so that sampling and scoring take as long as training does. The pipelines take
turns, ROUNDS times; a figure is the median over all steps but the first two of each run.
"""

import contextlib
import io
import json
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from shapes import record
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from verl.core.batch import from_groups
from verl.core.report import read_timeline, utilisation
from verl.core.types import Group, Request, Sampling, Task
from verl.core.weights import Weights
from verl.data import RLDataLoader
from verl.engine.native.config import NativeConfig
from verl.engine.native.engine import NativeEngine
from verl.models import load_lm
from verl.models.packed import Packed
from verl.trainer import RLTrainer
from verl.trainer.config import load_run

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 3
STEPS, WARM, PROMPTS, GROUP, TOKENS, PROCESSES, EPOCHS = 8, 2, 8, 8, 32, 8, 16
PIPELINES = ("step", "ahead", "stale(1)")
SLEEP = Path(tempfile.gettempdir()) / f"overlap_sleep_{os.getpid()}"


def judge(text: str) -> float:
    time.sleep(float(SLEEP.read_text()))
    return sum(c.isdigit() for c in text) / 8


class Judges:
    """A reward function that scores in processes, PROCESSES answers at a time."""

    __name__ = "judges"

    def __init__(self):
        self.pool = ProcessPoolExecutor(PROCESSES)
        list(self.pool.map(abs, range(PROCESSES)))

    def __call__(self, completions, **_):
        return list(self.pool.map(judge, completions))


def model_dir(folder: Path) -> str:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", pad_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=264, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                                 intermediate_size=128, max_position_embeddings=256, bos_token_id=None, eos_token_id=256,
                                 pad_token_id=256)).save_pretrained(folder)
    return str(folder)


def train(folder: Path, pipeline: str, judges: Judges, steps: int = STEPS) -> tuple[list[float], dict[str, float], Path]:
    """Seconds of each step after the first WARM, least seconds of its verbs, the run's directory."""
    out = Path(tempfile.mkdtemp(dir=folder))
    settings = {"trainer": {"pipeline": pipeline, "rollout_batch_size": PROMPTS, "group_size": GROUP, "steps": steps,
                            "output_dir": str(out), "update_epochs": EPOCHS, "report_to": [], "samples_every": 0,
                            "sampling": {"max_tokens": TOKENS, "min_tokens": TOKENS}, "optim": {"lr": 1e-4}},
                "model": {"actor": {"model_name_or_path": str(folder / "model")}}, "data": {"train": str(folder / "train.jsonl")}}
    config = load_run(data=settings).config
    with contextlib.redirect_stdout(io.StringIO()):
        RLTrainer(config.trainer, RLDataLoader(config.data), config.model, rewards=[judges]).train()
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "step_time" in row][WARM:]
    names = {name for row in rows for name in row if name.startswith("timing/")}
    return [row["step_time"] for row in rows], {n: min(r.get(n, 0.0) for r in rows) for n in names}, out


def overlap(folder: Path) -> None:
    judges, seconds = Judges(), {p: [] for p in PIPELINES}
    SLEEP.write_text("0")
    _, verbs, _ = train(folder, "step", judges, 6)
    training = verbs["timing/update"] + verbs["timing/old_logprobs"]
    wanted = max(training - verbs["timing/generate"], 0.2 * training)
    SLEEP.write_text(f"{wanted / (PROMPTS * GROUP / PROCESSES):.4f}")
    print(f"sampling {verbs['timing/generate']:.2f} s, training {training:.2f} s, scoring set to {wanted:.2f} s", flush=True)
    for _ in range(ROUNDS):
        for pipeline in PIPELINES:
            steps, _, out = train(folder, pipeline, judges)
            seconds[pipeline] += steps
            shares = {role: round(share, 2) for role, _, _, _, share in utilisation(read_timeline(out))}
            print(f"{pipeline:9s} {statistics.median(steps):.2f} s a step; busy: {shares}", flush=True)
    base = statistics.median(seconds["step"])
    for pipeline, values in seconds.items():
        middle = statistics.median(values)
        spread = [round(float(q), 3) for q in np.quantile(values, (0.1, 0.9))]
        record("overlap", f"{PROMPTS}x{GROUP}x{TOKENS}", f"verl {pipeline}", "step_s", middle, "s", "overlap.cpu.jsonl",
               speedup=round(base / middle, 3), spread=spread, sample_s=round(verbs["timing/generate"], 3),
               train_s=round(training, 3), score_s=round(wanted, 3), load=round(os.getloadavg()[0], 1))
        print(f"{pipeline:9s} {middle:.3f} s a step, {base / middle:.2f} times step")
    judges.pool.shutdown()


def generate(lms, updates: int, keep: bool):
    """(seconds, requests, samples) of 64 answers of 128 tokens, with new weights (the two in turn) after every 16th token."""
    engine = NativeEngine(lms[0], NativeConfig(max_sequences=64, max_total_tokens=192)).apart(keep)
    requests = [Request(str(i), np.arange(i, i + 32, dtype=np.int32), tuple(range(8 * i, 8 * i + 8))) for i in range(8)]
    polls, got = 0, {}

    def between():
        nonlocal polls
        polls += 1
        if polls % 16 == 0 and engine.version < updates:
            own = lms[(engine.version + 1) % 2].module
            engine.load_weights(Weights(engine.version + 1, lambda: ((n, p.detach()) for n, p in own.named_parameters())))
        return []

    def on_sample(key, index, sample):
        got[key, index] = sample

    start = time.perf_counter()
    engine.generate(requests, Sampling(max_tokens=128, ignore_eos=True), on_sample, between=between)
    return time.perf_counter() - start, requests, [[got[r.key, i] for i in range(r.n)] for r in requests]


def in_flight(folder: Path) -> None:
    """What an update in mid-answer costs, and how far the sampler's log-probs are from the training forward of their version.

    Two sets of weights in turn, each weight 1e-4 apart: as far as an update of Adam at that rate can go.
    """
    lms = [load_lm(str(folder / "model"), "float32") for _ in range(2)]
    with torch.no_grad():
        for p in lms[1].module.parameters():
            p.add_(torch.randn_like(p).sign() * 1e-4)
    plain = min(generate(lms, 0, False)[0] for _ in range(3))
    for keep in (False, True):
        runs = [generate(lms, 7, keep) for _ in range(3)]
        cost = (min(run[0] for run in runs) - plain) / 7
        _, requests, samples = runs[0]
        batch = from_groups([Group(Task(r.key, ""), r.prompt_ids, own) for r, own in zip(requests, samples)])
        with torch.no_grad():
            by_version = [lm.forward(Packed(batch, lm.device), 1.0).logprobs_T.numpy() for lm in lms]
        error_T = np.abs(np.where(batch.versions_T % 2, by_version[1], by_version[0]) - batch.rollout_logprobs_T)
        name = "kept" if keep else "computed again"
        print(f"keys {name}: {cost * 1e3:.1f} ms an update of 64 answers ({plain:.2f} s without); log-probs off by "
              f"{error_T.mean():.1e} in the mean, {error_T.max():.1e} at most")
        record("overlap", "64 answers x 128 tokens, 7 updates", f"verl, keys {name}", "update_s", cost, "s", "overlap.cpu.jsonl",
               generate_s=round(plain, 3), logprob_error_mean=float(error_T.mean()), logprob_error_max=float(error_T.max()),
               load=round(os.getloadavg()[0], 1))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model_dir(folder / "model")
        (folder / "train.jsonl").write_text("".join(json.dumps({"prompt": f"{i} plus {i % 7} is "}) + "\n" for i in range(400)))
        try:
            overlap(folder)
            in_flight(folder)
        finally:
            SLEEP.unlink(missing_ok=True)
