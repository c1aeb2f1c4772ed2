"""What every reward source is: a name, a check of its gold at load, and a typed answer for each sample."""

from __future__ import annotations

import math
import numbers
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from verl.core.errors import DataError, RewardError, nearest
from verl.core.types import Abstained, Failed, Message, RewardResult, Sample, Scored, Task


@dataclass(frozen=True, slots=True)
class Item:
    """One sample to be scored, with the task it answers. `sample.text` is the decoded response."""

    task: Task
    sample: Sample

    @property
    def completion(self) -> str | list[Message]:
        """The response as rewards see it: text, or one assistant message when the prompt is a conversation."""
        text = self.sample.text
        return [{"role": "assistant", "content": text}] if self.task.conversational else text


class Source:
    """One reward source. Subclasses implement `score`; `timeout_s` bounds what one sample may cost."""

    inline = False  # scores in microseconds: runs in the caller's thread
    whole_groups = False  # wants all samples of a task at once (a function may compare them)

    def __init__(self, name: str, timeout_s: float):
        self.name, self.timeout_s = name, timeout_s
        self.metrics: list[tuple[str, float]] = []  # (name, value) the source reported since the last collection

    def check(self, tasks: Sequence[Task]) -> None:
        """Raise DataError or ConfigError when these tasks can never be scored (a gold answer that does not parse)."""

    def score(self, items: Sequence[Item]) -> list[RewardResult]:
        """One result an item, in order. Any exception but RewardError counts as a failure of every item."""
        raise NotImplementedError

    def describe(self) -> str:
        """What a reader of the log must know to interpret its scores (a mode, an isolation); "" for nothing."""
        return ""

    def limit_s(self, n: int) -> float:
        """Seconds after which a call over n samples is taken for hung."""
        return self.timeout_s * max(n, 1) + 30

    def close(self) -> None:
        """End processes and connections. Idempotent."""


def failure(error: BaseException) -> Failed:
    """A Failed whose first line is the error and whose rest is its traceback."""
    return Failed("".join(traceback.format_exception_only(error)).strip() + "\n" + "".join(
        traceback.format_exception(error)).rstrip())


def number(value: Any, who: str) -> RewardResult:
    """A finite number as Scored, None as Abstained. Raises RewardError naming `who` for anything else."""
    if value is None:
        return Abstained()
    if getattr(value, "ndim", None) == 0:  # a numpy scalar or a 0-d tensor
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise RewardError(f"{who} returned {value!r:.80} of type {type(value).__name__}; "
                          "a reward is a float, or None to abstain")
    if not math.isfinite(value):
        raise RewardError(f"{who} returned {value}; a reward must be finite, return None to abstain")
    return Scored(float(value))


def results(returned: Any, n: int, who: str) -> list[RewardResult]:
    """Check what a function returned for n completions: a list, tuple or 1-d array of n numbers or None.

    Raises RewardError naming the function, what was expected and what came.
    """
    if hasattr(returned, "tolist") and hasattr(returned, "ndim"):
        if returned.ndim != 1:
            raise RewardError(f"{who} returned an array of shape {tuple(returned.shape)}, expected ({n},); "
                              "return one number a completion, e.g. rewards.reshape(-1)")
        returned = returned.tolist()
    if not isinstance(returned, (list, tuple)):
        raise RewardError(f"{who} returned {returned!r:.80} of type {type(returned).__name__}, expected a list of {n} "
                          "floats or None, one a completion")
    if len(returned) != n:
        raise RewardError(f"{who} returned {len(returned)} rewards, expected {n}: one a completion, None to abstain")
    return [number(value, f"{who}, sample {i},") for i, value in enumerate(returned)]


def gold(task: Task, column: str, who: str) -> Any:
    """The task's value of `column`; None when the row leaves it empty. Raises DataError when there is no such column."""
    if column not in task.columns:
        raise DataError(f"{who}: task {task.id!r} has no column {column!r}; {nearest(column, task.columns)} "
                        "(set the source's `gold` to the column with the right answers)")
    return task.columns[column]


class Verifier(Source):
    """A rule that needs only the response and the task's gold column; rows whose gold is None are abstained from."""

    inline = True

    def __init__(self, name: str, timeout_s: float, column: str):
        super().__init__(name, timeout_s)
        self.column = column

    def parse_gold(self, value: Any) -> Any:
        """The gold answer in comparable form. Raises ValueError with the reason when it has none."""
        raise NotImplementedError

    def grade(self, text: str, value: Any) -> float:
        """Score of a response against a gold answer; value is as the column holds it."""
        raise NotImplementedError

    def check(self, tasks: Sequence[Task]) -> None:
        self.check_rows(tasks, self.parse_gold)

    def check_rows(self, tasks: Sequence[Task], parse: Callable[[Any], Any]) -> None:
        for task in tasks:
            value = gold(task, self.column, f"reward {self.name!r}")
            try:
                if value is not None:
                    parse(value)
            except ValueError as error:
                raise DataError(f"reward {self.name!r}: gold {value!r:.120} of task {task.id!r} (column "
                                f"{self.column!r}) cannot be used: {error}; every answer to it would score 0. "
                                "Correct the row, or leave it empty to abstain") from error

    def score(self, items: Sequence[Item]) -> list[RewardResult]:
        out: list[RewardResult] = []
        for item in items:
            value = gold(item.task, self.column, f"reward {self.name!r}")
            try:
                out.append(Abstained() if value is None else Scored(self.grade(item.sample.text, value)))
            except Exception as error:
                out.append(failure(error))
        return out
