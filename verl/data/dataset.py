"""Datasets of Tasks: what is asked (PromptDataset) and what rewards may look up (RewardDataset)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.core.errors import DataError, nearest
from verl.core.types import Task, derive_seed
from verl.data.chat import encode_answer, prompt_lengths
from verl.data.config import DataConfig
from verl.data.order import permutation
from verl.data.read import Table, from_dataset, from_rows, read
from verl.data.rows import tasks_from

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def as_tasks(source: Any, config: DataConfig | None = None, split: str | None = None) -> list[Task]:
    """Tasks of whatever a user calls a dataset.

    A path or glob, a list of them, dicts, Tasks, a `datasets.Dataset`, or a PromptDataset. Raises DataError with file,
    row and column when something is not what it must be.
    """
    return list(load(source, config or DataConfig(), split).tasks)


@dataclass(frozen=True)
class PromptDataset(Sequence[Task]):
    """Tasks from one or more sources laid end to end; `weights` are the sources' shares (None: by size)."""

    tasks: tuple[Task, ...]
    sources: tuple[str, ...]
    sizes: tuple[int, ...]
    weights: tuple[float, ...] | None = None

    def __getitem__(self, index):
        return self.tasks[index]

    def __len__(self) -> int:
        return len(self.tasks)

    def keep(self, wanted: np.ndarray, why: str) -> PromptDataset:
        """Only the rows where `wanted` (bool) holds. Raises DataError when a source has none left, saying `why`."""
        parts = np.split(np.asarray(wanted, bool), np.cumsum(self.sizes)[:-1])
        for source, part in zip(self.sources, parts):
            if not part.any() and (len(self.sizes) == 1 or self.weights):
                raise DataError(f"{source}: no rows left, all {len(part)} were dropped ({why})")
        if not np.any(wanted):
            raise DataError(f"{', '.join(self.sources)}: no rows left, all {len(self)} were dropped ({why})")
        return replace(self, tasks=tuple(task for task, on in zip(self.tasks, wanted) if on),
                       sizes=tuple(int(part.sum()) for part in parts))

    def fingerprint(self) -> str:
        """16 hex digits over contents, order and shares; names and places of files do not count."""
        digest = hashlib.sha256(repr((self.sizes, self.weights)).encode())
        for t in self.tasks:
            text = repr((t.prompt, t.completion, t.chosen, t.rejected, t.label, t.tools, t.template_kwargs, t.columns))
            digest.update(re.sub(r" at 0x[0-9a-f]+", "", text).encode(errors="surrogatepass"))
        return digest.hexdigest()[:16]


class RewardDataset(Mapping[str, Mapping[str, Any]]):
    """The columns that reward functions receive, by task id."""

    def __init__(self, tasks: Iterable[Task]):
        self._columns = {task.id: task.columns for task in tasks}

    def __getitem__(self, task_id: str) -> Mapping[str, Any]:
        return self._columns[task_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def require(self, names: Iterable[str], who: str) -> None:
        """Raise DataError unless every task has these columns; `who` asked for them."""
        for name in names:
            lacking = next((i for i, columns in self._columns.items() if name not in columns), None)
            if lacking is not None:
                raise DataError(f"{who} needs column {name!r}, which task {lacking} does not have; "
                                f"{nearest(name, self._columns[lacking]) if self._columns[lacking] else 'it has none'}. "
                                "Another name can be mapped with data.columns")


def load(source: Any, config: DataConfig, split: str | None = None) -> PromptDataset:
    """The dataset behind a source (see `as_tasks`); a mapping {path: weight} makes a mixture."""
    if isinstance(source, PromptDataset):
        return source
    if isinstance(source, Mapping) and not hasattr(source, "with_format"):
        if not all(isinstance(weight, int | float) for weight in source.values()):
            raise DataError(f"a dict is a mixture {{path: weight}}, saw the keys {', '.join(map(str, source))}; "
                            "give rows as a list of dicts")
        parts = [(str(path), _tables(path, split)) for path in source]
        weights = tuple(float(weight) for weight in source.values())
    else:
        if not isinstance(source, str | Path) and hasattr(source, "__iter__") and not hasattr(source, "with_format"):
            source = list(source)
            if source and all(isinstance(item, Task) for item in source):
                return PromptDataset(tuple(source), ("tasks",), (len(source),))
        parts = [(_label(source), _tables(source, split))]
        weights = None
    _distinct([table for _, tables in parts for table in tables])
    rows = [[task for table in tables for task in tasks_from(table, config)] for _, tables in parts]
    return PromptDataset(tuple(task for part in rows for task in part), tuple(name for name, _ in parts),
                         tuple(len(part) for part in rows), weights)


def _label(source: Any) -> str:
    if isinstance(source, list) and source and all(isinstance(item, str | Path) for item in source):
        return ", ".join(map(str, source))
    return str(source) if isinstance(source, str | Path) else "rows"


def _tables(source: Any, split: str | None) -> list[Table]:
    if isinstance(source, str | Path):
        return read(source, split)
    if isinstance(source, list) and source and all(isinstance(item, str | Path) for item in source):
        return [table for item in source for table in read(item, split)]
    if hasattr(source, "with_format"):
        if hasattr(source, "keys"):
            raise DataError(f"a DatasetDict has splits {', '.join(source)}; pass one, e.g. dataset['train']")
        return [from_dataset(source, "dataset", "rows")]
    if isinstance(source, list):
        return [from_rows(source)]
    raise DataError(f"cannot read prompts from {type(source).__name__}; give a path, a list of dicts such as "
                    "{'prompt': ...}, or set data.train")


def _distinct(tables: list[Table]) -> None:
    """Make table names, and so task ids, unique."""
    seen: set[str] = set()
    for table in tables:
        names = chain([table.name], (f"{table.name}_{n}" for n in count(2)))
        table.name = next(name for name in names if name not in seen)
        seen.add(table.name)


def hold_out(data: PromptDataset, n: int) -> tuple[PromptDataset, PromptDataset, int]:
    """(training, evaluation, extra): n prompts leave training, the same for every seed.

    Training rows with the very prompt of a held-out one are dropped too; `extra` is their number.
    """
    if n >= len(data):
        raise DataError(f"data.eval_size: {n} of {len(data)} prompts would leave none to train on; give less")
    held = np.zeros(len(data), bool)
    held[permutation(len(data), derive_seed("hold out"), 0)[:n]] = True
    prompts = {repr(data[i].prompt) for i in np.flatnonzero(held) if data[i].prompt}
    same = np.array([repr(task.prompt) in prompts for task in data])
    evaluation = PromptDataset(tuple(data[i] for i in np.flatnonzero(held)), ("held out",), (n,))
    return data.keep(~(held | same), "data.eval_size"), evaluation, int((same & ~held).sum())


def limited(data: PromptDataset, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> tuple[PromptDataset, str, int]:
    """The dataset under data.max_prompt_tokens, a line that counts what changed ("" for nothing), its longest prompt.

    Renders and tokenises every prompt and the first row's answers, so that whatever cannot be encoded is reported
    here, by task. Raises DataError for a prompt without tokens, an over-long one (overlong: error), or no rows left.
    """
    lengths = prompt_lengths(tokenizer, data, config)
    for task, length in zip(data, lengths):
        if length == 0 and task.prompt:
            raise DataError(f"task {task.id}: the prompt {task.prompt!r:.60} has no tokens; remove the row")
    limit = config.max_prompt_tokens
    over = lengths > limit if limit is not None else np.zeros(len(data), bool)
    too_long, note = int(over.sum()), ""
    if too_long:
        row = int(np.argmax(over))
        seen = f"task {data[row].id} (row {row}): {lengths[row]} > {limit} tokens"
        if config.overlong == "error":
            raise DataError(f"data.max_prompt_tokens: {too_long} of {len(data)} prompts are too long, first {seen}; raise "
                            "it, or set data.overlong to drop or truncate_left")
        if config.overlong == "drop":
            data = data.keep(~over, f"data.max_prompt_tokens: {limit}, data.overlong: drop")
        verb = "dropped" if config.overlong == "drop" else "cut on the left"
        note = f"{too_long} {verb}, longer than {limit} tokens (first: {seen})"
    first = data[0]
    for answer in (first.completion, first.chosen, first.rejected):
        if answer is not None:
            encode_answer(tokenizer, first, answer, config)
    return data, note, int(lengths.max() if limit is None else np.minimum(lengths, limit).max())
