"""A whole training step on one GPU, split into its parts, of ours and of peers on the same work.

    python benchmarks/step.py                                  GRPO of ours, q05 and q15
    python benchmarks/step.py grpo --systems verl trl trl_tuned --cases q05 q15
    python benchmarks/step.py ppo --systems verl accelerate --cases q15 --steps 1
    python benchmarks/step.py ppo --cases l8lora --steps 2
    python benchmarks/step.py dpo --systems verl trl trl_tuned --cases q05
    python benchmarks/step.py --compare-losses --cases q05     the losses with every acceleration on and off
    python benchmarks/step.py grpo ppo dpo --tiny              all of it on a CPU with tiny models: nothing is recorded

Random weights of real shapes, forced lengths, one update a step. grpo: 64 prompts x 8 answers, prompt 256, response 1024, a
reward function; ppo: actor, critic, reward model and reference, 128 sequences, prompt 512, response 1536; dpo: 64 pairs, prompt
512, answers of 512. Ours: bf16 working weights with fp32 masters and fp32 gradient sums. Each method, case and system runs
in a process of its own; peak memory is device memory in use (sampled), not an allocator's count. Results are appended to
results/step.h200.jsonl; one that is there for this commit is still run again.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from dataclasses import replace

from measure import CASES, Options, report

RUNS = {  # (method, system) -> module with run(method, case, options)
    ("grpo", "verl"): "step_online", ("ppo", "verl"): "step_online", ("dpo", "verl"): "step_dpo",
    ("grpo", "trl"): "step_trl", ("grpo", "trl_tuned"): "step_trl", ("dpo", "trl"): "step_trl", ("dpo", "trl_tuned"): "step_trl",
    ("ppo", "accelerate"): "step_accelerate",
}
OURS = "verl"


def one(method: str, system: str, case: str, o: Options) -> str:
    """Run one line of the table in this process, record it and return it."""
    module = importlib.import_module(RUNS[method, system])
    extra = {} if system == OURS else {"system": system}
    result = module.run(method, CASES[case], o, **extra)
    return report(method, CASES[case], system, result, o, shared=system == OURS)


def options(args: argparse.Namespace) -> Options:
    o = Options(steps=args.steps, budget=args.budget, memory=tuple(args.memory), accelerations=not args.no_accelerations,
                sleep=args.sleep, micro=args.micro)
    o = o.tiny() if args.tiny else o
    changed = {k: v for k, v in (("prompts", args.prompts), ("prompt", args.prompt), ("response", args.response)) if v is not None}
    return replace(o, work={method: replace(work, **changed) for method, work in o.work.items()})


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("methods", nargs="*", help="grpo ppo dpo; left out: grpo")
    p.add_argument("--cases", nargs="+", choices=list(CASES), help="left out: q05 q15 (grpo), q15 (ppo), q05 (dpo)")
    p.add_argument("--systems", nargs="+", default=[OURS], choices=[OURS, "trl", "trl_tuned", "accelerate"])
    p.add_argument("--steps", type=int, default=3, help="measured steps, behind one that compiles and captures")
    p.add_argument("--memory", nargs="*", default=[], choices=["checkpoint", "offload"], help="memory for time")
    p.add_argument("--budget", type=int, help="tokens per micro-batch of ours; left out: from the memory there is")
    p.add_argument("--micro", type=int, help="sequences per micro-batch of a peer; left out: its usual one, or what fits")
    p.add_argument("--prompts", type=int, help="prompts of a step (pairs, for dpo) in place of the usual number")
    p.add_argument("--prompt", type=int, help="tokens of a prompt in place of the usual number")
    p.add_argument("--response", type=int, help="tokens of a response in place of the usual number")
    p.add_argument("--sleep", action=argparse.BooleanOptionalAction, default=True, help="the KV pool's memory serves training")
    p.add_argument("--no-accelerations", action="store_true", help="neither compiled layers nor CUDA graphs")
    p.add_argument("--compare-losses", action="store_true", help="losses with every acceleration on and off, on fixed samples")
    p.add_argument("--tiny", action="store_true", help="a CPU and tiny models, to see that everything runs")
    p.add_argument("--here", action="store_true", help="in this process: one method, one system, one case")
    args = p.parse_args()
    args.methods = args.methods or ["grpo"]
    if wrong := set(args.methods) - {"grpo", "ppo", "dpo"}:
        p.error(f"no such method: {', '.join(wrong)}; there are grpo, ppo, dpo")
    return args


def main() -> None:
    args = parse()
    o = options(args)
    usual = {"grpo": ["q05", "q15"], "ppo": ["q15"], "dpo": ["q05"]}
    lines = []
    for method in args.methods:
        for case in ["tiny"] if args.tiny and not args.cases else args.cases or usual[method]:
            if args.compare_losses:
                lines.append(importlib.import_module("compare_losses").run(CASES[case], o))
                continue
            for system in args.systems:
                if (method, system) not in RUNS:
                    continue
                if args.here:
                    lines.append(one(method, system, case, o))
                    continue
                command = [sys.executable, __file__, method, "--here", "--cases", case, "--systems", system,
                           *own_flags(sys.argv[1:])]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
                print(*done.stdout.strip().splitlines()[:-1], sep="\n", flush=True)
                lines.append(done.stdout.strip().splitlines()[-1] if done.returncode == 0 and done.stdout.strip() else
                             f"{method} {case} {system} FAILED with exit code {done.returncode}")
    print("\n" + "\n".join(lines), flush=True)


def own_flags(argv: list[str]) -> list[str]:
    """The flags of this call that each process gets too: all but methods, cases and systems."""
    kept, skip = [], True
    for word in argv:
        if word.startswith("--"):
            skip = word in ("--cases", "--systems")
        if not skip:
            kept.append(word)
    return kept


if __name__ == "__main__":
    main()
