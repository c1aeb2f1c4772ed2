"""RolloutWorker: what one process of a RolloutPool holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from verl.core.errors import WeightsError
from verl.core.types import Request, Sample, Sampling
from verl.core.weights import Receipt, Weights
from verl.engine.base import RolloutEngine
from verl.flow.layout import Layout, Table, TensorSpec, table_of
from verl.flow.link import SOURCES, Address, Member, gpu_id, own_device, reach_store
from verl.flow.transfer import Target

Emit = Callable[[tuple[str, int, Sample]], None]


class RolloutWorker:
    """An engine with weights of its own, made from the model directory in this process, and its part in their loads.

    make: device -> the engine. Weights arrive in the storage of the engine's `lm` where it has one, else in tensors of their
    own that are handed to `load_weights`.
    """

    def __init__(self, make: Callable[[torch.device], RolloutEngine], address: Address):
        self.device = own_device()
        self.engine = make(self.device)
        self.store = reach_store(address)
        self.lm = getattr(self.engine, "lm", None)
        self.target = Target({n: p.detach() for n, p in self.lm.module.named_parameters()} if self.lm is not None else {})
        self.owner: Any = self.lm.module if self.lm is not None else None
        self.member: Member | None = None
        self.loading: int | None = None
        self.cancelled = -1  # leases up to this one are

    def facts(self) -> dict[str, Any]:
        """What the pool has to know: limits, the tensors in whose storage weights arrive (None: any), the GPU."""
        return {"limit": self.engine.max_total_tokens, "gpu": gpu_id(self.device),
                "rows": self.lm.module.get_input_embeddings().weight.shape[0] if self.lm is not None else None,
                "table": table_of(self.target.arrays.items()) if self.lm is not None else None}

    # -- weights -----------------------------------------------------------------------------------------------------

    def join(self, name: str, rank: int, source: Layout, destination: Layout, fast: bool, lora: Any, beside: str | None) -> None:
        """Take part in the loads of this group; see Member. `lora`: peft's settings when adapters travel. `beside`: the role in
        this process that is a part of the source too."""
        if self.lm is None:
            self._make_room(destination.table, lora)
        arrays = SOURCES[beside] if beside else (lambda: self.target.arrays) if rank in source.pieces else None
        self.member = Member(rank, self.store, arrays, self.target)
        self.member.join(name, source, destination, self.device if fast else torch.device("cpu"))

    def _make_room(self, table: Table, lora: Any) -> None:
        have: Mapping[str, TensorSpec] = table_of(self.target.arrays.items())
        if have != table:
            self.target.arrays = {n: torch.empty(s.shape, dtype=s.dtype, device=self.device) for n, s in table.items()}
        self.owner = SimpleNamespace(verl_lora=lora) if lora is not None else None

    def load(self, version: int, deadline_s: float) -> Receipt | None:
        """Receive a version and put it in force; or pass on the one that is. Returns the receipt of a receiver."""
        receives = self.member.rank in self.member.plan.destination.pieces
        self.loading = version if receives else self.loading
        report = self.member.load(version, deadline_s)
        if not receives:
            return None
        names = self.member.plan.destination.table
        self.engine.load_weights(Weights(version, lambda: ((n, self.target.arrays[n]) for n in names), self.owner))
        self.loading = None
        return report.receipts[self.member.rank]

    def held(self) -> int | None:
        """The version in force; None when none was loaded."""
        return self.target.version

    # -- work --------------------------------------------------------------------------------------------------------

    def generate(self, lease: int, requests: Sequence[Request], sampling: Sampling, emit: Emit) -> None:
        """Sample, putting out (key, index, sample) as each one finishes."""
        if self.loading is not None:
            raise WeightsError(f"nothing can be sampled: the load of version {self.loading} did not complete")
        self.engine.generate(requests, sampling, lambda *finished: emit(finished), lambda: lease <= self.cancelled)

    def cancel(self, lease: int) -> None:
        """End this lease and all before it; what they have not finished comes back aborted."""
        self.cancelled = max(self.cancelled, lease)

    def sleep(self) -> None:
        self.engine.sleep()

    def wake(self) -> None:
        self.engine.wake()
