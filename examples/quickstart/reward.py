"""The quick start's rewards, in TRL's signature: keyword arguments that are lists aligned with the completions.

`exact` is the goal and the metric. `number` pays a little for the form of an answer, so that nearly every group of
samples differs from the first step on: with `exact` alone most groups are all wrong then, and teach nothing.
"""

import re


def exact(completions, answer, **columns):
    """1 for the right number and nothing else; `answer` is the dataset's column of right answers."""
    return [float(_text(completion).strip() == right) for completion, right in zip(completions, answer)]


def number(completions, **columns):
    """1 for a bare whole number, right or wrong."""
    return [float(re.fullmatch(r"\d+", _text(completion).strip()) is not None) for completion in completions]


def _text(completion) -> str:
    """A completion is a list of chat messages when the prompt is one, else a string."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
