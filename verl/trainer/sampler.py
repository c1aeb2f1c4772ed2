"""Sampler: tasks in, scored groups out. Binds tokenizer, rollout engine, reward scorer and the journal of this step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from verl.core.errors import WeightsError
from verl.core.types import Finish, Group, Request, Sample, Sampling, Task, derive_seed
from verl.core.weights import Weights
from verl.data.chat import encode_prompt
from verl.data.config import DataConfig
from verl.engine.base import RolloutEngine
from verl.rewards.scorer import Scorer


@dataclass(slots=True)
class Sampler:
    """Turns tasks into scored groups under one weights version.

    Seeds are a pure function of (run seed, purpose, place in the stream, sample number), so what a prompt gets does not
    depend on batch, neighbours, worker or resume. `known` holds samples of an interrupted step by (place, number):
    they are not generated again.
    """

    engine: RolloutEngine
    tokenizer: object
    data: DataConfig
    scorer: Scorer
    seed: int
    on_finished: Callable[[int, int, Sample], None] | None = None  # (place, number, sample), for the journal
    cancelled: Callable[[], bool] | None = None
    known: dict[tuple[int, int], Sample] = field(default_factory=dict)
    loaded: int | None = None  # version in force

    def load(self, weights: Weights) -> None:
        """Put these weights in force for every sample until the next load; the version in force is not sent again."""
        if self.loaded == weights.version:
            return
        receipt = self.engine.load_weights(weights)
        if receipt.version != weights.version:
            raise WeightsError(f"the rollout engine answers with version {receipt.version}, the trainer sent {weights.version}")
        self.loaded = weights.version

    def sample(self, tasks: Sequence[Task], first_place: int, n: int, sampling: Sampling, purpose: str = "train") -> list[Group]:
        """n samples for each task, decoded and handed to the scorer as they finish; tasks[i] stands at first_place + i.

        Groups come in task order. When cancelled, unfinished samples have finish ABORT.
        """
        journalled = purpose == "train"
        groups, requests, numbers = [], [], {}
        for place, task in enumerate(tasks, first_place):
            group = Group(task, encode_prompt(self.tokenizer, task, self.data), [None] * n)
            groups.append(group)
            missing = []
            for i in range(n):
                sample = self.known.pop((place, i), None) if journalled else None
                if sample is None:
                    missing.append(i)
                else:
                    group.samples[i] = sample
                    self._finished(task, sample)
            if missing:
                seeds = tuple(derive_seed(self.seed, purpose, place, i) for i in missing)
                numbers[str(place)] = missing
                requests.append(Request(str(place), group.prompt_ids, seeds))

        def on_sample(key: str, index: int, sample: Sample) -> None:
            place, number = int(key), numbers[key][index]
            if sample.finish is not Finish.ABORT:
                if journalled and self.on_finished is not None:
                    self.on_finished(place, number, sample)
                self._finished(tasks[place - first_place], sample)

        results = self.engine.generate(requests, sampling, on_sample, self.cancelled) if requests else []
        for request, samples in zip(requests, results, strict=True):
            for number, sample in zip(numbers[request.key], samples, strict=True):
                groups[int(request.key) - first_place].samples[number] = sample
        for group in groups:
            self.scorer.submit(group)
        return groups

    def _finished(self, task: Task, sample: Sample) -> None:
        sample.text = self.tokenizer.decode(sample.ids_L, skip_special_tokens=True)
        self.scorer.submit_sample(task, sample)


def completion_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Lengths and truncation of finished samples, before any masking (field names of TRL)."""
    samples = [s for g in groups for s in g.samples if s.finish is not Finish.ABORT]
    if not samples:
        return {}
    lengths = np.array([len(s) for s in samples], np.float64)
    return {"completions/mean_length": lengths.mean(), "completions/min_length": lengths.min(),
            "completions/max_length": lengths.max(), "completions/clipped_ratio": float(np.mean([s.truncated for s in samples]))}
