"""Checks of an algorithm's settings: what was set, what is allowed, what to type next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from verl.core.errors import ConfigError, nearest


def check_range(algorithm: Any, name: str, low: float, high: float = float("inf"), above: bool = False) -> None:
    """Raise ConfigError unless low <= value <= high (`above`: low < value); None is allowed where it is the default."""
    value = getattr(algorithm, name)
    default = next(f.default for f in fields(algorithm) if f.name == name)
    if value is None and default is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not (low < value if above else low <= value) or not value <= high or value == float("inf"):
        bounds = f"{'above' if above else 'at least'} {low:g}" + (f" and at most {high:g}" if high < 1e308 else "")
        raise ConfigError(f"trainer.algo.{name}: {value!r} with trainer.algorithm: {algorithm.name}; allowed is a number "
                          f"{bounds}; the default is {default!r}")


def check_choice(algorithm: Any, name: str, allowed: Iterable[str]) -> None:
    """Raise ConfigError unless the value is one of `allowed`."""
    value, allowed = getattr(algorithm, name), tuple(allowed)
    if value not in allowed:
        hint = nearest(value, allowed)
        everything = "" if hint.startswith("allowed") else f" (allowed: {', '.join(sorted(allowed))})"
        raise ConfigError(f"trainer.algo.{name}: {value!r} with trainer.algorithm: {algorithm.name}; {hint}{everything}")
