"""PPOTrainer and its siblings: the same script for every algorithm, from Python objects instead of a config file."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.algorithms import ALGORITHMS
from verl.algorithms.base import Algorithm
from verl.core.errors import ConfigError
from verl.core.types import Task
from verl.data import DataConfig, RLDataLoader
from verl.engine.base import RolloutEngine
from verl.models import LM
from verl.trainer.config import ALIASES, RunConfig, load_run
from verl.trainer.online_preference import by_data
from verl.trainer.reward_training import export_trained
from verl.trainer.rl_trainer import build_composition, dump_config, fit, manifest
from verl.trainer.roles import Roles, build_roles, build_rollout
from verl.trainer.run import Run


class _Epoch:
    """One pass over a loader: `issue` and `take` end at the epoch's border, everything else is the loader's."""

    def __init__(self, loader: RLDataLoader):
        self.loader, self.left = loader, len(loader)

    def issue(self, n: int) -> list[tuple[int, Task]]:
        issued = self.loader.issue(min(n, self.left))
        self.left -= len(issued)
        return issued

    def take(self, n: int) -> list[Task]:
        issued = self.issue(n)
        self.loader.done(slot for slot, _ in issued)
        return [task for _, task in issued]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


class PPOTrainer:
    """Train from objects: `train_epoch` once over a dataset, as often as you like; `save_checkpoint` any time.

    actor: an LM (get_actor_critic_from_hf) or a model directory. critic: the same LM (a value head on its trunk), an
    independent one, or None. reward_model / reward_fn: a RewardModel, a function with TRL's signature, a directory, or a
    list of these. ref_model: an LM or directory; left out, it is the frozen start. rollout_engine: left out, the
    built-in one. config: settings of `trainer` (train_batch_size, rollout_batch_size, ppo_epochs, clip_coef, vf_coef,
    kl_target, ...). Settings and arguments that do not apply to the algorithm are named in one line.
    """

    algorithm = "ppo"

    def __init__(self, actor: LM | str | None = None, critic: LM | None = None, reward_model: Any = None,
                 ref_model: LM | str | None = None, tokenizer: Any = None, rollout_engine: RolloutEngine | None = None,
                 config: Mapping[str, Any] | None = None, reward_fn: Any = None, reward_fns: Any = None,
                 model: LM | str | None = None):
        actor = actor if actor is not None else model
        if actor is None:
            raise ConfigError(f"{type(self).__name__}: no model was given; pass actor= (or model=) an LM or a model directory")
        settings, unused = self._applicable(dict(config or {}))
        settings.setdefault("output_dir", f"runs/{self.algorithm}-{time.strftime('%Y%m%d-%H%M%S')}")
        sections: dict[str, Any] = {"trainer": {"algorithm": self.algorithm, **settings}, "model": {}}
        for role, value in (("actor", actor), ("reference", ref_model)):
            if isinstance(value, (str, Path)):
                sections["model"][role] = {"model_name_or_path": str(value)}
        self.config: RunConfig = load_run(data=sections).config
        self._algo, self._resolved = self.config.trainer.algo, dump_config(self.config)
        self.sources = [s for s in (reward_model, reward_fn, reward_fns) if s is not None]
        self.sources = [x for s in self.sources for x in (s if isinstance(s, (list, tuple)) else [s])]
        self._has_reference = ref_model is not None
        self._given = {"actor": actor if isinstance(actor, LM) else None, "critic": critic,
                       "reference": ref_model if isinstance(ref_model, LM) else None, "rollout": rollout_engine}
        self._tokenizer, self._roles, self._epochs, self._step, self._unused = tokenizer, None, 0, 0, unused

    def _applicable(self, settings: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Settings split into those this algorithm has and the names of those only others have."""
        own = {f.name for f in dataclasses.fields(ALGORITHMS[self.algorithm])}
        known = {f.name for name in ALGORITHMS for f in dataclasses.fields(ALGORITHMS[name])}
        kept, unused = {}, []
        for key, value in settings.items():
            target = ALIASES.get(f"trainer.{key}", f"trainer.{key}")
            leaf = target.removeprefix("trainer.algo.")
            if target.startswith("trainer.algo.") and leaf in known and leaf not in own:
                unused.append(key)
            else:
                kept[key] = value
        return kept, unused

    def train_epoch(self, dataset: Any) -> dict[str, float]:
        """One pass over a dataset, a path, or a list of dicts. Returns the last step's metrics."""
        loader = RLDataLoader(dataset, config=DataConfig())
        algo, line = by_data(self._algo, loader.prompts)
        self.config.trainer.algo = algo
        algo.check_group(self.config.trainer.samples_per_prompt)
        if self._roles is None:
            self._say_unused(algo)
        print(f"verl: {line}", flush=True)
        roles = self._build(len(loader))
        for line in loader.bind(roles.policy.lm.tokenizer, self.config.trainer.seed):
            print(f"verl: {line}", flush=True)
        loader.position = self._epochs * len(loader)
        compositions = {}
        if algo.online:
            compositions[""] = build_composition(self.config, self.sources or None)
            compositions[""].check(list(loader.prompts))
        last = _Last()
        steps = math.ceil(len(loader) / self.config.trainer.rollout_batch_size)
        run = Run(self.config, self._step + steps, callbacks=[last], stop_ids=roles.policy.lm.stop_ids, start=self._step,
                  resolved=self._resolved, manifest=manifest(self.config, loader))
        with run:
            for line in self._notes:
                run.report.note(f"verl: {line}")
            fit(run, _Epoch(loader), roles, compositions)
        self._step, self._epochs = run.step, self._epochs + 1
        if run.stopped:
            raise KeyboardInterrupt
        return last.metrics

    def _say_unused(self, algo: Algorithm) -> None:
        """Name the settings and arguments that do not apply to this method, in one line."""
        given, unused = self._given, list(self._unused)
        if given["critic"] is not None and not algo.needs_critic:
            unused.append("critic")
        if self._has_reference and not algo.needs_reference:
            unused.append("ref_model")
        if not algo.online:
            unused += [n for n, v in (("rewards", self.sources), ("rollout_engine", given["rollout"])) if v]
        if unused:
            print(f"verl: {self.algorithm} does not use {', '.join(unused)}", flush=True)

    def _build(self, prompts: int) -> Roles:
        if self._roles is not None and self.config.trainer.algo.online and self._roles.rollout is None:
            self._roles.rollout = build_rollout(self.config, self._roles.policy.lm, self._given["rollout"], self._notes)
        if self._roles is None:
            self._notes: list[str] = []
            steps = self.config.trainer.steps or math.ceil(prompts / self.config.trainer.rollout_batch_size)
            self._roles = build_roles(self.config, steps * self.config.trainer.updates_per_step, self._notes, **self._given)
            if self._tokenizer is not None:
                self._roles.policy.lm.tokenizer = self._tokenizer
        return self._roles

    def save_checkpoint(self, path: str | Path) -> Path:
        """Write what is trained (a policy, a reward model) as a model directory. Raises ConfigError before any training."""
        if self._roles is None:
            raise ConfigError("save_checkpoint: nothing is trained yet; call train_epoch first")
        policy = self._roles.policy
        with contextlib.suppress(FileNotFoundError):
            Path(path).rmdir()
        return export_trained(policy.lm, self._algo, Path(path), policy.exported())


class _Last:
    """Keeps the last step's metrics."""

    def __init__(self):
        self.metrics: dict[str, float] = {}

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        self.metrics = dict(metrics)


class GRPOTrainer(PPOTrainer):
    """PPOTrainer with GRPO; a critic is not used."""

    algorithm = "grpo"


class SFTTrainer(PPOTrainer):
    """Supervised fine-tuning on recorded answers."""

    algorithm = "sft"


class DPOTrainer(PPOTrainer):
    """Direct preference optimisation: on recorded pairs, or on pairs of its own answers when the data are prompts."""

    algorithm = "dpo"


class KTOTrainer(PPOTrainer):
    """KTO on recorded, labelled answers, or on its own answers when the data are prompts."""

    algorithm = "kto"


class RewardTrainer(PPOTrainer):
    """A reward model from preference pairs; `save_checkpoint` writes a directory that RewardModel loads."""

    algorithm = "reward_model"
