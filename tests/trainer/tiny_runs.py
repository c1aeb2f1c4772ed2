"""A tiny real model directory, prompts and reward files, and runs of the real command on them."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from verl.cli.main import main

CHAT = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
REWARDS = '''
import time

def digits(completions, **_):
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [sum(ch.isdigit() for ch in t) / 8 for t in texts]

def slow_digits(completions, **kw):
    time.sleep(0.1)
    return digits(completions)

def raises(completions, **_):
    raise ZeroDivisionError("a bug in the reward")

def nothing(completions, **_):
    return [None] * len(completions)

def nan(completions, **_):
    return [float("nan")] * len(completions)

def short(completions, **_):
    return [1.0]
'''


def tiny_model(directory: Path, chat: bool = True, context: int = 256, seed: int = 0) -> Path:
    """A byte-level Llama with 2 layers of width 32; <|im_end|> ends turns."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|im_end|>",
                                        additional_special_tokens=["<|im_start|>"])
    if chat:
        tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(directory)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=264, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
        max_position_embeddings=context, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id))
    model.save_pretrained(directory)
    return directory


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def arithmetic(n: int = 40) -> list[dict]:
    return [{"prompt": [{"role": "user", "content": f"{i}+{i % 7}="}], "answer": str(i + i % 7)} for i in range(n)]


def workspace(folder: Path) -> Path:
    """folder/{model,train.jsonl,eval.jsonl,my.py,run.yaml}; returns the config."""
    tiny_model(folder / "model")
    write_jsonl(folder / "train.jsonl", arithmetic(40))
    write_jsonl(folder / "eval.jsonl", arithmetic(52)[40:])
    (folder / "my.py").write_text(REWARDS)
    (folder / "run.yaml").write_text("""
trainer:
  algorithm: grpo
  rewards:
    - function: my.py:digits
  rollout_batch_size: 4
  group_size: 4
  steps: 4
  output_dir: out
  sampling: {max_tokens: 8}
  optim: {lr: 3e-3}
  report_to: []
model:
  actor: {model_name_or_path: ./model}
data:
  train: train.jsonl
  eval: eval.jsonl
""")
    return folder / "run.yaml"


@dataclass
class Done:
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


def verl(*args: str) -> Done:
    """Run the command in this process: the same code as in a shell, without starting Python again."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(args)
    return Done(code, out.getvalue(), err.getvalue())


def verl_until(*args: str, ready, sig: signal.Signals, timeout: float = 120) -> tuple[int, str]:
    """Start the command, send `sig` to it as soon as `ready()` is true, and return (exit code, output)."""
    process = subprocess.Popen([sys.executable, "-m", "verl.cli.main", *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               text=True, env=os.environ | {"OMP_NUM_THREADS": "1", "CI": "1"})
    deadline = time.monotonic() + timeout
    while not ready():
        assert process.poll() is None, f"ended by itself: {process.communicate()[0]}"
        assert time.monotonic() < deadline, "never became ready"
        time.sleep(0.002)
    process.send_signal(sig)
    out, _ = process.communicate(timeout=timeout)
    return process.returncode, out


def curve(run: Path, name: str = "reward") -> list[tuple[int, float]]:
    """(step, value) of a metric from metrics.jsonl."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row[name]) for row in rows if name in row]


def weights(run: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file
    return load_file(run / "model" / "model.safetensors")
