"""RLTrainer: a config, a dataloader and models become a finished training."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
from importlib import metadata
from typing import Any

import torch

import verl
from verl.core.config import dump
from verl.core.errors import ConfigError
from verl.core.registry import load_object
from verl.data import RLDataLoader
from verl.models import context_length, load_tokenizer
from verl.models.reward_model import RewardModel
from verl.rewards.build import build_rewards
from verl.rewards.function import load_function
from verl.rewards.scorer import Scorer
from verl.trainer import offline, rl
from verl.trainer.config import ModelConfig, RunConfig, TrainerConfig
from verl.trainer.plan import plan
from verl.trainer.roles import Roles, build_roles, pick_device
from verl.trainer.run import Run, device_line, total_steps
from verl.trainer.sampler import Sampler


class RLTrainer:
    """Train as configured: resumes by itself, saves, evaluates, exports.

    config: the `trainer` section; model_config: the `model` section; dataloader: RLDataLoader over the `data` section.
    Construction checks what the machine has and prints which backend runs and why; bad settings and bad data are errors
    before any weights load.
    """

    def __init__(self, config: TrainerConfig, dataloader: RLDataLoader, model_config: ModelConfig,
                 rewards: Any = None, resolved: str | None = None):
        self.config = RunConfig(config, model_config, dataloader.config)
        self.loader = dataloader
        self.resolved = resolved if resolved is not None else dump_config(self.config)
        self.notes = plan(self.config)
        for line in self.notes:
            print(f"verl: {line}", flush=True)
        actor = model_config.actor
        if not actor.model_name_or_path:
            raise ConfigError("model.actor.model_name_or_path is not set; give a model directory, e.g. "
                              "model.actor.model_name_or_path=models/SmolLM2-135M-Instruct")
        self.tokenizer = load_tokenizer(actor.model_name_or_path, actor.trust_remote_code)
        fit_context(dataloader, context_length(actor.model_name_or_path, actor.trust_remote_code), config)
        for line in dataloader.bind(self.tokenizer, config.seed):
            print(f"verl: {line}", flush=True)
        self.composition = None
        if config.algo.online:
            self.composition = build_composition(self.config, rewards)
            print(f"verl: rewards: {self.composition.describe()}", flush=True)
            self.composition.check([*dataloader.prompts, *(dataloader.eval_prompts or ())])

    def train(self) -> Run:
        """Run to the end (or to a signal) and return the Run; its directory holds everything."""
        total = total_steps(self.config, len(self.loader))
        notes: list[str] = []
        roles = build_roles(self.config, total * self.config.trainer.updates_per_step, notes)
        run = Run(self.config, total, list(self.loader.eval_prompts or ()), load_callbacks(self.config.trainer),
                  roles.policy.lm.stop_ids, self.resolved, manifest(self.config, self.loader))
        with run:
            for line in notes:
                run.report.note(f"verl: {line}")
            fit(run, self.loader, roles, self.composition)
        return run


def fit(run: Run, tasks: RLDataLoader, roles: Roles, composition: Any) -> None:
    """Restore what a checkpoint holds and run the loop of the algorithm's kind."""
    algo, known = run.restore(tasks, roles.policy, roles.critic, run.config.algo)
    if not algo.online:
        offline.train(run, tasks, algo, roles.policy, roles.reference)
        return
    with contextlib.closing(Scorer(composition)) as scorer, contextlib.closing(roles.rollout):
        sampler = Sampler(roles.rollout, roles.policy.lm.tokenizer, tasks.config, scorer, run.config.seed,
                          on_finished=run.keep_sample(roles.policy), cancelled=lambda: run.stopped, known=known)
        rl.train(run, tasks, sampler, algo, roles.policy, roles.reference, roles.critic)


def fit_context(loader: RLDataLoader, context: int, config: TrainerConfig) -> None:
    """Without data.max_prompt_tokens the limit is what the model's context leaves beside the response."""
    if loader.config.max_prompt_tokens is None and config.algo.online:
        room = context - config.sampling.max_tokens
        if room < 1:
            raise ConfigError(f"trainer.sampling.max_tokens: {config.sampling.max_tokens} fills the model's context of {context} "
                              f"tokens; no prompt fits beside it. Set it below {context}")
        loader.config = dataclasses.replace(loader.config, max_prompt_tokens=room)


def build_composition(config: RunConfig, rewards: Any = None, notes: list[str] | None = None):
    """The run's rewards: given objects, else `trainer.rewards`, else the reward model of `model.reward_model`."""
    trainer, role = config.trainer, config.model.reward_model
    device = str(pick_device(role, notes if notes is not None else [], "reward_model"))
    sources = rewards if rewards is not None else trainer.rewards
    if not sources and role.implementation:
        sources = [load_object(role.implementation, "model.reward_model.class")(role)]
    if not sources and role.model_name_or_path:
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


