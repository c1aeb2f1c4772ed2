"""Time of a training step by phase, and bytes moved, as pure functions of a run in numbers (cost.Job) and a device kind.

Seconds of work that is known in FLOPs or bytes over a measured rate; nothing here is a promise for sizes far from the measured
ones (calibration.py names them).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from verl.trainer.calibration import CALIBRATION, Calibration, Device
from verl.trainer.cost import Job, Parallel, cache_bytes
from verl.trainer.shape import Shape


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a step: seconds, and bytes that each of its devices receives from others."""

    name: str
    seconds: float
    moved: float = 0.0


def context(job: Job) -> float:
    """Mean tokens that a computed token attends to."""
    prompt = job.prompts * job.prompt * job.prompt / 2
    return (prompt + job.samples * job.response * (job.prompt + job.response / 2)) / job.computed


def forward_flops(s: Shape, tokens: float, targets: float, context: float) -> tuple[float, float]:
    """FLOPs of the layers for `tokens`, and of the output layer for `targets`."""
    layers = 2 * s.active + 4 * s.layers * s.heads * s.head_dim * context
    return layers * tokens, 2 * s.matrix * targets


def train_flops(job: Job, s: Shape, lora: bool, head: bool = True) -> float:
    """Forward and backward over a step's tokens once: three times the forward, two where weights are frozen, one more with
    checkpointing. The output layer computes its logits twice."""
    layers, output = forward_flops(s, job.computed, job.samples * job.response, context(job))
    return layers * ((2 if lora else 3) + job.checkpoint) + (output * (3 if lora else 4) if head else 0)


def matrix_rate(device: Device, s: Shape, tensor: int = 1, cal: Calibration = CALIBRATION) -> float:
    """FLOP/s of one device on matrix products of this model's width."""
    width = s.hidden / tensor
    return device.matmul * width / (width + cal.narrow)


def link_rate(device: Device, devices: int, cal: Calibration = CALIBRATION) -> float:
    """Bytes/s that a device receives in a collective over `devices`: a ring enters each host once, through all its ports."""
    inside = device.link if devices <= device.host else min(device.link, device.network * device.host)
    return inside * cal.link_share


# -- sampling --------------------------------------------------------------------------------------------------------------

def decode_step(job: Job, device: Device, rows: int, tensor: int = 1, cal: Calibration = CALIBRATION) -> float:
    """Seconds of one decode step of `rows` sequences, half of their answers long: launches, the cache, and the larger of weights
    read and products computed. A group's prompt is read once."""
    s = job.actor
    kv = cache_bytes(job, tensor) * rows * (job.response / 2 + job.prompt / job.group)
    used = (s.active + s.matrix) / tensor
    reduce = 2 * s.layers * cal.small_reduce if tensor > 1 else 0
    return (s.layers * cal.decode_layer + reduce + kv / (cal.kv_read * device.copy)
            + max(used * job.width / device.copy, 2 * used * rows / device.matmul))


def generate(job: Job, device: Device, devices: int, slots: int, tensor: int = 1, cal: Calibration = CALIBRATION) -> list[Phase]:
    """Prefill and decoding of a step on `devices`, in copies of `tensor` devices whose caches hold `slots` tokens each."""
    copies = devices // tensor
    samples, prompts = -(-job.samples // copies), -(-job.prompts // copies)
    rows = max(1, min(samples, job.sequences, int(slots / (job.response + job.prompt / job.group))))
    flops = sum(forward_flops(job.actor, prompts * job.prompt, prompts, job.prompt / 2))
    prefill = cal.prefill + flops / tensor / matrix_rate(device, job.actor, tensor, cal)
    return [Phase("prefill", prefill),
            Phase("decode", job.response * samples / rows * decode_step(job, device, rows, tensor, cal))]


def transfer(job: Job, device: Device, p: Parallel, devices: int, tensor: int, shared: bool,
             cal: Calibration = CALIBRATION) -> Phase:
    """New weights to the samplers: each device receives what it does not hold of its part. Nothing where storage is shared;
    only the adapters with LoRA."""
    if shared and p.devices == 1:
        return Phase("weights to the sampler", 0.0)
    held = 1 / p.split / p.shard if shared else 0.0
    moved = (job.trained if job.lora else job.actor.parameters) * job.width / tensor * (1 - min(held, 1))
    rate = device.link if max(devices, p.devices) <= device.host else device.network
    return Phase("weights to the sampler", moved / rate / cal.link_share, moved)


# -- training --------------------------------------------------------------------------------------------------------------

def score(job: Job, s: Shape, name: str, device: Device, p: Parallel, head: bool = True, cal: Calibration = CALIBRATION) -> Phase:
    """One pass without gradient over a step's tokens."""
    layers, output = forward_flops(s, job.computed, job.samples * job.response, context(job))
    flops = layers + (output if head else 0)
    return Phase(name, flops / p.devices / matrix_rate(device, s, p.tensor, cal))


def exchange(s: Shape, trained: int, width: int, p: Parallel, device: Device, passes: int, updates: int) -> float:
    """Bytes a device receives for data parallelism: weights gathered for each forward and again for its backward ("layer"), or once
    for both ("whole"); gradients summed in float32 for each micro-batch, and once an update between copies of the shards."""
    weights, sums = s.parameters * width / p.split, 4 * trained / p.split
    part, copies = 1 - 1 / p.shard, p.data // p.shard
    gathered = {"layer": 2 * passes, "whole": passes, "": 0}[p.gather]
    return part * (gathered * weights + passes * sums) + updates * 2 * (1 - 1 / copies) * sums / p.shard


def train(job: Job, s: Shape, name: str, trained: int, device: Device, p: Parallel, head: bool = True,
          cal: Calibration = CALIBRATION) -> list[Phase]:
    """All updates of a step: forward and backward with their exchange (hidden behind computing where it is shorter), then
    the optimizer."""
    updates = job.updates
    passes = max(math.ceil(job.epochs * job.computed / p.data / job.micro), updates)
    compute = job.epochs * train_flops(job, s, trained < s.parameters, head) / p.devices / matrix_rate(device, s, p.tensor, cal)
    compute *= 1 + (p.pipeline - 1) * updates / max(passes, 1)  # stages wait while an update's pipeline fills
    own = trained / p.split / p.shard
    compute += passes * (s.layers / p.pipeline * cal.micro_layer + 10 * own / device.copy)  # its gradients are added in float32
    moved = exchange(s, trained, job.width, p, device, passes, updates)
    tokens = job.epochs * job.computed / p.data
    reduced = 4 * s.layers / p.pipeline * tokens * s.hidden * job.width * 2 * (1 - 1 / p.tensor)
    seconds = max(compute, moved / link_rate(device, p.shard, cal)) + reduced / link_rate(device, p.tensor, cal)
    optimizer = max(46 * own / device.copy, 12 * own / device.main if job.offload else 0)
    return [Phase(f"{name} forward and backward", seconds, moved + reduced), Phase(f"{name} optimizer", updates * optimizer)]


def train_phases(job: Job, device: Device, p: Parallel, cal: Calibration = CALIBRATION) -> list[Phase]:
    """What follows sampling, in the order of the loop."""
    out = []
    if job.reward is not None:
        out.append(score(job, job.reward, "reward model", device, Parallel(p.devices), head=False, cal=cal))
    if job.referenced:
        out.append(score(job, job.reference or job.actor, "reference log-probs", device, p, cal=cal))
    if job.values:
        out.append(score(job, job.critic or job.actor, "values", device, p, head=False, cal=cal))
    if job.updates > 1 and job.online:
        out.append(score(job, job.actor, "old log-probs", device, p, cal=cal))
    out += train(job, job.actor, "actor", job.trained, device, p, cal=cal)
    if job.critic is not None:
        out += train(job, job.critic, "critic", job.critic.parameters, device, p, head=False, cal=cal)
    return out
