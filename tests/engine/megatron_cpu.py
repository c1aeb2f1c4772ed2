"""Megatron-Core on a CPU: it names the device "cuda" and draws from CUDA's generator; here there is neither."""

from contextlib import nullcontext

import torch


def on_cpu() -> None:
    """Point what Megatron-Core takes from torch.cuda at the CPU, for the rest of this process. Nothing random is drawn."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    zeros = torch.zeros
    torch.cuda.current_device = lambda: "cpu"
    torch.zeros = lambda *size, device=None, **more: zeros(*size, device="cpu" if device == "cuda" else device, **more)
    CudaRNGStatesTracker.fork = lambda self, name="": nullcontext()
