"""Which role runs where: in this process, or in processes of its own. What was declared, else planned from what there is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from verl.core.errors import ConfigError, VerlError, nearest
from verl.flow.devices import Device, DeviceGroup, device_group
from verl.trainer.config import RunConfig

ROLES = ("actor", "critic", "reference", "reward_model", "rollout")
WITH_ACTOR = "with the actor"  # in the actor's own processes


@dataclass(slots=True)
class Placement:
    """here: role -> the device it uses in this process; far: role -> the devices of its own processes, or WITH_ACTOR.

    lines: what was planned; falls: what was asked for and cannot be had here, with what runs instead.
    """

    here: dict[str, str] = field(default_factory=dict)
    far: dict[str, DeviceGroup | str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    falls: list[str] = field(default_factory=list)

    @property
    def groups(self) -> dict[str, DeviceGroup]:
        """The device groups to reserve."""
        return {role: group for role, group in self.far.items() if group != WITH_ACTOR}


def place(config: RunConfig, gpus: int, ray: bool, given: Iterable[str] = ()) -> Placement:
    """Place every role on a machine with so many GPUs, with or without Ray.

    `given`: roles that came as Python objects; they stay here. Raises ConfigError when two settings name different devices for one
    role, or a name is no role or no device.
    """
    placed = Placement()
    wanted = {role: _fitting(role, *found, gpus, placed) for role, found in _declared(config).items()}
    _plan_actor(config, wanted, gpus, ray, placed)
    default = "cuda:0" if gpus else "cpu"
    for role in ROLES:
        setting, group = wanted.get(role, ("", None))
        if group is not None and group.own and role in given:
            placed.falls.append(f"{setting}: the {role} was given as an object, so it stays in this process")
            group = None
        if group is not None and group.own and not ray:
            placed.falls.append(f"{setting}: processes of their own need Ray, which is not installed (type: pip install ray); "
                                f"{role} runs in this process")
            group = None
        if group is not None and group.own:
            placed.far[role] = group
        else:
            placed.here[role] = default if group is None else str(group)
    declared = {role for role, (_, group) in wanted.items() if group is not None} | set(given)
    _beside_the_actor(placed, ray, config.trainer.pipeline.strip() != "step", declared)
    needed = _needed(config, given)
    if "critic" in wanted and "critic" not in needed and config.trainer.algo.needs_critic:
        placed.falls.append(f"{wanted['critic'][0]}: the critic is a value head on the actor and lives with it; for weights of its "
                            "own set model.critic.model_name_or_path")
    for role in [role for role in placed.far if role not in needed]:
        del placed.far[role]
        placed.here[role] = default
    for role, group in placed.far.items():
        why = f" ({wanted[role][0]})" if role in wanted else ""
        what = "in the processes of the actor" if group == WITH_ACTOR else f"{len(group)} processes of its own, {group}"
        placed.lines.append(f"{role}: {what}{why}")
    return placed


def _needed(config: RunConfig, given: Iterable[str]) -> set[str]:
    """The roles that have weights or work of their own in this run."""
    algo, model = config.trainer.algo, config.model
    adapters_off = model.actor.lora.rank and model.reference.model_name_or_path is None
    return {"actor"} | {role for role, is_needed in {
        "critic": algo.needs_critic and (model.critic.model_name_or_path is not None or "critic" in given),
        "reference": algo.needs_reference and not adapters_off, "rollout": algo.online,
        "reward_model": model.reward_model.model_name_or_path is not None}.items() if is_needed}


def _declared(config: RunConfig) -> dict[str, tuple[str, DeviceGroup]]:
    """Role -> the setting that names its devices, and the devices."""
    placement, workers = config.trainer.placement, config.trainer.rollout.workers
    if isinstance(placement, str) and placement != "auto":
        raise ConfigError(f"trainer.placement: {placement!r} is neither auto nor a mapping such as {{actor: 'cuda:0-1', rollout: "
                          "'cuda:2-3'}")
    own: Mapping[str, str] = placement if isinstance(placement, dict) else {}
    if wrong := [name for name in own if name not in ROLES]:
        raise ConfigError(f"trainer.placement: {wrong[0]!r} is no role; {nearest(wrong[0], ROLES)}")
    found = {}
    for role in ROLES:
        words = {f"trainer.placement.{role}": own[role] if role in own else "auto"}
        if role != "rollout":
            words[f"model.{role}.device_map"] = getattr(config.model, role).device_map
        groups = {f"{key}: {text}": device_group(text, key) for key, text in words.items() if text != "auto"}
        if len(set(groups.values())) > 1:
            raise ConfigError(f"{' and '.join(groups)} name different devices for the {role}; keep one of them")
        if groups:
            found[role] = next(iter(groups.items()))
    if workers > 1:
        setting, group = found.get("rollout", ("", None))
        if group is not None and len(group) not in (1, workers):
            raise ConfigError(f"trainer.rollout.workers: {workers}, but {setting} names {len(group)} devices; keep one of them")
        found["rollout"] = (f"trainer.rollout.workers: {workers}", DeviceGroup((group.devices if group else ()) * workers
                            if group is None or len(group) == 1 else group.devices, True))
    return found


def _fitting(role: str, setting: str, group: DeviceGroup, gpus: int, placed: Placement) -> tuple[str, DeviceGroup | None]:
    """The group without devices that are not here; None (with a line) when nothing is left of it."""
    if not group.devices:  # workers without devices: a core each, or the GPUs there are in turn
        workers = int(setting.rpartition(" ")[2])
        return setting, DeviceGroup(tuple(Device(i % gpus if gpus else None) for i in range(workers)), True)
    left = tuple(d for d in group.devices if d.gpu is None or d.host is not None or d.gpu < gpus)
    if len(left) == len(group):
        return setting, group
    have = f"{gpus} GPUs" if gpus else "no GPU"
    if role == "rollout" and not gpus and len(group) > 1:
        left = (Device(),) * len(group)
    runs = str(DeviceGroup(left, True)) if left else "cuda:0" if gpus else "cpu"
    placed.falls.append(f"{setting} is not here (this machine has {have}); {role} runs on {runs}")
    return setting, DeviceGroup(left, len(left) > 1) if left else None


Wanted = dict[str, tuple[str, DeviceGroup | None]]  # role -> the setting that names its devices, and those that are here


def _plan_actor(config: RunConfig, wanted: Wanted, gpus: int, ray: bool, placed: Placement) -> None:
    """Where an actor that was left to us trains: over the free GPUs when it was asked to be sharded, or does not fit one."""
    actor = config.model.actor
    taken = {d.gpu for _, group in wanted.values() if group is not None for d in group.devices}
    free = [i for i in range(gpus) if i not in taken]
    if "actor" in wanted or not ray or len(free) < 2:
        return
    why = "model.actor.use_fsdp: true" if actor.use_fsdp else "model.actor.megatron" if actor.megatron else _too_large(config)
    if why:
        wanted["actor"] = (why, DeviceGroup(tuple(Device(i) for i in free), True))
        placed.lines.append(f"actor: sharded over the {len(free)} GPUs that no other role names")
    else:
        placed.lines.append(f"actor: one of {gpus} GPUs trains it; model.actor.use_fsdp: true spreads it over {len(free)}")


def _too_large(config: RunConfig) -> str:
    """Why one GPU of this machine cannot hold the run, by the memory plan; "" when it can, or nobody knows."""
    from verl.trainer.capacity import read_shapes
    from verl.trainer.forecast import make_plan, this_machine
    with contextlib.suppress(VerlError):  # the model is looked at again, and refused by name, when it is loaded
        shapes = read_shapes(config)
        plan = make_plan(config, shapes, 1, this_machine()[1])
        return "" if plan.fits else f"one GPU would need {plan.needed / 2**30:.0f} GiB"
    return ""


def _beside_the_actor(placed: Placement, ray: bool, overlap: bool, declared: set[str]) -> None:
    """Roles that nobody placed follow an actor that has processes of its own; so does a rollout on the very same GPUs, unless it
    is to sample while the actor trains. A rollout on another device than an actor of this process needs a process."""
    actor = placed.far.get("actor")
    if actor is None:
        own = placed.here.get("rollout", placed.here["actor"])
        if own != placed.here["actor"] and "rollout" in declared and ray:
            placed.far["rollout"] = device_group(placed.here.pop("rollout"), "trainer.placement.rollout")
        return
    for role in ("critic", "reference", "rollout"):
        if role not in declared or (placed.far.get(role) == actor and all(d.gpu is not None for d in actor.devices)):
            placed.here.pop(role, None)
            placed.far[role] = actor if role == "rollout" and overlap else WITH_ACTOR
        elif role in placed.here:
            placed.far[role] = DeviceGroup(device_group(placed.here.pop(role), role).devices, True)
