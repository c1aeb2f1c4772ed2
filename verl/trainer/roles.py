"""From a config (or Python objects) to roles: policy, reference, critic, rollout engine, rewards."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

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
from verl.trainer.placement import Placement, place
from verl.trainer.plan import inspect_machine

if TYPE_CHECKING:
    from verl.trainer.far import FarRoles


class Reference:
    """Log-probs of the starting policy: a frozen copy, another directory, or the policy with its adapters off."""

    def __init__(self, engine: TrainEngine, adapters_off: bool):
        self.engine, self.adapters_off = engine, adapters_off

    def logprobs(self, batch: Batch) -> np.ndarray:
        """Float32 [T] nats, at the run's temperature."""
        batch = replace(batch, experts_T=None, prompt_experts=None)  # it chooses its own
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
    far: FarRoles | None = None

    def close(self) -> None:
        """End the processes of roles that have some."""
        if self.far is not None:
            self.far.close()


def build_roles(config: RunConfig, total_updates: int, notes: list[str], actor: LM | None = None, critic: LM | None = None,
                reference: LM | None = None, rollout: RolloutEngine | None = None, longest_prompt: int | None = None) -> Roles:
    """Load what was not given, derive what was left out (reference = frozen start, critic = value head), bind engines.

    longest_prompt, in tokens, lets the sampler's cache be no larger than the run can use. Roles with devices of their own are
    handles on other processes (verl/trainer/far.py).
    """
    algo, machine = config.trainer.algo, inspect_machine()
    given = {"actor": actor, "critic": critic, "reference": reference, "rollout": rollout}
    placed = place(config, machine.gpus, machine.ray, {role for role, value in given.items() if value is not None})
    own_critic = algo.needs_critic and (critic not in (None, actor) or config.model.critic.model_name_or_path is not None)
    placed.far.pop("reward_model", None)  # it comes with the rewards
    notes += placed.falls
    compiled = pays_to_compile(config, total_updates) and (machine.gpus > 0 if actor is None else actor.device.type == "cuda")
    far = None
    if placed.far:
        from verl.trainer.far import FarRoles
        far = FarRoles(config, placed, total_updates, notes)
    try:
        roles = _bind(config, total_updates, notes, given, placed, far, own_critic, compiled)
        if algo.online:
            roles.rollout = far.rollout(longest_prompt, compiled) if "rollout" in placed.far else build_rollout(
                config, roles.policy.lm, rollout, notes, longest_prompt, compiled)
        if far is not None:
            far.wait(roles)
    except BaseException:
        if far is not None:
            far.close()
        raise
    return roles


def _bind(config: RunConfig, total_updates: int, notes: list[str], given: dict[str, Any], placed: Placement, far: FarRoles | None,
          own_critic: bool, compiled: bool) -> Roles:
    """Policy, reference and critic: engines of this process, or handles whose processes have been started."""
    trainer, algo = config.trainer, config.trainer.algo
    shared_critic, scores = algo.needs_critic and not own_critic, any(part.algo.needs_scores for part in trainer.parts)
    arguments = (trainer.sampling.temperature, trainer.optim, total_updates, trainer.micro_batch_tokens)
    actor, critic, reference, critic_engine = given["actor"], given["critic"], None, None
    if "actor" in placed.far:
        policy = far.train_group("actor", True, shared_critic, scores, compiled)
    else:
        actor = actor or load_actor(config, torch.device(placed.here["actor"]))
        reference = build_reference(config, actor, given["reference"], placed, far) if algo.needs_reference else None
        if shared_critic and actor.value_head is None:
            actor.add_value_head(trainer.seed)
        if not algo.needs_critic:
            actor.value_head = None
        if scores:
            actor.add_score_head(trainer.seed)
        actor.replays = True
        policy = TrainEngine(actor, *arguments, shared_critic, trainer.memory)
        if compiled and actor.native:
            compile_for_training(actor)
    if "actor" in placed.far and algo.needs_reference:
        frozen = far.train_group("reference", False, False, False, False) if "reference" in placed.far else policy
        reference = Reference(frozen, adapters_off=frozen is policy)
    if shared_critic:
        critic_engine = policy
    elif own_critic and "critic" in placed.far:
        critic_engine = far.train_group("critic", True, True, False, False)
    elif own_critic:
        critic = critic or load_role(config.model.critic, "critic", notes, device=torch.device(placed.here["critic"]))
        if critic.value_head is None:
            critic.add_value_head(trainer.seed)
        critic_engine = TrainEngine(critic, *arguments, True, trainer.memory)
    return Roles(policy, reference, critic_engine, None, far)


def load_actor(config: RunConfig, device: torch.device) -> LM:
    """The actor of a config, the same in whatever process: fresh adapters depend on the run's seed alone."""
    with torch.random.fork_rng(devices=[]):  # they are drawn from torch's own generator
        torch.default_generator.manual_seed(config.trainer.seed)
        return load_role(config.model.actor, "actor", [], lora=config.model.actor.lora, device=device)


def load_role(role: RoleConfig, name: str, notes: list[str], lora=None, device: torch.device | None = None) -> LM:
    """Load one model role from its config. device: the first there is when left out."""
    if role.implementation is not None:
        return load_object(role.implementation, f"model.{name}.class")(role)
    if not role.model_name_or_path:
        raise ConfigError(f"model.{name}.model_name_or_path is not set; give a model directory, e.g. "
                          f"model.{name}.model_name_or_path=models/SmolLM2-135M-Instruct")
    device = device or torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    return load_lm(role.model_name_or_path, role.dtype, device, lora=lora, trust_remote_code=role.trust_remote_code)


def build_reference(config: RunConfig, actor: LM, given: LM | None, placed: Placement, far: FarRoles | None) -> Reference:
    """The reference: given, from its own directory, the actor without adapters, or a frozen copy of the actor now."""
    temperature, budget = config.trainer.sampling.temperature, config.trainer.micro_batch_tokens
    if "reference" in placed.far:
        return Reference(far.train_group("reference", False, False, False, False), adapters_off=False)
    if given is None and config.model.reference.model_name_or_path:
        given = load_role(config.model.reference, "reference", [], device=torch.device(placed.here["reference"]))
    if given is None and hasattr(actor.module, "verl_lora"):
        return Reference(TrainEngine(actor, temperature, token_budget=budget), adapters_off=True)
    if given is None or given is actor:
        given = actor.copy()
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
        if actor.mixture and actor.device.type == "cuda":
            notes.append("the built-in engine does not record experts on a GPU, training chooses them anew; set "
                         "trainer.rollout.engine: hf to record them (slower)")
        return ROLLOUTS[name](actor, native_config(config, actor, longest_prompt, compiled))
    if name == "vllm":
        return vllm_engine(config, actor.path, str(actor.dtype).removeprefix("torch."))
    return ROLLOUTS[name](actor)


def vllm_engine(config: RunConfig, path: str, dtype: str) -> RolloutEngine:
    """vLLM on a model directory, as the run's rollout settings say."""
    rollout = config.trainer.rollout
    return ROLLOUTS["vllm"](path, dtype=dtype, kv_cache_dtype=rollout.kv_cache_dtype,
                            tensor_parallel_size=rollout.tensor_parallel_size, enable_chunked_prefill=rollout.chunked_prefill,
                            gpu_memory_utilization=rollout.kv_memory, max_lora_rank=config.model.actor.lora.rank)


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
