"""The nouns. One sentence each; everything else in verl is verbs over these.

Axis letters in array names: P prompts, G samples of one prompt, S sequences (all samples of a batch), T tokens
(ragged, sequences laid end to end), V vocabulary. Log-probabilities are natural (nats).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Task:
    """One problem: a prompt, what a right answer looks like (`columns`), and a stable id.

    `prompt` is a string or a list of chat messages. The optional answer fields make it a row of another kind:
    `completion` (SFT), `chosen` and `rejected` (preference), `completion` and `label` (unpaired preference).
    `columns` holds every other dataset column under its own name, values exact.
    """

    id: str
    prompt: str | list[Message]
    completion: str | list[Message] | None = None
    chosen: str | list[Message] | None = None
    rejected: str | list[Message] | None = None
    label: bool | None = None
    tools: list[dict[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict)

    @property
    def conversational(self) -> bool:
        """True when the prompt is chat messages; rewards then receive message lists."""
        return not isinstance(self.prompt, str)


class Finish(enum.StrEnum):
    """Why a sample ended. Only STOP is a finished answer; ABORT is never trained on as if it were."""

    STOP = "stop"  # an end id or a stop string
    LENGTH = "length"  # max_tokens reached
    ABORT = "abort"  # cancelled, or its worker died


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Every field is explicit; nothing comes from a model's generation_config but `stop_ids`.

    temperature 0 means greedy. `stop_ids` are all ids that end a response (kept in the sample); `stop` are strings
    (the tokens that complete one are kept, `finish` is STOP). top_k 0 and top_p 1 mean off; they are for evaluation
    and generation only, since a policy gradient needs the full distribution.
    """

    temperature: float = 1.0
    max_tokens: int = 256
    min_tokens: int = 0
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Scored:
    """A reward source's answer: a finite value and its named parts."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Abstained:
    """The source has no opinion on this sample; it leaves the statistics and is never a number."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The source broke on this sample; never a number, counted against the source's failure budget."""

    reason: str


RewardResult = Scored | Abstained | Failed


@dataclass(slots=True)
class Sample:
    """One attempt at a task: the token ids are the record, text is only for rewards and logs.

    ids_L: int32, every token after the prompt. mask_L: bool, which of them the policy chose (tool output is False).
    logprobs_L: float32 nats under the sampling distribution actually used (0 where mask is False).
    versions_L: int32, the weight version that made each token.
    """

    ids_L: np.ndarray
    logprobs_L: np.ndarray
    versions_L: np.ndarray
    finish: Finish
    seed: int
    mask_L: np.ndarray | None = None  # None: all chosen by the policy
    experts: np.ndarray | None = None  # int16 [prompt + L, layers, k]: those a mixture-of-experts sampler used; -1: not known
    stop_reason: int | str | None = None  # the id or string that ended it
    text: str = ""
    rewards: dict[str, RewardResult] = field(default_factory=dict)  # by source name
    score: float | None = None  # raw aggregate of the sources; None when nobody scored it
    log: dict[str, Any] = field(default_factory=dict)  # extra columns a reward function logged

    def __post_init__(self):
        n = len(self.ids_L)
        if self.mask_L is None:
            self.mask_L = np.ones(n, bool)
        assert len(self.logprobs_L) == len(self.versions_L) == len(self.mask_L) == n, "columns of one sample differ in length"

    def __len__(self) -> int:
        return len(self.ids_L)

    @property
    def truncated(self) -> bool:
        """Cut by a limit: decided by the finish reason, never by the last id."""
        return self.finish is Finish.LENGTH


@dataclass(slots=True)
class Group:
    """All attempts at one task: the unit in which credit is compared."""

    task: Task
    prompt_ids: np.ndarray  # int32
    samples: list[Sample]


@dataclass(frozen=True, slots=True)
class Request:
    """What a rollout engine is asked: `n` attempts at one prompt, one 63-bit seed each. `key` comes back with the result."""

    key: str
    prompt_ids: np.ndarray  # int32, 1 or more ids
    seeds: tuple[int, ...]

    @property
    def n(self) -> int:
        return len(self.seeds)


_MASK64 = (1 << 64) - 1


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that is a pure function of its parts (splitmix64 over ints, FNV-1a over strings)."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        if isinstance(part, str):
            value = 0xCBF29CE484222325
            for byte in part.encode():
                value = ((value ^ byte) * 0x100000001B3) & _MASK64
        else:
            value = part & _MASK64
        state = (state ^ value) + 0x9E3779B97F4A7C15 & _MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return state >> 1
