"""Weights: a version and a stream of named tensors; every load answers with a receipt that can be checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from verl.core.errors import WeightsError

_INT = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x9E3779B1


def checksum(tensor: torch.Tensor) -> int:
    """A position-dependent checksum of the tensor's bits and shape (a transposed or shifted tensor differs).

    One pass on the tensor's own device in wrapping 64-bit integers; the same number on CPU and GPU.
    """
    flat = tensor.detach().contiguous().view(-1)
    bits = flat.view(_INT[flat.element_size()])
    total, step = 0, 1 << 24
    for start in range(0, bits.numel(), step):
        part = bits[start:start + step].to(torch.int64)
        index = torch.arange(start + 1, start + 1 + part.numel(), device=part.device, dtype=torch.int64)
        total += int(((part + 7) * (index * _ODD | 1)).sum())
    for size in tensor.shape:
        total = total * 1000003 + size
    return total & ((1 << 63) - 1)


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a receiver holds after a load: the version, how many tensors, and the sum of their checksums."""

    version: int
    count: int
    checksum: int

    def expect(self, other: Receipt, who: str) -> None:
        """Raise WeightsError, naming `who` and the difference, unless `other` equals this receipt."""
        for name in ("version", "count", "checksum"):
            want, got = getattr(self, name), getattr(other, name)
            if want != got:
                raise WeightsError(f"{who} holds weights with {name} {got}, the trainer sent {want}; "
                                   "the load is void and nothing may be sampled from it")


@dataclass(frozen=True, slots=True)
class Weights:
    """A version and a stream of (name, tensor).

    `owner` is the module whose storage the tensors are: a receiver that samples from that very module has nothing to
    copy. `tensors()` may be called more than once.
    """

    version: int
    tensors: Callable[[], Iterable[tuple[str, torch.Tensor]]]
    owner: torch.nn.Module | None = None

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors())

    def receipt(self) -> Receipt:
        """Count and checksum of this version (one pass over all tensors)."""
        count = total = 0
        for name, tensor in self:
            count += 1
            total += checksum(tensor) ^ (hash_name(name) & ((1 << 63) - 1))
        return Receipt(self.version, count, total & ((1 << 63) - 1))


def hash_name(name: str) -> int:
    """FNV-1a of a tensor's name: stable between processes, unlike `hash`."""
    value = 0xCBF29CE484222325
    for byte in name.encode():
        value = ((value ^ byte) * 0x100000001B3) & ((1 << 64) - 1)
    return value
