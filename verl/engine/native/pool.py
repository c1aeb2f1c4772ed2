"""The paged key-value cache: who owns which page (plain Python), and the tensors behind the pages.

Slot s of layer l is one token's key and value; page p is slots p*page_size ... A sequence's prompt and its response
lie on different pages, so that the samples of a group share their prompt's pages without ever copying one. Page 0 is
scratch: padding writes there and nobody reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from verl.models.lm import LM


class Pages:
    """Hands out pages 1 ... count; lowest first after a reset. Giving back what is not out is a bug and raises."""

    def __init__(self, count: int, size: int):
        self.count, self.size = count, size
        self._free = list(range(count, 0, -1))
        self._out: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def take(self, n: int) -> list[int]:
        if n > len(self._free):
            raise RuntimeError(f"{n} pages asked for, {len(self._free)} free")
        taken = [self._free.pop() for _ in range(n)]
        self._out.update(taken)
        return taken

    def give(self, pages: list[int]) -> None:
        for page in pages:
            if page not in self._out:
                raise RuntimeError(f"page {page} given back twice")
            self._out.remove(page)
            self._free.append(page)


@dataclass(slots=True, eq=False)
class LayerPool:
    """One layer's cache, kept as the attribute `verl_kv` of its attention module. k: [K, slots, D], v: [K, slots, E]."""

    k: torch.Tensor
    v: torch.Tensor

    def __reduce_ex__(self, protocol):  # a copied or pickled module starts without a cache
        return type(None), ()


def bytes_per_token(lm: LM, dtype: torch.dtype) -> int:
    """Device bytes one cached token costs over all layers."""
    return sum(layer.heads * (layer.key_dim + layer.value_dim) for layer in lm.layers) * dtype.itemsize


def attach(lm: LM, slots: int, dtype: torch.dtype) -> None:
    """Give every attention layer a cache of `slots` tokens. On a CPU untouched pages cost no memory."""
    for layer in lm.layers:
        kv = LayerPool(torch.empty(layer.heads, slots, layer.key_dim, dtype=dtype, device=lm.device),
                       torch.empty(layer.heads, slots, layer.value_dim, dtype=dtype, device=lm.device))
        kv.k[:, 0], kv.v[:, 0] = 0, 0  # padding is read with weight 0, and 0 * NaN is NaN
        layer.module.verl_kv = kv


def detach(lm: LM) -> None:
    """Drop all caches."""
    for layer in lm.layers:
        layer.module.verl_kv = None
