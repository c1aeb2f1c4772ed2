"""What a run tells its owner: metrics, notes, completions, curves and a timeline."""

from verl.core.report.curves import draw_curves, read_metrics
from verl.core.report.run import Report
from verl.core.report.timeline import Timeline, draw_timeline, read_timeline, role_of, utilisation

__all__ = ["Report", "Timeline", "draw_curves", "draw_timeline", "read_metrics", "read_timeline", "role_of", "utilisation"]
