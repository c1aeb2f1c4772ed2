"""Run: one training in one directory. Steps, reporting, evaluation, checkpoints, signals; no mathematics."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl.checkpoint import store
from verl.checkpoint.journal import Journal
from verl.checkpoint.lock import RunLock
from verl.core.batch import Batch
from verl.core.errors import CheckpointError
from verl.core.report import Report, Timeline, draw_curves, role_of
from verl.core.types import Finish, Group, Sample, Sampling, Scored, Task
from verl.engine.train import TrainEngine
from verl.trainer.config import RunConfig
from verl.trainer.reward_training import export_trained
from verl.trainer.sampler import Sampler, from_record, to_record

if TYPE_CHECKING:
    from verl.trainer.ahead import Source

JOURNAL_BYTES = 1 << 30  # samples kept since a checkpoint; a journal that has more starts anew with the next step


class Run:
    """Owns the output directory while it lives. Use as a context manager.

    Layout: config.yaml, manifest.json, metrics.jsonl, curves.png, completions/, checkpoints/step_N/,
    progress.journal (samples that are not trained yet), graph.json, timeline.json, model/ (the exported policy). Raises
    LockError when another live run owns the directory, CheckpointError when it holds another run's checkpoints.
    """

    def __init__(self, config: RunConfig, total_steps: int, eval_tasks: Sequence[Task] = (), callbacks: Sequence[Any] = (),
                 stop_ids: Sequence[int] = (), resolved: str = "", manifest: dict | None = None, start: int | None = None):
        self.run_config, self.config, self.total = config, config.trainer, total_steps
        self.dir = Path(self.config.output_dir)
        self.eval_tasks, self.callbacks = list(eval_tasks), list(callbacks)
        s = self.config.sampling
        self.sampling = Sampling(s.temperature, s.max_tokens, s.min_tokens, stop_ids=tuple(stop_ids), stop=tuple(s.stop))
        e = self.config.eval
        self.eval_sampling = Sampling(e.temperature, s.max_tokens, s.min_tokens, e.top_p, stop_ids=tuple(stop_ids),
                                      stop=tuple(s.stop))
        self.resolved, self.manifest = resolved, manifest or {}
        self.start = start  # set: steps go on from here and nothing is restored, saved or exported
        self.step = self.saved = start or 0  # last whole step, last step with a checkpoint
        self.found: store.Checkpoint | None = None
        self.stop_signal: int | None = None
        self.graph: list[dict] = []
        self.in_flight: Callable[[dict], Iterable[tuple[str, int, int, Sample]]] = lambda data: ()  # see `save`
        self._mark: dict | None = None  # the loader's state before the step in flight
        self._whole: tuple | None = None  # what a checkpoint of the last whole step needs beside the engines
        self._failed: Exception | None = None  # an error behind the update, raised once the step is safe

    # -- life --------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Run:
        self.dir.mkdir(parents=True, exist_ok=True)
        self.lock = RunLock(self.dir).acquire()
        try:
            if self.start is None:
                self._check_same_run()
                self.found = store.newest(self.dir / "checkpoints")
                self.step = self.saved = self.found.step if self.found else 0
            self.report = Report(self.dir, self.config.report_to, self.total, first_step=self.step + 1 if self.step else 0)
            self.journal = Journal(self.dir / "progress.journal", self._journal_key(self.saved))
            self.timeline = Timeline(self.dir / "timeline.json")
        except BaseException:
            self.lock.release()
            raise
        self._old_handlers = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._old_handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self.timeline.write()
        self.report.close()
        self.journal.close()
        self.lock.release()

    def _on_signal(self, number: int, frame: object) -> None:
        if self.stop_signal is not None:
            raise KeyboardInterrupt
        self.stop_signal = number
        print(f"\n{signal.Signals(number).name}: saving and stopping; once more to stop at once", file=sys.stderr, flush=True)

    def _journal_key(self, saved: int) -> dict:
        """Of finished samples since the checkpoint `saved`; other settings or data make other samples."""
        c, t = self.run_config, self.config
        made_by = repr((identity(c), t.optim, t.rewards, t.aggregate, t.rollout, c.model, c.data, self.manifest.get("data"),
                        self.total if t.optim.schedule != "constant" else None))
        return {"since": saved, "by": hashlib.sha256(made_by.encode()).hexdigest()}

    def _turn_journal(self, data_state: dict, saved: int) -> None:
        """Prepare the journal since `saved`: it begins with the finished samples whose places this data state has not consumed."""
        flying = self.in_flight(data_state)  # an iterator: what finishes until it is read has its place in it
        self.journal.prepare(self._journal_key(saved), lambda: (to_record(*one) for one in flying))

    @property
    def stopped(self) -> bool:
        """True once SIGINT or SIGTERM arrived; every phase looks at it."""
        return self.stop_signal is not None

    def _check_same_run(self) -> None:
        """Refuse a directory that holds another run, then write this run's config and manifest into it."""
        path = self.dir / "config.yaml"
        has_run = path.is_file() and (self.dir / "checkpoints").is_dir()
        if has_run and not self.config.resume:
            raise CheckpointError(f"{self.dir} holds a run already and trainer.resume is false; choose another trainer.output_dir, "
                                  "or set trainer.resume=true to continue it")
        fingerprint = identity(self.run_config)
        old = self.dir / "identity.json"
        if has_run and old.is_file():
            before = json.loads(old.read_text())
            changed = [k for k in fingerprint if before.get(k) != fingerprint[k]]
            if changed:
                shown = "; ".join(f"{k}: {before.get(k)} there, {fingerprint[k]} now" for k in changed[:4])
                raise CheckpointError(f"{self.dir} holds another run ({shown}); choose another trainer.output_dir")
        _replace(old, json.dumps(fingerprint, indent=1))
        _replace(path, self.resolved)
        _replace(self.dir / "manifest.json", json.dumps(self.manifest, indent=1))

    # -- the loop's services -----------------------------------------------------------------------------------------

    def steps(self, tasks) -> Iterator[int]:
        """Numbers of the steps that are left, 1-based, until the total is reached or a signal arrives."""
        while self.step < self.total and not self.stopped:
            self._mark, self._start = tasks.state(), time.perf_counter()
            if self.journal.path.exists() and self.journal.path.stat().st_size > JOURNAL_BYTES:
                self._turn_journal(self._mark, self.saved)
                self.journal.commit()
            yield self.step + 1
        self.graph and (self.dir / "graph.json").write_text(json.dumps(self.graph, indent=1))

    def verb(self, name: str, function: Callable, *args, **kwargs):
        """Call one verb of the step under its clock, and trace it once into the run's graph."""
        start = time.perf_counter()
        with self.report.clock(name), self.span(role_of(name), name):
            result = function(*args, **kwargs)
        if all(node["verb"] != name for node in self.graph):
            self.graph.append({"verb": name, "by": _owner(function), "reads": [_describe(a) for a in args],
                               "writes": _describe(result), "seconds": round(time.perf_counter() - start, 4)})
        return result

    @contextlib.contextmanager
    def span(self, role: str, name: str):
        """What runs inside keeps this role busy; any thread."""
        start, step = time.perf_counter(), min(self.step + 1, self.total)
        try:
            yield
        finally:
            self.timeline.add(role, name, start, time.perf_counter(), step)

    def state(self, step: int | None = None) -> SimpleNamespace:
        """What reward functions receive as `trainer_state` (TRL's names); `step`: the last one before that of the samples."""
        return SimpleNamespace(global_step=self.step if step is None else step, max_steps=self.total, is_world_process_zero=True)

    def shuffled(self, n: int, epoch: int) -> np.ndarray:
        """The order of a step's rows in one update epoch: a pure function of seed, step and epoch."""
        return np.random.default_rng([self.config.seed, self.step, epoch]).permutation(n)

    def report_step(self, step: int, groups: Sequence[Group], batch: Batch, metrics: dict[str, float], policy: TrainEngine) -> None:
        """Log one finished step."""
        seconds = time.perf_counter() - self._start
        metrics |= {"step_time": seconds, "num_tokens": batch.tokens, "tokens_per_second": batch.tokens / seconds,
                    "weight_version": policy.version}
        self.step, self._mark = step, None  # the step is no longer in flight
        every = self.config.samples_every
        self.timeline.write_if_due()
        with self._save_first():
            self.report.log(step, metrics)
            if every and (step == 1 or step % every == 0):
                self.report.samples(step, sample_rows(groups))
            for callback in self.callbacks:
                getattr(callback, "on_samples", _nothing)(step, groups)
                getattr(callback, "on_step", _nothing)(step, metrics)

    # -- evaluation --------------------------------------------------------------------------------------------------

    def evaluate_if_due(self, source: Source, policy: TrainEngine, step: int | None = None) -> None:
        """Evaluate before the first step, every `eval.every` steps and after the last."""
        if self.eval_tasks and self.eval_due(step or 0):
            with self._save_first() if step else contextlib.nullcontext(), source.at_rest(policy.weights()) as sampler:
                self.report.log(step or 0, self.verb("evaluate", self.evaluate, sampler, self.eval_tasks))

    def eval_due(self, step: int) -> bool:
        """True after this step (0: before the first one, where a resumed run has long been)."""
        every = self.config.eval.every
        due = self.step == 0 if step == 0 else (every and step % every == 0) or step == self.total
        return bool(due) and not self.stopped

    def evaluate(self, sampler: Sampler, tasks: Sequence[Task], name: str = "eval") -> dict[str, float]:
        """Held-out metrics with prefix eval_; the same seeds every time, so that curves compare weights, not luck."""
        sampler.scorer.trainer_state = self.state()
        groups = sampler.sample(tasks, range(len(tasks)), self.config.eval.samples, self.eval_sampling, purpose="eval")
        metrics = sampler.scorer.collect(groups)
        if self.stopped:
            return {}
        path = self.dir / "completions" / f"{name}_{self.step:06d}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(sample_rows(groups), default=str))
        out = {f"eval_{k}": v for k, v in metrics.items() if k == "reward" or k.endswith("/mean")}
        for name in sorted({n for g in groups for s in g.samples for n in s.rewards}):
            values = [[s.rewards[name].value for s in g.samples if isinstance(s.rewards.get(name), Scored)] for g in groups]
            values = [v for v in values if v]
            if values:
                out[f"eval_{name}_pass1"] = float(np.mean([np.mean(v) for v in values]))
                if self.config.eval.samples > 1:
                    out[f"eval_{name}_pass{self.config.eval.samples}"] = float(np.mean([max(v) for v in values]))
        return out

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def restore(self, tasks, policy: TrainEngine, critic: TrainEngine | None, algo):
        """Bring every part to the newest whole checkpoint; return (algorithm, finished untrained samples by task name)."""
        if self.found is not None:
            restored = store.load(self.found)
            tensors, state = restored.tensors, restored.state
            policy.load_state(tensors["policy"], state["policy"])
            if critic is not None and critic is not policy:
                critic.load_state(tensors["critic"], state["critic"])
            tasks.load_state(state["data"])
            algo = dataclasses.replace(algo, **state["algorithm"])
            self.report.note(f"resuming after step {self.step} from {self.found.path}")
        known: dict[str, dict[tuple[int, int], Sample]] = {}
        for record in self.journal.read():
            known.setdefault(record["task"], {})[(record["place"], record["number"])] = from_record(record)
        if known:
            self.report.note(f"{sum(map(len, known.values()))} finished samples of the interrupted step are kept")
        return algo, known

    def keep_sample(self, task: str = "") -> Callable[[int, int, Sample], None]:
        """A callback that writes each finished sample (of a mixture's `task`) into the journal."""
        return lambda place, number, sample: self.journal.append(to_record(task, place, number, sample))

    def save_if_due(self, step: int, tasks, policy: TrainEngine, critic: TrainEngine | None, algo) -> None:
        """Save every `save.every` steps and after the last, and before an error that came behind the update is raised."""
        every, failed, self._failed = self.config.save.every, self._failed, None
        try:
            if self.start is None and (failed or (every and step % every == 0) or step == self.total):
                self.save(tasks.state(), policy, critic, algo)
            elif self.start is None:
                self._whole = (step, tasks.state(), _versions(policy, critic), algo)
        finally:
            if failed is not None:
                raise failed

    @contextlib.contextmanager
    def _save_first(self):
        """Around what follows a step's update: its error is raised by `save_if_due`, when nothing can be lost any more."""
        try:
            yield
        except Exception as error:
            self._failed = self._failed or error

    def rescue(self, policy: TrainEngine, critic: TrainEngine | None) -> None:
        """After an error before a step's update (a reward, the sampler): save the last whole step, which the engines hold."""
        if self._whole is not None and self.saved < self.step:
            step, data_state, versions, algo = self._whole
            if step == self.step and versions == _versions(policy, critic):
                self.save(data_state, policy, critic, algo)

    def save(self, data_state: dict, policy: TrainEngine, critic: TrainEngine | None, algo) -> None:
        """Write the checkpoint of the last whole step. `in_flight(data_state)` names the finished samples (task, place, number,
        sample) that it does not count as trained: they stay in the journal."""
        self._turn_journal(data_state, self.step)
        tensors, numbers = policy.state()
        files, state = {"policy": tensors}, {"policy": numbers, "data": data_state, "algorithm": steered(algo)}
        if critic is not None and critic is not policy:
            files["critic"], state["critic"] = critic.state()
        with self.report.clock("save"), self.span("driver", "save"):
            saved = store.save(self.dir / "checkpoints", self.step, files, state, keep_last=self.config.save.keep_last)
        self.saved = self.step
        self.journal.commit()
        for callback in self.callbacks:
            getattr(callback, "on_save", _nothing)(self.step, saved.path)

    def finish(self, tasks, policy: TrainEngine, critic: TrainEngine | None, algo) -> None:
        """After the last step, or when a signal stopped the loop: save what is not saved; export; draw the curves."""
        if self.start is not None:
            return
        if self.saved < self.step:
            self.save(self._mark if self.stopped and self._mark else tasks.state(), policy, critic, algo)
        if self.stopped:
            self.report.note(f"stopped after step {self.step} of {self.total}; the same command continues from there")
        else:
            export_trained(policy.lm, algo, self.dir / "model", policy.exported())
        if (self.dir / "metrics.jsonl").stat().st_size:
            try:
                draw_curves(self.dir)
            except Exception as error:  # a picture; metrics.jsonl has the numbers
                self.report.note(f"curves.png could not be drawn ({error}); type: verl show run {self.dir}")


def _versions(policy: TrainEngine, critic: TrainEngine | None) -> tuple[int, ...]:
    """Updates the weights have seen: equal before and after means untouched."""
    return tuple(engine.version for engine in (policy, critic) if engine is not None)


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all, so that no kill and no full disk leaves half of one."""
    aside = path.with_name(f".{path.name}.writing")
    aside.write_text(text, "utf-8")
    os.replace(aside, path)


def steered(algo) -> dict[str, float]:
    """The settings that a run itself changes: the KL coefficient under a target."""
    return {"kl_coef": algo.kl_coef} if getattr(algo, "kl_target", None) is not None else {}


def identity(config: RunConfig) -> dict[str, str]:
    """What makes a run this run: settings that may not change between its beginning and a resume."""
    t = config.trainer
    return {"trainer.algorithm": t.algorithm, "trainer.algo": repr(t.algo), "trainer.seed": str(t.seed),
            "trainer.rollout_batch_size": str(t.rollout_batch_size), "trainer.group_size": str(t.samples_per_prompt),
            "trainer.train_batch_size": str(t.train_batch_size), "trainer.update_epochs": str(t.update_epochs),
            "trainer.sampling": repr(t.sampling), "model.actor": str(config.model.actor.model_name_or_path),
            "model.actor.lora": repr(config.model.actor.lora), "data.train": str(config.data.train)}


def total_steps(config: RunConfig, prompts: int) -> int:
    """Steps of the run: as set, or enough for `epochs` passes over the prompts."""
    if config.trainer.steps is not None:
        return config.trainer.steps
    return max(1, math.ceil(config.trainer.epochs * prompts / config.trainer.rollout_batch_size))


def sample_rows(groups: Sequence[Group]) -> list[dict]:
    """Prompt, completion, score and parts of every finished sample: what tables and people read."""
    rows = []
    for group in groups:
        for sample in group.samples:
            if sample.finish is Finish.ABORT:
                continue
            parts = {f"reward/{n}": r.value for n, r in sample.rewards.items() if isinstance(r, Scored)}
            rows.append({"task": group.task.id, "prompt": group.task.prompt, "completion": sample.text, "reward": sample.score,
                         "finish": str(sample.finish), "tokens": len(sample), **parts, **sample.log})
    return rows


def _owner(function: Callable) -> str:
    owner = getattr(function, "__self__", None)
    return type(owner).__name__ if owner is not None else function.__module__.rsplit(".", 1)[-1]


def _describe(value: Any) -> str:
    """A word for what a verb read or wrote: a batch with its filled columns, or a type."""
    if isinstance(value, Batch):
        columns = [n for n in value.__slots__ if n.endswith("_T") and getattr(value, n) is not None]
        return f"Batch({', '.join(columns)})"
    if isinstance(value, list) and value:
        return f"list of {type(value[0]).__name__}"
    return type(value).__name__


def _nothing(*_: Any) -> None:
    """A callback method that a callback does not have."""


def device_line() -> str:
    """The accelerator in words, for the manifest."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
