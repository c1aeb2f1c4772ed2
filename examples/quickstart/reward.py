"""The quick start's reward: 1 for the right number and nothing else, 0 for everything else."""


def exact(completions, answer, **columns):
    """TRL's signature: lists aligned with the completions; `answer` is the dataset's column of right answers."""
    return [float(text(completion).strip() == right) for completion, right in zip(completions, answer)]


def text(completion) -> str:
    """A completion is a string, or a list of chat messages when the prompt is a list of chat messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
