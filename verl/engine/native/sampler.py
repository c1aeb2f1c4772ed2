"""One uniform per (seed, position) and the inverse of the cumulative distribution: the whole randomness of sampling.

    h = mix32(lo(seed) ^ mix32(position * 0x9E3779B9 + hi(seed)))      u = ((h >> 8) + 0.5) * 2^-24
    token = the first id, in id order, whose cumulative probability reaches u * total

A sample therefore depends on its seed and its logits only: not on the batch, the order, the device, or on having been
computed twice. Because u > 0 and the cumulative sum must rise at the chosen id, an id of probability 0 (a spare row of
the output layer, a banned or truncated token) is never drawn.
"""

from __future__ import annotations

import math

import torch

from verl.core.errors import ConfigError
from verl.core.types import Sampling

_LOW = 0xFFFFFFFF


def check(sampling: Sampling) -> None:
    """Raise ConfigError naming the first sampling setting that is out of range."""
    rules = {
        "temperature": (math.isfinite(sampling.temperature) and sampling.temperature >= 0, "0 (greedy) or more"),
        "max_tokens": (sampling.max_tokens >= 1, "1 or more"),
        "min_tokens": (0 <= sampling.min_tokens <= sampling.max_tokens, f"from 0 to max_tokens ({sampling.max_tokens})"),
        "top_p": (0 < sampling.top_p <= 1, "above 0 and at most 1 (1: off)"),
        "top_k": (sampling.top_k >= 0, "0 (off) or more"),
        "stop": (all(sampling.stop), "strings that are not empty"),
    }
    for name, (good, allowed) in rules.items():
        if not good:
            raise ConfigError(f"sampling setting {name} is {getattr(sampling, name)!r}; allowed: {allowed}")


def _mix32(x: torch.Tensor) -> torch.Tensor:
    """A bijection of 32-bit integers with good avalanche, in int64 arithmetic (products wrap; the mask keeps 32 bits)."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _LOW
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _LOW
    return x ^ (x >> 16)


def uniforms(seeds_B: torch.Tensor, positions_B: torch.Tensor) -> torch.Tensor:
    """Float32 numbers in (0, 1] from int64 seeds and response positions."""
    high, low = (seeds_B >> 32) & _LOW, seeds_B & _LOW
    h = _mix32(low ^ _mix32((positions_B * 0x9E3779B9 + high) & _LOW))
    return ((h >> 8).float() + 0.5) * 2.0 ** -24


def truncate(z_BV: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Logits outside the top k, then outside the smallest set of probability top_p, become -inf."""
    if 0 < top_k < z_BV.shape[-1]:
        kth = z_BV.topk(top_k, dim=-1).values[:, -1:]
        z_BV = z_BV.masked_fill(z_BV < kth, float("-inf"))
    if top_p < 1:
        sorted_BV, order_BV = z_BV.sort(dim=-1, descending=True)
        probs = sorted_BV.softmax(-1)
        outside = probs.cumsum(-1) - probs >= top_p
        z_BV = z_BV.masked_fill(torch.zeros_like(outside).scatter(-1, order_BV, outside), float("-inf"))
    return z_BV


def sample(z_BV: torch.Tensor, sampling: Sampling, seeds_B: torch.Tensor, positions_B: torch.Tensor,
           ends: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 logits at temperature 1 -> (ids int64 [B], log-probs float32 [B], nats).

    The log-prob is of the distribution that was sampled from: log softmax of logits / temperature after top_k, top_p
    and the ban on `ends` before min_tokens; greedy (temperature 0) is reported at temperature 1.
    """
    if ends and sampling.min_tokens:
        banned = torch.zeros(z_BV.shape[-1], dtype=torch.bool, device=z_BV.device)
        banned[list(ends)] = True
        z_BV = z_BV.masked_fill((positions_B < sampling.min_tokens)[:, None] & banned, float("-inf"))
    if sampling.temperature == 0:
        best = z_BV.max(-1)
        return best.indices, best.values - z_BV.logsumexp(-1)
    if sampling.temperature != 1:
        z_BV = z_BV / sampling.temperature
    z_BV = truncate(z_BV, sampling.top_k, sampling.top_p)
    peak_B = z_BV.max(-1, keepdim=True).values
    cumulative_BV = (z_BV - peak_B).exp_().cumsum_(-1)
    total_B = cumulative_BV[:, -1:]
    target_B = uniforms(seeds_B, positions_B)[:, None] * total_B
    ids_B = torch.searchsorted(cumulative_BV, target_B).clamp_(max=z_BV.shape[-1] - 1)
    return ids_B[:, 0], (z_BV.gather(-1, ids_B) - peak_B - total_B.log())[:, 0]
