"""RLTrainer: a config, a dataloader and models become a finished training."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import torch

import verl
from verl.core.config import dump
from verl.core.errors import ConfigError
from verl.core.registry import load_object
from verl.core.types import Sample
from verl.data import DataConfig, RLDataLoader
from verl.models import context_length, load_tokenizer
from verl.models.reward_model import RewardModel
from verl.rewards.build import build_rewards
from verl.rewards.function import load_function
from verl.rewards.model import ModelSource
from verl.rewards.scorer import Scorer
from verl.trainer import hybrid, offline, online_preference, pipeline, rl
from verl.trainer.config import ModelConfig, RunConfig, TrainerConfig
from verl.trainer.online_preference import FromSamples, by_data
from verl.trainer.placement import place
from verl.trainer.plan import inspect_machine, plan
from verl.trainer.roles import Roles, build_roles
from verl.trainer.run import Run, device_line, total_steps
from verl.trainer.sampler import Sampler
from verl.trainer.tasks import Hybrid


class RLTrainer:
    """Train as configured: resumes by itself, saves, evaluates, exports.

    config: the `trainer` section; model_config: the `model` section; dataloader: RLDataLoader over the `data` section (None:
    every task of a mixture has data of its own). rewards: Python objects in place of `trainer.rewards`.
    Construction checks what the machine has and prints which backend runs and why; bad settings and bad data are errors
    before any weights load.
    """

    def __init__(self, config: TrainerConfig, dataloader: RLDataLoader | None, model_config: ModelConfig,
                 rewards: Any = None, resolved: str | None = None):
        mixture = isinstance(config.algo, Hybrid)
        self.loader = hybrid.Tasks(config, dataloader) if mixture else dataloader or RLDataLoader(DataConfig())
        self.config = RunConfig(config, model_config, self.loader.config)
        self.resolved = resolved if resolved is not None else dump_config(self.config)
        self.notes = plan(self.config)
        for line in self.notes:
            print(f"verl: {line}", flush=True)
        actor = model_config.actor
        if not actor.model_name_or_path:
            raise ConfigError("model.actor.model_name_or_path is not set; give a model directory, e.g. "
                              "model.actor.model_name_or_path=models/SmolLM2-135M-Instruct")
        self.tokenizer = load_tokenizer(actor.model_name_or_path, actor.trust_remote_code)
        context = context_length(actor.model_name_or_path, actor.trust_remote_code)
        self.compositions: dict[str, Any] = {}  # by task name; a run of one method has one task, named ""
        parts = [(t.name, t.config, t.loader) for t in self.loader] if mixture else [("", config, self.loader)]
        for name, part, loader in parts:
            bind_data(part, loader, self.tokenizer, context)
            pipeline.check(config)
            if part.algo.online:
                same = next((n for n, p, _ in parts if n in self.compositions and p.rewards is part.rewards), None)
                self.compositions[name] = (self.compositions[same] if same is not None else
                                           build_composition(RunConfig(part, model_config, loader.config), rewards))
                print(f"verl: {self.compositions[name].describe()}", flush=True)
                self.compositions[name].check([*loader.prompts, *(loader.eval_prompts or ())])
        self.longest_prompt = max(loader.longest_prompt for _, _, loader in parts)
        if mixture:
            config.algo = config.algo.learning(self.loader)

    def train(self) -> Run:
        """Run to the end (or to a signal) and return the Run; its directory holds everything."""
        callbacks = load_callbacks(self.config.trainer)  # a wrong name is known before weights load
        total = total_steps(self.config, len(self.loader))
        notes: list[str] = []
        roles = build_roles(self.config, total * self.config.trainer.updates_per_step, notes,
                            longest_prompt=self.longest_prompt)
        with contextlib.closing(roles):
            run = Run(self.config, total, list(self.loader.eval_prompts or ()), callbacks, roles.policy.lm.stop_ids, self.resolved,
                      manifest(self.config, self.loader))
            with run:
                for line in notes:
                    if line not in self.notes:
                        run.report.note(f"verl: {line}")
                fit(run, self.loader, roles, self.compositions)
        return run


def bind_data(config: TrainerConfig, loader: RLDataLoader, tokenizer: Any, context: int) -> None:
    """Decide how the method learns from these rows, hold prompts to the model's context, check and count them."""
    config.algo, line = by_data(config.algo, loader.prompts)
    config.algo.check_group(config.samples_per_prompt)
    print(f"verl: {line}", flush=True)
    if loader.config.max_prompt_tokens is None and config.algo.online:
        room = context - config.sampling.max_tokens  # the limit is what the context leaves beside the response
        if room < 1:
            raise ConfigError(f"trainer.sampling.max_tokens: {config.sampling.max_tokens} fills the model's context of {context} "
                              f"tokens; no prompt fits beside it. Set it below {context}")
        loader.config = dataclasses.replace(loader.config, max_prompt_tokens=room)
    for line in loader.bind(tokenizer, config.seed):
        print(f"verl: {line}", flush=True)


def fit(run: Run, tasks: RLDataLoader | hybrid.Tasks, roles: Roles, compositions: dict[str, Any]) -> None:
    """Restore what a checkpoint holds and run the loop of the method's kind."""
    algo, known = run.restore(tasks, roles.policy, roles.critic, run.config.algo)
    policy, reference, critic = roles.policy, roles.reference, roles.critic
    with contextlib.ExitStack() as stack:
        samplers = {}
        for name, composition in compositions.items():
            scorer = stack.enter_context(contextlib.closing(Scorer(composition)))
            part, loader = tasks.part(name) if name else (run.config, tasks)
            samplers[name] = Sampler(roles.rollout, policy.lm.tokenizer, loader.config, scorer, part.seed,
                                     on_finished=run.keep_sample(name), cancelled=lambda: run.stopped,
                                     known=known.get(name, {}))
        if samplers:
            stack.enter_context(contextlib.closing(roles.rollout))
            for sampler in samplers.values():
                sampler.scorer.on_span = lambda source, *span: run.timeline.add(f"reward {source}", "score", *span, run.step + 1)
            if hasattr(roles.rollout, "note"):  # a pool of workers, which may lose some
                roles.rollout.note = run.report.note
        source = None
        if "" in samplers:
            source = pipeline.open_source(run, tasks, samplers[""], algo, policy)
            stack.enter_context(contextlib.closing(source))
        run.in_flight = lambda data: unfinished(samplers, source, data)
        run.timeline.devices |= devices(roles)
        try:
            if isinstance(algo, Hybrid):
                hybrid.train(run, tasks.sampling_with(samplers), algo, policy, reference, critic)
            elif isinstance(algo, FromSamples):
                online_preference.train(run, tasks, source, algo, policy, reference)
            elif algo.online:
                rl.train(run, tasks, source, algo, policy, reference, critic)
            else:
                offline.train(run, tasks, algo, policy, reference)
        except Exception:
            run.rescue(policy, critic)
            raise


def unfinished(samplers: dict[str, Sampler], source: pipeline.Source | None, data: dict) -> Iterator[tuple[str, int, int, Sample]]:
    """(task, place, number, sample) of finished samples that this data state does not count as trained."""
    if source is not None:
        source.settle()
    return ((name, *key, sample) for name, sampler in samplers.items()
            for key, sample in sampler.untrained(data[name]["data"] if name else data).items())


def devices(roles: Roles) -> dict[str, str]:
    """Role -> device, as far as a role lives on one."""
    engines = {"actor": roles.policy, "critic": roles.critic, "reference": getattr(roles.reference, "engine", None),
               "rollout": roles.rollout}
    return {role: str(lm.device) for role, engine in engines.items() if (lm := getattr(engine, "lm", None)) is not None}


def build_composition(config: RunConfig, rewards: Any = None):
    """The run's rewards: given objects, else `trainer.rewards`, else the reward model of `model.reward_model`."""
    trainer, role = config.trainer, config.model.reward_model
    machine = inspect_machine()
    placed = place(config, machine.gpus, machine.ray)
    device = placed.here.get("reward_model", "cpu")
    sources = rewards if rewards is not None else trainer.rewards
    if not sources and role.implementation:
        sources = [load_object(role.implementation, "model.reward_model.class")(role)]
    if not sources and "reward_model" in placed.far:
        from verl.trainer.far import FarRewardModel
        sources = [ModelSource(FarRewardModel(role, placed.far["reward_model"]))]
    elif not sources and role.model_name_or_path:
        sources = [RewardModel(role.model_name_or_path, device=device, dtype=role.dtype,
                               trust_remote_code=role.trust_remote_code)]
    if not sources:
        raise ConfigError("trainer.rewards is empty and model.reward_model is not set; nothing would be rewarded. Add e.g.\n"
                          "  rewards:\n    - verifier: math")
    return build_rewards(sources, trainer.aggregate, base_dir=trainer.base_dir, device=device)


def load_callbacks(config: TrainerConfig) -> list[Any]:
    """Callback objects by `module:Class` or `file.py:Class`; any of on_step, on_samples, on_save."""
    out = []
    for path in config.callbacks:
        in_file = ".py:" in path
        kind = load_function(path, config.base_dir, "trainer.callbacks") if in_file else load_object(path, "trainer.callbacks")
        out.append(kind())
    return out


def dump_config(config: RunConfig) -> str:
    """The resolved config as YAML; Python objects that YAML cannot hold are named instead."""
    try:
        return dump(config)
    except ConfigError as error:
        return f"# {error}\n"


def manifest(config: RunConfig, loader: RLDataLoader) -> dict[str, Any]:
    """What a reader of this run needs to repeat it: versions, data fingerprint, seed, machine."""
    def version(name: str) -> str | None:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
        return None

    return {"verl": verl.__version__, "commit": commit(), "python": platform.python_version(),
            "versions": {n: version(n) for n in ("torch", "transformers", "peft", "datasets", "safetensors", "vllm", "ray")},
            "device": device_line(), "threads": torch.get_num_threads(), "seed": config.trainer.seed,
            "data": loader.fingerprint, "prompts": len(loader)}


def commit() -> str | None:
    """The checkout's commit, with + when files differ from it; None outside a checkout."""
    import subprocess
    from pathlib import Path
    here = Path(verl.__file__).resolve().parent
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=10)
        if head.returncode == 0:
            dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=here, capture_output=True, text=True, timeout=10)
            return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")
    return None


