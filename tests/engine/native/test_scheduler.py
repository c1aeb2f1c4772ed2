"""Pages are never owned twice, all come back, everybody finishes: under random work, lengths and lateness of results."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.core.types import Finish
from verl.engine.native.pool import Pages
from verl.engine.native.scheduler import Decode, Prefill, Prompt, Scheduler, Sequence


def build(groups, max_tokens, pages, size=4, max_sequences=3, prefill=5, steps=1):
    scheduler = Scheduler(Pages(pages, size), max_sequences, prefill, steps, max_tokens)
    for g, (length, n, _) in enumerate(groups):
        prompt = Prompt(np.zeros(length, np.int32))
        for j in range(n):
            scheduler.waiting.append(Sequence(prompt, g, j, 0, np.zeros(max_tokens, np.int32), np.zeros(max_tokens, np.float32)))
    return scheduler


def owners(scheduler):
    held = [p for s in scheduler.running for p in s.pages]
    prompts = {id(s.prompt): s.prompt for s in [*scheduler.running, *scheduler.waiting]}.values()
    return held + [p for prompt in prompts for p in prompt.pages]


def deliver(scheduler, step, lengths, done):
    """Results of one step come back; sequence (g, j) ends after lengths[g] + j tokens."""
    scheduler.in_flight -= 1
    sequences, k = (step.starts, 1) if isinstance(step, Prefill) else (step.sequences, step.steps)
    for sequence in sequences:
        if sequence.finish is None:
            end = min(lengths[sequence.request] + sequence.index, scheduler.max_tokens)
            sequence.n = min(sequence.n + k, end)
            if sequence.n == end:
                scheduler.finish(sequence, Finish.STOP)
                done.append(sequence)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_invariants_under_random_work(data):
    size, max_tokens = data.draw(st.sampled_from([1, 4])), data.draw(st.integers(1, 12))
    groups = data.draw(st.lists(st.tuples(st.integers(1, 14), st.integers(1, 4), st.integers(1, 12)), min_size=1, max_size=5))
    least = max(-(-length // size) for length, _, _ in groups) + -(-max_tokens // size)
    scheduler = build(groups, max_tokens, least + data.draw(st.integers(0, 12)), size, data.draw(st.integers(1, 6)),
                      data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4)))
    depth, lengths, done = data.draw(st.integers(0, 2)), [g[2] for g in groups], []
    flying: deque = deque()
    for _ in range(5000):
        if not scheduler.unfinished:
            break
        step = scheduler.next()
        held = owners(scheduler)
        assert len(held) == len(set(held)) and 0 not in held
        assert len(held) + scheduler.pages.free == scheduler.pages.count
        if isinstance(step, Prefill):
            assert sum(s.count for s in step.segments) <= scheduler.prefill_tokens
            assert all(s.prompt.stored == len(s.prompt.ids) for s in step.starts)
        if isinstance(step, Decode):
            for s in step.sequences:
                assert s.prompt.stored == len(s.prompt.ids)
                assert len(s.pages) * size >= s.stored
        if step is not None:
            flying.append(step)
        else:
            assert flying, "the scheduler waits for results that nobody owes"
        if step is None or len(flying) > depth:
            deliver(scheduler, flying.popleft(), lengths, done)
    assert not scheduler.unfinished and len(done) == sum(n for _, n, _ in groups)
    assert scheduler.pages.free == scheduler.pages.count


def test_a_prompt_is_prefilled_once_for_its_group():
    scheduler = build([(10, 6, 3), (3, 2, 3)], max_tokens=3, pages=40, max_sequences=8, prefill=5)
    segments, done = [], []
    while scheduler.unfinished:
        step = scheduler.next()
        segments += [(s.start, s.count) for s in step.segments] if isinstance(step, Prefill) else []
        deliver(scheduler, step, [3, 3], done)
    assert segments == [(0, 5), (5, 5), (0, 3)]


def test_the_oldest_sequence_is_never_preempted():
    scheduler = build([(4, 1, 12), (4, 1, 12), (4, 1, 12)], max_tokens=12, pages=5)
    done = []
    while scheduler.unfinished:
        deliver(scheduler, scheduler.next(), [12] * 3, done)
    assert [s.request for s in done] == [0, 1, 2] and scheduler.preemptions > 0


def test_pages_refuse_wrong_accounts():
    pages = Pages(3, 4)
    taken = pages.take(2)
    assert taken == [1, 2] and pages.needed(9) == 3
    with pytest.raises(RuntimeError, match="2 pages asked for, 1 free"):
        pages.take(2)
    pages.give(taken)
    with pytest.raises(RuntimeError, match="page 1 given back twice"):
        pages.give([1])
