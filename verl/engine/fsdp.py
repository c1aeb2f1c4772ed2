"""Training over many ranks: torch's FSDP2 (`fully_shard`) under TrainEngine's methods.

Every rank of a process group makes the same engine and is called with the same whole batch. The ranks cut it among
themselves by tokens; coefficients were computed over all of it, so gradients are added up over the ranks, never averaged.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from verl.core.batch import Batch
from verl.core.errors import ConfigError
from verl.core.weights import Receipt, Weights
from verl.engine.optimizer import WIDE, OptimConfig, find
from verl.engine.requests import check_newer
from verl.engine.train import TrainEngine, check_fit, plan_token_budget
from verl.flow.layout import Layout, fsdp, merge, table_of, whole
from verl.models.compile import decoder_layers
from verl.models.lm import LM, Outputs
from verl.models.packed import Packed

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


class _Root(nn.Module):
    """The root forward as a module's: what it reads outside the layers (embeddings, last norm, output layer) is whole inside."""

    def __init__(self, lm: LM):
        super().__init__()
        self.module, self.lm = lm.module, lm

    def forward(self, packed: Packed, *asked) -> tuple[torch.Tensor | None, ...]:
        out = self.lm.forward(packed, *asked)
        columns = (out.logprobs_T, out.entropy_T, out.values_T, out.scores_S)
        return tuple(None if c is None else c.clone() for c in columns)  # torch's hooks sit on them: no views


class FsdpEngine(TrainEngine):
    """TrainEngine over the ranks of a process group (left out: the default one; gloo or NCCL). Results are the same on every rank.

    strategy: FULL_SHARD keeps layers whole only while they are used; SHARD_GRAD_OP from forward to backward; NO_SHARD always,
    and adds gradients up once an update; HYBRID_SHARD and _HYBRID_SHARD_ZERO2 do the first two among `shard_ranks`
    neighbouring ranks (left out: those of a host) and hold a replica on every such set.

    Sharded, a rank's float32 shards are the masters and bfloat16 layers are made from them when needed; value and score head
    are on every rank. Raises ConfigError for an unknown strategy, sizes that do not divide, or a model that runs unpacked.
    """

    def __init__(self, lm: LM, temperature: float = 1.0, optim: OptimConfig | None = None, total_updates: int = 1,
                 token_budget: int | None = None, train_values: bool = False, memory: Sequence[str] = (),
                 strategy: str = "FULL_SHARD", group: dist.ProcessGroup | None = None,
                 shard_ranks: int | None = None):
        if lm.device.type == "cuda":
            torch.cuda.set_device(lm.device)
        self.group = group if group is not None else dist.group.WORLD
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.strategy, self.dtype = strategy, lm.dtype
        budgets = self._everyone(token_budget or plan_token_budget(lm, training=optim is not None))
        self.shards: dict[str, DTensor] = {}  # by name; empty when every rank holds everything
        if strategy not in STRATEGIES:
            raise ConfigError(f"sharding_strategy: {strategy!r} is not known; allowed: {', '.join(STRATEGIES)}")
        if strategy != "NO_SHARD":
            if not lm.native:
                raise ConfigError(f"sharding_strategy: {strategy} needs a model that runs packed, and {lm.config.model_type} does "
                                  f"not ({lm.why_not}); set model.actor.fsdp_config.sharding_strategy to NO_SHARD")
            self._shard(lm, self._mesh(lm.device.type, shard_ranks), masters=optim is not None)
        # a rank's part of each tensor, as the optimizer sees it: the same storage, a gradient of its own
        self._parts = {n: nn.Parameter(p.to_local().detach(), requires_grad=p.requires_grad) for n, p in self.shards.items()}
        super().__init__(lm, temperature, optim, total_updates, min(budgets), train_values, memory)
        if self.shards:  # torch looks at what requires a gradient when it first runs: now, with all adapters on
            self.logprobs(Batch([np.zeros(2, np.int32)], np.zeros(1, np.int64), np.ones(1, np.int64), np.zeros(1, np.int32),
                                np.ones(1, bool), np.zeros(1, np.int64), np.zeros(1, np.int64)))

    def _shard(self, lm: LM, mesh: DeviceMesh, masters: bool) -> None:
        """Cut every decoder layer, then what is left, as groups that are gathered and reduced together."""
        low = None if lm.dtype in WIDE else lm.dtype
        settings = dict(mesh=mesh, mp_policy=MixedPrecisionPolicy(low, None if low is None else torch.float32,
                                                                  cast_forward_inputs=False))
        self.root = _Root(lm)
        for module in (*decoder_layers(lm), self.root):
            for parameter in module.parameters():
                if masters and parameter.requires_grad and not isinstance(parameter, DTensor):
                    parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
            fully_shard(module, reshard_after_forward=None if module is self.root else "ZERO2" not in self.strategy
                        and self.strategy != "SHARD_GRAD_OP", **settings)
        self._groups = [m for m in self.root.modules() if isinstance(m, FSDPModule)]
        for group in self._groups:  # exact sums, on every backend
            group.set_gradient_divide_factor(1.0)
            group.set_force_sum_reduction_for_comms(True)
        self.shards = dict(lm.module.named_parameters())

    def _everyone(self, value) -> list:
        """Each rank's value, on every rank."""
        values = [None] * self.ranks
        dist.all_gather_object(values, value, group=self.group)
        return values

    def _mesh(self, device: str, shard_ranks: int | None) -> DeviceMesh:
        """All ranks in a row, or replicas x the ranks that share one."""
        if "HYBRID" not in self.strategy:
            return DeviceMesh.from_group(self.group, device)
        hosts = self._everyone(socket.gethostname())
        size = shard_ranks or hosts.count(hosts[0])
        uneven = shard_ranks is None and any(len(set(hosts[i:i + size])) > 1 for i in range(0, self.ranks, size))
        if self.ranks % size or uneven:
            raise ConfigError(f"sharding_strategy: {self.strategy} shards over {size} ranks, but {self.ranks} ranks on "
                              f"{len(set(hosts))} hosts do not fall into such sets; use FULL_SHARD")
        ranks = torch.tensor(dist.get_process_group_ranks(self.group))
        return DeviceMesh(device, ranks.view(-1, size), mesh_dim_names=("replicas", "shards"))

    # -- one batch over the ranks ------------------------------------------------------------------------------------

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return [(n, self._parts.get(n, p)) for n, p in self.lm.parameters()]

    def _micro_batches(self, batch: Batch, unit: str = "row") -> list[Batch]:
        """This rank's micro-batches: as many on every rank, and as even as whole units allow.

        Layers are gathered and reduced by all ranks together, so one with less to do computes the smallest unit again, at
        weight 0.
        """
        pieces = even_pieces(batch, self.ranks, self.token_budget, unit)
        own = [batch.select(piece) for piece in pieces[self.rank::self.ranks]]
        if len(own) * self.ranks < len(pieces) and self.shards:
            own_U = [(int(batch.lengths_S[rows].sum()), rows) for rows in batch.pieces(1, unit)]
            idle = batch.select(min((n == 0, n, rows) for n, rows in own_U)[2])
            none = {n: 0 * getattr(idle, n) for n in ("weights_T", "weights_S") if getattr(idle, n) is not None}
            own.append(replace(idle, row_S=np.full(len(idle), -1), **none))
        return own

    def _forward(self, packed: Packed, logprobs: bool, values: bool, scores: bool) -> Outputs:
        if not self.shards:
            return super()._forward(packed, logprobs, values, scores)
        return Outputs(*self.root(packed, self.temperature, logprobs, values, scores))

    def _gathered(self, column_T: np.ndarray) -> np.ndarray:
        self._reshard()
        column = torch.from_numpy(column_T).to(self.lm.device)
        if len(column_T):
            dist.all_reduce(column, group=self.group)
        return column.cpu().numpy()

    def _shared(self, metrics: dict[str, tuple[float, float]], loss: float) -> tuple[dict[str, tuple[float, float]], float]:
        self._reshard()
        for name, shard in self.shards.items():
            if shard.grad is not None:
                part, grad = self._parts[name], shard.grad.to_local()
                part.grad = grad if part.grad is None else part.grad.add_(grad)
                shard.grad = None
        return add_up(self._everyone((metrics, loss)))

    def _reshard(self) -> None:
        """No whole layer outlives the call: after an update it would be an old one."""
        if self.shards:
            for group in self._groups:
                group.reshard()

    def _grad_norm(self) -> float:
        """Adds up the gradients that every rank holds whole, then the squares of all; the same number on every rank."""
        optimizer, device = self.optimizer, self.lm.device
        copied = [(h, w) for n, h, w in zip(optimizer.names, optimizer.sums, optimizer.working) if n not in self.shards]
        seen, waits = torch.tensor([float(h.grad is not None) for h, _ in copied], device=device), []
        if copied:
            dist.all_reduce(seen, group=self.group)
        for (holder, working), ranks in zip(copied, seen.tolist()):
            if ranks:
                if holder.grad is None:  # others had tokens for it
                    holder.grad = torch.zeros_like(working, dtype=torch.promote_types(working.dtype, torch.float32))
                waits.append(dist.all_reduce(holder.grad, group=self.group, async_op=True))
        for wait in waits:
            wait.wait()
        squares = torch.zeros((), dtype=torch.float64, device=device)
        for name, holder in zip(optimizer.names, optimizer.sums):
            if holder.grad is not None:
                copies = self.ranks // self._sharing if name in self.shards else self.ranks
                squares += torch.linalg.vector_norm(holder.grad).double().square() / copies
        dist.all_reduce(squares, group=self.group)
        return float(squares.sqrt())

    @property
    def _sharing(self) -> int:
        """Ranks that hold one replica together."""
        return next(iter(self.shards.values())).device_mesh.size(-1) if self.shards else 1

    # -- weights -----------------------------------------------------------------------------------------------------

    def _whole(self, name: str, part: torch.Tensor | None = None) -> torch.Tensor:
        """A tensor of the shard's shape from every rank's part (left out: the working weight itself)."""
        shard = self.shards[name]
        part = shard.to_local().detach().to(self.dtype) if part is None else part.to(shard.device)
        return DTensor.from_local(part, shard.device_mesh, shard.placements, run_check=False, shape=shard.shape,
                                  stride=shard.stride()).full_tensor()

    def _part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a whole tensor."""
        rows = -(-len(tensor) // self._sharing)
        first = self.rank % self._sharing * rows
        return tensor[first:first + rows]

    def weights(self) -> Weights:
        """The working weights, put together one by one: all ranks iterate, or none."""
        if not self.shards:
            return super().weights()
        return Weights(self.version, lambda: ((n, self._whole(n)) for n in self.shards))

    @torch.no_grad()
    def load_weights(self, weights: Weights) -> Receipt:
        """See TrainEngine; every rank is given whole tensors and keeps its part."""
        if not self.shards:
            return super().load_weights(weights)
        check_newer(weights, self.version)
        check_fit(weights, self.shards)
        for name, tensor in weights:
            self._parts[name].copy_(self._part(name, tensor))
        self.version = weights.version
        return self.weights().receipt()

    def exported(self) -> dict[str, torch.Tensor]:
        """See TrainEngine; sharded, in main memory of rank 0, and nothing elsewhere. All ranks call it."""
        if not self.shards:
            return super().exported()
        return self._on_first((n, self._whole(n)) for n, p in self.shards.items() if p.requires_grad)

    def _on_first(self, tensors) -> dict[str, torch.Tensor]:
        return {n: t.cpu() for n, t in tensors if self.rank == 0}

    def layout(self, ranks: Sequence[int] | None = None) -> Layout:
        """Where the trained tensors of `arrays` lie, when the ranks of this engine have these numbers."""
        ranks = list(range(self.ranks) if ranks is None else ranks)
        if not self.shards:
            return whole(table_of(self.arrays().items()), ranks)
        table = {n: replace(spec, dtype=self.dtype)
                 for n, spec in table_of((n, p) for n, p in self.shards.items() if p.requires_grad).items()}
        return merge(*(fsdp(table, ranks[i:i + self._sharing]) for i in range(0, self.ranks, self._sharing)))

    def arrays(self) -> Mapping[str, torch.Tensor]:
        """This rank's part of every trained tensor, as it is used: a copy where the master is wider."""
        if not self.shards:
            return {n: p.detach() for n, p in self.lm.module.named_parameters() if p.requires_grad}
        return {n: self._parts[n].detach().to(self.dtype) for n, p in self.shards.items() if p.requires_grad}

    # -- checkpoint --------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, torch.Tensor], dict]:
        """TrainEngine's names and whole tensors, whatever the number of ranks; sharded, in main memory of rank 0 and nothing
        elsewhere. All ranks call it."""
        tensors, numbers = super().state()
        return (self._on_first(self._gathering(tensors)) if self.shards else tensors), numbers

    def _gathering(self, tensors: dict[str, torch.Tensor]):
        for key, tensor in tensors.items():
            kind, name = key.split(".", 1)
            if name not in self.shards or kind == "step":
                yield key, tensor
            elif kind != "working":
                yield key, self._whole(name, tensor)
            else:
                yield key, self._whole(name)
                if self.dtype not in WIDE:
                    yield f"master.{name}", self._whole(name, self._parts[name].detach())

    @torch.no_grad()
    def load_state(self, tensors: dict[str, torch.Tensor], numbers: dict) -> None:
        """See TrainEngine; every rank is given the whole state, made by any number of ranks."""
        if not self.shards:
            super().load_state(tensors, numbers)
            return
        own = dict(tensors)
        for name, shard in self.shards.items():
            if shard.requires_grad:
                source = f"master.{name}" if f"master.{name}" in tensors else f"working.{name}"
                own[f"working.{name}"] = self._part(name, find(tensors, source, shard.shape))
                for key in (f"exp_avg.{name}", f"exp_avg_sq.{name}"):
                    if key in tensors:
                        own[key] = self._part(name, find(tensors, key, shard.shape))
        super().load_state(own, numbers)


def even_pieces(batch: Batch, ranks: int, budget: int, unit: str) -> list[list[int]]:
    """Rows of micro-batches within the budget, in the smallest possible multiple of `ranks` and then as even as whole units
    allow: piece i is computed by rank i % ranks. Fewer when there are fewer units. A pure function: all ranks agree."""
    low, high = 1, max(1, min(budget, batch.tokens))
    most = -(-len(batch.pieces(high, unit)) // ranks) * ranks
    while low < high:
        middle = (low + high) // 2
        if len(batch.pieces(middle, unit)) <= most:
            high = middle
        else:
            low = middle + 1
    return batch.pieces(low, unit)


def add_up(everyone: list[tuple[dict[str, tuple[float, float]], float]]) -> tuple[dict[str, tuple[float, float]], float]:
    """Sums (or extremes) and counts of metrics, and the loss, over what each rank computed."""
    found: dict[str, tuple[float, float]] = {}
    for own, _ in everyone:
        for name, (total, count) in own.items():
            before, counted = found.get(name, (None, 0.0))
            join = max if name.endswith("/max") else min if name.endswith("/min") else sum
            found[name] = (total if before is None else join((before, total)), counted + count)
    return found, float(np.sum([own for _, own in everyone]))
