"""A GRPO step of a tiny model on two CPU cores, ours and TRL's in turn: python benchmarks/cpu_step.py [--steps 12]

A Llama of 0.86M weights, 32 prompts x 8 answers of 4 tokens (end of text never sampled), one update a step, float32, the same
reward function. Both live in one process and step alternately, so that each pair meets the same machine; TRL's step is its
own time from step begin to step end. Prints medians and the median of the pairs' ratios; appends to results/step.cpu.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import pstats
import random
import tempfile
import time
from types import SimpleNamespace

import numpy as np
import torch
from shapes import record
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from verl.algorithms.grpo import GRPO
from verl.core.batch import from_groups
from verl.core.types import Group, Request, Sampling, Task, derive_seed
from verl.engine.native.config import NativeConfig
from verl.engine.native.engine import NativeEngine
from verl.engine.optimizer import OptimConfig
from verl.engine.train import TrainEngine
from verl.models.load import bind
from verl.trainer.rl import apply_credit, update

PROMPTS, GROUP, TOKENS, LENGTH, LR = 32, 8, 4, 6, 1e-4
PARTS = ("generate", "score", "train")


def model(folder: str) -> str:
    """4 layers of width 128 over 62 words: 0.86M weights. The end id lies outside the model's rows: nothing ends a response."""
    words = {f"{i}": i for i in range(60)} | {"<pad>": 60, "<unk>": 61}
    raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", unk_token="<unk>", eos_token="<end>",
                                        padding_side="left")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    lm = LlamaForCausalLM(LlamaConfig(
        vocab_size=62, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, intermediate_size=384,
        max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=60, tie_word_embeddings=True))
    lm.save_pretrained(folder)
    print(f"{sum(p.numel() for p in lm.parameters()) / 1e6:.2f}M weights, {torch.get_num_threads()} threads", flush=True)
    return folder


class Ours:
    """One step of ours at a time."""

    def __init__(self, folder: str, steps: int):
        self.policy = TrainEngine(bind(LlamaForCausalLM.from_pretrained(folder), None, folder), 1.0, OptimConfig(lr=LR), steps)
        self.rollout = NativeEngine(self.policy.lm, NativeConfig(max_total_tokens=LENGTH + TOKENS))
        self.sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
        self.loop = SimpleNamespace(config=SimpleNamespace(train_batch_size=None, update_epochs=1, updates_per_step=1),
                                    sampling=self.sampling)
        self.times: dict[str, list[float]] = {part: [] for part in PARTS}
        self.count = 0

    @contextlib.contextmanager
    def clock(self, part: str):
        begun = time.perf_counter()
        yield
        self.times[part].append(time.perf_counter() - begun)

    def step(self) -> None:
        self.count += 1
        rng = np.random.default_rng(self.count)
        asked = [Request(str(i), rng.integers(0, 60, LENGTH).astype(np.int32),
                         tuple(derive_seed(self.count, i, j) for j in range(GROUP))) for i in range(PROMPTS)]
        with self.clock("generate"):
            self.rollout.load_weights(self.policy.weights())
            samples = self.rollout.generate(asked, self.sampling)
            self.rollout.sleep()
        with self.clock("score"):
            groups = [Group(Task(r.key, "p"), r.prompt_ids, s) for r, s in zip(asked, samples)]
            for group in groups:
                for sample in group.samples:
                    sample.score = share(sample.ids_L)
            batch, algo = from_groups(groups), GRPO()
            credit = algo.credit(batch)
            apply_credit(batch, credit)
        with self.clock("train"):
            update(self.loop, batch, credit, algo, self.policy, None)


def share(ids) -> float:
    return sum(int(i) % 2 for i in ids) / len(ids)


def trl_steps(folder: str, steps: int, between) -> list[float]:
    """Seconds of each of TRL's steps; `between` runs before each."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    rng, times = random.Random(0), []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            between()
            self.begun = time.perf_counter()

        def on_step_end(self, *_, **__):
            times.append(time.perf_counter() - self.begun)
    config = GRPOConfig(output_dir=f"{folder}/out", per_device_train_batch_size=PROMPTS * GROUP, num_generations=GROUP,
                        max_steps=steps, max_completion_length=TOKENS, learning_rate=LR, beta=0.0, logging_steps=1000,
                        save_strategy="no", bf16=False, report_to="none", use_cpu=True, disable_tqdm=True,
                        gradient_checkpointing=False, model_init_kwargs={"dtype": "float32"})
    data = Dataset.from_list([{"prompt": " ".join(str(rng.randrange(60)) for _ in range(LENGTH))} for _ in range(PROMPTS * steps)])

    def reward(completion_ids, **_):
        return [share(ids) for ids in completion_ids]
    trainer = GRPOTrainer(model=folder, reward_funcs=reward, args=config,
                          train_dataset=data, processing_class=PreTrainedTokenizerFast.from_pretrained(folder), callbacks=[Clock()])
    trainer.train()
    return times


def profile(ours: Ours, steps: int) -> None:
    """Where a step of ours spends its time."""
    profiler = cProfile.Profile(time.process_time)  # other processes do not count
    profiler.enable()
    for _ in range(steps):
        ours.step()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(22)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=12, help="pairs; the first two warm up")
    p.add_argument("--profile", action="store_true", help="only ours, under Python's profiler")
    p.add_argument("--dry", action="store_true", help="nothing is recorded")
    args = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ours, mine = Ours(model(folder), args.steps), []
        if args.profile:
            ours.step()
            return profile(ours, args.steps)

        def between() -> None:
            begun = time.perf_counter()
            ours.step()
            mine.append(time.perf_counter() - begun)
        theirs = trl_steps(folder, args.steps, between)
    a, b = np.array(mine[2:]), np.array(theirs[2:])
    split = "   ".join(f"{part} {np.median(times[2:]):.3f}" for part, times in ours.times.items())
    print(f"verl {np.median(a):.3f} s ({split})   trl {np.median(b):.3f} s   trl / verl, median of pairs {np.median(b / a):.2f} "
          f"(smallest {np.min(b / a):.2f}, largest {np.max(b / a):.2f})")
    if not args.dry:
        for system, values in (("verl", a), ("trl", b)):
            record("step", "tiny-0.86M", system, "step_s", float(np.median(values)), "s", "step.cpu.jsonl", pairs=len(a),
                   threads=torch.get_num_threads())
        record("step", "tiny-0.86M", "verl", "speedup_over_trl", float(np.median(b / a)), "median of pairs", "step.cpu.jsonl",
               pairs=len(a))


if __name__ == "__main__":
    main()
