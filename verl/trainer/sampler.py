"""Sampler: tasks in, scored groups out. Binds tokenizer, rollout engine, reward scorer and the journal of this step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl.core.errors import WeightsError
from verl.core.types import Finish, Group, Request, Sample, Sampling, Task, derive_seed
from verl.core.weights import Weights
from verl.data.chat import encode_prompt
from verl.data.config import DataConfig
from verl.engine.base import RolloutEngine
from verl.rewards.scorer import Scorer


@dataclass(slots=True)
class Attempt:
    """A group in the making: the task's place in the stream, and the numbers of the samples that are asked for."""

    place: int
    group: Group
    numbers: list[int]
    purpose: str

    @property
    def complete(self) -> bool:
        return all(sample is not None for sample in self.group.samples)


@dataclass(slots=True)
class Sampler:
    """Turns tasks into scored groups.

    Seeds are a pure function of (run seed, purpose, place in the stream, sample number), so what a prompt gets does not
    depend on batch, neighbours, worker or resume. `known` holds samples of an interrupted run by (place, number): they are
    not generated again. `finished` holds those of this one until `forget`.
    """

    engine: RolloutEngine
    tokenizer: object
    data: DataConfig
    scorer: Scorer
    seed: int
    on_finished: Callable[[int, int, Sample], None] | None = None  # (place, number, sample), for the journal
    cancelled: Callable[[], bool] | None = None
    known: dict[tuple[int, int], Sample] = field(default_factory=dict)
    finished: dict[tuple[int, int], Sample] = field(default_factory=dict)
    loaded: int | None = None  # version in force
    sent: set[int] = field(default_factory=set)  # every version that was

    def load(self, weights: Weights) -> None:
        """Put these weights in force for every sample until the next load; the version in force is not sent again."""
        if self.loaded == weights.version:
            return
        receipt = self.engine.load_weights(weights)
        if receipt.version != weights.version:
            raise WeightsError(f"the rollout engine answers with version {receipt.version}, the trainer sent {weights.version}")
        self.told(weights.version)

    def told(self, version: int) -> None:
        """This version is in force in the engine."""
        self.loaded = version
        self.sent.add(version)

    def sample(self, tasks: Sequence[Task], places: Sequence[int], n: int, sampling: Sampling,
               purpose: str = "train") -> list[Group]:
        """n samples for each task, decoded and handed to the scorer as they finish; `places`: of the tasks in the stream.

        Groups come in task order. When cancelled, unfinished samples have finish ABORT.
        """
        attempts = {str(place): self.begin(task, place, n, purpose) for place, task in zip(places, tasks, strict=True)}
        requests = [self.request(attempt) for attempt in attempts.values() if attempt.numbers]

        def on_sample(key: str, index: int, sample: Sample) -> None:
            self.take(attempts[key], index, sample)

        results = self.engine.generate(requests, sampling, on_sample, self.cancelled) if requests else []
        for request, samples in zip(requests, results, strict=True):
            attempt = attempts[request.key]
            for number, sample in zip(attempt.numbers, samples, strict=True):
                attempt.group.samples[number] = sample
        for attempt in attempts.values():
            self.scorer.submit(attempt.group)
        return [attempt.group for attempt in attempts.values()]

    @property
    def stopped(self) -> bool:
        """True once what is sampled is not wanted any more."""
        return self.cancelled is not None and self.cancelled()

    def begin(self, task: Task, place: int, n: int, purpose: str = "train") -> Attempt:
        """A group of n samples, those that an interrupted run has finished in their places."""
        group = Group(task, encode_prompt(self.tokenizer, task, self.data), [None] * n)
        attempt = Attempt(place, group, [], purpose)
        for number in range(n):
            sample = self.known.pop((place, number), None) if purpose == "train" else None
            if sample is None:
                attempt.numbers.append(number)
            else:
                self._put(attempt, number, sample)
        return attempt

    def request(self, attempt: Attempt) -> Request:
        """What the engine is asked for; `take` reads its answers."""
        seeds = tuple(derive_seed(self.seed, attempt.purpose, attempt.place, number) for number in attempt.numbers)
        return Request(str(attempt.place), attempt.group.prompt_ids, seeds)

    def take(self, attempt: Attempt, index: int, sample: Sample) -> None:
        """A sample that the engine has ended: to the scorer and into the journal. What was aborted goes nowhere.

        Raises WeightsError for a token of a version that this trainer never sent: nothing may be trained on unknown weights.
        """
        if sample.finish is Finish.ABORT:
            return
        unknown = set(sample.versions_L.tolist()) - self.sent
        if unknown and attempt.purpose == "train":
            raise WeightsError(f"a sample for prompt {attempt.place} carries weights of version {min(unknown)}, which the trainer "
                               f"never sent (the last ones: {sorted(self.sent)[-3:]}); the rollout engine has to stamp every token "
                               "(Sample.versions_L) with the version of the load_weights that was in force")
        number = attempt.numbers[index]
        self._put(attempt, number, sample)  # first: what a new journal begins with must not miss it
        if attempt.purpose == "train" and self.on_finished is not None:
            self.on_finished(attempt.place, number, sample)

    def _put(self, attempt: Attempt, number: int, sample: Sample) -> None:
        if attempt.purpose == "train":
            self.finished[attempt.place, number] = sample
        attempt.group.samples[number] = sample
        sample.text = self.tokenizer.decode(sample.ids_L, skip_special_tokens=True)
        self.scorer.submit_sample(attempt.group.task, sample)

    def untrained(self, data: Mapping[str, Any]) -> dict[tuple[int, int], Sample]:
        """Finished samples of places that are not consumed in this state of the data."""
        return {key: sample for key, sample in [*self.known.items(), *self.finished.items()] if not _consumed(data, key[0])}

    def forget(self, data: Mapping[str, Any]) -> None:
        """Let go of the samples whose places are consumed in this state of the data."""
        for own in (self.known, self.finished):
            for key in [key for key in list(own) if _consumed(data, key[0])]:  # other threads may add
                del own[key]


def _consumed(data: Mapping[str, Any], place: int) -> bool:
    return place < data["position"] or place in data["done"]


def to_record(task: str, place: int, number: int, sample: Sample) -> dict[str, Any]:
    """A finished sample as the journal keeps it; `task`: of a mixture, else ""."""
    return {"task": task, "place": place, "number": number, "seed": sample.seed, "finish": str(sample.finish),
            "stop_reason": sample.stop_reason, "ids": sample.ids_L, "logprobs": sample.logprobs_L, "versions": sample.versions_L,
            "mask": sample.mask_L, "experts": sample.experts}


def from_record(record: dict[str, Any]) -> Sample:
    return Sample(np.asarray(record["ids"], np.int32), np.asarray(record["logprobs"], np.float32),
                  np.asarray(record["versions"], np.int32), Finish(record["finish"]), record["seed"],
                  np.asarray(record["mask"], bool), None if record["experts"] is None else np.asarray(record["experts"], np.int16),
                  record["stop_reason"])


def completion_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Lengths and truncation of finished samples, before any masking (field names of TRL)."""
    samples = [s for g in groups for s in g.samples if s.finish is not Finish.ABORT]
    if not samples:
        return {}
    lengths = np.array([len(s) for s in samples], np.float64)
    return {"completions/mean_length": lengths.mean(), "completions/min_length": lengths.min(),
            "completions/max_length": lengths.max(), "completions/clipped_ratio": float(np.mean([s.truncated for s in samples]))}
