"""Scores that people gave: a dataset column, or a JSON-lines file that may grow while the run goes on."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.core.errors import DataError, RewardError
from verl.core.types import Abstained, RewardResult, Task
from verl.rewards.base import Item, Source, gold, number


class Human(Source):
    """What nobody has scored yet is abstained from.

    A column gives its number to every sample of the row. A `.jsonl` file has lines {"id": task id, "score": number or
    null, "completion": text}; with `completion` a line is about that very response, without it about every response to
    the task. A later line replaces an earlier one. The file need not exist yet; new whole lines are read before each
    scoring; a line that cannot be used is named on stderr, skipped and counted (`rewards/{name}/bad_lines`).
    """

    def __init__(self, name: str, where: str, base: Path, timeout_s: float):
        super().__init__(name, timeout_s)
        self.column = None if where.endswith(".jsonl") else where
        self.path = base / where if self.column is None else None
        self._offset, self._line = 0, 0
        self._scores: dict[tuple[str, str | None], RewardResult] = {}

    def check(self, tasks: Sequence[Task]) -> None:
        if self.path is not None:
            problems = self._read()
            if problems:
                raise DataError(f"reward {self.name!r}: {problems[0]}" + (f" ({len(problems)} such lines)" if problems[1:] else ""))
            return
        for task in tasks:
            try:
                number(gold(task, self.column, f"reward {self.name!r}"), f"column {self.column!r} of task {task.id!r}")
            except RewardError as error:
                raise DataError(f"reward {self.name!r}: {error}") from error

    def score(self, items: Sequence[Item]) -> list[RewardResult]:
        if self.path is None:
            who = f"reward {self.name!r}"
            return [number(gold(item.task, self.column, who), f"column {self.column!r}") for item in items]
        problems = self._read()
        for problem in problems:
            print(f"reward {self.name!r}: {problem}; the line is skipped", file=sys.stderr)
        if problems:
            self.metrics.append((f"rewards/{self.name}/bad_lines", float(len(problems))))
        return [self._scores.get((item.task.id, item.sample.text)) or self._scores.get((item.task.id, None)) or Abstained()
                for item in items]

    def _read(self) -> list[str]:
        """Take the whole lines that were appended since; what is wrong with them."""
        if not self.path.is_file():
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole, newline, _ = data.rpartition(b"\n")  # a line without its end is still being written
        self._offset += len(whole) + len(newline)
        problems = []
        for raw in whole.split(b"\n") if newline else []:
            self._line += 1
            try:
                line = raw.decode("utf-8-sig" if self._line == 1 else "utf-8").strip()
                if line:
                    self._take(json.loads(line))
            except (ValueError, RewardError) as error:
                problems.append(f"{self.path}:{self._line}: {error}")
        return problems

    def _take(self, row: Any) -> None:
        if not isinstance(row, dict) or "id" not in row or "score" not in row:
            raise ValueError('a line is {"id": task id, "score": number or null, optionally "completion": text}')
        self._scores[str(row["id"]), row.get("completion")] = number(row["score"], "the score")
