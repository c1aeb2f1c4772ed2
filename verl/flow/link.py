"""Process groups made for one set of weights: between any processes that reach one store, whatever world they are in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from verl.core.errors import WeightsError
from verl.flow.layout import Layout
from verl.flow.reshard import Plan, plan
from verl.flow.transfer import DEADLINE_S, Arrays, Report, Target, transfer
from verl.flow.transport import GRACE_S, Message, TorchTransport, Wait, _first_line, _wait

Address = tuple[str, int]  # host and port of a store
SOURCES: dict[str, Callable[[], Arrays]] = {}  # role -> what its engine trains in this process, for receivers that share it


class Meeting:
    """A store on this host that other processes reach under `address`, as long as this object is kept."""

    def __init__(self, host: str):
        self.store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=DEADLINE_S))
        self.address: Address = (host, self.store.port)


def reach_store(address: Address) -> dist.TCPStore:
    """The store that another process has opened."""
    return dist.TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=DEADLINE_S))


def own_device() -> torch.device:
    """What this process computes on: the first GPU it sees, or the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def gpu_id(device: torch.device) -> str | None:
    """What tells a GPU from all others; None for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


class LinkTransport(TorchTransport):
    """A TorchTransport over a group of its own: gloo, or NCCL where `device` is a GPU. Ranks are any numbers, the same for all."""

    def __init__(self, store: dist.Store, name: str, rank: int, ranks: Sequence[int], device: torch.device):
        self.rank, self.ranks, self.device, self.grace_s = rank, tuple(sorted(ranks)), device, GRACE_S
        store = dist.PrefixStore(f"verl/{name}", store)
        self._store, self._turn = dist.PrefixStore("rows", store), 0
        index, wait = self.ranks.index(rank), timedelta(seconds=DEADLINE_S)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = wait
            self._links = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), index, len(self.ranks), options)
            self._links.allreduce([torch.zeros(1, device=device)]).wait()  # makes the communicator, with every rank
        else:
            self._links = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), index, len(self.ranks), wait)

    def post(self, tag: int, sends: Sequence[Message], receives: Sequence[Message]) -> list[Wait]:
        if not sends and not receives:
            return []
        together, works = self.device.type == "cuda", []
        try:
            if together:
                self._links._start_coalescing(self.device)
            for post, messages in ((self._links.send, sends), (self._links.recv, receives)):
                works += [post([tensor], self.ranks.index(peer), tag) for peer, tensor in messages]
            if together:
                works = [self._links._end_coalescing(self.device)] * len(works)
        except RuntimeError as error:
            raise ConnectionError(_first_line(error)) from error
        return [lambda timeout_s, work=work: _wait(work, timeout_s) for work in works]


class Member:
    """One process' part in the loads of one set of weights: `join` a group, then `load` each version with it.

    rank: its number among all that send or receive. arrays: the source's storage, read anew at every load; target: what is
    filled. A process may have either or both.
    """

    def __init__(self, rank: int, store: dist.Store, arrays: Callable[[], Arrays] | None = None, target: Target | None = None):
        self.rank, self.store, self.arrays, self.target = rank, store, arrays, target
        self.transport: LinkTransport | None = None
        self.plan: Plan | None = None

    def join(self, name: str, source: Layout, destination: Layout, device: torch.device) -> None:
        """Make the group of all ranks of the two layouts, which all call this at the same time with the same arguments."""
        self.leave()
        made = plan(source, destination)
        try:
            self.transport = LinkTransport(self.store, name, self.rank, made.ranks, device)
        except RuntimeError as error:
            raise WeightsError(f"rank {self.rank} could not reach ranks {list(made.ranks)}: {_first_line(error)}") from error
        self.plan = made

    def leave(self) -> None:
        """Drop the group."""
        self.transport = self.plan = None

    def load(self, version: int, deadline_s: float = DEADLINE_S) -> Report:
        """Move `version` with the group; see `transfer`."""
        if self.plan is None:
            raise WeightsError(f"rank {self.rank} is in no group; join one first")
        sends, takes = self.rank in self.plan.source.pieces, self.rank in self.plan.destination.pieces
        return transfer(self.plan, self.transport, version=version if sends else None, arrays=self.arrays() if sends else None,
                        target=self.target if takes else None, deadline_s=deadline_s)
