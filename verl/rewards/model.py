"""Local reward models as sources: directories, RewardModel, transformers classifiers, or any module that scores text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from verl.core.errors import ConfigError
from verl.core.types import Failed, Message, RewardResult
from verl.models.reward_model import RewardModel
from verl.rewards.base import Item, Source, failure, results
from verl.rewards.config import RewardSource


class ModelSource(Source):
    """A model's `score(texts) -> one number a text`, over prompt + response as text.

    Conversations are rendered with the reward model's own chat template where its tokenizer has one, else their
    contents are joined by newlines. A model that fails on a list is called one text at a time from then on, and says so.
    """

    def __init__(self, model: Any, name: str | None = None, timeout_s: float = 600.0, device: str | None = None):
        model = _adopt(model)
        if device is not None and hasattr(model, "to"):
            model.to(device)
        super().__init__(name or Path(str(getattr(model, "name", type(model).__name__))).name, timeout_s)
        self.model = model
        self.one_by_one = False

    @classmethod
    def load(cls, settings: RewardSource, base: Path, device: str | None) -> ModelSource:
        """The source behind `- model: path`; a path that exists relative to the config file is meant before a hub name."""
        path = base / settings.model
        model = RewardModel.from_pretrained(
            str(path) if path.exists() else settings.model, max_length=settings.max_length, batch_size=settings.batch_size,
            device=settings.device or device or "cpu", trust_remote_code=settings.trust_remote_code)
        return cls(model, settings.name, settings.timeout)

    def score(self, items: Sequence[Item]) -> list[RewardResult]:
        tokenizer = getattr(self.model, "tokenizer", None)
        rendered = [render(tokenizer, item.task.prompt, item.completion) for item in items]
        out: list[RewardResult | None] = [None] * len(items)
        before = getattr(self.model, "truncated", 0)
        for special in (True, False):
            rows = [i for i, (_, s) in enumerate(rendered) if s is special]
            for i, result in zip(rows, self._score([rendered[i][0] for i in rows], special) if rows else []):
                out[i] = result
        cut = getattr(self.model, "truncated", 0) - before
        self.metrics.append((f"rewards/{self.name}/truncated_rate", cut / len(items)))
        return out

    def _score(self, texts: list[str], special: bool) -> list[RewardResult]:
        options = {} if special else {"add_special_tokens": False}
        who = f"reward model {self.name!r}"
        batch_error: Exception | None = None
        if not self.one_by_one:
            try:
                return results(self.model.score(texts, **options), len(texts), who)
            except Exception as error:
                batch_error = error
        out = [self._single(text, options, who) for text in texts]
        if batch_error is not None:
            if all(isinstance(result, Failed) for result in out):
                return [failure(batch_error)] * len(texts)  # not a matter of batches
            print(f"{who} cannot score a list ({type(batch_error).__name__}: {batch_error!s:.80}); it is called one text "
                  "at a time", file=sys.stderr)
            self.one_by_one = True
        return out

    def _single(self, text: str, options: dict[str, Any], who: str) -> RewardResult:
        """One text given as a string, or where the model wants a list, as a list of one."""
        result: RewardResult = Failed("")
        for argument in (text, [text]):
            try:
                value = self.model.score(argument, **options)
                value = value.tolist() if hasattr(value, "tolist") else value
                return results(value if isinstance(value, (list, tuple)) else [value], 1, who)[0]
            except Exception as error:
                result = failure(error)
        return result


def render(tokenizer: Any, prompt: str | list[Message], completion: str | list[Message]) -> tuple[str, bool]:
    """(text to score, whether special tokens still have to be added): the same when a reward model learns and judges."""
    if isinstance(prompt, str):
        return prompt + completion, True
    messages = [*prompt, *completion]
    if getattr(tokenizer, "chat_template", None):
        return tokenizer.apply_chat_template(messages, tokenize=False), False
    return "\n".join(str(message.get("content") or "") for message in messages), True


def _adopt(model: Any) -> Any:
    """A transformers sequence classifier becomes a RewardModel with the tokenizer of the directory it came from."""
    if isinstance(model, PreTrainedModel):
        if not model.config._name_or_path:
            raise ConfigError(f"reward model {type(model).__name__} names no directory to take a tokenizer from; pass the "
                              "directory as a string, or RewardModel.of(model, tokenizer)")
        return RewardModel.of(model)
    if not callable(getattr(model, "score", None)):
        raise ConfigError(f"reward model {type(model).__name__} has no method score(texts) -> list of numbers; add one, or "
                          "pass the directory of a sequence classifier as a string")
    return model
