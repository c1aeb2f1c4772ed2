"""User functions as reward sources: TRL's contract unchanged, OpenRLHF's through a named adapter, files by path."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import inspect
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from verl.core.errors import ConfigError, DataError, RewardError, nearest
from verl.core.registry import load_object
from verl.core.types import Failed, RewardResult, Task
from verl.rewards.base import Item, Source, failure, results

CONTRACT = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


class FunctionSource(Source):
    """A reward function with TRL's contract: keywords only, lists aligned with the completions of whole groups.

    It receives prompts, completions (str, or lists of messages), completion_ids, trainer_state, log_extra(column,
    values), log_metric(name, value) and every other dataset column; a function without **kwargs receives only what it
    names. It returns one float or None a completion; `async def` is awaited on an event loop of its own.

    When a call raises or passes half of `timeout_s`, its samples are tried singly (side by side) in the other half, so
    that the failure has a sample's name and costs only that sample.
    """

    whole_groups = True

    def __init__(self, function: Callable[..., Any], name: str | None = None, timeout_s: float = 600.0):
        super().__init__(name or getattr(function, "__name__", type(function).__name__), timeout_s)
        self.function = function
        self.trainer_state: Any = None
        call = function if inspect.isroutine(function) else function.__call__
        self._async = inspect.iscoroutinefunction(call)
        parameters = inspect.signature(function).parameters.values()
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._named = {p.name: p.default is p.empty for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD,
                                                                                      p.KEYWORD_ONLY)}
        self._loop: asyncio.AbstractEventLoop | None = None

    def check(self, tasks: Sequence[Task]) -> None:
        columns = {name for task in tasks for name in _columns(task)}
        for name, required in self._named.items():
            if required and tasks and name not in CONTRACT and name not in columns:
                raise DataError(f"reward function {self.name!r} asks for {name!r}, which is no dataset column; "
                                f"{nearest(name, [*CONTRACT, *columns])}")

    def score(self, items: Sequence[Item]) -> list[RewardResult]:
        outcome = self._finish(items, self._start(items), time.monotonic() + self.timeout_s / 2)
        if not isinstance(outcome, Failed):
            return outcome
        singles = [[item] for item in items]
        calls = [self._start(single) for single in singles]
        deadline = time.monotonic() + self.timeout_s / 2
        outcomes = [self._finish(single, call, deadline) for single, call in zip(singles, calls)]
        return [outcome if isinstance(outcome, Failed) else outcome[0] for outcome in outcomes]

    def _finish(self, items: Sequence[Item], call: Future, deadline: float) -> list[RewardResult] | Failed:
        """The results of a call, or its failure. Raises RewardError when what it returned breaks the contract."""
        wait([call], max(0.0, deadline - time.monotonic()))
        if not call.done():
            if self._async:  # a plain function cannot be stopped; its thread is left behind
                call.cancel()
            return Failed(f"TimeoutError: reward function {self.name!r} took longer than its timeout_s {self.timeout_s:g}")
        error = call.exception()
        if isinstance(error, RewardError):
            raise error
        return failure(error) if error else results(call.result(), len(items), f"reward function {self.name!r}")

    def _start(self, items: Sequence[Item]) -> Future:
        """Begin a call. A plain function runs on a daemon thread, since a thread cannot be stopped, only left behind."""
        arguments = self._arguments(items)
        if self._async:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, daemon=True, name=f"reward-{self.name}-loop").start()
            return asyncio.run_coroutine_threadsafe(self.function(**arguments), self._loop)
        future: Future = Future()

        def run():
            try:
                future.set_result(self.function(**arguments))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True, name=f"reward-{self.name}").start()
        return future

    def _arguments(self, items: Sequence[Item]) -> dict[str, Any]:
        columns = [_columns(item.task) for item in items]
        names = dict.fromkeys(name for row in columns for name in row)
        arguments: dict[str, Any] = {name: [row.get(name) for row in columns] for name in names}

        def log_extra(column: str, values: Sequence[Any]) -> None:
            if len(values) != len(items):
                raise RewardError(f"reward function {self.name!r}: log_extra({column!r}) got {len(values)} values for "
                                  f"{len(items)} completions")
            for item, value in zip(items, values):
                item.sample.log[column] = value

        arguments |= {
            "prompts": [item.task.prompt for item in items],
            "completions": [item.completion for item in items],
            "completion_ids": [item.sample.ids_L.tolist() for item in items],
            "trainer_state": self.trainer_state,
            "log_extra": log_extra,
            "log_metric": lambda name, value: self.metrics.append((name, float(value))),
        }
        return arguments if self._takes_all else {k: v for k, v in arguments.items() if k in self._named}

    def close(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None


def _columns(task: Task) -> dict[str, Any]:
    """The dataset columns a reward function sees besides the prompt."""
    known = {"tools": task.tools, "chat_template_kwargs": dict(task.template_kwargs) or None}
    return {**task.columns, **{name: value for name, value in known.items() if value is not None}}


def openrlhf(function: Callable[..., Any], label: str = "label") -> Callable[..., Any]:
    """OpenRLHF's `reward_func(queries, prompts, labels)` as a function with TRL's contract.

    queries are prompt + response as text (the messages of a conversation joined by newlines). It may return rewards, or
    a dict with `rewards` and optionally `scores` (raw, logged beside the reward) and `extra_logs` (metrics).
    """

    def adapted(prompts, completions, log_extra, log_metric, **columns):
        if label not in columns:
            raise DataError(f"reward function {adapted.__name__!r}: no column {label!r} for its labels; "
                            f"{nearest(label, columns)}")
        texts = [_plain(prompt) for prompt in prompts]
        queries = [prompt + ("\n" if isinstance(completion, list) else "") + _plain(completion)
                   for prompt, completion in zip(texts, completions)]
        returned = function(queries, texts, columns[label])
        if not isinstance(returned, dict):
            return returned
        if returned.get("scores") is not None:
            log_extra(f"{adapted.__name__}_score", list(returned["scores"]))
        for name, value in (returned.get("extra_logs") or {}).items():
            values = value.tolist() if hasattr(value, "tolist") else value
            log_metric(name, sum(values) / len(values) if isinstance(values, list) else values)
        return returned["rewards"]

    adapted.__name__ = getattr(function, "__name__", "reward_func")
    return adapted


def _plain(prompt: str | list[dict[str, Any]]) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(str(m.get("content") or "") for m in prompt)


def load_function(path: str, base_dir: Path, setting: str) -> Any:
    """The object behind `file.py:name` (relative to base_dir) or `module:name`. Raises ConfigError naming the setting."""
    file, colon, name = path.rpartition(":")
    if not colon or not name:
        raise ConfigError(f"{setting}: {path!r} is not of the form file.py:function or module:function")
    if not file.endswith(".py"):
        return load_object(path, setting)
    source = (base_dir / file).resolve()
    if not source.is_file():
        raise ConfigError(f"{setting}: no file {source} (paths are relative to {base_dir})")
    module_name = f"verl_user_{source.stem}_{hashlib.sha256(str(source).encode()).hexdigest()[:8]}"
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, source)
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
    if not hasattr(sys.modules[module_name], name):
        raise ConfigError(f"{setting}: {source} has no {name!r}; {nearest(name, vars(sys.modules[module_name]))}")
    return getattr(sys.modules[module_name], name)
