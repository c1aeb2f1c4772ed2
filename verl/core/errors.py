"""Every error verl raises on purpose, as one tree.

    VerlError
    ├── ConfigError      (ValueError)    a setting is unknown, mistyped, contradictory or impossible here
    ├── DataError        (ValueError)    a dataset row, column or file is not what it must be
    ├── ModelError       (ValueError)    a model directory cannot be loaded, or is refused by name
    ├── CapacityError    (ValueError)    a sequence or a plan cannot fit; raised before anything runs
    ├── RewardError      (RuntimeError)  a reward source broke its contract or its failure budget
    ├── WeightsError     (RuntimeError)  weights arrived incomplete, altered, stale or out of order
    ├── CheckpointError  (RuntimeError)  a checkpoint is missing, incomplete or does not belong to this run
    ├── LockError        (RuntimeError)  another live run owns the directory
    ├── TrainingError    (RuntimeError)  training cannot go on (non-finite streak, out of memory with advice)
    └── WorkerError      (RuntimeError)  a worker died or missed its deadline; names the worker

Each also subclasses the builtin that a caller would have caught before.
A message says what was set, what was seen, what is allowed, and what to type next.
"""

import difflib
from collections.abc import Iterable


class VerlError(Exception):
    """Base of every error raised on purpose; the command line prints these as one line without a traceback."""


class ConfigError(VerlError, ValueError):
    """A setting is unknown, mistyped, contradictory, or impossible on this machine."""


class DataError(VerlError, ValueError):
    """A dataset file, row or column is not what it must be; names file, row and column."""


class ModelError(VerlError, ValueError):
    """A model directory cannot be loaded, or its architecture is refused by name."""


class CapacityError(VerlError, ValueError):
    """A sequence or a memory plan cannot fit; raised before anything runs."""


class RewardError(VerlError, RuntimeError):
    """A reward source broke its contract, or failed more often than its budget allows."""


class WeightsError(VerlError, RuntimeError):
    """Weights arrived incomplete, altered, stale or out of order."""


class CheckpointError(VerlError, RuntimeError):
    """A checkpoint is missing, incomplete, or does not belong to this run."""


class LockError(VerlError, RuntimeError):
    """Another live run owns the output directory."""


class TrainingError(VerlError, RuntimeError):
    """Training cannot go on: a streak of non-finite steps, or memory ran out (with advice)."""


class WorkerError(VerlError, RuntimeError):
    """A worker died or missed its deadline; names the worker."""


def nearest(name: str, allowed: Iterable[str]) -> str:
    """A phrase naming the closest allowed spelling, or all of them: `did you mean 'x'?` / `allowed: a, b`."""
    options = sorted(str(a) for a in allowed)
    swapped = [a for a in options if sorted(a) == sorted(str(name))]  # gpro: grpo, not the equally close gspo
    close = swapped or difflib.get_close_matches(str(name), options, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"allowed: {', '.join(options)}"
