"""The paged key-value cache: who owns which page (plain Python), and the tensors behind the pages.

Slot s of layer l is one token's key and value; page p is slots p*page_size ... A sequence's prompt and its response
lie on different pages, so that the samples of a group share their prompt's pages without ever copying one. Page 0 is
scratch: padding writes there and nobody reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from verl.engine.native import vmm
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
    scale: float = 1.0  # a cached number times this is the real one

    def __reduce_ex__(self, protocol):  # a copied or pickled module starts without a cache
        return type(None), ()


def bytes_per_token(lm: LM, dtype: torch.dtype) -> int:
    """Device bytes one cached token costs over all layers."""
    return sum(layer.heads * (layer.key_dim + layer.value_dim) for layer in lm.layers) * dtype.itemsize


class Memory:
    """The cache of all layers, `slots` tokens each, in one piece. `lasting`: its address survives sleep."""

    def __init__(self, lm: LM, slots: int, dtype: torch.dtype, scale: float):
        self.lm, self.slots, self.dtype, self.scale = lm, slots, dtype, scale
        self.size = slots * bytes_per_token(lm, dtype)
        self.lasting = lm.device.type == "cuda" and vmm.driver is not None
        self.arena: vmm.Arena | None = None
        self.pools: list[LayerPool] | None = None

    def wake(self) -> None:
        """Take the memory, if it is not held. On a CPU untouched pages cost none."""
        if self.pools is not None:
            return
        if self.lasting:
            self.arena = self.arena or vmm.Arena(self.size, self.lm.device)
            raw = self.arena.wake()
        else:
            raw = torch.empty(self.size, dtype=torch.uint8, device=self.lm.device)
        self.pools, start = [], 0
        for layer in self.lm.layers:
            parts = []
            for width in (layer.key_dim, layer.value_dim):
                end = start + layer.heads * self.slots * width * self.dtype.itemsize
                parts.append(raw[start:end].view(self.dtype).view(layer.heads, self.slots, width))
                parts[-1][:, 0] = 0  # padding is read with weight 0, and 0 * NaN is NaN
                start = end
            self.pools.append(LayerPool(*parts, self.scale))

    def bind(self) -> None:
        """Let the attention layers use this cache; several engines may take turns on one module."""
        for layer, kv in zip(self.lm.layers, self.pools):
            layer.module.verl_kv = kv

    def sleep(self) -> None:
        """Give the memory back."""
        if self.pools is None:
            return
        for layer in self.lm.layers:
            layer.module.verl_kv = None
        self.pools = None
        if self.arena is not None:
            self.arena.sleep()

    def close(self) -> None:
        """Give the addresses back too; `wake` would reserve others."""
        self.sleep()
        if self.arena is not None:
            self.arena.close()
            self.arena = None
