"""A run's curves from its metrics.jsonl, as one picture."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl.core.errors import DataError

_PANELS = (("Reward", r"reward"), ("Evaluation", r"eval_.+"), ("Loss", r"loss|policy_loss|value_loss"),
           ("KL to the reference (nats)", r"kl"), ("Entropy (nats)", r"entropy"),
           ("Response length (tokens)", r"completions/mean_length"))
_COLOURS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#0891b2", "#be123c")
_POINTS = 2000  # of one line; longer runs are averaged down to it


def read_metrics(run_dir: str | Path) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl, one at a time; a torn last line is left out. Raises DataError when there is no file."""
    path = Path(run_dir) / "metrics.jsonl"
    if not path.exists():
        raise DataError(f"{path} does not exist; give the directory a run writes to (trainer.output_dir)")
    with open(path, encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def draw_curves(run_dir: str | Path) -> Path:
    """Draw reward, evaluation, loss, KL, entropy and length (those the run has) to run_dir/curves.png; returns it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    series: dict[str, list[tuple[int, float]]] = {}
    for row in read_metrics(run_dir):
        for name, value in row.items():
            if any(re.fullmatch(pattern, name) for _, pattern in _PANELS):
                series.setdefault(name, []).append((row["step"], value))
    panels = [(title, [n for n in series if re.fullmatch(pattern, n)][:len(_COLOURS)]) for title, pattern in _PANELS]
    panels = [panel for panel in panels if panel[1]]
    if not panels:
        raise DataError(f"{Path(run_dir) / 'metrics.jsonl'} holds none of: reward, eval_*, loss, kl, entropy, length")
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.1 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for index, (title, names) in enumerate(panels):
        axes = figure.add_subplot(rows, columns, index + 1)
        for colour, name in zip(_COLOURS, names):
            _line(axes, *_thin(series[name]), colour, name)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("step", fontsize=8)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        if len(names) > 1:
            axes.legend(fontsize=7, frameon=False)
    path = Path(run_dir) / "curves.png"
    aside = path.with_suffix(".writing")
    figure.savefig(aside, dpi=130, format="png")
    os.replace(aside, path)
    return path


def _line(axes: Any, steps: list[float], values: list[float], colour: str, name: str) -> None:
    """The values; beyond 30 points pale, with their running mean (exponential, about a fiftieth of the run) on top."""
    if len(values) <= 30:
        axes.plot(steps, values, color=colour, linewidth=1.4, label=name, marker="o", markersize=2.5)
        return
    smooth, mean, keep = [], values[0], 1 - 1 / max(5, len(values) // 50)
    for value in values:
        mean = keep * mean + (1 - keep) * value
        smooth.append(mean)
    axes.plot(steps, values, color=colour, linewidth=0.7, alpha=0.3)
    axes.plot(steps, smooth, color=colour, linewidth=1.6, label=name)


def _thin(points: list[tuple[int, float]]) -> tuple[list[float], list[float]]:
    bucket = -(-len(points) // _POINTS)
    parts = [points[i:i + bucket] for i in range(0, len(points), bucket)]
    return [part[-1][0] for part in parts], [sum(v for _, v in part) / len(part) for part in parts]
