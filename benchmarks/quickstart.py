"""The quick start over several seeds: python benchmarks/quickstart.py [--seeds 0 1 2 3 4] [a.b=value ...]

Held-out exact-match accuracy of sampled answers before and after, both measured by the run itself, and the seconds of training.
Appends to results/quickstart.<device>.jsonl.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from shapes import record

CONFIG = Path(__file__).parents[1] / "examples" / "quickstart" / "config.yaml"
METRIC = "eval_rewards/exact/mean"


def start(seed: int, folder: str, overrides: list[str]) -> subprocess.Popen:
    command = [sys.executable, "-m", "verl.cli.main", "train", str(CONFIG), f"trainer.seed={seed}",
               f"trainer.output_dir={folder}/{seed}", "trainer.report_to=[]", "trainer.samples_every=0", *overrides]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def show(seed: int, folder: str, whole: float, overrides: list[str], note: str, device: str) -> tuple[float, float]:
    lines = [json.loads(line) for line in (Path(folder) / str(seed) / "metrics.jsonl").read_text().splitlines()]
    accuracy = [line[METRIC] for line in lines if METRIC in line]
    steps = [line for line in lines if "step_time" in line]
    training = sum(line["step_time"] for line in steps)
    print(f"seed {seed}: {' '.join(f'{a:.3f}' for a in accuracy)}  gain {accuracy[-1] - accuracy[0]:+.3f}  "
          f"training {training:.0f} s of {whole:.0f} s", flush=True)
    print("   batch reward", *(f"{s['reward']:.2f}" for s in steps if "reward" in s), flush=True)
    for name, value, unit in (("accuracy_before", accuracy[0], ""), ("accuracy_after", accuracy[-1], ""),
                              ("training_s", training, "s")):
        record("quickstart", f"seed{seed}", "verl", name, value, unit, f"quickstart.{device}.jsonl", settings=overrides, note=note)
    return accuracy[0], accuracy[-1]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time (for looking at curves; times then mean nothing)")
    parser.add_argument("--note", default="")
    args, overrides = parser.parse_known_args()
    device = "h200" if torch.cuda.is_available() else "cpu"
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for i in range(0, len(args.seeds), args.parallel):
            begun = time.time()
            running = [(seed, start(seed, folder, overrides)) for seed in args.seeds[i:i + args.parallel]]
            for seed, process in running:
                out, _ = process.communicate()
                if process.returncode:
                    sys.exit(out)
                rows.append(show(seed, folder, time.time() - begun, overrides, args.note, device))
    print(f"{args.note} {' '.join(overrides)}: before at most {max(a for a, _ in rows):.3f}, gain at least "
          f"{min(b - a for a, b in rows):.3f}, mean {sum(b - a for a, b in rows) / len(rows):.3f}", flush=True)


if __name__ == "__main__":
    main()
