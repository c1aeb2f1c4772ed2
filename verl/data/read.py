"""Files to rows of plain Python values, exact: no number passes through a float, no line splits inside a string.

JSON and CSV are read by the standard library. Columnar files are read by pyarrow and `datasets`; their structs share
one set of fields over all rows, so a field that is null is a filler and is dropped again (a null that somebody wrote
into a struct cannot be told apart there; JSONL keeps it).
"""

from __future__ import annotations

import csv
import glob
import io
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verl.core.errors import DataError

SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")


@dataclass(slots=True)
class Table:
    """The rows of one file. `lines` are 1-based line numbers where the format has lines."""

    source: str  # as shown in messages
    name: str  # safe to use in ids and file names
    rows: list[dict[str, Any]]
    lines: list[int] | None = None

    def where(self, row: int) -> str:
        """The place of a row for an error message."""
        return f"{self.source}, row {row}" + (f" (line {self.lines[row]})" if self.lines else "")


def safe_name(text: str) -> str:
    """Letters, digits, "_" and "-" only, at most 64: never a path, whatever the file was called."""
    return re.sub(r"[^\w-]", "_", text)[:64] or "rows"


def read(path: str | Path, split: str | None = None) -> list[Table]:
    """All tables behind a file, a glob, a directory of files, or a directory made by `save_to_disk`.

    Raises DataError when there is none, when a file cannot be parsed, or when a directory holds several splits and
    `split` names none. Dataset scripts are never run.
    """
    place = Path(path).expanduser()
    if place.is_file():
        return [_read_file(place)]
    if place.is_dir():
        if (place / "state.json").exists() or (place / "dataset_dict.json").exists():
            return [_read_saved(place, split)]
        return [_read_file(file) for file in _files(place, split)]
    matches = sorted(m for m in glob.glob(str(place), recursive=True) if Path(m).is_file())
    if matches:
        return [_read_file(Path(m)) for m in matches]
    raise DataError(f"{path}: no such file or directory (looked from {Path.cwd()}); give a path or glob of "
                    f"{', '.join(READERS)}, or a directory. A hub dataset has to be downloaded first: "
                    f"hf download --repo-type dataset {path} --local-dir DIR")


def _files(folder: Path, split: str | None) -> list[Path]:
    """Data files of a folder by relative path, of one split when the names tell splits apart."""
    files = sorted(f for f in folder.rglob("*") if f.suffix.lower() in READERS and f.is_file()
                   and not any(part.startswith(".") for part in f.relative_to(folder).parts))
    if not files:
        scripts = sorted(f.name for f in folder.rglob("*.py"))
        note = f"; {scripts[0]} is not run (dataset scripts never are), convert the data to JSONL" if scripts else ""
        raise DataError(f"{folder}: no data file inside; allowed: {', '.join(READERS)}{note}")
    owner = {f: next((s for part in reversed(f.relative_to(folder).parts) for s in SPLITS
                      if re.match(rf"{s}(?![a-z])", part.lower())), None) for f in files}
    named = sorted({s for s in owner.values() if s})
    if split is not None:
        files = [f for f in files if owner[f] == split or f.relative_to(folder).parts[0] == split or f.stem == split]
        if not files:
            raise DataError(f"{folder}: no file of split {split!r}; splits seen: {', '.join(named) or 'none'}")
    elif len(named) > 1:
        raise DataError(f"{folder}: holds the splits {', '.join(named)}; name one (data.split: {named[-1]})")
    return files


def _read_file(path: Path) -> Table:
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path}: unknown file type {path.suffix!r}; allowed: {', '.join(READERS)}")
    rows, lines = reader(path)
    if not rows:
        raise DataError(f"{path}: holds no rows")
    return Table(str(path), safe_name(path.stem), rows, lines)


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[:error.start].count(b"\n") + 1
        raise DataError(f"{path}, line {line}: byte 0x{error.object[error.start]:02x} is not UTF-8; "
                        f"convert the file: iconv -f latin1 -t utf-8 {path.name}") from error


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{where}: a row must be a JSON object, saw {type(value).__name__}; "
                        'write it as {"prompt": ...}')
    return value


def _read_jsonl(path: Path) -> tuple[list[dict], list[int]]:
    """One JSON object a line; lines end at LF or CRLF only, so U+2028 and friends stay inside their strings."""
    rows, lines = [], []
    for number, line in enumerate(_text(path).split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line.strip(" \t\r"):
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number} (row {len(rows)}): not valid JSON ({error}); "
                            f"saw {line[:80]!r}") from error
        rows.append(_object(value, f"{path}, line {number}"))
        lines.append(number)
    return rows, lines


def _read_json(path: Path) -> tuple[list[dict], list[int] | None]:
    """A JSON array of objects, or one object a line under the name .json."""
    text = _text(path)
    if not text.lstrip().startswith("["):
        return _read_jsonl(path)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON ({error})") from error
    return [_object(value, f"{path}, row {row}") for row, value in enumerate(values)], None


def _read_csv(path: Path) -> tuple[list[dict], list[int]]:
    """Every cell stays the text that was written; the first row names the columns."""
    limit = csv.field_size_limit(2**31 - 1)
    try:
        reader = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
        header = next(reader, [])
        if len(set(header)) < len(header):
            raise DataError(f"{path}, line 1: a column name stands twice in {header}")
        rows, lines = [], []
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                raise DataError(f"{path}, line {reader.line_num} (row {len(rows)}): {len(cells)} cells under "
                                f"{len(header)} column names; quote cells that contain commas")
            rows.append(dict(zip(header, cells)))
            lines.append(reader.line_num)
        return rows, lines
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not valid CSV ({error})") from error
    finally:
        csv.field_size_limit(limit)


def _read_parquet(path: Path) -> tuple[list[dict], None]:
    import pyarrow.parquet as pq
    return _arrow_rows(path, lambda: pq.read_table(path)), None


def _read_arrow(path: Path) -> tuple[list[dict], None]:
    """An Arrow IPC file, or the stream format that `datasets` writes under the same name."""
    import pyarrow as pa

    def load():
        with pa.memory_map(str(path)) as source:
            try:
                return pa.ipc.open_file(source).read_all()
            except pa.ArrowInvalid:
                source.seek(0)
                return pa.ipc.open_stream(source).read_all()
    return _arrow_rows(path, load), None


def _arrow_rows(path: Path, load) -> list[dict]:
    import datasets
    import pyarrow as pa
    try:
        table = load()
        # Columns that `datasets` stores encoded (its Json type) are decoded by it alone.
        encoded = b'"_type": "Json"' in (table.schema.metadata or {}).get(b"huggingface", b"")
        rows = list(datasets.Dataset(table)) if encoded else table.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as {path.suffix[1:]} ({error})") from error
    return [drop_fillers(row, top=True) for row in rows]


def _read_saved(folder: Path, split: str | None) -> Table:
    """A directory made by Dataset.save_to_disk or DatasetDict.save_to_disk."""
    from datasets import DatasetDict, load_from_disk
    data = load_from_disk(str(folder))
    if isinstance(data, DatasetDict):
        names = list(data)
        if split is None and len(names) == 1:
            split = names[0]
        if split not in names:
            said = "no split is named" if split is None else f"there is no split {split!r}"
            raise DataError(f"{folder}: {said}; set data.split to one of {', '.join(names)}")
        data = data[split]
    return from_dataset(data, str(folder), split or folder.name)


def from_dataset(data: Any, source: str, name: str) -> Table:
    """The rows of a `datasets.Dataset` in memory. Raises DataError when it is empty."""
    rows = [drop_fillers(plain(row), top=True) for row in data.with_format(None)]
    if not rows:
        raise DataError(f"{source}: holds no rows")
    return Table(source, safe_name(name), rows)


def from_rows(rows: Iterable[Mapping[str, Any]], source: str = "rows") -> Table:
    """Dicts made in Python. numpy arrays and scalars become lists and numbers. Raises DataError for anything else."""
    made = []
    for row in rows:
        if not isinstance(row, Mapping):
            raise DataError(f"{source}, row {len(made)}: expected a dict such as {{'prompt': ...}}, "
                            f"saw {type(row).__name__}")
        made.append({str(key): plain(value) for key, value in row.items()})
    if not made:
        raise DataError(f"{source}: holds no rows")
    return Table(source, safe_name(source), made)


def plain(value: Any) -> Any:
    """numpy values as Python values at any depth; what hung below an array came from columns and loses its fillers."""
    if isinstance(value, np.ndarray):
        return [drop_fillers(plain(item)) for item in value.tolist()]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def drop_fillers(value: Any, top: bool = False) -> Any:
    """Without the None fields of structs (a null column of the row itself, `top`, is a value and stays)."""
    if isinstance(value, dict):
        return {key: drop_fillers(item) for key, item in value.items() if top or item is not None}
    if isinstance(value, list):
        return [drop_fillers(item) for item in value]
    return value


READERS = {".jsonl": _read_jsonl, ".ndjson": _read_jsonl, ".json": _read_json, ".csv": _read_csv,
           ".parquet": _read_parquet, ".arrow": _read_arrow}
