"""CUDA graphs of the decode step for a few batch sizes, over decoder layers compiled for decoding alone."""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from verl.engine.native.config import NativeConfig
from verl.models.compile import decoder_layers


def _sizes(most: int) -> list[int]:
    """Batch sizes worth a graph: powers of two, then steps of 32; the last is the largest batch."""
    return sorted({n for n in (1, 2, 4, 8, 16, *range(32, most, 32)) if n < most} | {most})


class DecodeGraphs:
    """Hands out `launch` for a batch: a graph's replay, or the step itself where graphs cannot be."""

    def __init__(self, runner, config: NativeConfig):
        self.runner, self.cuda = runner, runner.lm.device.type == "cuda"
        self.why_not = "" if config.cuda_graphs and self.cuda else "switched off"
        self.proven, self.sizes = False, _sizes(config.max_sequences)
        self.graphs: dict[tuple, torch.cuda.CUDAGraph] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.cuda else None
        layers = decoder_layers(runner.lm) if config.compile and self.cuda else []
        self.calls = [(layer, torch.compile(layer._call_impl, dynamic=True)) for layer in layers]

    def get(self, rows: int) -> tuple[Callable[[], None], int]:
        """What to launch for `rows` sequences, and how many rows it works on. Resets the batch when it has to capture."""
        runner = self.runner
        if self.why_not or runner.filtered:
            return lambda: runner.step(rows), rows
        size = self.sizes[bisect_left(self.sizes, rows)]
        key = (size, runner.sampling.temperature == 0, len(runner.banned), runner.members)
        if key not in self.graphs:
            runner.batch.zero_()
            self.graphs[key] = self._capture(size)
            if self.why_not:
                return self.get(rows)
        return self.graphs[key].replay, size

    def drop(self) -> None:
        """Forget all graphs: the addresses they use are about to change."""
        self.graphs.clear()

    def _capture(self, size: int) -> torch.cuda.CUDAGraph | None:
        """Warm up on a side stream, prove (once) that the step never waits for the device, capture it.

        The proof makes every wait in the process an error for a moment, so the first capture needs a trainer at rest.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.runner.counter.zero_()
            self.runner.step(size)
            self.runner.counter.zero_()
            stream.synchronize()
            if not self.proven:
                self._prove(size)
        torch.cuda.current_stream().wait_stream(stream)
        if self.why_not:
            return None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=stream, capture_error_mode="thread_local"):
            self.runner.step(size)
        return graph

    def _prove(self, size: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch announces that this mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            self.runner.step(size)
            self.proven = True
        except RuntimeError as error:
            self.why_not = f"a step of this model waits for the device: {error}"
        finally:
            torch.cuda.set_sync_debug_mode("default")

    @contextmanager
    def compiled(self) -> Iterator[None]:
        """The decoder layers' calls for sampling; training finds its own again afterwards. Attention stays outside both."""
        saved = [layer._compiled_call_impl for layer, _ in self.calls]
        for layer, call in self.calls:
            layer._compiled_call_impl = call
        try:
            with torch._dynamo.config.patch(recompile_limit=64):
                yield
        finally:
            for (layer, _), call in zip(self.calls, saved):
                layer._compiled_call_impl = call
