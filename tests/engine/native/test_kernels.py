"""The kernels' tests need Triton's interpreter, which has to be chosen before Triton is first imported."""

import os
import subprocess
import sys
from pathlib import Path


def test_kernels_in_the_interpreter():
    here = Path(__file__)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(here.with_name("interpreted_kernels.py"))]
    done = subprocess.run(command,
                          cwd=here.parents[3], env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
                          capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-4000:] + done.stderr
