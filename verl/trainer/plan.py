"""What this machine has, what the settings ask for, and what is done instead where the two differ."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import dataclass
from importlib import metadata

import torch

from verl.core.errors import ConfigError
from verl.trainer.config import RunConfig
from verl.trainer.placement import place


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts of this machine that decide which backends can run."""

    gpus: int
    gpu_name: str
    nccl: bool
    fsdp: bool
    cuda_graphs: bool
    vllm: bool
    flash_attention: bool
    ray: bool

    def lines(self) -> list[str]:
        """One readable line a fact."""
        def yes(flag: bool) -> str:
            return "yes" if flag else "no"
        return [f"GPUs: {self.gpus}" + (f" ({self.gpu_name})" if self.gpus else ""), f"FSDP: {yes(self.fsdp)}",
                f"NCCL: {yes(self.nccl)}", f"CUDA graphs: {yes(self.cuda_graphs)}", f"vLLM: {yes(self.vllm)}",
                f"fused attention: {yes(self.flash_attention)}", f"Ray: {yes(self.ray)}"]


def inspect_machine() -> Machine:
    """Look, without importing any optional package."""
    def has(name: str) -> bool:
        return importlib.util.find_spec(name) is not None
    cuda = torch.cuda.is_available()
    return Machine(gpus=torch.cuda.device_count() if cuda else 0, gpu_name=torch.cuda.get_device_name() if cuda else "",
                   nccl=cuda and torch.distributed.is_nccl_available(), fsdp=torch.distributed.is_available(),
                   cuda_graphs=cuda, vllm=has("vllm"), flash_attention=cuda and has("torch.nn.attention.varlen"), ray=has("ray"))


MINIMA = {"torch": "2.11", "transformers": "5.17"}


def minimum_problems() -> list[str]:
    """Stated minima that this environment does not meet, each with what to type."""
    out = [] if sys.version_info >= (3, 11) else [f"Python {sys.version.split()[0]} is too old; 3.11 or newer is needed"]
    for name, least in MINIMA.items():
        have = metadata.version(name)
        if tuple(int(x) for x in re.findall(r"\d+", have)[:2]) < tuple(int(x) for x in least.split(".")):
            out.append(f"{name} {have} is too old; type: pip install '{name}>={least}'")
    return out


def plan(config: RunConfig, machine: Machine | None = None) -> list[str]:
    """Lines that say which backend runs and what falls back; with `strict`, fall-backs are a ConfigError instead."""
    machine = machine or inspect_machine()
    trainer, actor = config.trainer, config.model.actor
    device = machine.gpu_name if machine.gpus else f"CPU ({torch.get_num_threads()} threads)"
    chosen = [f"{trainer.algorithm} on {device}; training in {'bf16 with fp32 masters' if machine.gpus else 'fp32'}"]
    placed = place(config, machine.gpus, machine.ray)
    falls = placed.falls + _fallbacks(config, machine, "actor" in placed.far)
    if trainer.strict and falls:
        raise ConfigError("trainer.strict: true and this machine cannot do what is asked:\n  " + "\n  ".join(falls))
    if actor.lora.rank:
        chosen.append(f"LoRA rank {actor.lora.rank}: only adapters are trained; the reference is the model without them")
    return chosen + placed.lines + falls


def _fallbacks(config: RunConfig, machine: Machine, sharded: bool) -> list[str]:
    rollout, actor = config.trainer.rollout, config.model.actor
    out = []
    if rollout.engine == "vllm" and not machine.vllm:
        out.append("trainer.rollout.engine: vllm is not installed; the built-in engine samples instead")
    if rollout.tensor_parallel_size > 1:
        out.append(f"trainer.rollout.tensor_parallel_size: {rollout.tensor_parallel_size} needs as many GPUs and vLLM; "
                   f"this machine has {machine.gpus}; sampling runs on one device")
    if rollout.kv_cache_dtype == "fp8" and not machine.gpus:
        out.append("trainer.rollout.kv_cache_dtype: fp8 needs a GPU; keys and values are kept in the model's precision")
    if actor.use_fsdp and not sharded:
        out.append(f"model.actor.use_fsdp: one process trains, so nothing is sharded ({actor.fsdp_config.sharding_strategy} is "
                   "read and has no effect)")
    if actor.megatron and not sharded:
        out.append(f"model.actor.megatron: {actor.megatron} needs as many GPUs; one process trains with verl's own engine")
    if actor.use_flash_attn and not machine.flash_attention:
        out.append("model.actor.use_flash_attn: no fused attention here; the exact CPU attention runs instead")
    return out
