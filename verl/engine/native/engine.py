"""NativeEngine: the built-in rollout engine, on the very module the trainer trains or on its own copy of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import psutil
import torch

from verl.core.errors import CapacityError, ConfigError, DataError, ModelError, WeightsError
from verl.core.types import Finish, Request, Sample, Sampling
from verl.core.weights import Receipt, Weights, receipt_of
from verl.engine.base import OnSample, RolloutEngine
from verl.engine.native import pool, sampler
from verl.engine.native.config import NativeConfig
from verl.engine.native.plain import Drawn, PlainRunner
from verl.engine.native.scheduler import Prompt, Scheduler, Sequence
from verl.models import routing


class NativeEngine(RolloutEngine):
    """Continuous batching over a paged cache.

    shared: `lm` is the trainer's own; its storage is sampled from directly and `load_weights` moves nothing. Otherwise
    `lm` belongs to this engine alone and `load_weights` copies into it. The module may be in train mode or carry
    active LoRA adapters: sampling runs in eval mode, under no_grad, and restores the mode.
    Raises ModelError when the architecture is not proven native, ConfigError when a setting cannot hold here.
    """

    in_flight = True

    def __init__(self, lm, config: NativeConfig | None = None, shared: bool = True):
        if not lm.native:
            raise ModelError(f"the built-in engine cannot sample from {lm.path!r}: {lm.why_not or 'not proven'}; "
                             "set trainer.rollout.engine: hf")
        self.lm, self.config, self.shared = lm, config or NativeConfig(), shared
        self._cuda = lm.device.type == "cuda"
        self._dtype = self._cache_dtype()
        self._scale = self.config.kv_scale if self._dtype == torch.float8_e4m3fn else 1.0
        self.page_size = self.config.page_size or (64 if self._cuda else 16)
        limit = min(self.config.max_total_tokens or lm.context, lm.context)
        self.pages = self._pages(limit)
        self.limit = min(limit, max(1, (self.pages - 2) * self.page_size))
        self.runner = self._make_runner()
        self.memory = pool.Memory(lm, (self.pages + 1) * self.page_size, self._dtype, self._scale)
        self._loaded = False
        self._void: str | None = None  # why the held weights may not be sampled from
        self.preemptions = 0  # sequences computed again in the last generate, for want of pages

    def _cache_dtype(self) -> torch.dtype:
        name = self.config.kv_cache_dtype
        if name == "fp8" and not self._cuda:
            raise ConfigError("kv_cache_dtype: fp8 needs a GPU and this model is on the CPU; set kv_cache_dtype: auto")
        return {"auto": self.lm.dtype, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[name]

    def _pages(self, limit: int) -> int:
        """Pages of the pool, sized once: from kv_tokens, or a share of free memory, never more than could be used."""
        most = self.config.max_sequences * (limit + 2 * self.page_size)
        tokens = self.config.kv_tokens
        if tokens is None:
            free = torch.cuda.mem_get_info(self.lm.device)[0] if self._cuda else psutil.virtual_memory().available
            tokens = int(free * self.config.kv_memory) // pool.bytes_per_token(self.lm, self._dtype)
        return max(1, min(tokens, most) // self.page_size)

    def _make_runner(self):
        if self._cuda:
            from verl.engine.native.gpu import GpuRunner
            return GpuRunner(self.lm, self.config, self.page_size, self.limit)
        return PlainRunner(self.lm, self.page_size, self.config.max_sequences, self.limit)

    # -- weights and memory --------------------------------------------------------------------------------------------

    def load_weights(self, weights: Weights) -> Receipt:
        """See BaseEngine. Shared storage: nothing is copied, the receipt counts 0 tensors. Any version is newer than none."""
        if self._loaded and weights.version <= self.version:
            raise WeightsError(f"weights of version {weights.version} were sent, version {self.version} is in force; "
                               "versions only go up")
        if self.shared:
            if weights.owner is not self.lm.module:
                raise WeightsError("this engine samples from the trainer's own module, but the weights belong to another; "
                                   "build NativeEngine(lm, config, shared=False) to hold a copy")
            receipt = Receipt(weights.version, 0, 0)
        else:
            self._void = f"the load of version {weights.version} did not complete"
            receipt = self._copy(weights)
            self._void = None
        self.version, self._loaded = weights.version, True
        return receipt

    @torch.no_grad()
    def _copy(self, weights: Weights) -> Receipt:
        own = dict(self.lm.module.state_dict(keep_vars=True))
        seen, loaded = set(), {}
        for name, tensor in weights:
            if name not in own:
                raise WeightsError(f"weights of version {weights.version} hold {name!r}, which this engine's model has not")
            if own[name].shape != tensor.shape:
                raise WeightsError(f"weights of version {weights.version}: {name!r} has shape {tuple(tensor.shape)}, "
                                   f"this engine's is {tuple(own[name].shape)}")
            own[name].copy_(tensor)
            seen.add(own[name].data_ptr())
            loaded[name] = own[name]
        missing = [n for n, p in self.lm.module.named_parameters() if p.data_ptr() not in seen]
        if missing:
            raise WeightsError(f"weights of version {weights.version} lack {len(missing)} tensors, the first {missing[0]!r}; "
                               "nothing may be sampled until a whole load succeeds")
        return receipt_of(weights.version, loaded)

    def apart(self, keep_kv: bool = False) -> NativeEngine:
        """An engine like this one on its own copy of the module, which takes weights while another trains this one's."""
        return NativeEngine(self.lm.copy(), replace(self.config, keep_kv=keep_kv), shared=False)

    def sleep(self) -> None:
        if not self.memory.lasting:
            self.runner.forget()
        self.memory.sleep()

    def wake(self) -> None:
        self.memory.wake()

    def close(self) -> None:
        self.runner.forget()
        self.memory.close()

    @property
    def max_total_tokens(self) -> int:
        return self.limit

    # -- sampling ------------------------------------------------------------------------------------------------------

    def generate(self, requests: Seq[Request], sampling: Sampling, on_sample: OnSample | None = None,
                 cancelled: Callable[[], bool] | None = None,
                 between: Callable[[], Seq[Request]] | None = None) -> list[list[Sample]]:
        """See RolloutEngine. End ids are `sampling.stop_ids`, or the model's own when that is empty; none with ignore_eos.

        `between` is called before every launch. It may load weights, which then make the next token of every sequence: their
        keys and values are computed again, or kept under `config.keep_kv`. It returns further requests; the call lasts until
        there are none. Samples then come through `on_sample` alone, and the returned list is empty.

        Raises CapacityError, DataError or ConfigError before anything runs.
        """
        if self._void is not None:
            raise WeightsError(f"nothing can be sampled: {self._void}")
        sampler.check(sampling)
        self._check(requests, sampling)
        ends = () if sampling.ignore_eos else tuple(sampling.stop_ids or self.lm.stop_ids)
        with self._sampling_mode():
            return _Run(self, requests, sampling, ends, on_sample, keep_results=between is None).all(cancelled, between)

    def _check(self, requests: Seq[Request], sampling: Sampling) -> None:
        rows = self.lm.module.get_input_embeddings().weight.shape[0]
        for request in requests:
            n = len(request.prompt_ids)
            if n == 0:
                raise DataError(f"the prompt of request {request.key!r} is empty; it needs at least one token (for example BOS)")
            worst = int(np.max(request.prompt_ids)) if np.min(request.prompt_ids) >= 0 else int(np.min(request.prompt_ids))
            if not 0 <= worst < rows:
                raise DataError(f"the prompt of request {request.key!r} holds id {worst}; the model knows ids 0 to {rows - 1}")
            if n + sampling.max_tokens > self.limit:
                raise CapacityError(f"request {request.key!r}: {n} prompt tokens + max_tokens {sampling.max_tokens} exceed "
                                    f"{self.limit}, the longest sequence here (model context {self.lm.context}, "
                                    f"{self.pages * self.page_size} cache tokens); lower max_tokens, drop the prompt, or raise "
                                    "max_total_tokens or kv_tokens")

    @contextmanager
    def _sampling_mode(self) -> Iterator[None]:
        training = self.lm.module.training
        if training:
            self.lm.module.eval()
        try:
            with torch.no_grad():
                self.memory.wake()
                self.memory.bind()
                yield
        finally:
            if training:
                self.lm.module.train()


class _Run:
    """One call of generate: the sequences under way, and how each one ends."""

    def __init__(self, engine: NativeEngine, requests: Seq[Request], sampling: Sampling, ends: tuple[int, ...],
                 on_sample: OnSample | None, keep_results: bool):
        if sampling.stop and engine.lm.tokenizer is None:
            raise ConfigError("stop strings need a tokenizer and this model was bound without one; use stop_ids")
        self.engine, self.sampling, self.ends, self.on_sample = engine, sampling, ends, on_sample
        self.window = max((len(s.encode()) for s in sampling.stop), default=0) + 4  # a token is at least one byte
        self.results: list[list[Sample | None]] = [[None] * r.n for r in requests] if keep_results else []
        self.added, self.keys = 0, {}  # requests taken up, and the names of those that are not finished
        runner, config = engine.runner, engine.config
        self.scheduler = Scheduler(pool.Pages(engine.pages, engine.page_size), config.max_sequences, config.prefill_tokens,
                                   runner.decode_steps, sampling.max_tokens)
        runner.begin(sampling, ends, max((r.n for r in requests), default=1))
        self._add(requests)

    def _add(self, requests: Seq[Request]) -> None:
        for request in requests:
            prompt, most = Prompt(np.asarray(request.prompt_ids, np.int32)), self.sampling.max_tokens
            for j, seed in enumerate(request.seeds):
                self.scheduler.waiting.append(Sequence(prompt, self.added, j, seed, np.empty(most, np.int32),
                                                       np.empty(most, np.float32), np.empty(most, np.int32)))
            self.keys[self.added] = [request.key, request.n]
            self.added += 1

    def all(self, cancelled: Callable[[], bool] | None, between: Callable[[], Seq[Request]] | None) -> list[list[Sample]]:
        runner, scheduler, version = self.engine.runner, self.scheduler, self.engine.version
        flying: deque[tuple[Drawn | None, int]] = deque()
        while True:
            if between is not None:
                more = between()
                self.engine._check(more, self.sampling)
                self._add(more)
                if version != self.engine.version:
                    while flying:
                        self._collect(*flying.popleft())
                    scheduler.renew(self.engine.config.keep_kv)
                    version = self.engine.version
            if not scheduler.unfinished:
                break
            if cancelled is not None and cancelled():
                while flying:
                    self._collect(*flying.popleft())
                for sequence in [*scheduler.running, *scheduler.waiting]:
                    self._end(sequence, Finish.ABORT)
                break
            step = scheduler.next()
            if step is not None:
                flying.append((runner.run(step), version))
            if step is None or len(flying) > runner.depth:
                self._collect(*flying.popleft())
        self.engine.preemptions = scheduler.preemptions
        return self.results

    def _collect(self, drawn: Drawn | None, version: int) -> None:
        """Take the tokens that `version` made in one step; the first end of each sequence counts, what follows does not."""
        self.scheduler.in_flight -= 1
        if drawn is None:
            return
        tokens_KB, logprobs_KB = drawn.wait()
        ends_B = np.isin(tokens_KB, self.ends).any(0)
        for b, sequence in enumerate(drawn.sequences):
            if sequence.finish is not None:
                continue
            start, count = sequence.n, min(len(tokens_KB), self.sampling.max_tokens - sequence.n)
            sequence.ids[start:start + count] = tokens_KB[:count, b]
            sequence.logprobs[start:start + count] = logprobs_KB[:count, b]
            sequence.versions[start:start + count] = version
            sequence.n += count
            self._finish(sequence, start, ends_B[b] or self.sampling.stop)

    def _finish(self, sequence: Sequence, start: int, look: bool) -> None:
        """End the sequence at the first of its new tokens (from `start`) that ends it, if any; only when told to look."""
        if look:
            for i in range(max(start, self.sampling.min_tokens - 1), sequence.n):
                reason = self._reason(sequence.ids[:i + 1])
                if reason is not None:
                    sequence.n = i + 1
                    return self._end(sequence, Finish.STOP, reason)
        if sequence.n == self.sampling.max_tokens:
            self._end(sequence, Finish.LENGTH)

    def _experts(self, sequence: Sequence) -> np.ndarray | None:
        prompt, own, n = sequence.prompt.experts, sequence.experts, sequence.n
        if prompt is None or not n:
            return None
        blank = np.full((n, *prompt.shape[1:]), routing.NOT_COMPUTED, np.int16)
        return routing.of_sample(prompt, blank if own is None else own[:n])

    def _reason(self, ids_L: np.ndarray) -> int | str | None:
        last = int(ids_L[-1])
        if last in self.ends:
            return last
        if self.sampling.stop:
            text = self.engine.lm.tokenizer.decode(ids_L[-self.window:], skip_special_tokens=False,
                                                   clean_up_tokenization_spaces=False)
            return next((s for s in self.sampling.stop if s in text), None)
        return None

    def _end(self, sequence: Sequence, finish: Finish, reason: int | str | None = None) -> None:
        self.scheduler.finish(sequence, finish, reason)
        n = sequence.n
        sample = Sample(ids_L=sequence.ids[:n].copy(), logprobs_L=sequence.logprobs[:n].copy(),
                        versions_L=sequence.versions[:n].copy(), finish=finish, seed=sequence.seed, stop_reason=reason,
                        experts=self._experts(sequence))
        if self.results:
            self.results[sequence.request][sequence.index] = sample
        name = self.keys[sequence.request]
        name[1] -= 1
        if not name[1]:
            del self.keys[sequence.request]
        if self.on_sample is not None:
            self.on_sample(name[0], sequence.index, sample)
