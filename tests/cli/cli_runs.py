"""The tiny workspace of the trainer's tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))

from tiny_runs import verl, workspace  # noqa: E402

__all__ = ["verl", "workspace"]
