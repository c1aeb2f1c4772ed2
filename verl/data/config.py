"""The `data` settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.core.errors import ConfigError, nearest

OVERLONG = ("error", "drop", "truncate_left")
TEMPLATES = ("auto", "chat", "raw")


@dataclass(frozen=True, slots=True)
class DataConfig:
    """Where prompts come from and how they become token ids. Relative paths start at the working directory.

    The seed of the order is the trainer's; nothing here is random by itself.
    """

    train: str | list[str] | dict[str, float] | None = None  # path or glob; several are joined; {path: weight} mixes
    eval: str | list[str] | None = None  # paths of the evaluation prompts
    eval_size: int = 0  # without `eval`: hold this many training prompts out
    split: str | None = None  # which split of a directory to train on
    eval_split: str | None = None  # which split of a directory to evaluate on
    columns: dict[str, str] = field(default_factory=dict)  # {verl's name: the dataset's name}, e.g. {prompt: question}
    shuffle: bool = True
    sampler: str | None = None  # "module:Class" that replaces the order (order.Sampler)
    system_prompt: str | None = None  # put before every prompt that has no system message
    template: str = "auto"  # string prompts: raw text, or one user message of a chat; auto is raw without system_prompt
    chat_template: str | None = None  # a Jinja file or text that replaces the tokenizer's own
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # for every row; a row's own chat_template_kwargs win
    max_prompt_tokens: int | None = None
    overlong: str = "error"  # longer prompts: error | drop | truncate_left

    def __post_init__(self):
        for name, allowed in (("overlong", OVERLONG), ("template", TEMPLATES)):
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"data.{name}: {value!r} is not known; {nearest(value, allowed)}")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise ConfigError(f"data.max_prompt_tokens: {self.max_prompt_tokens} leaves no prompt; "
                              "give 1 or more, or leave it out for no limit")
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

    @property
    def wraps_strings(self) -> bool:
        """True when a string prompt is rendered as a user message by the chat template."""
        return self.template == "chat" or (self.template == "auto" and self.system_prompt is not None)
