"""The training engine of one device: log-probs, forward_backward, step, weights in and out.

Packing, micro-batches and precision live here; losses return unreduced values and the coefficients that reduce them were
computed once over the whole optimizer batch, so no cut of that batch changes the gradient.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from verl.algorithms.base import LossInputs, LossOutputs
from verl.core.batch import Batch
from verl.core.errors import TrainingError, WeightsError
from verl.core.weights import Receipt, Weights
from verl.engine.base import BaseEngine
from verl.engine.memory import HostAdamW, blocks, check_words, recomputed
from verl.engine.optimizer import MasterAdamW, OptimConfig, find, learning_rate
from verl.engine.requests import check_newer
from verl.models.lm import LM, Outputs
from verl.models.packed import Packed, to_device

_FLOAT_COLUMNS = ("rollout_logprobs_T", "old_logprobs_T", "ref_logprobs_T", "advantages_T", "returns_T", "margin_S", "ref_sums_S")
_EXTREMES = ("/max", "/min")
MAX_SKIPPED = 10  # updates in a row that are not finite end the run
_CPU_FULL = ("not enough memory", "can't allocate memory")  # the CPU allocator's words


@dataclass(slots=True)
class StepInfo:
    """What one optimizer update did. `skipped` is "" or the reason: "no signal" or "non-finite"."""

    lr: float
    grad_norm: float
    skipped: str = ""


@dataclass(slots=True)
class _Totals:
    """Sums, counts and extremes of metrics over micro-batches, kept on the device until the end."""

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    counts: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, metrics: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        for name, (values, selection) in metrics.items():
            count = selection.sum()
            if name.endswith(_EXTREMES):
                worst = float("-inf") if name.endswith("/max") else float("inf")
                best = torch.where(selection, values.float(), worst)
                best = torch.cat([best.flatten(), best.new_full((1,), worst)])  # nothing was selected: counted as 0 below
                best = best.max() if name.endswith("/max") else best.min()
                old = self.sums.get(name, best)
                self.sums[name] = torch.maximum(old, best) if name.endswith("/max") else torch.minimum(old, best)
            else:
                total = torch.where(selection, values.double(), 0.0).sum()
                self.sums[name] = self.sums[name] + total if name in self.sums else total
            self.counts[name] = self.counts[name] + count if name in self.counts else count

    def read(self) -> dict[str, tuple[float, float]]:
        """Each metric's sum (or extreme) and count, in one transfer."""
        if not self.sums:
            return {}
        numbers = torch.stack([torch.stack([self.sums[n].double(), self.counts[n].double()]) for n in self.sums]).tolist()
        return {n: (total, count) for n, (total, count) in zip(self.sums, numbers)}


class TrainEngine(BaseEngine):
    """Owns an LM's working weights and, when `optim` is given, their optimizer. Without one it only scores.

    temperature: the sampling temperature the log-probs belong to, on every side of the loss.
    total_updates: length of the learning-rate schedule. token_budget: computed tokens a micro-batch may have; None
    chooses it from the memory there is. memory: "checkpoint" keeps only the layers' inputs for backward, "offload" keeps
    masters and moments in main memory; neither changes a result.
    """

    def __init__(self, lm: LM, temperature: float = 1.0, optim: OptimConfig | None = None, total_updates: int = 1,
                 token_budget: int | None = None, train_values: bool = False, memory: Sequence[str] = ()):
        check_words(memory)
        self.lm, self.temperature, self.total_updates = lm, temperature, total_updates
        if lm.device.type == "cuda":
            grow_in_place()
        make = HostAdamW if "offload" in memory else MasterAdamW
        self.optimizer = make(self._named(), optim) if optim is not None else None
        self.recomputed = blocks(lm.module) if "checkpoint" in memory else []
        self.train_values = train_values and lm.value_head is not None
        self.token_budget = token_budget or plan_token_budget(lm, training=optim is not None)
        self.attempts = self.skipped_in_a_row = self.skipped_total = 0  # attempts: updates made or skipped

    # -- what changes when several ranks train (fsdp.py) -------------------------------------------------------------

    def _named(self) -> list[tuple[str, torch.nn.Parameter]]:
        """What the optimizer works on."""
        return self.lm.parameters()

    def _micro_batches(self, batch: Batch, unit: str = "row") -> list[Batch]:
        """What is computed here. Rows numbered -1 are computed and count nowhere."""
        return batch.micro_batches(self.token_budget, unit)

    def _forward(self, packed: Packed, logprobs: bool, values: bool, scores: bool) -> Outputs:
        return self.lm.forward(packed, self.temperature, logprobs, values, scores)

    def _gathered(self, column_T: np.ndarray) -> np.ndarray:
        """A column of the whole batch, zero where others computed it."""
        return column_T

    def _shared(self, metrics: dict[str, tuple[float, float]], loss: float) -> tuple[dict[str, tuple[float, float]], float]:
        """Sums and counts over everything that was computed."""
        return metrics, loss

    def _grad_norm(self) -> float:
        """Global norm of the whole batch's gradient."""
        return float(self.optimizer.grad_norm())

    # -- scoring -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> np.ndarray:
        """Log-prob (nats, float32 [T]) of every token of the batch under the current weights."""
        return self._score(batch, values=False)

    @torch.no_grad()
    def values(self, batch: Batch) -> np.ndarray:
        """Critic value before every token, float32 [T]."""
        return self._score(batch, values=True)

    def _score(self, batch: Batch, values: bool) -> np.ndarray:
        out = np.zeros(len(batch.ids_T), np.float32)
        numbered = replace(batch, row_S=np.arange(len(batch), dtype=np.int64))
        offsets = batch.offsets
        places, columns = [], []  # columns stay on the device until the last one is there
        with self._memory_advice():
            for micro in self._micro_batches(numbered):
                result = self._forward(Packed(micro, self.lm.device), not values, values, False)
                if _counts(micro):
                    columns.append(result.values_T if values else result.logprobs_T)
                    places += [np.arange(offsets[r], offsets[r + 1]) for r in micro.row_S]
        if columns:
            out[np.concatenate(places)] = torch.cat(columns).float().cpu().numpy()
        return self._gathered(out)

    @contextmanager
    def _memory_advice(self):
        """Turn the end of memory into an error that says what to set. Accumulated gradients are dropped."""
        try:
            yield
        except RuntimeError as error:  # torch.OutOfMemoryError on a GPU, a plain one from the CPU's allocator
            if not isinstance(error, torch.OutOfMemoryError) and not any(words in str(error) for words in _CPU_FULL):
                raise
            if self.optimizer is not None:
                self.optimizer.clear()
            raise TrainingError(f"out of memory with micro-batches of {self.token_budget} tokens; set "
                                f"trainer.micro_batch_tokens to {self.token_budget // 2} or less, trainer.memory to "
                                f"[checkpoint, offload], or use LoRA (model.actor.lora.rank: 16)") from error

    # -- training ----------------------------------------------------------------------------------------------------

    def forward_backward(self, batch: Batch, loss: Callable[[LossInputs], LossOutputs], unit: str = "row",
                         context: Mapping[str, float] | None = None, logprobs: bool = True,
                         entropy_grad: bool = False, scores: bool = False) -> dict[str, float]:
        """Accumulate the gradient of sum(values * coefficients) over the batch; returns reduced metrics and "loss".

        `batch.weights_T` / `weights_S` hold the coefficients (algorithms.reduce). Raises TrainingError with advice when
        memory runs out; gradients are then cleared.
        """
        totals = _Totals()
        losses = []
        with self._memory_advice():
            for micro in self._micro_batches(batch, unit):
                losses.append(self._micro(micro, loss, totals, context or {}, logprobs, entropy_grad, scores))
        found, total = self._shared(totals.read(), float(torch.stack(losses).double().sum()) if losses else 0.0)
        result = {n: s if n.endswith(_EXTREMES) else s / c for n, (s, c) in found.items() if c > 0}
        return result | {"loss": total}

    def _micro(self, micro: Batch, loss, totals: _Totals, context: Mapping[str, float], logprobs: bool,
               entropy_grad: bool, scores: bool) -> torch.Tensor:
        packed = Packed(micro, self.lm.device, keep_last=scores)
        with recomputed(self.recomputed):
            outputs = self._forward(packed, logprobs, self.train_values, scores)
        total = self._total(micro, outputs, loss, totals, context, entropy_grad)
        if total.requires_grad:
            total.backward()
        return total.detach()

    def _total(self, micro: Batch, outputs: Outputs, loss, totals: _Totals, context: Mapping[str, float],
               entropy_grad: bool) -> torch.Tensor:
        """A micro-batch's part of the loss; its metrics go into `totals`."""
        if outputs.entropy_T is not None and not entropy_grad:
            outputs.entropy_T = outputs.entropy_T.detach()
        device = self.lm.device
        out = loss(loss_inputs(micro, outputs, device, context))
        coefficients = micro.weights_T if out.per_token else micro.weights_S
        weights = to_device(coefficients, device, out.values.dtype)
        if _counts(micro):
            totals.add(out.metrics)
        return torch.where(weights != 0, out.values * weights, 0.0).sum()

    def step(self) -> StepInfo:
        """Apply the accumulated gradient, unless it is exactly zero (no group had signal) or not finite."""
        optimizer = self.optimizer
        rate = learning_rate(optimizer.config, self.attempts, self.total_updates)
        self.attempts += 1
        norm = self._grad_norm()
        if norm == 0.0:
            optimizer.clear()
            return StepInfo(rate, norm, "no signal")
        if not np.isfinite(norm):
            optimizer.clear()
            self.skipped_in_a_row += 1
            self.skipped_total += 1
            if self.skipped_in_a_row >= MAX_SKIPPED:
                raise TrainingError(f"{self.skipped_in_a_row} updates in a row had gradients that are not finite; weights are as "
                                    "they were before the first of them. Lower trainer.optim.lr, or look at the last samples")
            return StepInfo(rate, norm, "non-finite")
        self.skipped_in_a_row = 0
        optimizer.step(rate, norm)
        self.version += 1
        return StepInfo(rate, norm)

    # -- weights -----------------------------------------------------------------------------------------------------

    def weights(self) -> Weights:
        """The working weights as they are now; a sampler on the same module has nothing to copy."""
        return Weights(self.version, lambda: ((n, p.detach()) for n, p in self.lm.module.named_parameters()), owner=self.lm.module)

    @torch.no_grad()
    def load_weights(self, weights: Weights) -> Receipt:
        """Copy tensors by name into the working weights and their masters; moments stay. Raises WeightsError naming what
        does not fit, before anything was changed."""
        check_newer(weights, self.version)
        own = dict(self.lm.module.named_parameters())
        check_fit(weights, own)
        masters = {} if self.optimizer is None else dict(zip(self.optimizer.names, self.optimizer.masters))
        for name, tensor in weights:
            own[name].copy_(tensor)
            if name in masters and masters[name] is not own[name]:
                masters[name].copy_(tensor)
        self.version = weights.version
        return self.weights().receipt()

    def exported(self) -> dict[str, torch.Tensor]:
        """Trained tensors by module name: working weights, which are the policy that was sampled and scored."""
        return {n: p.detach() for n, p in self.lm.module.named_parameters() if p.requires_grad}

    # -- checkpoint --------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, torch.Tensor], dict]:
        """(tensors, plain numbers) from which `load_state` continues bit for bit."""
        tensors = {f"working.{n}": p.detach() for n, p in self._named() if p.requires_grad}
        numbers = {"version": self.version, "attempts": self.attempts, "skipped_total": self.skipped_total,
                   "skipped_in_a_row": self.skipped_in_a_row}
        if self.optimizer is not None:
            tensors.update(self.optimizer.state())
            numbers["updates"] = self.optimizer.updates
        return tensors, numbers

    @torch.no_grad()
    def load_state(self, tensors: dict[str, torch.Tensor], numbers: dict) -> None:
        """Restore `state()`. Raises KeyError naming what is missing or of another shape."""
        trained = {n: p for n, p in self._named() if p.requires_grad}
        for name, parameter in trained.items():
            find(tensors, f"working.{name}", parameter.shape)
        if self.optimizer is not None:
            self.optimizer.load_state(tensors, numbers["updates"])
        for name, parameter in trained.items():
            parameter.copy_(tensors[f"working.{name}"])
        self.version = numbers["version"]
        self.attempts, self.skipped_total = numbers["attempts"], numbers["skipped_total"]
        self.skipped_in_a_row = numbers["skipped_in_a_row"]


def _counts(micro: Batch) -> bool:
    return not (micro.row_S < 0).any()


def check_fit(weights: Weights, own: Mapping[str, torch.Tensor]) -> None:
    """Raises WeightsError unless these are all the tensors there are, in their shapes."""
    missing = set(own)
    for name, tensor in weights:
        if name not in own or own[name].shape != tensor.shape:
            want = f"shape {tuple(own[name].shape)}" if name in own else "no such tensor"
            raise WeightsError(f"tensor {name!r} of shape {tuple(tensor.shape)} has no place in this model, which has {want}")
        missing.discard(name)
    if missing:
        raise WeightsError(f"{len(missing)} of {len(own)} tensors did not arrive, the first is {min(missing)!r}")


def loss_inputs(batch: Batch, outputs, device: torch.device, context: Mapping[str, float]) -> LossInputs:
    """A micro-batch's columns on the device, beside what the forward gave."""
    def column(value, dtype=torch.float32):
        return None if value is None else to_device(value, device, dtype)

    named = {name: column(getattr(batch, name)) for name in _FLOAT_COLUMNS}
    return LossInputs(logprobs_T=outputs.logprobs_T, scores_S=outputs.scores_S, entropy_T=outputs.entropy_T,
                      values_T=outputs.values_T, mask_T=column(batch.mask_T, torch.bool),
                      sequence_T=column(batch.sequence_T, torch.int64), sequences=len(batch),
                      group_S=column(batch.group_S, torch.int64), old_values_T=column(batch.values_T),
                      label_S=column(batch.label_S), context=context, **named)


def grow_in_place() -> None:
    """Let torch's GPU allocator extend its segments: micro-batches of ever new sizes otherwise leave holes that nothing fits
    (10 GiB at 1.5B on an H200). A setting of the user's own stands."""
    if not (os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def plan_token_budget(lm: LM, training: bool) -> int:
    """Computed tokens a micro-batch may have on this machine. It uses total and not free memory, so that a run and its resume
    cut their batches alike and add up the same rounding."""
    config, gpu = lm.config, lm.device.type == "cuda"
    hidden = getattr(config, "hidden_size", None) or lm.module.get_input_embeddings().weight.shape[1]
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    memory = torch.cuda.mem_get_info(lm.device)[1] if gpu else host_memory()
    return token_budget(memory, gpu, hidden, inner, getattr(config, "num_hidden_layers", 12), lm.dtype.itemsize, training)


def token_budget(memory: float, gpu: bool, hidden: int, inner: int, layers: int, width: int, training: bool) -> int:
    """Computed tokens of a micro-batch for `memory` bytes of device or host and weights of `width` bytes.

    The estimate counts, per layer, about 16 hidden-sized and 3 intermediate-sized activations kept for backward.
    """
    token = min(width, 4) * (layers * (16 * hidden + 3 * inner) if training else 8 * hidden + 4 * inner)
    share = (0.14 if training else 0.3) if gpu else 0.25  # more is hardly faster
    return int(min(max(memory * share / token, 512), 65536 if gpu else 16384))


def host_memory() -> int:
    """Bytes of main memory this process may use: the machine's, or its container's limit."""
    import psutil
    total = psutil.virtual_memory().total
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(path).read_text()))
        except (OSError, ValueError):  # another system, or "max": no limit
            continue
    return total
