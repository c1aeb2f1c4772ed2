"""Weights: a version and a stream of named tensors; every load answers with a receipt that can be checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from verl.core.errors import WeightsError

_INT = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_63 = (1 << 63) - 1
_ROWS = 0x3C6EF372FE94F82B
_SMALL = {"cpu": 1 << 10, "cuda": 1 << 16}  # elements up to which a block is cheaper summed together with others
_TOGETHER = 1 << 20  # elements summed together


def checksum(tensor: torch.Tensor) -> int:
    """A position-dependent checksum of the tensor's bits and shape (a transposed or shifted tensor differs).

    One pass on the tensor's own device in wrapping 64-bit integers; the same number on CPU and GPU.
    """
    return fold(block_sum(tensor, (0,) * tensor.dim(), tensor.shape).item(), tensor.shape)


def fold(total: int, shape: Sequence[int]) -> int:
    """The checksum of a tensor of this shape whose blocks have sums that add up to `total`."""
    for size in shape:
        total = total * 1000003 + size
    total &= (1 << 64) - 1
    return (total ^ total >> 32) & _63  # a flipped top bit must not fall away with the sign


def block_sum(block: torch.Tensor, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """What one block of a tensor adds to its checksum: int64 [], on the block's device.

    The block covers `start` onwards of a tensor of `shape`. Sums of disjoint blocks add up (mod 2**64) to the sum of the
    whole, however it was cut: shards can be compared with slices without putting a tensor together anywhere.

    Each row (last axis) is read as little-endian 8-byte words; word j of row i is multiplied with r_i + c_j, pseudo-random
    and odd, so that every single flipped bit shows. That factor needs only the sums of rows and columns: no temporaries.
    """
    columns = block.shape[-1] if block.dim() else 1
    if not block.numel():
        return torch.zeros((), dtype=torch.int64, device=block.device)
    rows = block.detach().reshape(-1, columns).view(_INT[block.element_size()])
    row_ids = torch.zeros((), dtype=torch.int64, device=block.device)
    for first, size, full in zip(start[:-1], block.shape[:-1], shape[:-1]):
        row_ids = row_ids[..., None] * full + torch.arange(first, first + size, device=block.device)
    row_weights = _mix(row_ids.reshape(-1), _ROWS) | 1
    first, per = (start[-1] if block.dim() else 0), 8 // block.element_size()
    head = min(columns, -first % per)  # columns before the first whole word, then whole words, then the rest
    body = columns - (columns - head) % per
    total = torch.zeros((), dtype=torch.int64, device=block.device)
    for begin, end, part in ((0, head, _parts), (head, body, _words), (body, columns, _parts)):
        if begin < end:
            total += part(rows[:, begin:end], first + begin, row_weights)
    return total


Block = tuple[torch.Tensor, Sequence[int], Sequence[int]]  # as block_sum takes it: what it holds, its start, the whole shape


def block_sums(blocks: Sequence[Block]) -> torch.Tensor:
    """`block_sum` of many blocks on one device, int64 [blocks]: a few operations for all small ones, not for each."""
    sums: list[torch.Tensor | None] = [None] * len(blocks)
    groups: dict[torch.dtype, list[list[int]]] = {}
    room: dict[torch.dtype, int] = {}
    for i, (block, start, shape) in enumerate(blocks):
        if not 0 < block.numel() <= _SMALL[block.device.type] or not 1 <= block.dim() <= 2:
            sums[i] = block_sum(block, start, shape)
            continue
        if room.get(block.dtype, 0) < block.numel():
            groups.setdefault(block.dtype, []).append([])
            room[block.dtype] = _TOGETHER
        groups[block.dtype][-1].append(i)
        room[block.dtype] -= block.numel()
    for run in (run for runs in groups.values() for run in runs):
        for i, total in zip(run, _small_sums([blocks[i] for i in run]).unbind()):
            sums[i] = total
    return torch.stack(sums)


def _small_sums(blocks: Sequence[Block]) -> torch.Tensor:
    """Sums of blocks of one dtype with one or two axes: each element's term, then differences of the running total."""
    first, device = blocks[0][0], blocks[0][0].device
    bits, per = 8 * first.element_size(), 8 // first.element_size()
    sizes, columns, rows_from, columns_from = torch.tensor(
        [(b.numel(), b.shape[-1], start[0] if len(start) > 1 else 0, start[-1]) for b, start, _ in blocks]).to(device).unbind(1)
    ends = sizes.cumsum(0)
    total = sum(b.numel() for b, _, _ in blocks)
    which = torch.repeat_interleave(torch.arange(len(blocks), device=device), sizes, output_size=total)
    place = torch.arange(total, device=device) - (ends - sizes)[which]
    column = columns_from[which] + place % columns[which]
    weight = (_mix(rows_from[which] + place // columns[which], _ROWS) | 1) + _column_weights(column // per)
    value = torch.cat([b.detach().reshape(-1).view(_INT[b.element_size()]) for b, _, _ in blocks]).to(torch.int64)
    value &= (1 << bits) - 1 if bits < 64 else -1
    running = ((value << column % per * bits) * weight).cumsum(0)[ends - 1]
    return running.diff(prepend=running.new_zeros(1))


def _words(rows: torch.Tensor, first: int, row_weights: torch.Tensor) -> torch.Tensor:
    """Sum over whole 8-byte words; `first`: the column, in elements, of the first."""
    per = 8 // rows.element_size()
    if rows.storage_offset() % per or rows.stride(0) % per or rows.stride(1) != 1:
        rows = rows.clone(memory_format=torch.contiguous_format)
    words = rows.view(torch.int64)
    ids = torch.arange(first // per, first // per + words.shape[1], device=rows.device)
    return (words.sum(1) * row_weights).sum() + (words.sum(0) * _column_weights(ids)).sum()


def _parts(rows: torch.Tensor, first: int, row_weights: torch.Tensor) -> torch.Tensor:
    """The same sum for columns that do not fill a word: each element stands at its own byte of it."""
    bits, per = 8 * rows.element_size(), 8 // rows.element_size()
    columns = torch.arange(first, first + rows.shape[1], device=rows.device)
    value = rows.to(torch.int64) & ((1 << bits) - 1 if bits < 64 else -1)
    return ((value << columns % per * bits) * (row_weights[:, None] + _column_weights(columns // per))).sum()


def _column_weights(ids: torch.Tensor) -> torch.Tensor:
    return _mix(ids, 0x1F83D9ABFB41BD6B) & ~1


def _mix(ids: torch.Tensor, salt: int) -> torch.Tensor:
    """Pseudo-random int64 of an index: two rounds of multiply and shift."""
    x = (ids + 1) * salt
    x = (x ^ (x >> 29)) * 0x2545F4914F6CDD1D
    return x ^ (x >> 32)


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
            total += checksum(tensor) ^ (hash_name(name) & _63)
        return Receipt(self.version, count, total & _63)


def receipt_of(version: int, tensors: Mapping[str, torch.Tensor]) -> Receipt:
    """The receipt of who holds all these tensors, on one device, which is waited for once and not for each of them."""
    sums = block_sums([(t, (0,) * t.dim(), t.shape) for t in tensors.values()]).tolist() if tensors else []
    total = sum(fold(s, t.shape) ^ (hash_name(name) & _63) for s, (name, t) in zip(sums, tensors.items()))
    return Receipt(version, len(tensors), total & _63)


def hash_name(name: str) -> int:
    """FNV-1a of a tensor's name: stable between processes, unlike `hash`."""
    value = 0xCBF29CE484222325
    for byte in name.encode():
        value = ((value ^ byte) * 0x100000001B3) & ((1 << 64) - 1)
    return value
