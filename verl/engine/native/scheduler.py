"""What to compute next: plain Python over pages and lengths, no tensors, no clock.

A prompt is prefilled once and read by all its samples. Prefill goes before decode. `sampled` counts the tokens whose
sampling was launched, `n` those whose value came back; on a CPU they are equal after every step, on a GPU the host
runs some steps behind. When pages run out the youngest sequence gives its pages back and is computed again later from
its ids; since a token's random number depends only on (seed, position), it goes on as if nothing had happened.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from verl.core.types import Finish
from verl.engine.native.pool import Pages


@dataclass(slots=True, eq=False)
class Prompt:
    """A request's prompt: `stored` of its tokens are in `pages`, which `holders` admitted sequences read."""

    ids: np.ndarray
    pages: list[int] = field(default_factory=list)
    stored: int = 0
    holders: int = 0
    experts: np.ndarray | None = None  # [tokens, layers, k] of a mixture, where the runner records them
    hidden: object = None  # hidden state of its last token: the runner's, for the first token of late samples


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample under way. `ids` and `logprobs` have room for max_tokens; the first `n` are known."""

    prompt: Prompt
    request: int
    index: int
    seed: int
    ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray | None = None  # of the weights that made each token
    n: int = 0
    sampled: int = 0
    stored: int = 0  # own tokens whose keys and values are in `pages`
    pages: list[int] = field(default_factory=list)
    experts: np.ndarray | None = None  # of own tokens, as in Prompt
    slot: int = -1  # row in the runner's tables while admitted
    finish: Finish | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens start ... start + count of a prompt, or (with `sequence`) of a response computed again."""

    prompt: Prompt
    sequence: Sequence | None
    start: int
    count: int

    @property
    def ids(self) -> np.ndarray:
        return (self.prompt.ids if self.sequence is None else self.sequence.ids)[self.start:self.start + self.count]


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute the segments, then draw the first token of `starts` (whose prompts are complete by then)."""

    segments: list[Segment]
    starts: list[Sequence]


@dataclass(frozen=True, slots=True)
class Decode:
    """`steps` tokens for each sequence; those past a sequence's end are thrown away."""

    sequences: list[Sequence]
    steps: int


class Scheduler:
    """Owns the pages and the order. `admitted` receives a sequence that just got a slot."""

    def __init__(self, pages: Pages, max_sequences: int, prefill_tokens: int, decode_steps: int, max_tokens: int):
        self.pages, self.prefill_tokens, self.decode_steps, self.max_tokens = pages, prefill_tokens, decode_steps, max_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}  # in order of admission
        self.slots = list(range(max_sequences, 0, -1))  # slot 0 is scratch
        self.in_flight = 0  # launched steps whose tokens have not come back
        self.preemptions = 0

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def next(self) -> Prefill | Decode | None:
        """The next step; None when results must come back first. Its effects on lengths count as done."""
        self._admit()
        step = self._prefill() or self._decode()
        self.in_flight += step is not None
        return step

    # -- admission -----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """In order, while slots last and every running sequence could still get one more page."""
        while self.waiting and self.slots:
            sequence = self.waiting[0]
            prompt = sequence.prompt
            own = self.pages.needed(max(sequence.sampled, 1))
            need = own + (0 if prompt.pages else self.pages.needed(len(prompt.ids)))
            if self.running and need + len(self.running) > self.pages.free:
                return
            self.waiting.popleft()
            if not prompt.pages:
                prompt.pages = self.pages.take(self.pages.needed(len(prompt.ids)))
            prompt.holders += 1
            sequence.pages, sequence.slot = self.pages.take(own), self.slots.pop()
            self.running[sequence] = None

    def release(self, sequence: Sequence) -> None:
        """Take slot and pages back; the prompt's too when nobody else reads them."""
        del self.running[sequence]
        self.slots.append(sequence.slot)
        self.pages.give(sequence.pages)
        sequence.pages, sequence.slot, sequence.stored = [], -1, 0
        prompt = sequence.prompt
        prompt.holders -= 1
        if prompt.holders == 0:
            self.pages.give(prompt.pages)
            prompt.pages, prompt.stored, prompt.hidden = [], 0, None

    def finish(self, sequence: Sequence, finish: Finish, reason: int | str | None = None) -> None:
        """End a sequence, running or waiting."""
        sequence.finish, sequence.stop_reason = finish, reason
        if sequence in self.running:
            self.release(sequence)
        else:
            self.waiting.remove(sequence)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _prefill(self) -> Prefill | None:
        segments, starts, budget = [], [], self.prefill_tokens
        for sequence in self.running:
            prompt = sequence.prompt
            if prompt.stored < len(prompt.ids) and budget:
                budget -= self._segment(segments, prompt, None, prompt.stored, len(prompt.ids), budget)
            if prompt.stored < len(prompt.ids):
                continue
            if sequence.sampled == 0:
                sequence.sampled = 1
                starts.append(sequence)
            elif sequence.stored < sequence.sampled - 1 and budget:
                budget -= self._segment(segments, prompt, sequence, sequence.stored, sequence.sampled - 1, budget)
        return Prefill(segments, starts) if segments or starts else None

    @staticmethod
    def _segment(segments: list[Segment], prompt: Prompt, sequence: Sequence | None, start: int, end: int, budget: int) -> int:
        count = min(end - start, budget)
        segments.append(Segment(prompt, sequence, start, count))
        (prompt if sequence is None else sequence).stored += count
        return count

    def _decode(self) -> Decode | None:
        steps = self.decode_steps
        while True:
            ready = [s for s in self.running if s.sampled < self.max_tokens]
            if not ready:
                return None
            steps = min(steps, self.max_tokens - min(s.sampled for s in ready))
            need = [self.pages.needed(min(s.sampled - 1 + steps, self.max_tokens)) - len(s.pages) for s in ready]
            if sum(need) <= self.pages.free:
                break
            if self.in_flight:
                return None  # results may end sequences and free their pages
            if steps > 1:
                steps //= 2
            else:
                self._preempt()
        for sequence, pages in zip(ready, need):
            if pages > 0:
                sequence.pages += self.pages.take(pages)
            sequence.sampled = min(sequence.sampled + steps, self.max_tokens)
            sequence.stored = sequence.sampled - 1
        ready.sort(key=lambda s: s.request)
        return Decode(ready, steps)

    def _preempt(self) -> None:
        self._put_back(next(reversed(self.running)))
        self.preemptions += 1

    def _put_back(self, sequence: Sequence) -> None:
        self.release(sequence)
        sequence.sampled = sequence.n
        self.waiting.appendleft(sequence)

    def renew(self, keep: bool) -> None:
        """Other weights are in force; nothing may be in flight. All that older ones computed is computed again; with `keep`
        only the last token of each prompt, whose hidden state the first tokens of late samples are drawn from."""
        for sequence in list(reversed(self.running)):
            if keep:
                sequence.prompt.stored = min(sequence.prompt.stored, len(sequence.prompt.ids) - 1)
            else:
                self._put_back(sequence)
