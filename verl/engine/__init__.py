"""Engines: things that hold weights and compute with them. Rollout engines by name; import stays lazy."""

from importlib import import_module
from typing import Any

from verl.core.registry import Table
from verl.engine.base import BaseEngine, RolloutEngine

ROLLOUTS = Table("trainer.rollout.engine", {
    "native": "verl.engine.native.engine:NativeEngine",
    "hf": "verl.engine.hf_engine:HFEngine",
    "vllm": "verl.engine.vllm_engine:vLLMEngine",
})

_LAZY = {"FsdpEngine": "verl.engine.fsdp", "MegatronEngine": "verl.engine.megatron"}

__all__ = ["BaseEngine", "FsdpEngine", "MegatronEngine", "RolloutEngine", "ROLLOUTS"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
