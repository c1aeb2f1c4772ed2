"""TrainGroup: a training engine whose ranks live in other processes, with the methods of one that lives here."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from verl.core.batch import Batch
from verl.core.weights import Receipt, Weights
from verl.engine.base import BaseEngine
from verl.engine.train import StepInfo, TrainEngine
from verl.flow.actors import CALL_S, Actor, Call, Slot, broadcast, gather
from verl.flow.layout import Layout, table_of, whole
from verl.flow.link import SOURCES, Address, Meeting, Member, gpu_id, own_device, reach_store
from verl.models.lm import LM

WORLD_S = 1800.0  # the longest that one rank may wait for another in a collective: an uneven share, not a dead process
Packed = dict[str, tuple[np.ndarray, torch.dtype, tuple[int, ...]]]  # tensors as bytes, which processes of one host share


class TrainRank:
    """In a rank's process: its engine. Every rank is called with the same arguments and only rank 0's answer travels.

    make: device -> the engine; with several ranks it finds the default process group of the ranks made.
    """

    def __init__(self, role: str, make: Callable[[torch.device], TrainEngine], rank: int, ranks: int, address: Address):
        self.rank, self.device, self.member = rank, own_device(), None
        if not dist.is_initialized():
            if address[0].startswith("127."):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            store = dist.PrefixStore(f"world/{role}", reach_store(address))
            dist.init_process_group("cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo", store=store, rank=rank,
                                    world_size=ranks, timeout=timedelta(seconds=WORLD_S))
        self.engine = make(self.device)
        SOURCES[role] = self._arrays

    def run(self, name: str, args: tuple, adapters: bool) -> tuple[int, Any] | None:
        """A method of the engine: (version afterwards, its answer)."""
        args = [_own(a) for a in args]
        with nullcontext() if adapters else self.engine.lm.adapters_off():
            answer = getattr(self, name)(*args) if name in _PACKED else getattr(self.engine, name)(*args)
        return (self.engine.version, answer) if self.rank == 0 else None

    def state(self) -> tuple[Packed, dict]:
        tensors, numbers = self.engine.state()
        return (pack_tensors(tensors) if self.rank == 0 else {}), numbers

    def load_state(self, packed: Packed, numbers: dict) -> None:
        self.engine.load_state(unpack_tensors(packed), numbers)

    def exported(self) -> Packed:
        found, lm = self.engine.exported(), self.engine.lm
        heads = [("score_head.weight", lm.score_head.weight)] if lm.score_head is not None else []
        return pack_tensors({**found, **dict(heads)}) if self.rank == 0 else {}

    def named(self) -> Packed:
        """All tensors of the policy, whole."""
        found = dict(self.engine.weights())
        return pack_tensors(found) if self.rank == 0 else {}

    def load_weights(self, packed: Packed, version: int) -> Receipt:
        tensors = unpack_tensors(packed)
        return self.engine.load_weights(Weights(version, tensors.items))

    def facts(self) -> dict[str, Any]:
        """What the driver has to know of the model."""
        lm = self.engine.lm
        frozen = {n for n, p in lm.module.named_parameters() if not p.requires_grad}
        return {"version": self.engine.version, "device": self.device, "path": lm.path, "stop_ids": lm.stop_ids,
                "context": lm.context, "native": lm.native, "why_not": lm.why_not, "frozen": frozen,
                "dtype": getattr(self.engine, "dtype", lm.dtype),
                "lora": getattr(lm.module, "verl_lora", None), "gpu": gpu_id(self.device)}

    # -- its part in loads -------------------------------------------------------------------------------------------

    def layout(self, ranks: Sequence[int]) -> Layout:
        """Where the trained tensors lie, when the ranks of this group have these numbers."""
        if hasattr(self.engine, "layout"):
            return self.engine.layout(ranks)
        return whole(table_of(self._arrays().items()), ranks)

    def _arrays(self) -> Mapping[str, torch.Tensor]:
        if hasattr(self.engine, "arrays"):
            return self.engine.arrays()
        return {n: p.detach() for n, p in self.engine.lm.module.named_parameters() if p.requires_grad}

    def join(self, address: Address, name: str, rank: int, source: Layout, destination: Layout, fast: bool) -> None:
        self.member = Member(rank, reach_store(address), self._arrays)
        self.member.join(name, source, destination, self.device if fast else torch.device("cpu"))

    def load(self, version: int, deadline_s: float) -> None:
        self.member.load(version, deadline_s)


_PACKED = ("state", "load_state", "exported", "named", "load_weights")


class FarLM:
    """What the driver knows of a model that lives in other processes. The module itself is read from its directory, onto this
    process' CPU, when somebody asks for it: to export it with the tensors of `exported`."""

    def __init__(self, facts: Mapping[str, Any], tokenizer: Any, load: Callable[[], LM]):
        self.path, self.stop_ids, self.context = facts["path"], facts["stop_ids"], facts["context"]
        self.native, self.why_not, self.dtype = facts["native"], facts["why_not"], facts["dtype"]
        self.device, self.tokenizer, self.adapters_on = facts["device"], tokenizer, True
        self._load, self._whole = load, None

    def __getattr__(self, name: str) -> Any:
        if self._whole is None:
            self._whole = self._load()
        return getattr(self._whole, name)

    @contextmanager
    def adapters_off(self) -> Iterator[FarLM]:
        """Calls of the group inside are answered by the starting policy."""
        self.adapters_on = False
        try:
            yield self
        finally:
            self.adapters_on = True


class TrainGroup(BaseEngine):
    """TrainEngine's methods over ranks in other processes. Call `ready` once before anything else.

    make: a picklable function device -> engine, the same for every rank; load: reads the model here, for an export; within:
    the group whose processes these ranks share.
    A rank that fails or dies ends the call with its error, and the group with it: a training goes on from its checkpoint.
    """

    optimizer = None  # it lives with the ranks

    def __init__(self, slots: Sequence[Slot], role: str, make: Callable[[torch.device], TrainEngine], meeting: Meeting,
                 tokenizer: Any, load: Callable[[], LM], within: TrainGroup | None = None):
        self._tokenizer, self._load, self.role = tokenizer, load, role
        self.actors = [Actor(slot, role, rank, partial(TrainRank, role, make, rank, len(slots), meeting.address),
                             within.actors[rank] if within is not None else None) for rank, slot in enumerate(slots)]

    def ready(self, deadline_s: float = CALL_S) -> TrainGroup:
        """Wait for every rank's engine. Raises the first error of any."""
        gather([Call(a, "start", a.built) for a in self.actors], deadline_s)
        self.facts = [a.ready().call("facts") for a in self.actors]
        self.lm, self.version = FarLM(self.facts[0], self._tokenizer, self._load), self.facts[0]["version"]
        return self

    def _run(self, name: str, *args: Any) -> Any:
        answers = gather(broadcast(self.actors, "run", name, args, self.lm.adapters_on))
        self.version, answer = answers[0]
        return answer

    def logprobs(self, batch: Batch) -> np.ndarray:
        """See TrainEngine."""
        return np.array(self._run("logprobs", batch))

    def values(self, batch: Batch) -> np.ndarray:
        """See TrainEngine."""
        return np.array(self._run("values", batch))

    def forward_backward(self, batch: Batch, loss: Callable, unit: str = "row", context: Mapping[str, float] | None = None,
                         logprobs: bool = True, entropy_grad: bool = False, scores: bool = False) -> dict[str, float]:
        """See TrainEngine; `loss` is picklable."""
        return self._run("forward_backward", batch, loss, unit, context, logprobs, entropy_grad, scores)

    def step(self) -> StepInfo:
        """See TrainEngine."""
        return self._run("step")

    def state(self) -> tuple[dict[str, torch.Tensor], dict]:
        """See TrainEngine: the whole state, independent of the number of ranks."""
        packed, numbers = self._run("state")
        return unpack_tensors(packed), numbers

    def load_state(self, tensors: dict[str, torch.Tensor], numbers: dict) -> None:
        """See TrainEngine."""
        self._run("load_state", pack_tensors(tensors), numbers)

    def exported(self) -> dict[str, torch.Tensor]:
        """See TrainEngine."""
        return unpack_tensors(self._run("exported"))

    def weights(self) -> Weights:
        """The working weights. A RolloutPool takes them from the ranks; iterating brings whole tensors here."""
        return Weights(self.version, lambda: unpack_tensors(self._run("named")).items(), owner=self)

    def load_weights(self, weights: Weights) -> Receipt:
        """See TrainEngine."""
        return self._run("load_weights", pack_tensors(dict(weights)), weights.version)

    def sleep(self) -> None:
        self._run("sleep")

    def wake(self) -> None:
        self._run("wake")

    def close(self) -> None:
        """End the ranks' processes."""
        for actor in self.actors:
            actor.kill()

    # -- as a source of weights, see RolloutPool ---------------------------------------------------------------------

    @property
    def gpus(self) -> list[str | None]:
        """The GPU of each rank, by its own id."""
        return [f["gpu"] for f in self.facts]

    @property
    def frozen(self) -> set[str]:
        """Tensors that are never sent: workers have them from the model directory."""
        return self.facts[0]["frozen"]

    @property
    def lora(self) -> Any:
        """peft's settings when the ranks train adapters."""
        return self.facts[0]["lora"]

    @cached_property
    def _layout(self) -> Layout:
        return self.actors[0].call("layout", range(len(self.actors)))

    def layout(self) -> Layout:
        """Where the trained tensors lie; ranks from 0."""
        return self._layout

    def join(self, meeting: Meeting, name: str, source: Layout, destination: Layout, fast: bool) -> list[Call]:
        """Ranks that a receiver shares a process with leave their part to it."""
        self._senders = [(rank, a) for rank, a in enumerate(self.actors) if rank not in destination.pieces]
        return [a.start("join", meeting.address, name, rank, source, destination, fast) for rank, a in self._senders]

    def load(self, version: int, deadline_s: float) -> list[Call]:
        return [a.start("load", version, deadline_s) for _, a in self._senders]


def pack_tensors(tensors: Mapping[str, torch.Tensor]) -> Packed:
    """Tensors as arrays of bytes."""
    return {name: (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy(), t.dtype, tuple(t.shape))
            for name, t in tensors.items()}


def unpack_tensors(packed: Packed) -> dict[str, torch.Tensor]:
    """The tensors again, in memory of their own."""
    out = {name: torch.empty(shape, dtype=dtype) for name, (_, dtype, shape) in packed.items()}
    for name, tensor in out.items():
        np.copyto(tensor.reshape(-1).view(torch.uint8).numpy(), packed[name][0])
    return out


def _own(value: Any) -> Any:
    """A batch in memory that may be written to, as it may where it was made."""
    if not isinstance(value, Batch):
        return value
    arrays = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return dataclasses.replace(value, prompts=[np.array(p) for p in value.prompts],
                               **{n: np.array(a) for n, a in arrays.items() if isinstance(a, np.ndarray)})
