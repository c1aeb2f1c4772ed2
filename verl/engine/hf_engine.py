"""HFEngine: transformers' own `generate` behind the rollout contract. Slow, and right for every decoder-only architecture.

It runs on the very module it is given (shared storage with training when that is the trainer's), with the stock
attention, the stock cache and none of the checkpoint's sampling defaults; only the choice of each token is ours.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from verl.core.errors import WeightsError
from verl.core.types import Finish, Request, Sample, Sampling
from verl.core.weights import Receipt, Weights
from verl.engine.base import OnSample, RolloutEngine
from verl.engine.native.sampler import sample
from verl.engine.requests import StopRule, check_newer, check_requests, ignored_defaults, sampling_line
from verl.models import attention, routing
from verl.models.lm import LM

log = logging.getLogger("verl")


@dataclass(slots=True, eq=False)
class _Row:
    """One sample in the making."""

    request: int
    index: int
    key: str
    prompt_ids: np.ndarray
    seed: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sample: Sample | None = None


class HFEngine(RolloutEngine):
    """Samples with `lm.module.generate`, up to `batch_size` sequences at a time, shortest prompts first.

    Prompts of different lengths are padded on the left where the architecture is proven to mask exactly (`lm.native`);
    elsewhere (state-space layers, ALiBi, ...) only prompts of one length share a batch, so that no padding exists.
    """

    def __init__(self, lm: LM, max_total_tokens: int | None = None, batch_size: int = 128):
        self.lm, self.batch_size = lm, batch_size
        self._limit = min(max_total_tokens or lm.context, lm.context)
        self._loaded, self._void = False, ""  # why nothing may be sampled; "" when all is well
        self._told: Sampling | None = None

    @property
    def max_total_tokens(self) -> int:
        return self._limit

    def load_weights(self, weights: Weights) -> Receipt:
        """See BaseEngine. Shared storage: nothing is copied, the receipt counts 0 tensors. Any version is newer than none."""
        check_newer(weights, self.version if self._loaded else None)
        receipt = Receipt(weights.version, 0, 0)
        if weights.owner is not self.lm.module:
            self._void = f"the load of version {weights.version} did not complete"
            receipt = _copy(self.lm.module, weights)
            self._void = ""
        self.version, self._loaded = weights.version, True
        return receipt

    def apart(self) -> HFEngine:
        """An engine like this one on its own copy of the module, to sample while another trains this one's."""
        return HFEngine(self.lm.copy(), self._limit, self.batch_size)

    def generate(self, requests: Sequence[Request], sampling: Sampling, on_sample: OnSample | None = None,
                 cancelled: Callable[[], bool] | None = None) -> list[list[Sample]]:
        """See RolloutEngine. End ids are `sampling.stop_ids`, or the model's own when that is empty; none with ignore_eos."""
        if self._void:
            raise WeightsError(f"nothing can be sampled: {self._void}; load a full set of weights first")
        sampling = replace(sampling, stop_ids=sampling.stop_ids or self.lm.stop_ids)
        check_requests(requests, sampling, self._limit, self.lm.module.get_input_embeddings().weight.shape[0])
        if sampling != self._told:
            log.info(sampling_line(sampling, ignored_defaults(self.lm.module.generation_config)))
            self._told = sampling
        rows = [_Row(i, j, r.key, r.prompt_ids, seed) for i, r in enumerate(requests) for j, seed in enumerate(r.seeds)]
        with _stock(self.lm):
            for batch in self._batches(rows):
                _Run(self, batch, sampling, on_sample, cancelled or (lambda: False)).generate()
        out: list[list[Sample]] = [[] for _ in requests]
        for row in rows:
            out[row.request].append(row.sample)
        return out

    def _batches(self, rows: list[_Row]) -> list[list[_Row]]:
        """Rows by prompt length, cut by batch size and, where padding is not proven exact, by length."""
        batches: list[list[_Row]] = []
        for row in sorted(rows, key=lambda r: len(r.prompt_ids)):
            last = batches[-1] if batches else None
            if last is None or len(last) == self.batch_size or not (
                    self.lm.native or len(last[0].prompt_ids) == len(row.prompt_ids)):
                batches.append([row])
            else:
                last.append(row)
        return batches


class _Run:
    """One call of `generate`: draws every token itself and leaves `generate` no choice; ends rows and reports them."""

    def __init__(self, engine: HFEngine, rows: list[_Row], sampling: Sampling, on_sample: OnSample | None,
                 cancelled: Callable[[], bool]):
        self.lm, self.version, self.rows, self.sampling = engine.lm, engine.version, rows, sampling
        self.on_sample, self.cancelled = on_sample, cancelled
        self.rule = StopRule(sampling, self.lm.tokenizer)
        self.seeds_B = torch.tensor([r.seed for r in rows], dtype=torch.int64, device=self.lm.device)
        self.position = 0

    def generate(self) -> None:
        if self._aborted():
            return
        longest = max(len(r.prompt_ids) for r in self.rows)
        ids_BL = np.zeros((len(self.rows), longest), np.int64)
        mask_BL = np.zeros((len(self.rows), longest), np.int64)
        for b, row in enumerate(self.rows):
            ids_BL[b, longest - len(row.prompt_ids):] = row.prompt_ids
            mask_BL[b, longest - len(row.prompt_ids):] = 1
        with routing.record(self.lm.module) if self.lm.mixture else nullcontext() as self.routes:
            self._generate(ids_BL, mask_BL)

    def _generate(self, ids_BL: np.ndarray, mask_BL: np.ndarray) -> None:
        self.lm.module.generate(
            torch.from_numpy(ids_BL).to(self.lm.device), attention_mask=torch.from_numpy(mask_BL).to(self.lm.device),
            generation_config=GenerationConfig(
                max_new_tokens=self.sampling.max_tokens, do_sample=False, use_cache=True,
                decoder_start_token_id=getattr(self.lm.module.config, "decoder_start_token_id", None)),
            logits_processor=LogitsProcessorList([_Draw(self)]), stopping_criteria=StoppingCriteriaList([_Stop(self)]))

    def draw(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """Logits at temperature 1 -> scores whose maximum is the token that was drawn."""
        logits_BV[:, self.lm.head.rows:] = float("-inf")
        ids_B, logprobs_B = sample(logits_BV, self.sampling, self.seeds_B, torch.full_like(self.seeds_B, self.position),
                                   self.rule.stop_ids)
        self.position += 1
        for row, token, logprob in zip(self.rows, ids_B.tolist(), logprobs_B.tolist()):
            if row.sample is None:
                row.ids.append(token)
                row.logprobs.append(logprob)
        return torch.full_like(logits_BV, float("-inf")).scatter_(1, ids_B[:, None], 0.0)

    def stopped(self) -> list[bool]:
        """Which rows have ended, now that each has a new token."""
        for row in self.rows:
            if row.sample is None and (end := self.rule(row.ids)) is not None:
                self._end(row, *end)
        self._aborted()
        return [row.sample is not None for row in self.rows]

    def _aborted(self) -> bool:
        if not self.cancelled():
            return False
        for row in self.rows:
            if row.sample is None:
                self._end(row, Finish.ABORT, None)
        return True

    def _end(self, row: _Row, finish: Finish, reason: int | str | None) -> None:
        row.sample = Sample(np.array(row.ids, np.int32), np.array(row.logprobs, np.float32),
                            np.full(len(row.ids), self.version, np.int32), finish, row.seed, stop_reason=reason,
                            experts=self._experts(row) if self.lm.mixture and row.ids else None)
        if self.on_sample is not None:
            self.on_sample(row.key, row.index, row.sample)


    def _experts(self, row: _Row) -> np.ndarray:
        """Those of the row's prompt (the first forward) and of its tokens, which each went into the next one."""
        b, n = self.rows.index(row), len(row.prompt_ids)
        prompts = routing.stacked(self.routes, 0)
        prompt = prompts.reshape(len(self.rows), -1, *prompts.shape[1:])[b, -n:]
        own = [routing.stacked(self.routes, i)[b] for i in range(1, len(row.ids))]
        return routing.of_sample(prompt, np.stack([*own, prompt[-1]]))


class _Draw(LogitsProcessor):
    def __init__(self, run: _Run):
        self.run = run

    def __call__(self, input_ids, scores):
        return self.run.draw(scores)


class _Stop(StoppingCriteria):
    def __init__(self, run: _Run):
        self.run = run

    def __call__(self, input_ids, scores, **_):
        return torch.tensor(self.run.stopped(), device=input_ids.device)


@contextmanager
def _stock(lm: LM):
    """The module as transformers knows it: stock attention, eval mode, no sampling defaults; restored on the way out."""
    module = lm.module
    kept = module.training, module.config._attn_implementation, module.generation_config
    exact_sdpa = module._supports_sdpa and getattr(lm.config, "attn_logit_softcapping", None) is None
    module.eval()
    module.generation_config = GenerationConfig()
    if kept[1] == attention.NAME:
        module.set_attn_implementation("sdpa" if exact_sdpa else "eager")
    try:
        yield
    finally:
        module.train(kept[0])
        module.generation_config = kept[2]
        if kept[1] == attention.NAME:
            module.set_attn_implementation(attention.NAME)


@torch.no_grad()
def _copy(module: torch.nn.Module, weights: Weights) -> Receipt:
    """Copy tensors by name into the module. Raises WeightsError naming what is missing, unknown or of another shape."""
    own = dict(module.named_parameters(remove_duplicate=False))
    seen = set()
    for name, tensor in weights:
        if name not in own or own[name].shape != tensor.shape:
            want = f"shape {tuple(own[name].shape)}" if name in own else "no such tensor"
            raise WeightsError(f"tensor {name!r} of shape {tuple(tensor.shape)} has no place in this model, which has {want}")
        own[name].copy_(tensor)
        seen.add(name)
    held = {own[name].data_ptr() for name in seen}
    if missing := sorted(name for name, p in own.items() if p.data_ptr() not in held):
        raise WeightsError(f"{len(missing)} of {len(own)} tensors did not arrive, the first is {missing[0]!r}")
    return Weights(weights.version, lambda: ((n, p.detach()) for n, p in own.items() if n in seen)).receipt()
