"""BaseEngine: what actor, critic, reference, reward model and rollout engines all answer to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from verl.core.types import Request, Sample, Sampling
from verl.core.weights import Receipt, Weights


class BaseEngine(ABC):
    """Holds weights of one version on one device group. Everything an engine can do is optional but these."""

    version: int = 0

    @abstractmethod
    def load_weights(self, weights: Weights) -> Receipt:
        """Take these weights in force for the next token and drop every cache made by older ones, as one operation.

        A no-op but for the version when storage is shared. Raises WeightsError when tensors are missing, unknown,
        of another shape, or the version is not newer than the one held.
        """

    def sleep(self) -> None:
        """Give device memory back that the next phase does not need (KV pages, caches). Idempotent."""

    def wake(self) -> None:
        """Take it again. Idempotent; the next use would wake it anyway."""

    def close(self) -> None:
        """Release everything; child processes end with it."""


OnSample = Callable[[str, int, Sample], None]


class RolloutEngine(BaseEngine):
    """Turns requests into samples; each token carries the version of the weights that made it.

    in_flight: `generate` takes `between` and so accepts weights and further requests in the middle (see NativeEngine). An
    engine that can sample from a module another trains has `apart()`: one like it on a copy of its own.
    """

    in_flight: ClassVar[bool] = False

    @abstractmethod
    def generate(self, requests: Sequence[Request], sampling: Sampling, on_sample: OnSample | None = None,
                 cancelled: Callable[[], bool] | None = None) -> list[list[Sample]]:
        """Sample `request.n` sequences for every request; results in request order, samples in seed order.

        `on_sample(request.key, index, sample)` is called as each one finishes, in the caller's thread, so that scoring
        starts early. Sample text is left empty (the caller decodes). When `cancelled()` turns true, unfinished samples
        come back with finish ABORT. Raises CapacityError before anything runs when a request cannot fit.
        """

    @property
    @abstractmethod
    def max_total_tokens(self) -> int:
        """The longest prompt + response one sequence can have."""
