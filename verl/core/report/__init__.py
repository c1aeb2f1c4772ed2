"""What a run tells its owner: metrics, notes, completions and curves."""

from verl.core.report.curves import draw_curves, read_metrics
from verl.core.report.run import Report

__all__ = ["Report", "draw_curves", "read_metrics"]
