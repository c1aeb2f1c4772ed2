"""Engines: things that hold weights and compute with them. Rollout engines by name; import stays lazy."""

from verl.core.registry import Table
from verl.engine.base import BaseEngine, RolloutEngine

ROLLOUTS = Table("trainer.rollout.engine", {
    "native": "verl.engine.native.engine:NativeEngine",
    "hf": "verl.engine.hf_engine:HFEngine",
    "vllm": "verl.engine.vllm_engine:vLLMEngine",
})

__all__ = ["BaseEngine", "RolloutEngine", "ROLLOUTS"]
