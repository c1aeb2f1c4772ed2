"""Commands that look and change nothing: doctor, show ..., and the summary at the end of a run."""

from __future__ import annotations

import argparse
import json
from importlib import metadata
from pathlib import Path

import verl
from verl.core.errors import DataError, ModelError


def doctor(args: argparse.Namespace) -> int:
    """Versions, hardware and the backends that would be chosen."""
    import platform
    import shutil

    import psutil

    from verl.trainer.plan import inspect_machine, minimum_problems
    print(f"verl {verl.__version__}, Python {platform.python_version()}")
    for name in ("torch", "transformers", "peft", "datasets", "vllm", "ray", "math-verify"):
        try:
            print(f"  {name:14s} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            print(f"  {name:14s} not installed")
    machine = inspect_machine()
    print(f"machine: {psutil.cpu_count(logical=False)} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB memory, "
          f"{shutil.disk_usage('.').free / 2**30:.0f} GiB free disk")
    for line in machine.lines():
        print(f"  {line}")
    print("verl would train in " + ("bf16 with fp32 masters on the GPU" if machine.gpus else "fp32 on the CPU")
          + " and sample with the built-in engine" + (" (vLLM on request)" if machine.vllm else ""))
    problems = minimum_problems()
    for line in problems:
        print(f"problem: {line}")
    return 1 if problems else 0


def config(args: argparse.Namespace) -> int:
    from verl.core.config import dump
    from verl.trainer.config import load_run
    loaded = load_run(args.config, args.overrides)
    print(dump(loaded.config, loaded.origins), end="")
    return 0


def plan_of(args: argparse.Namespace) -> int:
    from verl.trainer.config import load_run
    from verl.trainer.forecast import memory_lines
    from verl.trainer.plan import plan
    settings = load_run(args.config, args.overrides).config
    for line in plan(settings):
        print(line)
    if settings.model.actor.model_name_or_path:
        try:
            print("\n".join(memory_lines(settings)))
        except ModelError as error:
            print(f"memory is not planned: {error}")
    t = settings.trainer
    if t.algo.online:
        samples = t.rollout_batch_size * t.samples_per_prompt
        print(f"a step: {t.rollout_batch_size} prompts x {t.samples_per_prompt} samples = {samples} responses of at most "
              f"{t.sampling.max_tokens} tokens, {t.updates_per_step} optimizer update{'s' * (t.updates_per_step > 1)}")
    return 0


def forecast(args: argparse.Namespace) -> int:
    """Memory and time of a config on devices that need not be here."""
    from verl.trainer.forecast import plan_devices
    print("\n".join(plan_devices(args.config, args.overrides, args.devices)))
    return 0


def data(args: argparse.Namespace) -> int:
    from verl.core.errors import ConfigError
    from verl.data import RLDataLoader, describe_row
    from verl.models import load_tokenizer
    from verl.trainer.config import load_run
    from verl.trainer.hybrid import Tasks
    from verl.trainer.tasks import Hybrid
    settings = load_run(args.config, args.overrides).config
    if not settings.model.actor.model_name_or_path:
        raise ConfigError("model.actor.model_name_or_path is not set; its tokenizer is needed to show rows")
    tokenizer = load_tokenizer(settings.model.actor.model_name_or_path, settings.model.actor.trust_remote_code)
    mixture = isinstance(settings.trainer.algo, Hybrid)
    loader = RLDataLoader(settings.data) if settings.data.train is not None or not mixture else None
    for name, own in [(t.name, t.loader) for t in Tasks(settings.trainer, loader)] if mixture else [("", loader)]:
        for line in own.bind(tokenizer, settings.trainer.seed):
            print(f"{name}: {line}" if name else line)
        print(describe_row(tokenizer, own.prompts[0], own.config))
    return 0


def graph(args: argparse.Namespace) -> int:
    path = Path(args.directory) / "graph.json"
    if not path.is_file():
        raise DataError(f"{path} does not exist; a run writes it when it ends or is stopped")
    nodes = json.loads(path.read_text())
    width = max(len(n["verb"]) for n in nodes)
    for n in nodes:
        print(f"{n['verb']:{width}s}  {n['by']:14s} {n['seconds']:8.3f} s   {', '.join(n['reads'])} -> {n['writes']}")
    return 0


def timeline(args: argparse.Namespace) -> int:
    from verl.core.report import draw_timeline, read_timeline, utilisation
    directory = Path(args.directory)
    data = read_timeline(directory)
    rows = utilisation(data)
    width = max((len(r[0]) for r in rows), default=4)
    print(f"{'role':{width}s}  {'device':10s} {'spans':>7s} {'busy':>10s}   of {data['otherData']['seconds']:.1f} s")
    for role, device, spans, busy, share in rows:
        print(f"{role:{width}s}  {device:10s} {spans:7d} {busy:8.1f} s   {share:6.1%}")
    print(f"trace: {directory / 'timeline.json'} (opens in ui.perfetto.dev or chrome://tracing)")
    print(f"picture: {draw_timeline(directory)}")
    return 0


def run(args: argparse.Namespace) -> int:
    from verl.core.report import draw_curves
    from verl.core.report.curves import read_metrics
    directory = Path(args.directory)
    rows = list(read_metrics(directory))
    if not rows:
        raise DataError(f"{directory} has no metrics yet")
    names = ("reward", "eval_reward", "loss", "kl", "entropy", "completions/mean_length", "grad_norm", "step_time")
    print(f"{directory}: step {rows[-1]['step']}")
    for name in names:
        values = [r[name] for r in rows if name in r]
        if values:
            print(f"  {name:26s} first {values[0]:10.4f}   last {values[-1]:10.4f}   min {min(values):10.4f}   "
                  f"max {max(values):10.4f}")
    print(f"curves: {draw_curves(directory)}")
    return 0


def summary(directory: Path, config_path: str) -> None:
    """What a person wants to see when a run has ended: before and after, the curves, the model, and what to do next."""
    from verl.core.report.curves import read_metrics
    before, after = _evals(directory)
    rows = list(read_metrics(directory))
    evals, steps = [r for r in rows if "eval_reward" in r], rows[-1]["step"] if rows else 1
    print()
    if before and after:
        print("the same held-out prompts before and after:")
        for b, a in _one_each(before, after)[:6]:
            print(f"  {_last_message(b['prompt'])!s:.60}\n    before {b['completion'].strip()!r:.60} ({b['reward']:g})   "
                  f"after {a['completion'].strip()!r:.60} ({a['reward']:g})")
    if len(evals) > 1:
        print(f"held-out reward: {evals[0]['eval_reward']:.3f} -> {evals[-1]['eval_reward']:.3f}")
        for name in [n for n in evals[-1] if n.endswith("_pass1") and n in evals[0]]:
            print(f"held-out {name[len('eval_'):-len('_pass1')]}: {evals[0][name]:.3f} -> {evals[-1][name]:.3f}")
    print(f"curves: {directory / 'curves.png'}")
    model = directory / "model"
    if model.is_dir():
        print(f"model:  {model}  (transformers loads it: AutoModelForCausalLM.from_pretrained)")
    print(f"""next:
  your own data   verl train {config_path} data.train=yours.jsonl data.eval=null data.eval_size=64 trainer.output_dir=runs/mine
  go on           the same command with more steps, e.g. trainer.steps={2 * steps} (a stopped run resumes with the same command)
  on a GPU        the same command, on a machine that has one: bf16 weights with fp32 masters, CUDA graphs
talk to it: verl generate {directory} "your prompt\"""")


def _evals(directory: Path) -> tuple[list[dict], list[dict]]:
    files = sorted((directory / "completions").glob("eval_*.json"))
    if len(files) < 2:
        return [], []
    return json.loads(files[0].read_text()), json.loads(files[-1].read_text())


def _one_each(before: list[dict], after: list[dict]) -> list[tuple[dict, dict]]:
    """The first scored sample of every prompt, before and after."""
    pairs = {b["task"]: (b, a) for b, a in reversed(list(zip(before, after))) if None not in (b["reward"], a["reward"])}
    return list(reversed(pairs.values()))


def _last_message(prompt) -> str:
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]
