"""From a config to numbers: the job, who lies on which devices (they need not exist), and what those hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from verl.core.errors import ConfigError
from verl.engine.train import token_budget
from verl.flow.devices import Device as Place
from verl.flow.devices import DeviceGroup, device_group
from verl.trainer.calibration import Device
from verl.trainer.config import RunConfig
from verl.trainer.cost import Job, Parallel, Part, rollout_parts, sampler_parts, score_parts, train_parts
from verl.trainer.placement import WITH_ACTOR, place
from verl.trainer.shape import Shape, read_shape

PROMPT = 512  # tokens of a prompt, where neither the data nor data.max_prompt_tokens says


@dataclass(frozen=True, slots=True)
class Shapes:
    """The models of a run by role; None: there is none, or it is derived from the actor without memory of its own."""

    actor: Shape
    critic: Shape | None = None
    reference: Shape | None = None
    reward: Shape | None = None


def read_shapes(config: RunConfig) -> Shapes:
    """Shapes of the model directories that a run loads, from config.json alone. Raises ConfigError or ModelError."""
    model, algo = config.model, config.trainer.algo
    if not model.actor.model_name_or_path:
        raise ConfigError("model.actor.model_name_or_path is not set; a directory with the model's config.json is enough to plan")
    target = model.actor.lora.target

    def shape(role, headless: bool = False) -> Shape | None:
        path = role.model_name_or_path
        return read_shape(path, role.trust_remote_code, target, headless) if path and role.implementation is None else None

    actor = read_shape(model.actor.model_name_or_path, model.actor.trust_remote_code, target)
    reference = (shape(model.reference) or (None if model.actor.lora.rank else actor)) if algo.needs_reference else None
    judged = [source.model for source in config.trainer.rewards if source.model] if algo.online else []
    reward = read_shape(judged[0], headless=True) if judged else shape(model.reward_model, True) if algo.online else None
    return Shapes(actor, shape(model.critic) if algo.needs_critic else None, reference, reward)


def job_of(config: RunConfig, shapes: Shapes, memory: float, gpu: bool = True, prompt: int | None = None,
           steps: int | None = None) -> Job:
    """The run in numbers. memory: of one device, from which the micro-batch follows where it is not set; prompt: the longest,
    in tokens; steps: of the whole run, which decide whether layers are compiled."""
    from verl.trainer.roles import pays_to_compile  # roles import the plan that prints this
    t, algo, s = config.trainer, config.trainer.algo, shapes.actor
    rank = config.model.actor.lora.rank
    width = 4 if config.model.actor.dtype == "float32" or not gpu else 2
    prompt = prompt or config.data.max_prompt_tokens or max(1, min(PROMPT, s.context - t.sampling.max_tokens))
    pairs = algo.unit == "group"
    group = t.samples_per_prompt if algo.online else 2 if pairs else 1
    longest = prompt + t.sampling.max_tokens * (group if pairs else 1)
    steps = steps if steps is not None else t.steps
    sizes = (memory, gpu, s.hidden, s.inner, s.layers, width)
    whole = t.rollout_batch_size * (prompt + group * t.sampling.max_tokens)  # a step's tokens: no micro-batch has more

    def micro(training: bool) -> int:
        return max(min(t.micro_batch_tokens or token_budget(*sizes, training=training), whole), longest)

    return Job(
        actor=s, trained=s.lora(rank) if rank else s.parameters, prompts=t.rollout_batch_size, group=group, prompt=prompt,
        response=t.sampling.max_tokens, micro=micro(True), score=micro(False), critic=shapes.critic,
        values=algo.needs_critic, reference=shapes.reference, referenced=algo.needs_reference, reward=shapes.reward,
        online=algo.online, updates=t.updates_per_step, epochs=t.update_epochs, width=width,
        kv_width=1 if t.rollout.kv_cache_dtype == "fp8" and gpu else 2 if t.rollout.kv_cache_dtype == "bf16" else width,
        kv_share=t.rollout.kv_memory, sequences=min(512, max(t.rollout_batch_size * t.samples_per_prompt, 64)), gpu=gpu,
        compiled=gpu and not config.model.actor.megatron and (
            pays_to_compile(config, steps * t.updates_per_step) if steps is not None else t.compile is not False),
        checkpoint="checkpoint" in t.memory, offload="offload" in t.memory)


# -- who lies where ----------------------------------------------------------------------------------------------------------

@dataclass(slots=True)
class Layout:
    """Devices of trainer and sampler, how each cuts its weights, and models with devices of their own."""

    train: tuple[Place, ...]
    rollout: tuple[Place, ...]
    parallel: Parallel
    tensor: int
    own: dict[str, tuple[Place, ...]]  # critic, reference, reward_model
    shared: bool = True  # the sampler lives in the trainer's processes
    ahead: bool = False  # a sampler in processes of its own works while the policy trains
    lines: list[str] = field(default_factory=list)

    @property
    def beside(self) -> bool:
        """Sampling takes no time from training: it overlaps, on other devices."""
        return self.ahead and set(self.train).isdisjoint(self.rollout)


def lay_out(config: RunConfig, count: int, device: Device, shapes: Shapes) -> Layout:
    """Place a run on `count` devices as it would place itself there. Raises ConfigError for sizes that cannot be cut so."""
    actor, placement, lines = config.model.actor, config.trainer.placement, []
    if count > 1 and not actor.megatron and not actor.use_fsdp and placement == "auto" and actor.device_map == "auto":
        lines.append("model.actor.use_fsdp: true is assumed; without it one device would train")
        config = replace(config, model=replace(config.model, actor=replace(actor, use_fsdp=True)))
    if config.data.max_prompt_tokens is None:
        lines.append(f"data.max_prompt_tokens is not set; prompts of {PROMPT} tokens are assumed where they are not known")
    placed = place(config, count, ray=True)
    lines += placed.falls

    def devices(role: str) -> tuple[Place, ...]:
        group = placed.far[role] if role in placed.far else device_group(placed.here[role], role)
        return (placed.far["actor"] if group == WITH_ACTOR else group).devices

    train, rollout = devices("actor"), devices("rollout") if config.trainer.algo.online else devices("actor")
    parallel, tensor = _cut(config, len(train), device, shapes.actor), config.trainer.rollout.tensor_parallel_size
    if len(rollout) % tensor or shapes.actor.heads % tensor:
        raise ConfigError(f"trainer.rollout.tensor_parallel_size: {tensor} does not divide {len(rollout)} devices and "
                          f"{shapes.actor.heads} heads evenly; use a divisor of both")
    own = {role: devices(role) for role, shape in _models(shapes).items() if shape is not None and devices(role) != train}
    shared = placed.far["rollout"] == WITH_ACTOR if "rollout" in placed.far else train == rollout
    layout = Layout(train, rollout, parallel, tensor, own, shared, not shared and config.trainer.pipeline != "step")
    layout.lines = [*lines, *_described(config, layout)]
    return layout


def _cut(config: RunConfig, count: int, device: Device, s: Shape) -> Parallel:
    actor, strategy = config.model.actor, config.model.actor.fsdp_config.sharding_strategy
    tensor, pipeline = (actor.megatron[key] if key in actor.megatron else 1 for key in ("tensor", "pipeline"))
    if count % (tensor * pipeline) or s.layers % pipeline or s.heads % tensor:
        raise ConfigError(f"model.actor.megatron: tensor {tensor} x pipeline {pipeline} does not cut {count} devices, "
                          f"{s.heads} heads and {s.layers} layers evenly; use divisors of them")
    if actor.megatron or count == 1 or strategy == "NO_SHARD":
        return Parallel(count, tensor, pipeline)
    shard = min(count, device.host) if "HYBRID" in strategy else count
    if count % shard:
        raise ConfigError(f"model.actor.fsdp_config.sharding_strategy: {strategy} needs whole hosts of {shard} devices, not "
                          f"{count}; use FULL_SHARD")
    return Parallel(count, shard=shard, gather="whole" if strategy in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2") else "layer")


def _described(config: RunConfig, layout: Layout) -> list[str]:
    p, actor = layout.parallel, config.model.actor
    how = (f"tensor {p.tensor} x pipeline {p.pipeline} x data {p.data} (Megatron)" if actor.megatron else
           "one device" if p.devices == 1 else f"{actor.fsdp_config.sharding_strategy} over {p.devices} devices")
    lines = [f"actor: {how}"]
    if config.trainer.algo.online:
        copies = len(layout.rollout) // layout.tensor
        where = "on the trainer's device" if layout.shared and copies == 1 else (
            f"{copies} copies of {layout.tensor} device{'s' * (layout.tensor > 1)}, "
            + ("on the trainer's devices" if layout.shared or layout.train == layout.rollout else "on devices of their own"))
        lines.append(f"rollout: {where}")
    return lines + [f"{role}: {DeviceGroup(places, True)}" for role, places in layout.own.items()]


def _models(of: Shapes | Job) -> dict[str, Shape | None]:
    """The models beside the actor, by role."""
    return {"critic": of.critic, "reference": of.reference, "reward_model": of.reward}


def occupants(job: Job, layout: Layout, memory: float) -> list[tuple[str, int, list[Part]]]:
    """(roles, devices, parts) for devices that hold the same."""
    with_actor = replace(job, **{role.removesuffix("_model"): None for role in layout.own})
    held: dict[Place, tuple[list[str], list[Part]]] = {}

    def add(role: str, places: Iterable[Place], parts: list[Part]) -> None:
        for at in places:
            names, there = held.setdefault(at, ([], []))
            names.append(role)
            there += parts

    add("trainer", layout.train, train_parts(with_actor, layout.parallel))
    for role, shape in _models(job).items():
        if role in layout.own and shape is not None:
            alone = Parallel(len(layout.own[role]), shard=len(layout.own[role]), gather="layer" * (len(layout.own[role]) > 1))
            only = replace(job, actor=shape, trained=shape.parameters, critic=None, reference=None, reward=None, values=False)
            add(role, layout.own[role], train_parts(only, alone) if role == "critic" else score_parts(only))
    if job.online:
        own = sampler_parts(job, layout.tensor, not layout.shared) if len(layout.train) > 1 or not layout.shared else []
        made: dict[tuple, list[Part]] = {}
        for at, workers in Counter(layout.rollout).items():
            names, there = held[at] if at in held else ([], [])
            key = (*names, workers)
            if key not in made:
                static = [part for part in (*there, *own * workers) if part.when == "always" and not part.name.endswith("moments")]
                made[key] = (own + rollout_parts(job, memory - sum(part.bytes for part in static), layout.tensor)) * workers
                if layout.ahead:
                    made[key] = [replace(part, when="always") for part in made[key]]
            add("sampler" + f" x {workers}" * (workers > 1), [at], made[key])
    alike = Counter(tuple(names) for names, _ in held.values())  # the same roles hold the same
    return [(" and ".join(key), count, next(parts for names, parts in held.values() if tuple(names) == key))
            for key, count in alike.items()]


def memory_plan(config: RunConfig, shapes: Shapes, device_bytes: float, longest_prompt: int | None = None,
                steps: int | None = None, gpu: bool = True) -> list[Part]:
    """Memory by part of a run on one device of this many bytes: what `verl train` prints before weights load."""
    job = job_of(config, shapes, device_bytes, gpu, longest_prompt, steps)
    here = (Place(0),)
    return occupants(job, Layout(here, here, Parallel(), 1, {}), device_bytes)[0][2]
