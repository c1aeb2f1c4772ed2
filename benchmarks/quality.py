"""Quality at equal samples, ours and TRL's: python benchmarks/quality.py [--seeds 0 1 2] [--systems verl trl] [--steps 20]

SmolLM2-135M-Instruct learns the quick start's sums by GRPO: the same prompts, 6 x 8 answers a step, the same learning rate,
rewards, optimizer settings and number of steps; each library otherwise at its defaults (TRL: float32 weights, bf16 autocast
on a GPU, transformers' generate). The trained model directories are then sampled by one and the same evaluation: 16 answers
to every held-out prompt at temperature 1, share of exactly right ones. Appends to results/quality.<device>.jsonl and draws
docs/quality.png, reward against seconds spent in steps. TRL runs in a process of its own; --trl-python names another
interpreter for it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from shapes import RESULTS, record

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "examples" / "quickstart" / "config.yaml"
DEVICE = "h200" if torch.cuda.is_available() else "cpu"
LR, WARMUP, BETAS, PROMPTS, GROUP, TOKENS = 3e-5, 3, (0.9, 0.99), 6, 8, 6  # the quick start's


def overrides(seed: int, steps: int, folder: Path, model: Path, answers: int = 1) -> list[str]:
    return [f"model.actor.model_name_or_path={model}",
            f"trainer.seed={seed}", f"trainer.steps={steps}", f"trainer.output_dir={folder}", "trainer.report_to=[]",
            "trainer.samples_every=0", "trainer.eval.every=0", f"trainer.eval.samples={answers}"]


def verl_run(seed: int, steps: int, folder: Path, model: Path, python: str) -> list[tuple[float, float]]:
    """Train with the command; [(seconds in steps so far, mean reward of exact answers)]."""
    command = [sys.executable, "-m", "verl.cli.main", "train", str(CONFIG), *overrides(seed, steps, folder, model)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [r for r in rows if "step_time" in r]
    return list(zip(np.cumsum([r["step_time"] for r in rows]).tolist(), [r["rewards/exact/mean"] for r in rows]))


def trl_run(seed: int, steps: int, folder: Path, model: Path, python: str) -> list[tuple[float, float]]:
    command = [python, __file__, "--trl", str(seed), str(steps), str(folder), "--model", str(model)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [tuple(point) for point in json.loads((folder / "curve.json").read_text())]


def trl_main(seed: int, steps: int, folder: Path, model: Path) -> None:
    """TRL's GRPOTrainer on the same task, through its public API."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    sys.path.insert(0, str(CONFIG.parent))
    from reward import exact, number
    data = [json.loads(line) for line in (CONFIG.parent / "data" / "train.jsonl").read_text().splitlines()]
    curve, clock = [], [0.0, 0.0]

    class Curve(TrainerCallback):
        def on_train_begin(self, *_, lr_scheduler, **__):
            lr_scheduler.step()  # its warm-up begins at a rate of 0, ours at the first third

        def on_step_begin(self, *_, **__):
            clock[0] = time.perf_counter()

        def on_step_end(self, *_, **__):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            clock[1] += time.perf_counter() - clock[0]

        def on_log(self, args, state, control, logs=None, **_):
            if "rewards/exact/mean" in logs:
                curve.append((clock[1], float(logs["rewards/exact/mean"])))
    config = GRPOConfig(output_dir=str(folder / "out"), seed=seed, data_seed=seed, max_steps=steps, learning_rate=LR,
                        warmup_steps=WARMUP, lr_scheduler_type="constant_with_warmup", adam_beta1=BETAS[0], adam_beta2=BETAS[1],
                        weight_decay=0.0, per_device_train_batch_size=PROMPTS * GROUP, num_generations=GROUP, beta=0.0,
                        max_completion_length=TOKENS, temperature=1.0, reward_weights=[1.0, 0.2], gradient_checkpointing=False,
                        logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
                        use_cpu=not torch.cuda.is_available(), bf16=torch.cuda.is_available(),
                        model_init_kwargs={"dtype": "float32"})
    trainer = GRPOTrainer(model=str(model), reward_funcs=[exact, number], args=config, train_dataset=Dataset.from_list(data),
                          processing_class=AutoTokenizer.from_pretrained(model), callbacks=[Curve()])
    trainer.train()
    trainer.save_model(str(folder / "model"))
    (folder / "curve.json").write_text(json.dumps(curve))


def accuracy(folder: Path, model: Path, answers: int) -> float:
    """Share of exactly right held-out answers of a trained model directory."""
    from verl.trainer.config import load_run
    from verl.trainer.evaluate import evaluate_config
    metrics = evaluate_config(load_run(CONFIG, overrides(0, 1, folder, model, answers)).config, str(folder / "model"))
    return metrics["rewards/exact/mean"]


def draw(curves: dict[tuple[str, int], list[tuple[float, float]]], path: Path) -> None:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    figure, axis = plt.subplots(figsize=(8, 4.5))
    colours = {system: f"C{i}" for i, system in enumerate(dict.fromkeys(s for s, _ in curves))}
    for (system, seed), points in curves.items():
        first = seed == min(other for name, other in curves if name == system)
        axis.plot(*zip(*points), color=colours[system], lw=1, label=system if first else None)
    axis.set_xlabel("seconds in steps")
    axis.set_ylabel("exact answers while training")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    p.add_argument("--systems", nargs="+", default=["verl", "trl"], choices=["verl", "trl"])
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--model", type=Path, default=ROOT / "models" / "SmolLM2-135M-Instruct")
    p.add_argument("--answers", type=int, default=16, help="to every held-out prompt of the evaluation")
    p.add_argument("--trl-python", default=sys.executable)
    p.add_argument("--dry", action="store_true", help="nothing is recorded or drawn")
    p.add_argument("--trl", nargs=3, metavar=("SEED", "STEPS", "FOLDER"), help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.trl:
        return trl_main(int(args.trl[0]), int(args.trl[1]), Path(args.trl[2]), args.model)
    curves, found = {}, {system: [] for system in args.systems}
    with tempfile.TemporaryDirectory() as temporary:
        for seed in args.seeds:
            for system in args.systems:
                folder, begun = Path(temporary) / f"{system}{seed}", time.time()
                folder.mkdir()
                curve = {"verl": verl_run, "trl": trl_run}[system](seed, args.steps, folder, args.model, args.trl_python)
                curves[system, seed], right = curve, accuracy(folder, args.model, args.answers)
                found[system].append(right)
                last, seconds = float(np.mean([r for _, r in curve[-5:]])), curve[-1][0]
                print(f"{system} seed {seed}: held-out {right:.3f}, exact answers of the last 5 steps {last:.3f}, {seconds:.1f} s "
                      f"in steps, {time.time() - begun:.0f} s in all", flush=True)
                if not args.dry:
                    for metric, value, unit in (("heldout_exact", right, "share"), ("steps_s", seconds, "s"),
                                                ("reward_last5", last, "share")):
                        record("quality", f"seed{seed}", system, metric, value, unit, f"quality.{DEVICE}.jsonl", steps=args.steps)
    print("   ".join(f"{system}: held-out mean {np.mean(v):.3f} of {len(v)} seeds" for system, v in found.items()))
    if not args.dry:
        (RESULTS / f"quality.{DEVICE}.json").write_text(json.dumps({f"{s}{seed}": c for (s, seed), c in curves.items()}))
        draw(curves, ROOT / "docs" / "quality.png")


if __name__ == "__main__":
    main()
