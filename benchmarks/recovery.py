"""From SIGKILL to the next finished step: python benchmarks/recovery.py [CONFIG.yaml] [a.b=value ...]

Starts a run with a checkpoint every step, kills it in mid generation, starts the same command again at once, and measures until
metrics.jsonl has the next step. Appends to results/recovery.<device>.jsonl.
"""

import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from shapes import record

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart" / "config.yaml"


def steps(run: Path) -> list[int]:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [row["step"] for row in (json.loads(line) for line in lines if line.endswith("}")) if "step_time" in row]


def wait(condition, process, limit: float = 600) -> None:
    deadline = time.time() + limit
    while not condition():
        if process.poll() is not None or time.time() > deadline:
            sys.exit(f"the run ended or hung: exit code {process.poll()}")
        time.sleep(0.01)


def main():
    config = next((a for a in sys.argv[1:] if a.endswith(".yaml")), str(QUICKSTART))
    overrides = [a for a in sys.argv[1:] if "=" in a]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "verl.cli.main", "train", config, f"trainer.output_dir={run}", "trainer.save.every=1",
                   "trainer.report_to=[]", "trainer.samples_every=0", "trainer.eval.every=0", *overrides]

        def start():
            return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)

        process = start()
        journal = run / "progress.journal"
        wait(lambda: 2 in steps(run) and len(list((run / "checkpoints").glob("[!.]*2"))) and journal.exists()
             and journal.stat().st_size > 2000, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
        killed, begun = steps(run)[-1], time.time()
        process = start()
        wait(lambda: steps(run)[-1] > killed, process)
        seconds = time.time() - begun
        process.kill()
        process.wait()
    print(f"killed after step {killed}, step {killed + 1} finished {seconds:.1f} s later")
    case = "quickstart" if config == str(QUICKSTART) else Path(config).stem
    device = "h200" if torch.cuda.is_available() else "cpu"
    record("recovery", case, "verl", "kill_to_next_step_s", seconds, "s", f"recovery.{device}.jsonl")


if __name__ == "__main__":
    main()
