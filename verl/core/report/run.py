"""Report: one object that every loop writes to.

In the run directory: `metrics.jsonl` (a line for each `log`), `notes.txt`, `completions/step_000012.parquet`,
`tensorboard/`. Everything held in memory is bounded; metric values are plain floats from the door on.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl.core.errors import ConfigError
from verl.core.report.display import Display
from verl.core.report.sinks import SINKS, redact


class Report:
    """Metrics to `metrics.jsonl` and to `sinks`, progress to the terminal, completions to parquet.

    `first_step` is the first step this process will log: older lines from that step on (of a run that was killed and
    resumes) are cut away, so a curve has no step twice. `sinks` are names (tensorboard, wandb, mlflow, trackio) or
    `module:Class`. Raises ConfigError when a sink's package is missing. One process of a run holds a Report.
    """

    def __init__(self, run_dir: str | Path, sinks: Sequence[str] = (), total_steps: int | None = None, *,
                 first_step: int = 0, config: Mapping[str, Any] | None = None, live: bool | None = None):
        self.dir = Path(run_dir)
        self.dir.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._clocks: dict[str, float] = {}
        self._notes: set[str] = set()
        self._metrics = self.dir / "metrics.jsonl"
        _cut(self._metrics, first_step)
        self._file = open(self._metrics, "a", encoding="utf-8")
        self._sinks = {name: _open_sink(name, self.dir, first_step, dict(config or {})) for name in sinks}
        self.display = Display(total_steps, live)

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write one line. Scalars of torch and numpy become floats; None, NaN and infinities are left out.

        Seconds that `clock` collected since the last call are added as `timing/<name>`. Raises TypeError for a value
        that is not one number.
        """
        with self._lock:
            clocks, self._clocks = self._clocks, {}
        values = {name: _number(name, value) for name, value in metrics.items()}
        values |= {f"timing/{name}": seconds for name, seconds in clocks.items()}
        values = {name: value for name, value in values.items() if value is not None}
        self._file.write(json.dumps({"step": int(step), "time": round(time.time(), 3), **values}, allow_nan=False) + "\n")
        self._file.flush()
        for name, sink in list(self._sinks.items()):
            try:
                sink.log(int(step), values)
            except Exception as error:  # a tracker's server must not end a run; the JSONL file is the record
                del self._sinks[name]
                self.note(f"{name} stopped taking metrics ({redact(str(error)):.200}); metrics.jsonl goes on")
        self.display.update(int(step), values)

    def note(self, text: str) -> None:
        """Print a line once, however often it is said, and keep it in notes.txt."""
        if text in self._notes:
            return
        self._notes.add(text)
        with open(self.dir / "notes.txt", "a", encoding="utf-8") as file:
            file.write(text + "\n")
        self.display.print(text)

    @contextmanager
    def clock(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside to `timing/<name>` of the next `log`; threads may nest and overlap."""
        self.display.phase = name
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            with self._lock:
                self._clocks[name] = self._clocks.get(name, 0.0) + spent

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> Path:
        """Write rows (`prompt`, `completion`, `reward`, ...) to completions/step_<step>.parquet; print the first.

        Columns without one arrow type are stored as JSON text. Returns the file.
        """
        import pyarrow
        import pyarrow.parquet

        columns = {name: _column([row.get(name) for row in rows])
                   for name in dict.fromkeys(key for row in rows for key in row)}
        path = self.dir / "completions" / f"step_{step:06d}.parquet"
        path.parent.mkdir(exist_ok=True)
        aside = path.with_suffix(".writing")
        pyarrow.parquet.write_table(pyarrow.table(columns), aside)
        os.replace(aside, path)
        if rows:
            self.display.sample(step, rows[0])
        return path

    def close(self) -> None:
        """End the display, flush and close every sink. Idempotent."""
        self.display.close()
        for name, sink in self._sinks.items():
            try:
                sink.close()
            except Exception as error:  # as in `log`
                self.note(f"{name} did not close ({redact(str(error)):.200}); metrics.jsonl is whole")
        self._sinks = {}
        self._file.close()


def _number(name: str, value: Any) -> float | None:
    """A finite plain float, or None for what no log should hold."""
    if value is None:
        return None
    if getattr(value, "ndim", 0) or isinstance(value, (str, bytes)):
        raise TypeError(f"metric {name!r}: expected one number, got {type(value).__name__} "
                        f"{getattr(value, 'shape', repr(value))}")
    number = float(value.item() if hasattr(value, "item") else value)
    return number if math.isfinite(number) else None


def _cut(path: Path, first_step: int) -> None:
    """Drop lines of `first_step` and later, and a torn last line, in one atomic replacement."""
    if not path.exists():
        return
    aside = path.with_suffix(".writing")
    with open(path, encoding="utf-8", errors="replace") as old, open(aside, "w", encoding="utf-8") as new:
        for line in old:
            try:
                keep = json.loads(line)["step"] < first_step
            except (ValueError, KeyError, TypeError):
                keep = False
            if keep:
                new.write(line.rstrip("\n") + "\n")
        new.flush()
        os.fsync(new.fileno())
    os.replace(aside, path)


def _open_sink(name: str, run_dir: Path, first_step: int, config: dict[str, Any]) -> Any:
    kind = SINKS[name]
    id_file = run_dir / "run_id"
    if not id_file.exists():
        id_file.write_text(uuid.uuid4().hex[:12])
    try:
        return kind(run_dir, id_file.read_text().strip(), first_step, config)
    except ModuleNotFoundError as error:
        raise ConfigError(f"report_to: {name!r} needs the package {error.name!r}, which is not installed; "
                          f"type `pip install {error.name}` or leave {name!r} out") from error


def _column(values: list[Any]) -> Any:
    """An arrow array; values of mixed or free form become JSON text, invalid text is repaired."""
    import pyarrow

    if any(isinstance(v, (Mapping, list, tuple)) for v in values):
        return pyarrow.array([None if v is None else json.dumps(v, default=str) for v in values], pyarrow.string())
    try:
        return pyarrow.array(_repaired(values))
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, pyarrow.ArrowNotImplementedError):
        return pyarrow.array(list(_repaired(None if v is None else str(v) for v in values)), pyarrow.string())


def _repaired(values: Iterable[Any]) -> list[Any]:
    return [v.encode("utf-8", "replace").decode() if isinstance(v, str) else v for v in values]
