"""What all rollout engines do alike: refuse what cannot run, end a response, name the file defaults that are ignored."""

from __future__ import annotations

from collections.abc import Sequence

from verl.core.errors import CapacityError, ConfigError, DataError, WeightsError
from verl.core.types import Finish, Request, Sampling
from verl.core.weights import Weights
from verl.engine.native.sampler import check


def check_requests(requests: Sequence[Request], sampling: Sampling, limit: int, rows: int) -> None:
    """Raise before anything runs: CapacityError for a sequence longer than `limit`, DataError for a prompt that is empty
    or has ids outside the `rows` of the embedding (rows without a token are allowed there: they are only never sampled),
    ConfigError for sampling settings out of range."""
    check(sampling)
    for request in requests:
        prompt = request.prompt_ids
        if len(prompt) == 0:
            raise DataError(f"prompt {request.key!r} is empty; it needs at least one id, such as the begin-of-text id")
        if int(prompt.min()) < 0 or int(prompt.max()) >= rows:
            raise DataError(f"prompt {request.key!r} holds id {int(prompt.max() if prompt.max() >= rows else prompt.min())}; "
                            f"the model has rows 0..{rows - 1}: was it made by another model's tokenizer?")
        if len(prompt) + sampling.max_tokens > limit:
            room = max(limit - len(prompt), 0)
            raise CapacityError(f"prompt {request.key!r} has {len(prompt)} tokens and may get {sampling.max_tokens} more; this "
                                f"engine holds {limit} a sequence. Lower max_tokens to {room}, cut the prompt, or raise "
                                "max_total_tokens (up to the context the model was made for)")


def check_newer(weights: Weights, held: int | None) -> None:
    """Raise WeightsError unless the weights are newer than the version held (None: nothing was loaded yet)."""
    if held is not None and weights.version <= held:
        raise WeightsError(f"weights of version {weights.version} were sent, version {held} is in force; versions only go up")


class StopRule:
    """Decides after every token whether a response has ended, and by what. `tokenizer` is needed for stop strings only.

    A stop string counts from the token that completes it; text before `min_tokens` cannot stop a response later.
    """

    def __init__(self, sampling: Sampling, tokenizer=None):
        self.sampling, self.tokenizer = sampling, tokenizer
        self.stop_ids = () if sampling.ignore_eos else sampling.stop_ids
        if sampling.stop and tokenizer is None:
            raise ConfigError(f"stop strings {sampling.stop} need a tokenizer and this engine has none; use stop_ids")
        self._window = max((len(s.encode()) for s in sampling.stop), default=0) + 4  # a token is at least one byte

    def __call__(self, ids: Sequence[int]) -> tuple[Finish, int | str | None] | None:
        """(finish, what ended it) for a response whose newest token is the last of `ids`; None: it goes on."""
        if len(ids) >= self.sampling.min_tokens:
            if ids[-1] in self.stop_ids:
                return Finish.STOP, ids[-1]
            if self.sampling.stop and (found := self._string(ids[-self._window:])) is not None:
                return Finish.STOP, found
        return (Finish.LENGTH, None) if len(ids) >= self.sampling.max_tokens else None

    def _string(self, tail: Sequence[int]) -> str | None:
        before = self.tokenizer.decode(tail[:-1], skip_special_tokens=False, clean_up_tokenization_spaces=False).rstrip("\ufffd")
        text = self.tokenizer.decode(tail, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        for string in self.sampling.stop:
            if string in text[max(0, len(before) - len(string) + 1):]:
                return string
        return None


def ignored_defaults(generation_config) -> dict[str, object]:
    """Sampling values in a checkpoint's generation_config that no engine follows (all but its end ids)."""
    if generation_config is None:
        return {}
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "typical_p": 1.0, "repetition_penalty": 1.0,
               "length_penalty": 1.0, "no_repeat_ngram_size": 0, "num_beams": 1, "min_length": 0, "min_new_tokens": 0,
               "max_new_tokens": None, "suppress_tokens": None, "bad_words_ids": None, "forced_eos_token_id": None}
    values = {name: getattr(generation_config, name, None) for name in neutral}
    return {name: v for name, v in values.items() if v is not None and v != neutral[name]}


def sampling_line(sampling: Sampling, ignored: dict[str, object]) -> str:
    """One line for the log: what is in force, and what the checkpoint's file asked for in vain."""
    shown = (f"sampling: temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k or 'off'}, "
             f"repetition_penalty 1, end ids {list(sampling.stop_ids)}{' (ignored)' if sampling.ignore_eos else ''}")
    return shown + (f"; ignored from generation_config: {ignored}" if ignored else "")
