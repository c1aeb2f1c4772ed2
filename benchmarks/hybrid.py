"""One mixed run of SFT, PPO and DPO against the same three one after another, on a tiny model that learns to add.

    python benchmarks/hybrid.py [STEPS] [SEEDS]

The sequence makes STEPS updates of each task. The mixture makes STEPS (the same rows of each task) and, in another run, as many
as the whole sequence. Figures of each model: held-out negative log-likelihood, share of sampled answers that are right, share of
held-out pairs in the right order (policy against the base model).
"""

import contextlib
import io
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
from shapes import record
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from verl.trainer import RLTrainer
from verl.trainer.config import load_run

STEPS, SEEDS = (int(given or default) for given, default in zip([*sys.argv[1:3], None, None], (200, 3)))
LR = 5e-4
WEIGHTS = {"sft": 0.4, "ppo": 0.4, "dpo": 0.2}


def exact(completions, answer, **_):
    return [float(c == a) for c, a in zip(completions, answer)]


def base_model(folder: Path, seed: int) -> str:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", pad_token="<end>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(vocab_size=264, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                                 intermediate_size=128, max_position_embeddings=64, bos_token_id=None,
                                 eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)).save_pretrained(folder)
    return str(folder)


def write_data(folder: Path, seed: int) -> None:
    """100 sums of two digits, 20 of them held out; a pair's rejected answer is off by one to three."""
    rng = random.Random(seed)
    sums = [(a, b) for a in range(10) for b in range(10)]
    rng.shuffle(sums)
    for name, part in (("train", sums[20:]), ("eval", sums[:20])):
        rows = [(f"{a}+{b}=", str(a + b), str(a + b + rng.choice([-3, -2, -1, 1, 2, 3]))) for a, b in part]
        kinds = {"sft": [{"prompt": p, "completion": r} for p, r, _ in rows],
                 "ppo": [{"prompt": p, "answer": r} for p, r, _ in rows],
                 "dpo": [{"prompt": p, "chosen": r, "rejected": w} for p, r, w in rows]}
        for kind, lines in kinds.items():
            (folder / f"{kind}_{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def train(folder: Path, out: Path, tasks: list[str], actor: str, steps: int, lr: float, seed: int,
          reference: str | None = None) -> list[dict]:
    """Run these tasks as a mixture; rows of metrics."""
    data = {t: {"train": str(folder / f"{t}_train.jsonl"), "eval": str(folder / f"{t}_eval.jsonl")} for t in WEIGHTS}
    algo = {"sft": {}, "ppo": {"kl_coef": 0.0}, "dpo": {}}
    trainer = {"algorithm": "hybrid", "rollout_batch_size": 32, "steps": steps, "output_dir": str(out), "seed": seed,
               "report_to": [],
               "tasks": [{"algorithm": t, "weight": WEIGHTS[t] if len(tasks) > 1 else 1.0, "data": data[t], "algo": algo[t]}
                         for t in tasks],
               "sampling": {"max_tokens": 4}, "optim": {"lr": lr}, "eval": {"samples": 16}, "samples_every": 0}
    model = {"actor": {"model_name_or_path": actor}, "reference": {"model_name_or_path": reference or actor}}
    config = load_run(data={"trainer": trainer, "model": model}).config
    with contextlib.redirect_stdout(io.StringIO()):
        RLTrainer(config.trainer, None, config.model, rewards=[exact]).train()
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def held_out(folder: Path, out: Path, model: str, base: str, seed: int) -> dict:
    """All three held-out figures of a model."""
    row = {k: v for r in train(folder, out, list(WEIGHTS), model, 1, 0.0, seed, base) if r["step"] == 0 for k, v in r.items()}
    return {"nll": round(row["sft/eval_nll"], 4), "right": round(row["ppo/eval_reward"], 4),
            "pairs": round(row["dpo/eval_rewards/accuracies"], 4)}


def show(way: str, seed: int, updates: int, seconds: float, figures: dict) -> None:
    """Print one model's figures and append them to results/hybrid.cpu.jsonl."""
    print(json.dumps({"way": way, "seed": seed, "updates": updates, "seconds": round(seconds, 1), **figures}), flush=True)
    for name, value in figures.items():
        record("hybrid", f"{way}, seed {seed}", "verl", name, value, "nats" if name == "nll" else "", "hybrid.cpu.jsonl",
               updates=updates, lr=LR)


def main():
    for seed in range(SEEDS):
        with tempfile.TemporaryDirectory() as tmp:
            folder = Path(tmp)
            base = base_model(folder / "base", seed)
            write_data(folder, seed)
            for steps in (STEPS, 3 * STEPS):
                start, out = time.time(), folder / f"mixture{steps}"
                train(folder, out, list(WEIGHTS), base, steps, LR, seed)
                took = time.time() - start
                show("mixture", seed, steps, took, held_out(folder, folder / f"of{steps}", str(out / "model"), base, seed))
            start, actor = time.time(), base
            for i, task in enumerate(WEIGHTS):
                train(folder, folder / task, [task], actor, STEPS, LR, seed)
                actor, took = str(folder / task / "model"), time.time() - start
                figures = held_out(folder, folder / f"of{task}", actor, base, seed)
                show(f"sequence, after {task}", seed, STEPS * (i + 1), took, figures)


if __name__ == "__main__":
    main()
