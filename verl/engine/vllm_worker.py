"""What runs inside vLLM's worker: a receiver of weights and a mask over rows without a token. Imported by vLLM, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from verl.core.weights import checksum, hash_name

try:
    from vllm.v1.sample.logits_processor import LogitsProcessor
except ImportError:  # without vLLM nobody asks for the class; the module can still be imported
    LogitsProcessor = object

ROWS = "verl_rows"  # key of additional_config: ids the tokenizer knows


class Receiver:
    """Mixed into vLLM's worker (`worker_extension_cls`), so that weights arrive in one call."""

    def verl_receive(self, source: str | Iterable[tuple[str, torch.Tensor]]) -> tuple[int, int]:
        """Load a whole set of named tensors (a stream, or a safetensors file) in place.

        Returns (count, checksum) of what arrived, in the terms of `verl.core.weights.Receipt`.
        """
        arrived = _Counted(_read(source) if isinstance(source, str) else source)
        self.model_runner.reload_weights(weights_iterator=arrived)
        return arrived.count, arrived.total & ((1 << 63) - 1)


class _Counted:
    """A stream of named tensors that counts and sums what passes."""

    def __init__(self, source: Iterable[tuple[str, torch.Tensor]]):
        self.source, self.count, self.total = source, 0, 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.source:
            self.count += 1
            self.total += checksum(tensor) ^ (hash_name(name) & ((1 << 63) - 1))
            yield name, tensor


def _read(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open
    with safe_open(path, "pt") as file:
        for name in file.keys():
            yield name, file.get_tensor(name)


class SpareRows(LogitsProcessor):
    """Rows of the output layer beyond the tokenizer's ids can never be sampled or counted."""

    def __init__(self, vllm_config, device, is_pin_memory):
        self.rows = vllm_config.additional_config[ROWS]

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        logits[:, self.rows:] = float("-inf")
        return logits

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update) -> None:
        pass
