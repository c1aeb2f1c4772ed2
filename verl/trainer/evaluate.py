"""Score, sample and export without training."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from verl.checkpoint import store
from verl.core.errors import CheckpointError, DataError
from verl.core.types import Sampling, Task
from verl.data import DataConfig, RLDataLoader
from verl.rewards.build import build_rewards
from verl.rewards.scorer import Scorer
from verl.trainer.config import RunConfig, load_run
from verl.trainer.reward_training import export_trained
from verl.trainer.rl_trainer import build_composition
from verl.trainer.roles import build_rollout, load_role
from verl.trainer.sampler import Sampler, completion_metrics


def evaluate_config(config: RunConfig, model: str | None = None) -> dict[str, float]:
    """Held-out metrics of a model directory (default: the run's exported policy, else the actor) under a config's rewards."""
    exported = config.trainer.output_dir / "model"
    path = model or (str(exported) if (exported / "config.json").is_file() else config.model.actor.model_name_or_path)
    notes: list[str] = []
    config.model.actor.model_name_or_path = path
    lm = load_role(config.model.actor, "actor", notes)
    loader = RLDataLoader(config.data)
    if loader.config.max_prompt_tokens is None:  # as in training: what the context leaves beside the response
        loader.config = replace(loader.config, max_prompt_tokens=lm.context - config.trainer.sampling.max_tokens)
    loader.bind(lm.tokenizer, config.trainer.seed)
    tasks = list(loader.eval_prompts or ())
    if not tasks:
        raise DataError("there is nothing to evaluate on; set data.eval to a path, or data.eval_size to hold prompts out")
    s, e = config.trainer.sampling, config.trainer.eval
    sampling = Sampling(e.temperature, s.max_tokens, s.min_tokens, e.top_p, stop_ids=lm.stop_ids, stop=tuple(s.stop))
    state = SimpleNamespace(global_step=0, max_steps=0, is_world_process_zero=True)
    with contextlib.closing(Scorer(build_composition(config), state)) as scorer:
        sampler = Sampler(build_rollout(config, lm, None, notes), lm.tokenizer, config.data, scorer, config.trainer.seed)
        groups = sampler.sample(tasks, range(len(tasks)), e.samples, sampling, purpose="eval")
        metrics = scorer.collect()
    return metrics | completion_metrics(groups)


def generate_texts(model: str, prompts: list[str], max_tokens: int, temperature: float, samples: int, seed: int,
                   raw: bool) -> list[list[str]]:
    """Answers of a model directory; prompts are user messages when it has a chat template, unless `raw`."""
    config = load_run(data={"model": {"actor": {"model_name_or_path": model}}}).config
    lm = load_role(config.model.actor, "actor", [])
    chat = not raw and getattr(lm.tokenizer, "chat_template", None)
    tasks = [Task(str(i), [{"role": "user", "content": p}] if chat else p) for i, p in enumerate(prompts)]
    composition = build_rewards([_nothing])
    with contextlib.closing(Scorer(composition)) as scorer:
        sampler = Sampler(build_rollout(config, lm, None, []), lm.tokenizer, DataConfig(), scorer, seed)
        sampling = Sampling(temperature, max_tokens, stop_ids=lm.stop_ids)
        groups = sampler.sample(tasks, range(len(tasks)), samples, sampling, purpose="eval")
        scorer.collect()
    return [[s.text for s in g.samples] for g in groups]


def _nothing(completions, **_) -> list[None]:
    """A reward that abstains."""
    return [None] * len(completions)


def export_checkpoint(directory: Path, out: Path) -> Path:
    """What a run's newest whole checkpoint trains (a policy, a reward model), as a model directory. Raises CheckpointError
    when there is none."""
    found = store.newest(directory / "checkpoints")
    if found is None:
        raise CheckpointError(f"{directory} holds no whole checkpoint; give a run directory (trainer.output_dir)")
    config = load_run(directory / "config.yaml").config
    lm = load_role(config.model.actor, "actor", [], lora=config.model.actor.lora)
    own = {n: t for n, t in found.tensors("policy").items() if n.startswith("working.")}
    if any(part.algo.needs_scores for part in config.trainer.parts):
        lm.add_score_head()
    return export_trained(lm, config.trainer.algo, out, {n.removeprefix("working."): t for n, t in own.items()})
