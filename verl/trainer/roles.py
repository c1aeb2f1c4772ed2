"""From a config (or Python objects) to roles: policy, reference, critic, rollout engine, rewards."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import torch

from verl.core.batch import Batch
from verl.core.errors import ConfigError
from verl.core.registry import load_object
from verl.engine import ROLLOUTS
from verl.engine.base import RolloutEngine
from verl.engine.train import TrainEngine
from verl.models import LM, load_lm
from verl.models.compile import compile_for_training
from verl.trainer.config import RoleConfig, RunConfig


class Reference:
    """Log-probs of the starting policy: a frozen copy, another directory, or the policy with its adapters off."""

    def __init__(self, engine: TrainEngine, adapters_off: bool):
        self.engine, self.adapters_off = engine, adapters_off

    def logprobs(self, batch: Batch) -> np.ndarray:
        """Float32 [T] nats, at the run's temperature."""
        if not self.adapters_off:
            return self.engine.logprobs(batch)
        with self.engine.lm.adapters_off():
            return self.engine.logprobs(batch)


@dataclass(slots=True)
class Roles:
    """The working parts of one training. `critic` is `policy` itself when the value head sits on its trunk."""

    policy: TrainEngine
    reference: Reference | None
    critic: TrainEngine | None
    rollout: RolloutEngine | None


def pick_device(role: RoleConfig, notes: list[str], name: str) -> torch.device:
    """The device of one role; a device this machine lacks falls back with a note."""
    wanted = role.device_map
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    local = wanted.rsplit("/", 1)[-1]
    first = local.split("-")[0]
    device = torch.device(first)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        have = f"{torch.cuda.device_count()} GPUs" if torch.cuda.is_available() else "no GPU"
        notes.append(f"model.{name}.device_map: {wanted} is not here (this machine has {have}); {name} runs on "
                     f"{'cuda:0' if torch.cuda.is_available() else 'cpu'}")
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if "-" in local or "/" in wanted:
        notes.append(f"model.{name}.device_map: {wanted} names several devices or a host; {name} runs on {first} alone")
    return device


def build_roles(config: RunConfig, total_updates: int, notes: list[str], actor: LM | None = None, critic: LM | None = None,
                reference: LM | None = None, rollout: RolloutEngine | None = None, longest_prompt: int | None = None) -> Roles:
    """Load what was not given, derive what was left out (reference = frozen start, critic = value head), bind engines.

    longest_prompt, in tokens, lets the sampler's cache be no larger than the run can use.
    """
    trainer, algo = config.trainer, config.trainer.algo
    if actor is None:
        with torch.random.fork_rng(devices=[]):  # fresh adapters are drawn from torch's own generator
            torch.default_generator.manual_seed(trainer.seed)
            actor = load_role(config.model.actor, "actor", notes, lora=config.model.actor.lora)
    needs_reference = algo.needs_reference
    reference_engine = build_reference(config, actor, reference, notes) if needs_reference else None
    shared_critic = algo.needs_critic and critic in (None, actor) and config.model.critic.model_name_or_path is None
    if shared_critic and actor.value_head is None:
        actor.add_value_head(trainer.seed)
    if not algo.needs_critic:
        actor.value_head = None
    if any(part.algo.needs_scores for part in trainer.parts):
        actor.add_score_head(trainer.seed)
    budget = trainer.micro_batch_tokens
    policy = TrainEngine(actor, trainer.sampling.temperature, trainer.optim, total_updates, budget, shared_critic, trainer.memory)
    critic_engine = policy if shared_critic else None
    if algo.needs_critic and not shared_critic:
        critic = critic or load_role(config.model.critic, "critic", notes)
        if critic.value_head is None:
            critic.add_value_head(trainer.seed)
        critic_engine = TrainEngine(critic, trainer.sampling.temperature, trainer.optim, total_updates, budget, True, trainer.memory)
    compiled = pays_to_compile(config, total_updates) and actor.device.type == "cuda"
    if compiled and actor.native:
        compile_for_training(actor)
    engine = build_rollout(config, actor, rollout, notes, longest_prompt, compiled) if algo.online else None
    return Roles(policy, reference_engine, critic_engine, engine)


def load_role(role: RoleConfig, name: str, notes: list[str], lora=None) -> LM:
    """Load one model role from its config."""
    if role.implementation is not None:
        return load_object(role.implementation, f"model.{name}.class")(role)
    if not role.model_name_or_path:
        raise ConfigError(f"model.{name}.model_name_or_path is not set; give a model directory, e.g. "
                          f"model.{name}.model_name_or_path=models/SmolLM2-135M-Instruct")
    device = pick_device(role, notes, name)
    return load_lm(role.model_name_or_path, role.dtype, device, lora=lora, trust_remote_code=role.trust_remote_code)


def build_reference(config: RunConfig, actor: LM, given: LM | None, notes: list[str]) -> Reference:
    """The reference: given, from its own directory, the actor without adapters, or a frozen copy of the actor now."""
    temperature, budget = config.trainer.sampling.temperature, config.trainer.micro_batch_tokens
    if given is None and config.model.reference.model_name_or_path:
        given = load_role(config.model.reference, "reference", notes)
    if given is None and hasattr(actor.module, "verl_lora"):
        return Reference(TrainEngine(actor, temperature, token_budget=budget), adapters_off=True)
    if given is None or given is actor:
        given = copy.copy(actor)
        given.module = copy.deepcopy(actor.module)
        given.value_head = None
    for parameter in given.module.parameters():
        parameter.requires_grad_(False)
    return Reference(TrainEngine(given, temperature, token_budget=budget), adapters_off=False)


COMPILE_TOKENS = 20_000_000  # sampled tokens from which on a minute of compilation is won back


def pays_to_compile(config: RunConfig, total_updates: int) -> bool:
    """As set, or whether the run will sample enough tokens."""
    trainer = config.trainer
    if trainer.compile is not None:
        return trainer.compile
    steps = total_updates // trainer.updates_per_step
    return steps * trainer.rollout_batch_size * trainer.samples_per_prompt * trainer.sampling.max_tokens >= COMPILE_TOKENS


def build_rollout(config: RunConfig, actor: LM, given: RolloutEngine | None, notes: list[str], longest_prompt: int | None = None,
                  compiled: bool = False) -> RolloutEngine:
    """The rollout engine: given, named, or (auto) the built-in one where it is proven, else transformers' generate."""
    rollout = config.trainer.rollout
    name = rollout.engine
    if given is not None:
        if getattr(given, "available", True):
            return given
        name = "auto"
    if name == "vllm":
        from verl.engine.vllm_engine import vllm_available
        ok, why = vllm_available()
        if not ok:
            notes.append(f"trainer.rollout.engine: vllm is not usable here ({why}); the built-in engine samples instead")
            name = "auto"
    if name == "auto":
        name = "native" if actor.native else "hf"
        if not actor.native:
            notes.append(f"{actor.config.model_type} runs unpacked and is sampled by transformers' generate: {actor.why_not}")
    if name == "native" and not actor.native:
        raise ConfigError(f"trainer.rollout.engine: native cannot run {actor.config.model_type}: {actor.why_not}; set it to hf")
    if name == "native":
        return ROLLOUTS[name](actor, native_config(config, actor, longest_prompt, compiled))
    if name == "vllm":
        return ROLLOUTS[name](actor.path, dtype=str(actor.dtype).removeprefix("torch."), kv_cache_dtype=rollout.kv_cache_dtype,
                              tensor_parallel_size=rollout.tensor_parallel_size, enable_chunked_prefill=rollout.chunked_prefill,
                              gpu_memory_utilization=rollout.kv_memory, max_lora_rank=config.model.actor.lora.rank)
    return ROLLOUTS[name](actor)


def native_config(config: RunConfig, actor: LM, longest_prompt: int | None, compiled: bool):
    """Settings of the built-in engine: a cache no larger than one step can fill, as far as the prompts are known."""
    from verl.engine.native.config import NativeConfig
    trainer, rollout = config.trainer, config.trainer.rollout
    native = NativeConfig(kv_memory=rollout.kv_memory, compile=compiled,
                          kv_cache_dtype=rollout.kv_cache_dtype if actor.device.type == "cuda" else "auto")
    if not rollout.chunked_prefill:
        native.prefill_tokens = max(native.prefill_tokens, actor.context)
    if longest_prompt is not None:
        native.max_total_tokens = min(longest_prompt + trainer.sampling.max_tokens, actor.context)
        samples = trainer.rollout_batch_size * trainer.samples_per_prompt
        native.max_sequences = min(native.max_sequences, max(samples, 64))
    return native
