"""The `data` settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

from verl.core.errors import ConfigError, nearest
from verl.core.schema import option


@dataclass(frozen=True, slots=True)
class DataConfig:
    """Where prompts come from and how they become token ids. The seed of the order is the trainer's.

    Raises ConfigError when settings contradict each other.
    """

    train: str | list[str] | dict[str, float] | None = option(
        None, "file, glob or directory; a list is joined; {path: weight} is a mixture with these shares", path="file")
    eval: str | list[str] | None = option(None, "file, glob or directory of evaluation prompts", path="file")
    eval_size: int = option(0, "without eval: hold this many training prompts out")
    split: str | dict[str, str] | None = option(None, "which split of a directory to train on, or {train: ..., eval: ...}")
    columns: dict[str, str] = option({}, "{verl's name: the dataset's name}, such as {prompt: question}")
    sampler: str = option("shuffle", "shuffle: another order in every epoch; in_order: as the files have it; or module:Class")
    system_prompt: str | None = option(None, "put before every prompt that has no system message")
    template: Literal["auto", "chat", "raw"] = option(
        "auto", "string prompts are raw text, or one user message of a chat; auto: raw unless system_prompt is set")
    chat_template: str | None = option(None, "a Jinja file or text that replaces the tokenizer's own", path=True)
    template_kwargs: dict[str, Any] = option({}, "arguments of the template; a row's chat_template_kwargs win")
    max_prompt_tokens: int | None = option(None, "longest prompt in tokens; null: no limit")
    overlong: Literal["error", "drop", "truncate_left"] = option("error", "what becomes of longer prompts")

    def __post_init__(self):
        hints = get_type_hints(DataConfig)
        for name in ("overlong", "template"):
            value, allowed = getattr(self, name), get_args(hints[name])
            if value not in allowed:
                raise ConfigError(f"data.{name}: {value!r} is not known; {nearest(value, allowed)}")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise ConfigError(f"data.max_prompt_tokens: {self.max_prompt_tokens} leaves no prompt; "
                              "give 1 or more, or leave it out for no limit")
        if isinstance(self.split, Mapping) and not set(self.split) <= {"train", "eval"}:
            raise ConfigError(f"data.split: {sorted(self.split)} are not all known; allowed: train, eval")
        if self.sampler not in ("shuffle", "in_order") and ":" not in self.sampler:
            raise ConfigError(f"data.sampler: {self.sampler!r} is not known; allowed: shuffle, in_order, or module:Class")
        if self.eval_size < 0:
            raise ConfigError(f"data.eval_size: {self.eval_size} is negative; give the number of prompts to hold out")
        if self.eval_size and self.eval is not None:
            raise ConfigError(f"data.eval_size: {self.eval_size} and data.eval: {self.eval!r} are both set; keep one")
        if self.template == "raw" and self.system_prompt is not None:
            raise ConfigError("data.system_prompt needs a chat, but data.template is raw; set data.template: chat")
        if isinstance(self.train, Mapping):
            for path, weight in self.train.items():
                if not 0 < weight < float("inf"):
                    raise ConfigError(f"data.train: the weight of {path!r} is {weight}; weights are shares above 0")

    def split_of(self, part: Literal["train", "eval"]) -> str | None:
        """The split that training or evaluation reads; a plain `split` names the one to train on."""
        if isinstance(self.split, Mapping):
            return self.split[part] if part in self.split else None
        return self.split if part == "train" else None

    @property
    def wraps_strings(self) -> bool:
        """True when a string prompt is rendered as a user message by the chat template."""
        return self.template == "chat" or (self.template == "auto" and self.system_prompt is not None)
