"""Settings of the built-in rollout engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl.core.config import option
from verl.core.errors import ConfigError


@dataclass(slots=True)
class NativeConfig:
    """How much the sampler may hold at once. None means: chosen from the device and the model."""

    kv_tokens: int | None = option(None, "tokens of key-value cache in all; left out: kv_memory of the free memory")
    kv_memory: float = option(0.3, "share of the free memory that the key-value cache takes when kv_tokens is left out")
    kv_cache_dtype: Literal["auto", "bf16", "fp8"] = option("auto", "auto: the model's dtype; fp8 (e4m3) halves it on a GPU")
    kv_scale: float = option(1.0, "fp8 only: keys and values are divided by this before they are stored")
    page_size: int | None = option(None, "tokens of one cache page; left out: 16 on a CPU, 64 on a GPU")
    max_sequences: int = option(512, "sequences that decode together")
    max_total_tokens: int | None = option(None, "longest prompt + response; left out: the model's context")
    prefill_tokens: int = option(8192, "prompt tokens computed in one forward pass; longer prompts go in chunks")
    decode_steps: int = option(8, "tokens per sequence launched before the host looks at results (GPU)")
    cuda_graphs: bool = option(True, "replay the decode step as a CUDA graph")
    compile: bool = option(True, "fuse the small operations of a decoder layer when decoding on a GPU")
    keep_kv: bool = option(False, "when weights change in mid-generation, keep the keys and values that older ones made")

    def __post_init__(self):
        for name in ("kv_tokens", "page_size", "max_sequences", "max_total_tokens", "prefill_tokens", "decode_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"rollout engine setting {name} is {value}; it must be at least 1")
        if not 0 < self.kv_memory < 1:
            raise ConfigError(f"rollout engine setting kv_memory is {self.kv_memory}; it is a share between 0 and 1")
        if self.page_size is not None and self.page_size & (self.page_size - 1):
            raise ConfigError(f"rollout engine setting page_size is {self.page_size}; it must be a power of two")
