"""Roles in other processes: how each is made there, and the handles that the loop calls as if they were here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from verl.engine.base import RolloutEngine
from verl.engine.group import TrainGroup
from verl.engine.optimizer import OptimConfig
from verl.engine.pool import RolloutPool
from verl.engine.train import TrainEngine
from verl.engine.vllm_engine import vllm_available
from verl.flow.actors import Actor, Cluster, gather
from verl.flow.devices import DeviceGroup
from verl.flow.link import Meeting, own_device
from verl.models import LM, load_tokenizer
from verl.models.compile import compile_for_training
from verl.models.reward_model import RewardModel
from verl.trainer.config import RoleConfig, RunConfig
from verl.trainer.placement import WITH_ACTOR, Placement
from verl.trainer.roles import Roles, build_rollout, load_actor, load_role, vllm_engine


class FarRoles:
    """The processes of one run: room for them in the cluster, and the handles made so far. `close` ends them all."""

    def __init__(self, config: RunConfig, placement: Placement, total_updates: int, notes: list[str]):
        self.config, self.placement, self.total_updates, self.notes = config, placement, total_updates, notes
        self.cluster = Cluster()
        self.slots = self.cluster.place(placement.groups)
        self.meeting = Meeting(self.cluster.address)
        self.groups: dict[str, TrainGroup] = {}
        actor = config.model.actor
        self.tokenizer = load_tokenizer(actor.model_name_or_path, actor.trust_remote_code)

    def train_group(self, role: str, trained: bool, value_head: bool, score_head: bool, compiled: bool) -> TrainGroup:
        """Start a role's ranks; `wait` for them all together."""
        make = partial(make_engine, self.config, role, self.total_updates if trained else None, value_head, score_head, compiled)
        within = self.groups["actor"] if self.placement.far[role] == WITH_ACTOR else None
        slots = self.slots["actor" if within is not None else role]
        load = partial(load_far, self.config, role, value_head, score_head, torch.device("cpu"))
        self.groups[role] = TrainGroup(slots, role, make, self.meeting, self.tokenizer, load, within)
        return self.groups[role]

    def rollout(self, longest_prompt: int | None, compiled: bool) -> RolloutPool:
        """Start the rollout workers."""
        make = partial(make_rollout, self.config, longest_prompt, compiled)
        within = self.groups["actor"].actors if self.placement.far["rollout"] == WITH_ACTOR else ()
        return RolloutPool(self.slots["actor" if within else "rollout"], make, self.meeting, within=within)

    def wait(self, roles: Roles) -> None:
        """Until every process has its engine. Raises the first error of any."""
        started = {role: group.ready().actors for role, group in self.groups.items()}
        if isinstance(roles.rollout, RolloutPool):
            started["rollout"] = [w.actor for w in roles.rollout.ready().workers]
        self.notes += [f"{role}: " + ", ".join(f"pid {a.pid} on {a.node}" for a in actors) for role, actors in started.items()]

    def close(self) -> None:
        """End all processes."""
        for group in self.groups.values():
            group.close()
        self.cluster.close()


class FarRewardModel:
    """A reward model with processes of its own, one a device; they start with the first texts, which they share."""

    def __init__(self, role: RoleConfig, group: DeviceGroup):
        self.role, self.group, self.name, self.truncated = role, group, str(role.model_name_or_path), 0
        self.tokenizer = load_tokenizer(role.model_name_or_path, role.trust_remote_code)
        self._actors: list[Actor] = []

    def score(self, texts: Sequence[str], **options: Any) -> list[float]:
        """See RewardModel."""
        if not self._actors:
            self.cluster = Cluster()
            slots = self.cluster.place({"reward_model": self.group})["reward_model"]
            self._actors = [Actor(slot, "reward_model", i, partial(RewardRank, self.role)) for i, slot in enumerate(slots)]
        parts = [p.tolist() for p in np.array_split(np.arange(len(texts)), len(self._actors))]
        calls = [a.start("score", [texts[i] for i in part], options) for a, part in zip(self._actors, parts) if part]
        answers = gather(calls)
        self.truncated += sum(cut for _, cut in answers)
        return [score for scores, _ in answers for score in scores]


class RewardRank:
    """In its process: the reward model."""

    def __init__(self, role: RoleConfig):
        self.model = RewardModel(role.model_name_or_path, device=str(own_device()), dtype=role.dtype,
                                 trust_remote_code=role.trust_remote_code)

    def score(self, texts: list[str], options: dict[str, Any]) -> tuple[list[float], int]:
        """(a number for each text, how many of them had to be cut)."""
        before = self.model.truncated
        scores = [float(s) for s in self.model.score(texts, **options)]
        return scores, self.model.truncated - before


def load_far(config: RunConfig, role: str, value_head: bool, score_head: bool, device: torch.device) -> LM:
    """The model of a role on this device: a reference without a directory is the actor before training."""
    if role == "actor":
        lm = load_actor(config, device)
    else:
        own = getattr(config.model, role)
        lm = load_role(own if own.model_name_or_path or own.implementation else config.model.actor, role, [], device=device)
    if value_head and lm.value_head is None:
        lm.add_value_head(config.trainer.seed)
    if score_head:
        lm.add_score_head(config.trainer.seed)
    return lm


def make_engine(config: RunConfig, role: str, total_updates: int | None, value_head: bool, score_head: bool, compiled: bool,
                device: torch.device) -> TrainEngine:
    """In a rank's process: its engine. total_updates None: it only scores."""
    trainer, actor = config.trainer, config.model.actor
    spread = role == "actor" and bool(actor.megatron)
    if spread:
        from verl.engine.megatron import MegatronEngine, outline
        lm: LM = outline(actor.model_name_or_path, actor.dtype, device)
    else:
        lm = load_far(config, role, value_head, score_head, device)
        lm.replays = role == "actor"
    if total_updates is None:
        for parameter in lm.module.parameters():
            parameter.requires_grad_(False)
    if compiled and lm.native and not spread and device.type == "cuda":
        compile_for_training(lm)
    optim: OptimConfig | None = trainer.optim if total_updates is not None else None
    arguments = (lm, trainer.sampling.temperature, optim, total_updates or 1, trainer.micro_batch_tokens, value_head,
                 trainer.memory)
    if spread:
        return MegatronEngine(*arguments, actor.megatron, dist.group.WORLD)
    if dist.get_world_size() > 1:
        from verl.engine.fsdp import FsdpEngine
        return FsdpEngine(*arguments, actor.fsdp_config.sharding_strategy, dist.group.WORLD)
    return TrainEngine(*arguments)


def make_rollout(config: RunConfig, longest_prompt: int | None, compiled: bool, device: torch.device) -> RolloutEngine:
    """In a worker's process: its engine, on a model of its own."""
    actor = config.model.actor
    if config.trainer.rollout.engine == "vllm" and vllm_available()[0]:
        return vllm_engine(config, actor.model_name_or_path, actor.dtype)
    return build_rollout(config, load_actor(config, device), None, [], longest_prompt, compiled and device.type == "cuda")
