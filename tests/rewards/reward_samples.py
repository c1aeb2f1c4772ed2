"""Samples and groups for the reward tests."""

import numpy as np

from verl.core.types import Finish, Group, Sample, Task


def sample(text, finish=Finish.STOP):
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    return Sample(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), finish, seed=0, text=text)


def group(texts, id="t", prompt="question", **columns):
    return Group(Task(id, prompt, columns=columns), np.array([1], np.int32), [sample(t) for t in texts])
