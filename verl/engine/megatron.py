"""Training with Megatron-Core: tensor, pipeline, sequence and data parallel, under TrainEngine's methods.

Every rank of the default torch.distributed world makes the same engine and is called with the same whole batch. Tensor and
pipeline ranks compute each micro-batch together, data-parallel ranks cut the batch by tokens; gradients are added up.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from verl.algorithms.base import LossInputs, LossOutputs
from verl.core.batch import Batch
from verl.core.errors import ConfigError, ModelError, nearest
from verl.core.weights import Receipt, Weights
from verl.engine.fsdp import add_up, even_pieces
from verl.engine.megatron_layout import EMBEDDING, HEAD, Shards, directory, held, megatron_layout
from verl.engine.memory import recomputed
from verl.engine.optimizer import WIDE, OptimConfig, find
from verl.engine.requests import check_newer
from verl.engine.train import _EXTREMES, TrainEngine, _Totals, check_fit, plan_token_budget
from verl.flow.layout import Layout, table_of
from verl.models import export, load_tokenizer
from verl.models.head import HeadSpec
from verl.models.lm import LM
from verl.models.load import resolve_dtype, stop_ids, token_rows
from verl.models.packed import Packed

Micro = tuple[Batch, Packed]


class SpreadLM(LM):
    """A model whose tensors are spread over ranks. Its module says what they are called and how large they are, nothing more."""

    device: torch.device = torch.device("cpu")

    @classmethod
    def of(cls, lm: LM, device: torch.device) -> SpreadLM:
        """The same model; the module's own tensors are dropped."""
        spread = cls(**{f.name: getattr(lm, f.name) for f in fields(LM)})
        spread.module.to("meta").tie_weights()
        spread.device = device
        return spread


def outline(path: str | Path, dtype: str | torch.dtype = "auto", device: torch.device | str = "cpu", tokenizer=None) -> SpreadLM:
    """A model directory without its tensors: each rank of a MegatronEngine reads only its own part of them. Raises ModelError."""
    tokenizer, device = tokenizer or load_tokenizer(path), torch.device(device)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=resolve_dtype(dtype, device))
    if (Path(path) / "generation_config.json").is_file():
        module.generation_config = GenerationConfig.from_pretrained(path)
    head = HeadSpec(token_rows(tokenizer, module.get_output_embeddings().weight.shape[0], str(path)))
    return SpreadLM.of(LM(module, tokenizer, str(path), head, stop_ids=stop_ids(module, tokenizer)), device)


class MegatronEngine(TrainEngine):
    """TrainEngine over Megatron-Core's grid of ranks. Results are the same on every rank; all ranks call every method together.

    lm: a loaded model, whose tensors each rank cuts up and drops, or an `outline` of a directory. sizes: {"tensor": t, "pipeline":
    p}, 1 where left out; the ranks that remain are data parallel, and sequence parallel goes with tensor parallel. group: the
    default world, which Megatron-Core builds on. Llama, Mistral, Qwen2 and Qwen3; others are refused by name (ModelError).

    Raises ConfigError where megatron-core is not installed, for sizes that do not fit, adapters, and critics.
    """

    def __init__(self, lm: LM, temperature: float = 1.0, optim: OptimConfig | None = None, total_updates: int = 1,
                 token_budget: int | None = None, train_values: bool = False, memory: Sequence[str] = (),
                 sizes: Mapping[str, int] | None = None, group: dist.ProcessGroup | None = None):
        tensor, pipeline = _sizes(sizes or {})
        if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
            raise ConfigError("model.actor.megatron asks for Megatron-Core and the package megatron-core is not installed; "
                              "pip install 'verl[megatron]', or leave model.actor.megatron out to train with FSDP")
        if train_values or hasattr(lm.module, "verl_lora"):
            raise ConfigError(f"{'a critic' if train_values else 'an adapter'} is not trained with Megatron-Core here; leave "
                              "model.actor.megatron out to train with FSDP")
        from verl.engine import megatron_model as mcore
        device = lm.device
        mcore.check(lm, tensor, pipeline)
        place = mcore.join_grid(tensor, pipeline, device)
        self.group = group if group is not None else dist.group.WORLD
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.place, self.pipeline = place, pipeline
        self.stage = mcore.Stage(lm, tensor, pipeline, place, device)
        self._speaks = self.stage.last and place.tensor == 0  # one rank of those that compute the same result
        budget = token_budget or plan_token_budget(lm, training=optim is not None)
        everyone = self._everyone((place, budget))
        config, self.table = lm.config, table_of(lm.module.named_parameters())
        self._layout = partial(megatron_layout, self.table, config.num_attention_heads, config.num_key_value_heads,
                               config.num_hidden_layers, [p for p, _ in everyone])
        self.shards = Shards(self.layout(), self.rank, self.group, device)
        self._fill(lm)
        super().__init__(SpreadLM.of(lm, device), temperature, optim, total_updates, min(b for _, b in everyone), False, memory)
        self.recomputed = list(self.stage.model.decoder.layers) if "checkpoint" in memory else []

    @torch.no_grad()
    def _fill(self, lm: LM) -> None:
        """Take this rank's part of the model's tensors. Raises ModelError when the two do not have the same."""
        arrays = {p.array for p in self.shards.pieces}
        if unlike := sorted(arrays ^ set(self.stage.parameters)):
            raise ModelError(f"{lm.path!r}: {unlike[0]} is in {'the model' if unlike[0] in arrays else 'Megatron-Core'} and not in "
                             "its counterpart; models of this family with other biases or norms than usual are not supported")
        if lm.module.get_input_embeddings().weight.is_meta:
            with directory(lm.path) as source:
                self.shards.fill(self.arrays(), source)
        else:
            self.shards.fill(self.arrays(), held((n, p.detach()) for n, p in lm.module.named_parameters()))

    def _everyone(self, value) -> list:
        """Each rank's value, on every rank."""
        values = [None] * self.ranks
        dist.all_gather_object(values, value, group=self.group)
        return values

    # -- one batch over the ranks ------------------------------------------------------------------------------------

    def _named(self) -> list[tuple[str, torch.nn.Parameter]]:
        return list(self.stage.parameters.items())

    def _micro_batches(self, batch: Batch, unit: str = "row") -> list[Batch]:
        """What this rank's replica computes. Replicas meet at the end only, so that each may have its own number."""
        replicas = self.ranks // (self.stage.tensor * self.pipeline)
        pieces = even_pieces(batch, replicas, self.token_budget, unit)
        return [batch.select(piece) for piece in pieces[self.place.data::replicas]]

    def _run(self, micros: list[Batch], finish: Callable[[Batch, Packed, torch.Tensor], torch.Tensor], training: bool) -> None:
        """All micro-batches through Megatron's schedule; `finish` turns the last stage's output into a loss.

        Stages send tensors of one size: in a pipeline each micro-batch is padded to the longest, which even pieces keep small.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func
        packed = [Packed(micro, self.lm.device) for micro in micros]
        lengths = [-(-len(p) // self.stage.tensor) * self.stage.tensor for p in packed]
        if self.pipeline > 1:
            lengths = [max(lengths, default=0)] * len(lengths)

        def step(iterator: Iterator[tuple[Batch, Packed, int]], model):
            micro, layout, length = next(iterator)
            with recomputed(self.recomputed):
                hidden = self.stage.forward(layout, length)
            return hidden, partial(self._end, finish, micro, layout)

        if micros:
            get_forward_backward_func()(
                forward_step_func=step, data_iterator=iter(zip(micros, packed, lengths)), model=self.stage.model,
                num_microbatches=len(micros), seq_length=lengths[0], micro_batch_size=1, forward_only=not training,
                collect_non_loss_data=not training)

    @staticmethod
    def _end(finish, micro: Batch, packed: Packed, hidden: torch.Tensor, non_loss_data: bool = False):
        total = finish(micro, packed, hidden)
        if non_loss_data:
            return total
        if not total.requires_grad:  # a loss without a gradient: earlier stages wait for one
            total = total + hidden.reshape(-1)[:0].sum()
        return total, torch.ones((), dtype=torch.int, device=hidden.device), None

    def _score(self, batch: Batch, values: bool) -> np.ndarray:
        if values:
            raise ConfigError("a critic's values are not computed with Megatron-Core; train the critic with FSDP")
        out, offsets = np.zeros(len(batch.ids_T), np.float32), batch.offsets
        places, columns = [], []

        def finish(micro: Batch, packed: Packed, hidden: torch.Tensor) -> torch.Tensor:
            columns.append(self.stage.outputs(hidden, packed, self.temperature).logprobs_T)
            places.extend(np.arange(offsets[r], offsets[r + 1]) for r in micro.row_S)
            return columns[-1]

        with self._memory_advice():
            self._run(self._micro_batches(replace(batch, row_S=np.arange(len(batch), dtype=np.int64))), finish, training=False)
        if columns and self._speaks:
            out[np.concatenate(places)] = torch.cat(columns).float().cpu().numpy()
        column = torch.from_numpy(out).to(self.lm.device)
        dist.all_reduce(column, group=self.group)
        return column.cpu().numpy()

    def forward_backward(self, batch: Batch, loss: Callable[[LossInputs], LossOutputs], unit: str = "row",
                         context: Mapping[str, float] | None = None, logprobs: bool = True,
                         entropy_grad: bool = False, scores: bool = False) -> dict[str, float]:
        """See TrainEngine."""
        if scores or not logprobs:
            raise ConfigError("only losses over log-probs are trained with Megatron-Core; train the others with FSDP")
        totals, losses = _Totals(), []

        def finish(micro: Batch, packed: Packed, hidden: torch.Tensor) -> torch.Tensor:
            outputs = self.stage.outputs(hidden, packed, self.temperature)
            total = self._total(micro, outputs, loss, totals, context or {}, entropy_grad)
            losses.append(total.detach())
            return total

        with self._memory_advice():
            self._run(self._micro_batches(batch, unit), finish, training=True)
        own = (totals.read(), float(torch.stack(losses).double().sum())) if losses and self._speaks else ({}, 0.0)
        found, total = add_up(self._everyone(own))
        return {n: s if n.endswith(_EXTREMES) else s / c for n, (s, c) in found.items() if c > 0} | {"loss": total}

    @torch.no_grad()
    def _grad_norm(self) -> float:
        """Adds up gradients over the ranks that computed parts of them, then squares, each parameter of the model once."""
        from megatron.core import parallel_state
        optimizer, tensor = self.optimizer, self.stage.tensor
        replicas = self.ranks // (tensor * self.pipeline)
        squares = torch.zeros((), dtype=torch.float64, device=self.lm.device)
        for name, holder, working in zip(optimizer.names, optimizer.sums, optimizer.working):
            if holder.grad is None:  # this replica had no tokens
                holder.grad = torch.zeros_like(working, dtype=torch.promote_types(working.dtype, torch.float32))
            copies = replicas
            if name.endswith("norm.weight") and tensor > 1:  # each tensor rank saw its part of the tokens, or of the heads
                copies *= tensor
                dist.all_reduce(holder.grad, group=self.stage.group)
            if name == EMBEDDING and self.pipeline > 1 and HEAD not in self.table:  # tied: on the first stage and the last
                copies *= 2
                dist.all_reduce(holder.grad, group=parallel_state.get_embedding_group())
            if replicas > 1:
                dist.all_reduce(holder.grad, group=parallel_state.get_data_parallel_group())
            squares += torch.linalg.vector_norm(holder.grad).double().square() / copies
        dist.all_reduce(squares, group=self.group)
        return float(squares.sqrt())

    # -- weights -----------------------------------------------------------------------------------------------------

    def layout(self, ranks: Sequence[int] | None = None) -> Layout:
        """Where `arrays` hold the tensors of the model directory, when the ranks of this engine have these numbers."""
        return self._layout(list(range(self.ranks) if ranks is None else ranks))

    def arrays(self) -> dict[str, torch.Tensor]:
        """This rank's working weights by the layout's names."""
        return {n: p.detach() for n, p in self.stage.parameters.items()}

    def weights(self) -> Weights:
        """The working weights under the model directory's names, put together one by one: all ranks iterate, or none."""
        return Weights(self.version, lambda: self.shards.whole(self.arrays(), self.lm.dtype))

    @torch.no_grad()
    def load_weights(self, weights: Weights) -> Receipt:
        """See TrainEngine; every rank is given whole tensors and keeps its part."""
        check_newer(weights, self.version)
        check_fit(weights, dict(self.lm.module.named_parameters()))
        source = held(weights)
        self.shards.fill(self.arrays(), source)
        if self.optimizer is not None and self.lm.dtype not in WIDE:
            self.shards.fill(dict(zip(self.optimizer.names, self.optimizer.masters)), source)
        self.version = weights.version
        return self.weights().receipt()

    def _on_first(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {n: t.cpu() for n, t in tensors if self.rank == 0}

    def exported(self) -> dict[str, torch.Tensor]:
        """See TrainEngine; in main memory of rank 0, and nothing elsewhere."""
        return self._on_first(self.weights().tensors())

    def export(self, path: str | Path) -> None:
        """Write a model directory that transformers loads; rank 0 writes, all ranks call it."""
        tensors = self.exported()
        if self.rank == 0:
            config = self.lm.module.config
            with torch.device("meta"):
                module = type(self.lm.module)(config)
            module.load_state_dict(tensors, strict=False, assign=True)
            module.tie_weights()
            module.generation_config = self.lm.module.generation_config
            export(LM(module, self.lm.tokenizer, self.lm.path, self.lm.head, stop_ids=self.lm.stop_ids), path)
        dist.barrier(group=self.group)

    # -- checkpoint --------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, torch.Tensor], dict]:
        """TrainEngine's names and whole tensors, whatever the grid; in main memory of rank 0 and nothing elsewhere."""
        own, numbers = super().state()
        tensors = {}
        for kind, arrays in _by_kind(own).items():
            if kind == "step":
                count = next(iter(arrays.values()))
                tensors |= {f"step.{n}": count.clone() for n in self.table if self.rank == 0}
            else:
                dtype = self.lm.dtype if kind == "working" else next(iter(arrays.values())).dtype
                tensors |= self._on_first((f"{kind}.{n}", t) for n, t in self.shards.whole(arrays, dtype))
        return tensors, numbers

    @torch.no_grad()
    def load_state(self, tensors: dict[str, torch.Tensor], numbers: dict) -> None:
        """See TrainEngine; every rank is given the whole state, made by any grid, by FSDP or on one device."""
        own: dict[str, torch.Tensor] = {}
        for kind in _by_kind(tensors):
            if kind == "step":
                count = tensors[f"step.{next(iter(self.table))}"]
                own |= {f"step.{n}": count for n in self.stage.parameters}
                continue
            found = {n: find(tensors, f"{kind}.{n}", spec.shape) for n, spec in self.table.items()}
            wide = found[EMBEDDING].dtype
            arrays = {n: torch.zeros_like(p, dtype=wide) for n, p in self.stage.parameters.items()}
            self.shards.fill(arrays, held(found.items()))
            own |= {f"{kind}.{n}": t for n, t in arrays.items()}
        super().load_state(own, numbers)


def _by_kind(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """A state's tensors by what they are of a parameter: working, master, exp_avg, exp_avg_sq, step."""
    kinds: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        kind, name = key.split(".", 1)
        kinds.setdefault(kind, {})[name] = tensor
    return kinds


def _sizes(sizes: Mapping[str, int]) -> tuple[int, int]:
    """(tensor, pipeline). Raises ConfigError for another key or a size below 1."""
    for name, size in sizes.items():
        if name not in ("tensor", "pipeline"):
            raise ConfigError(f"model.actor.megatron: {name!r} is not known; {nearest(name, ('tensor', 'pipeline'))}")
        if size < 1:
            raise ConfigError(f"model.actor.megatron: {name} is {size}; it counts ranks and is 1 or more")
    return sizes.get("tensor", 1), sizes.get("pipeline", 1)
