"""The terminal: a live panel where there is one, plain lines where output is a file or a CI log."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_BARS = "▁▂▃▄▅▆▇█"
_HEADLINE = ("reward", "eval_reward", "loss", "policy_loss")  # the first of these that a run logs is its curve


class Curve:
    """A whole curve in at most 2 x `size` points: when full, neighbours are averaged and each point covers twice as much."""

    def __init__(self, size: int = 64):
        self.size, self.stride, self.points, self._pending = size, 1, [], []

    def add(self, value: float) -> None:
        self._pending.append(value)
        if len(self._pending) == self.stride:
            self.points.append(sum(self._pending) / self.stride)
            self._pending = []
        if len(self.points) == 2 * self.size:
            self.points = [(a + b) / 2 for a, b in zip(self.points[::2], self.points[1::2])]
            self.stride *= 2

    def sparkline(self, width: int = 40) -> str:
        """Block characters from the lowest to the highest point; a flat curve is a low line."""
        if not self.points:
            return ""
        cells = min(width, len(self.points))
        means = []
        for i in range(cells):
            part = self.points[i * len(self.points) // cells:(i + 1) * len(self.points) // cells]
            means.append(sum(part) / len(part))
        low, high = min(means), max(means)
        return "".join(_BARS[round((m - low) / (high - low) * 7) if high > low else 0] for m in means)


class Display:
    """Shows step k/N, the headline metric with its curve, tokens/s, step time and time left."""

    def __init__(self, total_steps: int | None, live: bool | None = None):
        if live is None:
            live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and "CI" not in os.environ
        self.total, self.step, self.phase = total_steps, None, ""
        self.latest: dict[str, float] = {}
        self.headline: str | None = None
        self.curve = Curve()
        self.seconds: deque[float] = deque(maxlen=20)
        self._since = time.monotonic()
        self.console = Console(force_terminal=True) if live else None
        self.live = Live(get_renderable=self._panel, console=self.console, refresh_per_second=4) if live else None
        if self.live:
            self.live.start()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.step is not None and step > self.step:
            now = time.monotonic()
            self.seconds.append((now - self._since) / (step - self.step))
            self._since = now
        elif self.step is None:
            self._since = time.monotonic()
        self.step = step
        self.headline = self.headline or next((name for name in _HEADLINE if name in metrics), None)
        if self.headline in metrics:
            self.curve.add(metrics[self.headline])
        shown = (*_HEADLINE, "kl", "tokens_per_second", "step_time")
        self.latest |= {name: value for name, value in metrics.items() if name in shown}
        if not self.live:
            self.print(self._line(step, metrics))

    def _facts(self) -> list[tuple[str, str]]:
        """(name, value) of what is known about speed."""
        facts = []
        if "tokens_per_second" in self.latest:
            facts.append(("tokens/s", f"{self.latest['tokens_per_second']:,.0f}"))
        if self.seconds or "step_time" in self.latest:
            mean = sum(self.seconds) / len(self.seconds) if self.seconds else self.latest["step_time"]
            facts.append(("s/step", f"{self.latest.get('step_time', mean):.3g}"))
            if self.total is not None and self.step is not None:
                facts.append(("left", duration(mean * max(0, self.total - self.step))))
        return facts

    def _line(self, step: int, metrics: Mapping[str, float]) -> str:
        own = [name for name in metrics if name in (*_HEADLINE, "kl") or name.startswith("eval_")][:6]
        parts = [f"step {step}" + (f"/{self.total}" if self.total else "")]
        parts += [f"{name} {metrics[name]:.4g}" for name in own]
        if self.headline in metrics:
            parts += [f"{name} {value}" for name, value in self._facts()]
        return " | ".join(parts)

    def _panel(self) -> Panel:
        grid = Table.grid(padding=(0, 2))
        grid.add_row("step", f"{self.step if self.step is not None else '-'}" + (f" / {self.total}" if self.total else ""))
        if self.headline:
            grid.add_row(self.headline, f"[bold]{self.latest[self.headline]:.4g}[/]  [green]{self.curve.sparkline()}[/]")
        for name, value in self._facts():
            grid.add_row(name, value)
        if self.phase:
            grid.add_row("now", self.phase)
        bar = [ProgressBar(self.total, self.step or 0)] if self.total else []
        return Panel(Group(grid, *bar), title="verl", title_align="left", border_style="dim")

    def sample(self, step: int, row: Mapping[str, Any]) -> None:
        """One row in readable form: long texts shortened, control characters (a model can print any) shown as text."""
        self.print(f"--- a sample of step {step}")
        for name, value in row.items():
            text = value if isinstance(value, str) else _conversation(value)
            text = text if len(text) <= 600 else f"{text[:300]} [... {len(text) - 600} characters ...] {text[-300:]}"
            self.print(f"{name}: {text}")
        self.print("---")

    def print(self, text: str) -> None:
        text = printable(text)
        if self.console:
            self.console.print(Text(text))
        else:
            print(text, flush=True)

    def close(self) -> None:
        if self.live:
            self.live.stop()


def _conversation(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(m, Mapping) and "content" in m for m in value):
        return "\n".join(f"[{m.get('role', '?')}] {m['content']}" for m in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def printable(text: str) -> str:
    """The text with control characters other than newline and tab escaped, so that no terminal obeys it."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape", "backslashreplace").decode()
                   for c in text)


def duration(seconds: float) -> str:
    """`45s`, `12m 03s`, `3h 05m`, `2d 04h`."""
    s = int(seconds)
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m {s % 60:02d}s"
    return f"{s // 3600}h {s % 3600 // 60:02d}m" if s < 86400 else f"{s // 86400}d {s % 86400 // 3600:02d}h"
