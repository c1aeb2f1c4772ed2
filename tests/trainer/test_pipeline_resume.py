"""A job killed again and again, at any moment, under every pipeline: no finished sample is lost, no prompt is trained twice."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_runs import curve, weights, workspace

from verl.checkpoint import journal

STEPS, PROMPTS, SAMPLES = 4, 4, 16  # of a run; of a step
LIVES = '''
"""Runs the command in a process of its own for every line of arguments; imports are made once."""
import json, os, sys
import transformers.models.llama.modeling_llama
import verl.engine.native.engine, verl.trainer.rl_trainer
from verl.cli.main import main

for line in sys.stdin:
    args, log = json.loads(line)
    child = os.fork()
    if child == 0:
        for stream in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        os._exit(main(args))
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
'''
REWARD = '''
import os, pathlib

def digits(completions, **_):
    """Tells in a file that a sample was finished; slow enough for a kill to come between."""
    file = os.open(pathlib.Path(__file__).with_name("scored"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, b"." * len(completions))
    os.close(file)
    return [sum(ch.isdigit() for ch in c[-1]["content"]) / 8 for c in completions]
'''
WATCH = '''
import json, pathlib, time

class Watch:
    """Writes what every step trained on. Before the first checkpoint, it lets the sampler finish what it may."""
    def __init__(self):
        self.scored = pathlib.Path(__file__).with_name("scored")
        self.before = self.scored.stat().st_size if self.scored.exists() else 0

    def on_samples(self, step, groups):
        row = {"step": step, "tasks": [g.task.id for g in groups], "ids": [[s.ids_L.tolist() for s in g.samples] for g in groups],
               "versions": [[s.versions_L.tolist() for s in g.samples] for g in groups]}
        with open(pathlib.Path(__file__).with_name("trained.jsonl"), "a") as file:
            file.write(json.dumps(row) + "\\n")
        until = time.monotonic() + 20
        while step == 2 and self.scored.stat().st_size < self.before + EXPECTED and time.monotonic() < until:
            time.sleep(0.01)
'''


class Lives:
    """Starts lives of a job, and ends them."""

    def __init__(self):
        self.process = subprocess.Popen([sys.executable, "-c", LIVES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        env=os.environ | {"OMP_NUM_THREADS": "1", "CI": "1"})

    def run(self, args: list[str], log: Path, kill_when: Callable[[], bool] | None = None) -> int:
        """The exit code of the command; it is killed (-9) as soon as that is true."""
        self.process.stdin.write(json.dumps([args, str(log)]) + "\n")
        self.process.stdin.flush()
        pid, until = int(self.process.stdout.readline()), time.monotonic() + 200
        while kill_when is not None and os.path.exists(f"/proc/{pid}/exe"):
            if kill_when():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                break
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.001)
        return int(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(60)


@pytest.fixture(scope="module")
def lives():
    lives = Lives()
    yield lives
    lives.close()


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return str(workspace(tmp_path_factory.mktemp("kills")))


def command(config: str, out: Path, pipeline: str) -> list[str]:
    out.mkdir()
    (out / "my.py").write_text(REWARD)
    (out / "watch.py").write_text(WATCH.replace("EXPECTED", str(SAMPLES * (2 if pipeline == "step" else 3))))
    return ["train", config, f"trainer.pipeline={pipeline}", f"trainer.output_dir={out / 'run'}", f"trainer.steps={STEPS}",
            "trainer.save.every=2", "trainer.sampling.max_tokens=20", "data.eval=null", "trainer.samples_every=0",
            f"trainer.callbacks=['{out / 'watch.py'}:Watch']", f"trainer.rewards=[{{function: '{out / 'my.py'}:digits'}}]"]


def trained(out: Path) -> list[dict]:
    """What each step trained on in the life that counts: the last one that reports it."""
    rows = (out / "trained.jsonl").read_text().splitlines() if (out / "trained.jsonl").exists() else []
    last = {row["step"]: row for row in map(json.loads, rows)}
    return [last[step] for step in sorted(last)]


def scored(out: Path) -> int:
    return (out / "scored").stat().st_size if (out / "scored").exists() else 0


def checkpointed(out: Path) -> int:
    """The step of the newest checkpoint; 0 without one."""
    return max((json.loads(m.read_text())["step"] for m in (out / "run" / "checkpoints").glob("step_*/manifest.json")), default=0)


def finished(out: Path) -> dict[tuple[int, int], list[int]]:
    """(place, number) -> ids of the samples that the killed run had finished since its newest checkpoint."""
    newest = checkpointed(out)
    for name in ("progress.journal", "progress.journal.next"):
        (key, _), *rest = [*journal._records(out / "run" / name)] or [({"since": None}, 0)]
        if key["since"] == newest:
            assert all(r["place"] >= newest * PROMPTS for r, _ in rest), "a trained place is kept"
            return {(r["place"], r["number"]): r["ids"].tolist() for r, _ in rest}
    return {}


@pytest.fixture(scope="module")
def whole(lives, config, tmp_path_factory):
    """Runs that nothing disturbed."""
    made = {}

    def run(pipeline: str) -> Path:
        if pipeline not in made:
            made[pipeline] = out = tmp_path_factory.mktemp("whole") / "out"
            assert lives.run(command(config, out, pipeline), out / "log") == 0, (out / "log").read_text()
        return made[pipeline]

    return run


@pytest.mark.parametrize("pipeline", ["step", "ahead", "stale(1)"])
def test_killed_twice(lives, config, whole, tmp_path, pipeline):
    """The first time anywhere in its first two steps, the second time as soon as there is a new checkpoint."""
    out, kept = tmp_path / "out", {}
    args = command(config, out, pipeline)
    for kill in range(2):
        before, start = scored(out), checkpointed(out)
        enough = before + random.Random(pipeline).randint(1, 2 * SAMPLES)
        code = lives.run(args, out / "log", lambda kill=kill, start=start, enough=enough:
                         checkpointed(out) > start if kill else scored(out) >= enough)
        assert code == -signal.SIGKILL, (out / "log").read_text()
        now = finished(out)
        assert len(now) >= scored(out) - before - SAMPLES * (checkpointed(out) - start) - 1, "a finished sample is not kept"
        assert not [key for key in now.keys() & kept if now[key] != kept[key]], "finished before the last kill, and made again"
        kept |= now
    assert lives.run(args, out / "log") == 0, (out / "log").read_text()
    rows = trained(out)
    assert [row["step"] for row in rows] == [s for s, _ in curve(out / "run")] == list(range(1, STEPS + 1))
    assert [row["tasks"] for row in rows] == [row["tasks"] for row in trained(whole("step"))], "every prompt once, in order"
    for (place, number), ids in kept.items():
        step, i = divmod(place, PROMPTS)
        assert step >= STEPS or rows[step]["ids"][i][number] == ids, f"sample {number} of place {place} was finished and is lost"
    lags = [{step - v for group in row["versions"] for versions in group for v in versions} for step, row in enumerate(rows)]
    assert all(0 <= lag <= (pipeline != "step") for step in lags for lag in step), lags
    if pipeline != "stale(1)":  # where time does not decide which weights make a token, the result is the same too
        a, b = weights(out / "run"), weights(whole(pipeline) / "run")
        assert all(torch.equal(a[name], b[name]) for name in a)
        assert curve(out / "run") == curve(whole(pipeline) / "run")
