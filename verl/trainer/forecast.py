"""`verl plan`: what a run would take on devices that need not exist, and what would fit where it does not."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import torch

from verl.core.errors import CapacityError, ConfigError
from verl.engine.train import host_memory
from verl.trainer.calibration import DEVICES, GIB, Device, parse_devices
from verl.trainer.capacity import Layout, Shapes, job_of, lay_out, occupants, read_shapes
from verl.trainer.config import RunConfig, load_run
from verl.trainer.cost import Job, Part, fits, in_use, needed, phase
from verl.trainer.step_time import Phase, generate, train_phases, transfer

_WHEN = {"generate": "sampling", "score": "scoring", "train": "training"}


@dataclass(slots=True)
class Plan:
    """What a run would take on `count` devices of one kind."""

    device: Device
    count: int
    job: Job
    layout: Layout
    groups: list[tuple[str, int, list[Part]]]  # roles, devices that hold the same, parts
    sampling: list[Phase]
    training: list[Phase]

    @property
    def devices(self) -> str:
        """In the words of --devices, or "this CPU"."""
        return self.device.name if self.device.name.startswith("this") else f"{self.count}x{self.device.name}"

    @property
    def fits(self) -> bool:
        return all(fits(parts, self.device.memory) for _, _, parts in self.groups)

    @property
    def needed(self) -> float:
        """Bytes of the fullest device."""
        return max(needed(parts) for _, _, parts in self.groups)

    @property
    def seconds(self) -> float:
        """Of one step."""
        sampling, training = (sum(p.seconds for p in phases) for phases in (self.sampling, self.training))
        return max(sampling, training) if self.layout.beside else sampling + training

    @property
    def tokens(self) -> int:
        """Generated and trained tokens of a step, prompts counted for each answer."""
        job = self.job
        return job.samples * (job.response * job.online + job.epochs * (job.prompt + job.response))


def make_plan(config: RunConfig, shapes: Shapes, count: int, device: Device, gpu: bool = True) -> Plan:
    """Plan a run on these devices, whether or not it fits. Raises ConfigError for sizes that cannot be cut so."""
    job, layout = job_of(config, shapes, device.memory, gpu), lay_out(config, count, device, shapes)
    groups, sampling = occupants(job, layout, device.memory), []
    if job.online:
        pool = next(part for _, _, parts in groups for part in parts if part.name == "KV pool")
        slots = int(pool.bytes / job.actor.kv_bytes(job.kv_width) * min(layout.tensor, job.actor.kv_heads))
        devices = len(set(layout.rollout))
        sampling = [transfer(job, device, layout.parallel, devices, layout.tensor, layout.shared),
                    *generate(job, device, devices, slots, layout.tensor)]
    return Plan(device, count, job, layout, groups, sampling, train_phases(job, device, layout.parallel))


def this_machine() -> tuple[int, Device, bool]:
    """Devices, their kind with the memory there is, and whether they are GPUs. A kind nobody measured is timed for a moment."""
    gpu = torch.cuda.is_available()
    memory = torch.cuda.mem_get_info()[1] if gpu else host_memory()
    name, count = (torch.cuda.get_device_name(), torch.cuda.device_count()) if gpu else ("this CPU", 1)
    known = next((kind for word, kind in DEVICES.items() if word in name), None)
    if known is not None:
        return count, replace(known, memory=memory), gpu

    def seconds(work) -> float:
        times = []
        for _ in range(3):
            begun = perf_counter()
            work()
            if gpu:
                torch.cuda.synchronize()
            times.append(perf_counter() - begun)
        return min(times)

    at, dtype, size = ("cuda", torch.bfloat16, 8192) if gpu else ("cpu", torch.float32, 1024)
    a, big = torch.ones(size, size, dtype=dtype, device=at), torch.ones(1 << 26, dtype=torch.uint8, device=at)
    matmul, copy = 2 * size**3 / seconds(lambda: a @ a), 2 * len(big) / seconds(big.clone)
    return count, Device(name, memory, matmul, copy, copy / 10, copy / 100, copy), gpu


# -- in words ----------------------------------------------------------------------------------------------------------------

def parts_table(parts: Sequence[Part]) -> list[str]:
    """One line a part, then what must fit and what a monitor will show."""
    lines = [f"  {part.name:26s}{part.bytes / GIB:9.2f} GiB{'' if part.when == 'always' else '  while ' + _WHEN[part.when]}"
             for part in parts]
    phases = ", ".join(f"{phase(parts, when) / GIB:.1f} {word}" for when, word in _WHEN.items()
                       if any(part.when == when for part in parts))
    return [*lines, f"  at most {needed(parts) / GIB:.1f} GiB at a time ({phases}); where there is room, up to "
                    f"{in_use(parts) / GIB:.1f} GiB stay in use"]


def plan_text(plan: Plan) -> list[str]:
    """The plan as lines."""
    job, layout, s, device = plan.job, plan.layout, plan.job.actor, plan.device
    counts = ", ".join(f"{name} {n / 1e9:.2f}B" for name, n in (("embedding", s.embedding), (f"{s.layers} layers", s.blocks),
                                                                ("output layer", s.head)) if n)
    trained = f"{job.trained / 1e6:,.1f}M of adapters trained" if job.lora else "all trained"
    lines = [f"plan for {plan.devices} ({device.memory / GIB:.1f} GiB, matrix products {device.matmul / 1e12:,.3g} "
             f"TFLOP/s, copies {device.copy / 1e9:,.0f} GB/s)",
             f"model: {s.parameters / 1e9:.2f}B parameters ({counts}), {trained}", *layout.lines,
             f"a step: {job.prompts} x {job.group} answers of {job.response} tokens behind prompts of {job.prompt}; micro-batches "
             f"of {job.micro:,} tokens{', activations recomputed' * job.checkpoint}{', optimizer in main memory' * job.offload}"]
    for roles, count, parts in plan.groups:
        lines += [f"memory of a device with {roles}" + (f" ({count} of them)" if count > 1 else "") + ":", *parts_table(parts)]
    if job.offload:
        p, hosts = layout.parallel, -(-layout.parallel.devices // device.host)
        lines.append(f"main memory of a host: {12 * job.trained * p.data / p.shard / hosts / GIB:.0f} GiB of masters and moments")
    lines.append("time of a step, every answer as long as allowed:")
    lines += [f"  {p.name:26s}{p.seconds:9.2f} s" + (f"  {p.moved / GIB:8.2f} GiB received by a device" if p.moved else "")
              for p in (*plan.sampling, *plan.training)]
    rate, beside = plan.tokens / plan.seconds, " (sampling beside training)" * layout.beside
    return [*lines, f"  step {plan.seconds:.1f} s{beside}: {rate:,.0f} tokens/s, {rate / plan.count:,.0f} a device"]


def memory_lines(config: RunConfig, longest_prompt: int | None = None, steps: int | None = None) -> list[str]:
    """Memory by part of a run on this machine's devices, before weights load. Raises ModelError without a readable config.json."""
    count, device, gpu = this_machine()
    shapes = read_shapes(config)
    job, layout = job_of(config, shapes, device.memory, gpu, longest_prompt, steps), lay_out(config, count, device, shapes)
    lines = []
    for roles, _, parts in occupants(job, layout, device.memory):
        lines += [f"memory of a device with {roles}, of {device.memory / GIB:.1f} GiB:", *parts_table(parts)]
    return lines


# -- refusal -----------------------------------------------------------------------------------------------------------------

def plan_devices(path: str | Path, overrides: Sequence[str] = (), devices: str | None = None) -> list[str]:
    """The plan of a config on `devices` ("8xH200"; None: this machine), as lines.

    Raises CapacityError when it cannot fit: what is needed, and what to type for the nearest settings that do.
    """
    count, device, gpu = (*parse_devices(devices), True) if devices is not None else this_machine()
    config = load_run(path, overrides).config
    shapes = read_shapes(config)
    plan = make_plan(config, shapes, count, device, gpu)
    if plan.fits:
        return plan_text(plan)
    roles, _, parts = max(plan.groups, key=lambda group: needed(group[2]))
    nearest = list(itertools.islice(_that_fit(config, shapes, plan, gpu, may_grow=devices is not None), 3))
    advice = ["what fits, nearest first:"] if nearest else ["nothing near it fits; take a smaller model, or many more devices"]
    for words, found in nearest:
        where = [] if devices is None else ["--devices", found.devices]
        command = shlex.join(["verl", "plan", str(path), *overrides, *words, *where])
        advice.append(f"  {command}   # {found.needed / GIB:.1f} GiB")
    raise CapacityError("\n".join([
        f"this does not fit on {plan.devices}: a device with {roles} needs {plan.needed / GIB:.1f} GiB of "
        f"{device.memory / GIB:.1f}, of which 5% stay free", *parts_table(parts), *advice]))


def _that_fit(config: RunConfig, shapes: Shapes, plan: Plan, gpu: bool, may_grow: bool) -> Iterator[tuple[list[str], Plan]]:
    """(settings to type, plan) of what fits, with the fewest changes first; more devices are a change too."""
    job, tensor = plan.job, plan.layout.tensor
    longest, lora = job.prompt + job.response, config.model.actor.lora
    smaller = [n for n in (job.micro >> i for i in range(1, 8)) if n >= longest]
    memory = [["checkpoint"], *([["offload"], ["checkpoint", "offload"]] if gpu else [])]
    trainer = [[("micro_batch_tokens", n, f"trainer.micro_batch_tokens={n}") for n in smaller],
               [("memory", words, f"trainer.memory=[{','.join(words)}]") for words in memory],
               [("rollout", replace(config.trainer.rollout, tensor_parallel_size=n), f"trainer.rollout.tensor_parallel_size={n}")
                for n in (2, 4, 8) if n > tensor and job.online]]
    adapters = [("lora", replace(lora, rank=16), "model.actor.lora.rank=16")] * (not job.lora)
    more = [("devices", plan.count << i, "") for i in range(1, 7) if plan.count << i <= max(256, 2 * plan.count)] * may_grow
    axes = [axis for axis in (*trainer, adapters, more) if axis]
    for changes in range(1, len(axes) + 1):
        for chosen in itertools.combinations(axes, changes):
            for words in itertools.product(*chosen):
                values = {name: value for name, value, _ in words}
                own = {name: values[name] for name in ("micro_batch_tokens", "memory", "rollout") if name in values}
                actor = replace(config.model.actor, lora=values["lora"]) if "lora" in values else config.model.actor
                variant = replace(config, trainer=replace(config.trainer, **own), model=replace(config.model, actor=actor))
                derived = "lora" in values and not config.model.reference.model_name_or_path
                try:
                    found = make_plan(variant, replace(shapes, reference=None) if derived else shapes,
                                      values["devices"] if "devices" in values else plan.count, plan.device, gpu)
                except ConfigError:  # does not cut these devices evenly
                    continue
                if found.fits:
                    yield [text for _, _, text in words if text], found
                    break
