"""Memory for time: recomputed activations, and optimizer state in main memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.optim.adamw import adamw
from torch.utils.checkpoint import checkpoint

from verl.core.errors import ConfigError, TrainingError
from verl.engine.optimizer import EPS, WIDE, MasterAdamW

WORDS = ("checkpoint", "offload")
BUCKET = 1 << 24  # elements of each array that are on the device at a time, twice


def check_words(memory: Sequence[str]) -> None:
    """Raises ConfigError for a word that is none of WORDS."""
    if wrong := [word for word in memory if word not in WORDS]:
        raise ConfigError(f"memory {wrong[0]!r} is not known; allowed: {', '.join(WORDS)}")


def blocks(module: nn.Module) -> list[nn.Module]:
    """The repeated layers of a model: members of its outermost module lists, of whatever architecture."""
    if isinstance(module, nn.ModuleList):
        return list(module)
    return [block for child in module.children() for block in blocks(child)]


@contextmanager
def recomputed(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Forwards inside keep only these layers' inputs for backward, which computes the rest again.

    What a layer calls stays what it is (compiled for training or not), and outside, where a sampler runs the same layers,
    nothing changes. Everything that a layer reads is an argument, so the second forward is the first one.
    """
    saved = [layer._compiled_call_impl for layer in layers]
    for layer, own in zip(layers, saved):
        layer._compiled_call_impl = partial(checkpoint, own or layer._call_impl, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for layer, own in zip(layers, saved):
            layer._compiled_call_impl = own


class _Sum:
    """Where the gradient of a working weight adds up when its master is elsewhere."""

    grad: torch.Tensor | None = None


class HostAdamW(MasterAdamW):
    """MasterAdamW, bit for bit, with masters and moments in main memory; accumulated gradients stay on the device.

    The arrays of all tensors lie end to end, so that an update streams equal buckets through the device, the next one on
    its way in and the last one on its way out while one is computed. 12 bytes a parameter move each way (8 where a float32
    parameter is its own master).
    """

    def _allocate(self) -> None:
        self.device = self.working[0].device
        self.masters, self.sums, self.counts = list(self.working), list(self.working), [0] * len(self.working)
        self._moments: list[dict[str, torch.Tensor]] = [{} for _ in self.working]
        self._flat: list[tuple[list[int], dict[str, torch.Tensor]]] = []
        for dtype in {p.dtype: None for p in self.working}:
            members = [i for i, p in enumerate(self.working) if p.dtype is dtype]
            sizes = [self.working[i].numel() for i in members]
            keys = ("exp_avg", "exp_avg_sq") if dtype in WIDE else ("exp_avg", "exp_avg_sq", "master")
            arrays = {k: pinned(sum(sizes), dtype if dtype in WIDE else torch.float32, self.device) for k in keys}
            self._flat.append((members, arrays))
            for key, array in arrays.items():
                for i, part in zip(members, array.split(sizes)):
                    self._moments[i][key] = part.view(self.working[i].shape)
            if dtype not in WIDE:
                for i in members:
                    self.masters[i], self.sums[i] = self._moments[i].pop("master").copy_(self.working[i].detach()), _Sum()

    def _apply(self, rate: float) -> None:
        for i, holder in enumerate(self.sums):
            self.counts[i] += holder.grad is not None
        for members, arrays in self._flat:
            self._stream(members, arrays, rate)

    def _stream(self, members: list[int], arrays: dict[str, torch.Tensor], rate: float) -> None:
        total = len(arrays["exp_avg"])
        buckets = [slice(start, min(start + BUCKET, total)) for start in range(0, total, BUCKET)]
        counts = torch.tensor([self.counts[i] - 1.0 for i in members], device=self.device)
        if self.device.type != "cuda":
            for bucket in buckets:
                self._update(members, counts, bucket, {k: a[bucket] for k, a in arrays.items()}, rate)
            return
        main = torch.cuda.current_stream(self.device)
        inward, outward = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        rooms = [{k: torch.empty(min(BUCKET, total), dtype=a.dtype, device=self.device) for k, a in arrays.items()}
                 for _ in buckets[:2]]
        inward.wait_stream(main)
        left: list[torch.cuda.Event] = []
        for number, bucket in enumerate(buckets):
            room = {k: r[:bucket.stop - bucket.start] for k, r in rooms[number % 2].items()}
            with torch.cuda.stream(inward):
                if number >= 2:
                    inward.wait_event(left[number - 2])
                for key, there in room.items():
                    there.copy_(arrays[key][bucket], non_blocking=True)
            main.wait_stream(inward)
            self._update(members, counts, bucket, room, rate)
            outward.wait_stream(main)
            with torch.cuda.stream(outward):
                for key, there in room.items():
                    arrays[key][bucket].copy_(there, non_blocking=True)
                left.append(outward.record_event())
        outward.synchronize()  # the host may read its arrays, and the rooms may go back

    def _update(self, members: list[int], counts: torch.Tensor, bucket: slice, room: dict[str, torch.Tensor], rate: float) -> None:
        """AdamW on the parts of all tensors that lie in this bucket; `room` holds its arrays on the device."""
        place, parts = 0, []
        for i, count in zip(members, counts.clone().unbind()):  # AdamW raises them
            size = self.working[i].numel()
            low, high = max(place, bucket.start), min(place + size, bucket.stop)
            if low < high and self.sums[i].grad is not None:
                parts.append((i, slice(low - place, high - place), slice(low - bucket.start, high - bucket.start), count))
            place += size
        for decayed in (True, False):
            own = [part for part in parts if (self.working[part[0]].dim() >= 2) == decayed]
            if not own:
                continue
            weights = [self.working[i].detach().view(-1)[here] for i, here, _, _ in own]
            masters = [room["master"][there] for _, _, there, _ in own] if "master" in room else weights
            beta1, beta2 = self.config.betas
            adamw(masters, [self.sums[i].grad.reshape(-1)[here] for i, here, _, _ in own],
                  [room["exp_avg"][there] for _, _, there, _ in own], [room["exp_avg_sq"][there] for _, _, there, _ in own], [],
                  [count for *_, count in own], fused=True, amsgrad=False, beta1=beta1, beta2=beta2, lr=rate,
                  weight_decay=self.config.weight_decay if decayed else 0.0, eps=EPS, maximize=False)
            if masters is not weights:
                torch._foreach_copy_(weights, masters)

    def _moments_of(self, i: int) -> dict[str, torch.Tensor]:
        return {"step": torch.tensor(float(self.counts[i])), **self._moments[i]} if self.counts[i] else {}

    def _take_moments(self, found: dict[int, dict[str, torch.Tensor]]) -> None:
        for i, own in enumerate(self._moments):
            self.counts[i] = int(found[i]["step"]) if i in found else 0
            for key, tensor in own.items():
                tensor.copy_(found[i][key]) if i in found else tensor.zero_()


def pinned(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros in main memory, locked in place when a GPU will read them. (torch's own pinned allocator takes the next power of
    two of bytes.) Raises TrainingError when they cannot be locked."""
    array = torch.zeros(size, dtype=dtype)
    if device.type == "cuda" and size:
        error = int(torch.cuda.cudart().cudaHostRegister(array.data_ptr(), array.nbytes, 0))
        if error:
            raise TrainingError(f"{array.nbytes / 2**30:.1f} GiB of main memory cannot be locked for the GPU (CUDA error {error}); "
                                "take offload out of trainer.memory, or give the process more main memory")
        unlock = weakref.finalize(array.untyped_storage(), torch.cuda.cudart().cudaHostUnregister, array.data_ptr())
        unlock.atexit = False  # the process' end unlocks it anyway
    return array
