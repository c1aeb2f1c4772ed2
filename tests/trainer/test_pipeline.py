"""Sampling that overlaps training: every prompt once and in order, tokens no older than promised, nothing lost or hidden."""

import json
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from tiny_runs import curve, tiny_model, verl, verl_until, weights, workspace, write_jsonl

from verl.checkpoint import journal
from verl.core.errors import ConfigError, WorkerError
from verl.engine.native.engine import NativeEngine
from verl.models import load_lm
from verl.rewards.function import FunctionSource
from verl.trainer import GRPOTrainer, ahead
from verl.trainer.pipeline import Plan, parse

WATCH = '''
import json, pathlib

class Watch:
    """Writes what every step trained on."""
    def __init__(self):
        self.path = pathlib.Path(__file__).with_suffix(".jsonl")

    def on_samples(self, step, groups):
        self.rows = [{"task": g.task.id, "ids": [s.ids_L.tolist() for s in g.samples],
                      "versions": [s.versions_L.tolist() for s in g.samples]} for g in groups]

    def on_step(self, step, metrics):
        with open(self.path, "a") as file:
            file.write(json.dumps({"step": step, "version": metrics["weight_version"], "groups": self.rows}) + "\\n")
'''
OVERLAP = ["ahead", "stale(1)", "stale(2)", "stale(1, keep)"]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return str(workspace(tmp_path_factory.mktemp("pipeline")))


def run(config: str, out: Path, pipeline: str, *more: str):
    """A run with a watching callback in directory `out`; what the command left behind."""
    return verl(*command(config, out, pipeline, *more))


def command(config: str, out: Path, pipeline: str, *more: str) -> list[str]:
    out.mkdir(exist_ok=True)
    (out / "watch.py").write_text(WATCH)
    return ["train", config, f"trainer.pipeline={pipeline}", f"trainer.output_dir={out / 'run'}",
            f"trainer.callbacks=['{out / 'watch.py'}:Watch']", *more]


def seen(out: Path) -> list[dict]:
    """What was trained, by step; the last line may be half written while the run lives."""
    return [json.loads(line) for line in (out / "watch.jsonl").read_text().splitlines(keepends=True) if line.endswith("\n")]


def tasks(out: Path) -> list[list[str]]:
    return [[g["task"] for g in row["groups"]] for row in seen(out)]


def lags(out: Path) -> list[set[int]]:
    """For each step, how many updates older than the weights it trained its tokens are."""
    before = [0, *[int(row["version"]) for row in seen(out)]]
    return [{now - v for g in row["groups"] for s in g["versions"] for v in s} for now, row in zip(before, seen(out))]


@pytest.fixture(scope="module")
def in_step(config, tmp_path_factory):
    out = tmp_path_factory.mktemp("step")
    assert run(config, out, "step", "trainer.steps=5", "trainer.sampling.max_tokens=20").returncode == 0
    return out


def test_the_setting_is_read_in_one_place():
    assert parse("step") == Plan("step", 0, False) and parse(" ahead ") == Plan("ahead", 1, False)
    assert parse("stale(3)") == Plan("stale", 3, False) and parse("stale( 1 , keep )") == Plan("stale", 1, True)
    for text in ("stale", "stale(0)", "stale(-1)", "ahead(2)", "async", ""):
        with pytest.raises(ConfigError, match=r"allowed: step .*ahead.*stale\(k\)"):
            parse(text)


@pytest.mark.parametrize("pipeline, extra, words", [
    ("ahead", ["trainer.algorithm=hybrid", "trainer.tasks=[grpo]"], "take turns at one sampler"),
    ("ahead", ["trainer.algorithm=sft", "data.train={sft}", "data.eval=null"], "sft samples nothing"),
    ("stale(1)", ["trainer.algorithm=remax"], "greedy answer"), ("stale(2)", ["trainer.algorithm=dapo"], "dynamic sampling"),
    ("stale(1)", ["trainer.rollout.engine=hf"], "HFEngine does not")])
def test_what_cannot_overlap_is_refused_by_name(config, tmp_path, pipeline, extra, words):
    sft = write_jsonl(tmp_path / "sft.jsonl", [{"prompt": "a", "completion": "b"} for _ in range(8)])
    done = run(config, tmp_path, pipeline, *[e.format(sft=sft) for e in extra])
    assert done.returncode == 2 and words in done.stderr, done.stderr


@pytest.mark.parametrize("pipeline", OVERLAP)
def test_every_prompt_is_trained_once_in_order_and_no_token_is_later_than_promised(config, tmp_path, in_step, pipeline):
    done = run(config, tmp_path, pipeline, "trainer.steps=5", "trainer.sampling.max_tokens=20", "trainer.eval.every=2",
               "trainer.save.every=2")
    assert done.returncode == 0, done.stderr
    assert tasks(tmp_path) == tasks(in_step)
    late = lags(tmp_path)
    if pipeline == "ahead":
        assert late == [{0}, {1}, {1}, {1}, {1}]
    else:
        assert all(0 <= lag <= parse(pipeline).lag for step in late for lag in step) and any(1 in step for step in late)
    assert [v for _, v in curve(tmp_path / "run", "sampling/lag/max")] == [max(step) for step in late]
    assert "on its own copy of the weights" in done.stdout and "token_truncate, ratios 0 to 2" in done.stdout
    assert [s for s, _ in curve(tmp_path / "run", "eval_reward")] == [0, 2, 4, 5]


@pytest.fixture(scope="module")
def still(config, tmp_path_factory):
    out = tmp_path_factory.mktemp("still")
    assert run(config, out, "step", "trainer.optim.lr=0", "trainer.steps=3").returncode == 0
    return out


@pytest.mark.parametrize("pipeline", ["ahead", "stale(2)"])
def test_without_learning_it_equals_the_run_in_step(config, tmp_path, still, pipeline):
    assert run(config, tmp_path, pipeline, "trainer.optim.lr=0", "trainer.steps=3").returncode == 0
    for one, other in zip(seen(still), seen(tmp_path), strict=True):
        assert [(g["task"], g["ids"]) for g in one["groups"]] == [(g["task"], g["ids"]) for g in other["groups"]]
    for name in ("reward", "loss", "grad_norm", "completions/mean_length"):
        assert curve(still / "run", name) == curve(tmp_path / "run", name), name


def verbs(out: Path) -> list[str]:
    return [node["verb"] for node in json.loads((out / "run" / "graph.json").read_text())]


@pytest.mark.parametrize("pipeline, extra, old", [
    ("ahead", ["trainer.algorithm=ppo", "trainer.train_batch_size=8"], True),
    ("stale(1)", ["trainer.algorithm=reinforce_pp"], True),  # one update, but the penalty in the reward is the policy's own
    ("ahead", ["trainer.algorithm=remax"], False), ("ahead", ["trainer.algorithm=dapo"], False),
    ("ahead", ["trainer.algorithm=dpo"], False),
    ("stale(1)", ["model.actor.lora.rank=4", "trainer.algo.correction=none"], False),
    ("ahead", ["trainer.rollout.engine=hf"], False)], ids=lambda v: v[0] if isinstance(v, list) else None)
def test_methods_and_engines_that_overlap(config, tmp_path, pipeline, extra, old):
    done = run(config, tmp_path, pipeline, "trainer.steps=3", *extra)
    assert done.returncode == 0, done.stderr
    assert ("old_logprobs" in verbs(tmp_path)) is old
    assert all(lag <= 1 or "ppo" in extra[0] and lag <= 2 for step in lags(tmp_path) for lag in step)
    line = {"dpo": "dpo weighs no tokens", "rank=4": "correction: none"}
    assert next((text for word, text in line.items() if extra[0].endswith(word)), "weighed by importance") in done.stdout


def test_a_kill_in_mid_generation_ahead_then_resume_equals_the_uninterrupted_run(config, tmp_path):
    args = ["trainer.steps=6", "trainer.save.every=2", "trainer.sampling.max_tokens=24"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run(config, whole, "ahead", *args).returncode == 0
    code, out = verl_until(*command(config, killed, "ahead", *args), sig=signal.SIGKILL,
                           ready=lambda: (killed / "watch.jsonl").exists() and len(seen(killed)) >= 3)
    assert code == -signal.SIGKILL, out
    resumed = run(config, killed, "ahead", *args)
    assert resumed.returncode == 0 and "resuming after step" in resumed.stdout, resumed.stderr
    assert "finished samples of the interrupted step are kept" in resumed.stdout
    a, b = weights(whole / "run"), weights(killed / "run")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert curve(whole / "run") == curve(killed / "run")


@pytest.mark.parametrize("pipeline, sig", [("ahead", signal.SIGINT), ("stale(1)", signal.SIGTERM)])
def test_a_stop_with_work_in_flight_loses_no_finished_sample_and_trains_none_twice(config, tmp_path, in_step, pipeline, sig):
    args = ["trainer.steps=5", "trainer.save.every=1", "trainer.sampling.max_tokens=48", "data.eval=null",
            "trainer.rewards=[{function: 'my.py:slow_digits'}]"]
    stopped = tmp_path / "stopped"
    path = stopped / "run" / "progress.journal"

    def ahead_of_training() -> bool:
        """Samples of a step that is not trained are finished; its scores take a while."""
        steps = len(seen(stopped)) if (stopped / "watch.jsonl").exists() else 0
        return steps >= 2 and any("place" in r and r["place"] >= 4 * steps for r, _ in journal._records(path))

    code, out = verl_until(*command(config, stopped, pipeline, *args), sig=sig, ready=ahead_of_training)
    assert code == 128 + sig, out
    step = max(json.loads(m.read_text())["step"] for m in (stopped / "run" / "checkpoints").glob("step_*/manifest.json"))
    (key, _), *rest = journal._records(path)
    records = [record for record, _ in rest]
    assert key["since"] == step and records and all(r["place"] >= 4 * step for r in records)
    resumed = run(config, stopped, pipeline, *args)
    assert resumed.returncode == 0, resumed.stderr
    kept = {(r["place"], r["number"]): r["ids"].tolist() for r in records}
    assert f"{len(kept)} finished samples" in resumed.stdout
    trained = {row["step"]: [g["task"] for g in row["groups"]] for row in seen(stopped)}
    assert [trained[i] for i in sorted(trained)] == tasks(in_step)
    for row in [row for row in seen(stopped) if row["step"] > step][-(5 - step):]:
        for place, group in enumerate(row["groups"], 4 * (row["step"] - 1)):
            for number, ids in enumerate(group["ids"]):
                assert kept.get((place, number), ids) == ids, "a finished sample was made again"


LATE = '''
import os
def late(completions, trainer_state, **_):
    if trainer_state.global_step >= 3 and not os.path.exists(__file__ + ".fixed"):
        raise ConnectionError("the judge is down")
    return [float(len(c)) for c in completions]
'''


@pytest.mark.parametrize("pipeline", ["ahead", "stale(1)"])
def test_an_error_in_the_background_is_the_runs_error_and_costs_no_finished_step(config, tmp_path, pipeline):
    (tmp_path / "late.py").write_text(LATE)
    args = ["trainer.steps=6", f"trainer.rewards=[{{function: '{tmp_path / 'late.py'}:late'}}]", "data.eval=null"]
    failed = run(config, tmp_path, pipeline, *args)
    assert failed.returncode == 1 and "the judge is down" in failed.stderr and "reward" in failed.stderr
    steps = [row["step"] for row in seen(tmp_path)]
    saved = [json.loads(m.read_text())["step"] for m in (tmp_path / "run" / "checkpoints").glob("step_*/manifest.json")]
    assert saved == [steps[-1]] and 2 <= steps[-1] <= 3 + (pipeline != "ahead")  # its samples may have been scored earlier
    (tmp_path / "late.py.fixed").touch()
    assert run(config, tmp_path, pipeline, *args).returncode == 0
    assert [row["step"] for row in seen(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert len({t for step in tasks(tmp_path) for t in step}) == 24


class Broken(NativeEngine):
    """The built-in engine, until its third call fails; under `hang`, late."""

    calls, hang = 0, 0.0

    def apart(self, keep_kv=False):
        own = super().apart(keep_kv)
        own.__class__ = type(self)
        return own

    def generate(self, *args, **kwargs):
        Broken.calls += 1
        if Broken.calls == 3:
            time.sleep(self.hang)
            raise RuntimeError("the device fell off")
        return super().generate(*args, **kwargs)


def lengths(completions, **_):
    return [float(len(c)) for c in completions]


def objects(lm, tmp_path, engine=None, **settings):
    return GRPOTrainer(actor=lm, rollout_engine=engine, reward_fn=lengths, config={
        "rollout_batch_size": 4, "group_size": 4, "sampling": {"max_tokens": 8}, "report_to": [],
        "output_dir": str(tmp_path / "out"), **settings})


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return load_lm(str(tiny_model(tmp_path_factory.mktemp("model"))), "float32")


PROMPTS = [{"prompt": f"{i} and {i}"} for i in range(10)]


@pytest.mark.parametrize("hang, words", [(0.0, "the device fell off"), (4.0, "no sign of life")])
def test_an_engine_that_fails_or_hangs_ends_the_run(lm, tmp_path, monkeypatch, hang, words):
    threads = threading.active_count()
    monkeypatch.setattr(Broken, "calls", 0)
    monkeypatch.setattr(Broken, "hang", hang)
    monkeypatch.setattr(ahead, "STALL_S", 1.0 - FunctionSource(lengths).limit_s(32))
    with pytest.raises((RuntimeError, WorkerError), match=words):
        objects(lm, tmp_path, Broken(lm), pipeline="ahead").train_epoch(PROMPTS * 2)
    assert threading.active_count() < threads + 20


def test_epochs_from_objects_overlap_up_to_their_border(lm, tmp_path):
    trainer = objects(lm, tmp_path, pipeline="ahead")
    for steps in (3, 6):
        assert trainer.train_epoch(PROMPTS)["sampling/lag/max"] == 1.0
        assert len(curve(tmp_path / "out")) == steps
    with pytest.raises(ConfigError, match="end of an epoch"):
        objects(lm, tmp_path / "b", pipeline="stale(1)").train_epoch(PROMPTS)
