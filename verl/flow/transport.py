"""How blocks travel: between processes over torch.distributed, or between threads of one process.

A transport posts messages that complete later and lets all ranks share one small row of facts before and after. No wait is
without a limit: TimeoutError when it passes, ConnectionError when the other side is gone.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

GRACE_S = 5.0
Message = tuple[int, torch.Tensor]  # peer, uint8 [bytes]
Wait = Callable[[float], None]  # with the seconds it may take
Row = dict[str, Any]  # JSON values


class Transport(Protocol):
    """What `transfer` needs of a way to move bytes."""

    rank: int
    ranks: tuple[int, ...]
    device: torch.device  # where messages must lie
    grace_s: float  # what the others may need to report after the first has given up

    def post(self, tag: int, sends: Sequence[Message], receives: Sequence[Message]) -> list[Wait]:
        """Start these messages together; the waits, sends first. Messages of a pair match by tag and keep their order."""

    def share(self, row: Row, timeout_s: float) -> dict[int, Row | None]:
        """Everybody's row, the same answer on every rank; None for those whose row did not come in time.

        A row with a "why" shortens the wait for the others to `grace_s`.
        """


class TorchTransport:
    """Between the processes of a torch.distributed group: gloo for CPU tensors, NCCL for CUDA ones.

    Every rank of the group makes one, under the same `name`, and takes part in every transfer. After a missed deadline gloo
    and NCCL close their connections: the group has to be made anew. `store` carries the shared rows (default: the one that
    `init_process_group` made), so that they get through when the connections are gone.
    """

    def __init__(self, name: str, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu",
                 store: dist.Store | None = None, grace_s: float = GRACE_S):
        self.group = group if group is not None else dist.group.WORLD
        self.rank, self.ranks = dist.get_rank(), tuple(dist.get_process_group_ranks(self.group))
        self.device, self.grace_s = torch.device(device), grace_s
        store = dist.PrefixStore(f"verl/{name}", store or dist.distributed_c10d._get_default_store())
        self._store = dist.PrefixStore(str(store.add(f"made/{self.rank}", 1)), store)  # nothing of an earlier one is read
        self._turn = 0
        if self.device.type == "cuda":  # NCCL makes its communicator in the first call, in which every rank must take part
            dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)

    def post(self, tag: int, sends: Sequence[Message], receives: Sequence[Message]) -> list[Wait]:
        ops = [dist.P2POp(kind, tensor, peer, self.group, tag)
               for kind, messages in ((dist.isend, sends), (dist.irecv, receives)) for peer, tensor in messages]
        if not ops:
            return []
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise ConnectionError(_first_line(error)) from error
        if len(works) != len(ops):  # NCCL completes a batch as one
            works = works * len(ops)
        return [partial(_wait, work) for work in works]

    def share(self, row: Row, timeout_s: float) -> dict[int, Row | None]:
        self._turn += 1
        table_key = f"table/{self._turn}"
        try:
            self._store.set(f"row/{self._turn}/{self.rank}", json.dumps(row))
            if self.rank == self.ranks[0]:
                table = self._gather(timeout_s)
                self._store.set(table_key, json.dumps(list(table.items())))
                self._store.delete_key(f"table/{self._turn - 1}")  # read by all who have come this far
                return table
            self._store.wait([table_key], timedelta(seconds=max(timeout_s, 0) + self.grace_s))
            return {rank: other for rank, other in json.loads(self._store.get(table_key))}
        except RuntimeError as error:
            raise ConnectionError(f"rank {self.ranks[0]}, which gathers what every rank reports, did not answer within "
                                  f"{timeout_s + self.grace_s:.1f} s ({_first_line(error)})") from error

    def _gather(self, timeout_s: float) -> dict[int, Row | None]:
        table: dict[int, Row | None] = dict.fromkeys(self.ranks)
        keys = {rank: f"row/{self._turn}/{rank}" for rank in self.ranks}
        until = time.monotonic() + timeout_s
        while True:
            for rank in [r for r, key in keys.items() if self._store.check([key])]:
                key = keys.pop(rank)
                table[rank] = row = json.loads(self._store.get(key))
                self._store.delete_key(key)
                if row.get("why"):
                    until = min(until, time.monotonic() + self.grace_s)
            left = until - time.monotonic()
            if not keys or left <= 0:
                return table
            with contextlib.suppress(RuntimeError):  # nothing yet: look at the others
                self._store.wait([next(iter(keys.values()))], timedelta(seconds=min(left, 0.2)))


def _wait(work: dist.Work, timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    try:
        work.wait(timedelta(seconds=max(timeout_s, 0.001)))
    except RuntimeError as error:
        raise (TimeoutError if time.monotonic() >= until else ConnectionError)(_first_line(error)) from error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


class Wires:
    """Transports between threads of this process, one a rank."""

    device = torch.device("cpu")

    def __init__(self, ranks: Sequence[int]):
        self.ranks = tuple(ranks)
        self.queues: dict[tuple[int, int, int], queue.SimpleQueue] = defaultdict(queue.SimpleQueue)
        self.rows: dict[int, dict[int, Row]] = defaultdict(dict)
        self.changed = threading.Condition()

    def transport(self, rank: int) -> ThreadTransport:
        return ThreadTransport(self, rank)

    def deliver(self, source: int, destination: int, tag: int, message: torch.Tensor) -> None:
        """Put a message where its receiver looks."""
        with self.changed:
            line = self.queues[source, destination, tag]
        line.put(message)


class ThreadTransport:
    """One rank's end of Wires."""

    grace_s = GRACE_S

    def __init__(self, wires: Wires, rank: int):
        self.wires, self.rank, self.ranks, self.device = wires, rank, wires.ranks, wires.device
        self._turn = 0

    def post(self, tag: int, sends: Sequence[Message], receives: Sequence[Message]) -> list[Wait]:
        for peer, message in sends:
            self.wires.deliver(self.rank, peer, tag, message.clone())
        return [lambda _: None] * len(sends) + [partial(self._take, peer, tag, room) for peer, room in receives]

    def _take(self, peer: int, tag: int, room: torch.Tensor, timeout_s: float) -> None:
        with self.wires.changed:
            line = self.wires.queues[peer, self.rank, tag]
        try:
            room.copy_(line.get(timeout=max(timeout_s, 0)))
        except queue.Empty:
            raise TimeoutError(f"nothing from rank {peer}") from None

    def share(self, row: Row, timeout_s: float) -> dict[int, Row | None]:
        self._turn += 1
        with self.wires.changed:
            rows = self.wires.rows[self._turn]
            rows[self.rank] = row
            self.wires.changed.notify_all()
            self.wires.changed.wait_for(lambda: len(rows) == len(self.ranks), max(timeout_s, 0))
            return {rank: rows.get(rank) for rank in self.ranks}
