"""TRL's steps on the work of step.py, through its public trainers; runs where `trl` is installed.

trl: its default precision, float32 weights under bf16 autocast, and vLLM in the same process where it is installed (a pool of
0.3 of the device), else transformers' generate. trl_tuned: bf16 weights, the pool asleep while training and no larger than
the step needs. Both get activations kept (faster than TRL's default of recomputing them), the micro-batch that is usual for the
size, and TRL's own fused output layer.
"""

from __future__ import annotations

import importlib.util
import random
import tempfile
import time
from dataclasses import replace

import torch
import trl.extras.profiling as profiling
from datasets import Dataset
from measure import Case, Options, Rows, free
from shapes import config_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

MICRO = {"q05": 16, "q15": 8, "l8": 2, "tiny": 4}
POOL = {"q05": 0.1, "q15": 0.15, "l8": 0.4, "tiny": 0.1}  # of the device: weights and the keys and values of one step
CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def directory(case: Case, folder: str, device: str, ends: bool) -> str:
    """A model directory of the shape with a byte tokenizer whose ids cover the model's. Without `ends` the end id lies outside
    them, so that no response ends by itself."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config_of(case.shape), dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    model.save_pretrained(folder)
    rows = model.config.vocab_size
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    last = ["<end>", "<pad>"] if ends else ["<pad>"]
    words = [*letters, *(f"w{i:x}" for i in range(rows - len(letters) - len(last))), *last]
    vocabulary = {word: i for i, word in enumerate(words)}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<end>", padding_side="left")
    tokenizer.chat_template = CHAT
    assert ends or tokenizer.eos_token_id == rows, (tokenizer.eos_token_id, rows)
    tokenizer.save_pretrained(folder)
    return folder


def text(rng: random.Random, length: int) -> str:
    """One token a letter."""
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(length - 1)) + "."


class Clock(TrainerCallback):
    """A row for every optimizer step; TRL's own profiling contexts tell its parts."""

    names = {"generate": "generate", "sync_weights": "sync", "logps": "logprobs"}  # word in a context's name -> part

    def __init__(self, rows: Rows):
        self.rows, self.context, self.row, self.depth = rows, None, None, 0
        profiling.ProfilingContext.__enter__ = lambda context: self.enter(context)
        profiling.ProfilingContext.__exit__ = lambda context, *_: self.leave(context)

    def part(self, name: str) -> str | None:
        """The part a profiled name belongs to; log-probs inside the update belong to the update."""
        if "logps" in name and torch.is_grad_enabled():
            return None
        return next((part for word, part in self.names.items() if word in name), None)

    def enter(self, context):
        context._part = self.part(context.name) if self.row is not None and not self.depth else None
        if context._part:
            self.depth = 1
            if self.rows.device == "cuda":
                torch.cuda.synchronize()
            context._begun = time.perf_counter()
        return context

    def leave(self, context) -> bool:
        if context._part:
            if self.rows.device == "cuda":
                torch.cuda.synchronize()
            self.row[context._part] = self.row.get(context._part, 0.0) + time.perf_counter() - context._begun
            self.depth = 0
        return False

    def on_step_begin(self, *_, **__) -> None:
        self.context = self.rows.step()
        self.row = self.context.__enter__()

    def on_step_end(self, *_, **__) -> None:
        row, self.row = self.row, None
        begun = sum(row.values())
        self.context.__exit__(None, None, None)
        row["train"] = row["step"] - begun  # TRL's step has nothing else: batches, loss, backward, optimizer
        row["rest"] = 0.0

    def on_log(self, args, state, control, logs=None, **_) -> None:
        if logs:
            print({k: v for k, v in logs.items() if any(w in k for w in ("length", "grad_norm", "loss", "clipped"))}, flush=True)


def settings(case: Case, o: Options, system: str, rows: int, folder: str) -> dict:
    micro = o.micro or MICRO[case.shape]
    tuned = system == "trl_tuned" and o.device == "cuda"
    return {"output_dir": f"{folder}/out", "per_device_train_batch_size": min(micro, rows),
            "gradient_accumulation_steps": max(1, rows // micro), "max_steps": o.steps + 1, "learning_rate": 1e-6,
            "logging_steps": 1, "disable_tqdm": True, "save_strategy": "no",
            "report_to": "none", "gradient_checkpointing": "checkpoint" in o.memory,
            "use_cpu": o.device == "cpu", "bf16": o.device == "cuda",
            "model_init_kwargs": {"dtype": "bfloat16" if tuned else "float32"}}


def grpo(case: Case, o: Options, system: str, folder: str, clock: Clock) -> GRPOTrainer:
    work, rng = o.work["grpo"], random.Random(3)
    extra = {}
    if importlib.util.find_spec("vllm") and o.device == "cuda":
        extra = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": work.length,
                 "generation_kwargs": {"ignore_eos": True},
                 "vllm_gpu_memory_utilization": 0.3 if system == "trl" else POOL[case.shape],
                 "vllm_enable_sleep_mode": system == "trl_tuned"}
    config = GRPOConfig(**settings(case, o, system, work.sequences, folder), num_generations=work.group,
                        max_completion_length=work.response, beta=0.0, temperature=1.0, **extra)
    data = Dataset.from_list([{"prompt": text(rng, work.prompt)} for _ in range(work.prompts * (o.steps + 1))])

    def reward(completion_ids, **_):
        return [sum(i % 2 for i in ids) / len(ids) for ids in completion_ids]
    return GRPOTrainer(model=folder, reward_funcs=reward, args=config, train_dataset=data, callbacks=[clock],
                       processing_class=PreTrainedTokenizerFast.from_pretrained(folder))


def dpo(case: Case, o: Options, system: str, folder: str, clock: Clock) -> DPOTrainer:
    work, rng = o.work["dpo"], random.Random(3)
    micro = replace(o, micro=o.micro or MICRO[case.shape] // 2)  # a pair is two rows
    config = DPOConfig(**settings(case, micro, system, work.prompts, folder), max_length=work.length)

    def pair() -> dict[str, str]:  # an end id follows each answer
        return {"prompt": text(rng, work.prompt), **{side: text(rng, work.response - 1) for side in ("chosen", "rejected")}}
    data = Dataset.from_list([pair() for _ in range(work.prompts * (o.steps + 1))])
    return DPOTrainer(model=folder, args=config, train_dataset=data, callbacks=[clock],
                      processing_class=PreTrainedTokenizerFast.from_pretrained(folder))


def run(method: str, case: Case, o: Options, system: str) -> dict[str, float]:
    """Medians of `o.steps` steps behind a first one."""
    free(o.device)
    rows = Rows(f"{system} {method} {case.name}", o.device)
    with tempfile.TemporaryDirectory() as folder:
        directory(case, folder, o.device, ends=method == "dpo")
        free(o.device)
        trainer = {"grpo": grpo, "dpo": dpo}[method](case, o, system, folder, Clock(rows))
        generator = "vllm" if getattr(trainer, "use_vllm", False) else "transformers" if method == "grpo" else "none"
        print(f"{system}: weights {next(trainer.model.parameters()).dtype}, sampled by {generator}", flush=True)
        trainer.train()
    return rows.median()
