"""From settings or Python objects to a Composition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl.core.errors import ConfigError
from verl.rewards.base import Source
from verl.rewards.compose import Composition, Entry
from verl.rewards.config import RewardSource
from verl.rewards.function import FunctionSource, load_function, openrlhf
from verl.rewards.verifiers import VERIFIERS


def build_rewards(sources: Any, aggregate: str | Callable = "sum", base_dir: str | Path = ".",
                  weights: Sequence[float] | None = None, device: str | None = None) -> Composition:
    """A composition of one source or a list of them, in any mixture of

    RewardSource, a mapping of its fields, a Source, a function (TRL's contract), a model directory (a string), a
    RewardModel or another nn.Module that scores. `weights` sets one weight each (TRL's `reward_weights`). Relative
    paths are relative to `base_dir`. `device` is where reward models go that name none.
    Raises ConfigError naming the entry that cannot be used.
    """
    items = list(sources) if isinstance(sources, (list, tuple)) else [sources]
    if weights is not None and len(weights) != len(items):
        raise ConfigError(f"reward_weights has {len(weights)} numbers for {len(items)} reward sources; give one each")
    base = Path(base_dir)
    entries: list[Entry] = []
    for i, item in enumerate(items):
        entry = _entry(item, base, device)
        taken = {e.source.name for e in entries}
        if entry.source.name in taken and not _named(item):
            entry.source.name = next(name for k in range(2, len(items) + 2)
                                     if (name := f"{entry.source.name}_{k}") not in taken)
        entries.append(entry if weights is None else replace(entry, weight=float(weights[i])))
    if isinstance(aggregate, str) and ":" in aggregate:
        aggregate = load_function(aggregate, base, "trainer.aggregate")
    return Composition(entries, aggregate)


def _named(item: Any) -> bool:
    return isinstance(item, (RewardSource, dict)) and (item.name if isinstance(item, RewardSource) else item.get("name"))


def _entry(item: Any, base: Path, device: str | None) -> Entry:
    if isinstance(item, dict):
        item = RewardSource(**item)
    if isinstance(item, str):
        item = RewardSource(model=item)
    if isinstance(item, RewardSource):
        return Entry(_source(item, base, device), item.weight, item.budget, tuple(item.arms))
    if isinstance(item, Source):
        return Entry(item)
    if _is_model(item):
        from verl.rewards.model import ModelSource
        return Entry(ModelSource(item, device=device))
    if callable(item):
        return Entry(FunctionSource(item))
    raise ConfigError(f"a reward source is {item!r:.80} of type {type(item).__name__}; give a function, a model "
                      "directory, a RewardModel, or a mapping such as {'verifier': 'math'}")


def _is_model(item: Any) -> bool:
    import torch
    return isinstance(item, torch.nn.Module)


def _source(s: RewardSource, base: Path, device: str | None) -> Source:
    if s.function is not None:
        if s.mode not in (None, "trl", "openrlhf"):
            raise ConfigError(f"trainer.rewards: mode {s.mode!r} of function {s.function!r}; allowed: trl, openrlhf")
        function = load_function(s.function, base, "trainer.rewards function")
        return FunctionSource(openrlhf(function, s.gold) if s.mode == "openrlhf" else function, s.name, s.timeout)
    if s.verifier is not None:
        verifier = VERIFIERS[s.verifier]
        return verifier(s.name or s.verifier.rpartition(":")[2].lower(), s)
    if s.model is not None:
        from verl.rewards.model import ModelSource
        return ModelSource.load(s, base, device)
    if s.judge is not None:
        from verl.rewards.judge import Judge, OpenAIClient
        return Judge(s.name or "judge", s.judge, OpenAIClient(s.judge, s.timeout, s.concurrency), s.timeout)
    if s.human is not None:
        from verl.rewards.human import Human
        return Human(s.name or "human", s.human, base, s.timeout)
    from verl.rewards.remote import HTTPSource
    return HTTPSource(s.name or "http", s.http, s.timeout, s.concurrency)
