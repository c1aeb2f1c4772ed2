"""Tasks to token ids: the one place where prompts, answers and conversations are rendered and tokenised.

Every path (sampling, SFT, preference, reference) gets its ids here, so that they agree. A chat is rendered by the
template and tokenised without further special tokens: what the template writes is all there is. A raw string gets the
BOS its tokenizer puts before text, unless it already starts with one. Nothing is padded.

Text is cut at the borders of what is trained before it is tokenised, so no token spans a border: a whole text is
tokenised at once where every border falls between tokens anyway, and piece by piece where it does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError

from verl.core.errors import ConfigError, DataError
from verl.core.types import Message, Task
from verl.data.config import DataConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Text = str | list[Message]


def encode_prompt(tokenizer: PreTrainedTokenizerBase, task: Task, config: DataConfig) -> np.ndarray:
    """int32 ids of a task's prompt, 1 or more, ready for the model to go on from.

    Chat messages end with the template's generation prompt, or inside the last message when the assistant wrote it.
    A prompt above max_prompt_tokens keeps its last ids (overlong: truncate_left) or raises DataError.
    """
    ids = _tokenize(tokenizer, [_prompt_text(tokenizer, task, config)])[0]
    return _limited(_with_bos(tokenizer, task, config, ids), task, config)


def prompt_lengths(tokenizer: PreTrainedTokenizerBase, tasks: Sequence[Task], config: DataConfig) -> np.ndarray:
    """int64 lengths in tokens of all prompts before any limit (0 for rows without one). Raises DataError by task."""
    lengths: list[int] = []
    todo = iter(tasks)
    while chunk := list(islice(todo, 1024)):
        texts = [_prompt_text(tokenizer, task, config) if task.prompt else "" for task in chunk]
        batch = tokenizer(texts, add_special_tokens=False)["input_ids"]
        lengths += [len(_with_bos(tokenizer, task, config, ids)) if task.prompt else 0
                    for task, ids in zip(chunk, batch)]
    return np.array(lengths, np.int64)


def encode_answer(tokenizer: PreTrainedTokenizerBase, task: Task, answer: Text,
                  config: DataConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Prompt ids, answer ids (int32) and which answer tokens are trained (bool).

    The prompt ids are those of `encode_prompt`, whatever the answer. The answer ends with its end token, which is
    trained; turns of users and tools, and what the template writes between turns, are not. Rows of plain language
    modelling have no prompt but BOS: all their text, or all assistant turns of their messages, is trained.
    Raises DataError when no token would be trained or the template hides where the answer begins.
    """
    if not task.prompt and not isinstance(answer, str):
        ids, mask = encode_messages(tokenizer, answer, task.tools, config, task.template_kwargs, f"task {task.id}")
        return np.zeros(0, np.int32), ids, mask
    messages = _chat(task, config)
    prompt_text = _prompt_text(tokenizer, task, config) if task.prompt else ""
    if messages is None:
        if not isinstance(answer, str):
            raise DataError(f"task {task.id}: the prompt is a string and the answer messages; write both alike")
        pieces = _tokenize(tokenizer, [prompt_text, answer])
        answer_ids, mask = _ended(tokenizer, pieces[1], [True] * len(pieces[1]), {tokenizer.eos_token_id}, task.id)
    else:
        view = _Chat(tokenizer, config, task.tools, task.template_kwargs, f"task {task.id}")
        answer = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        whole = _joined(messages, answer)
        segments = view.segments(whole, len(whole) - len(answer), prompt_text)
        pieces, answer_ids, mask = view.tokens(segments)
    prompt_ids = _with_bos(tokenizer, task, config, pieces[0])
    if not len(prompt_ids) and len(mask):
        mask[0] = False  # nothing comes before it that could predict it
    prompt = _limited(prompt_ids, task, config) if task.prompt else np.array(prompt_ids, np.int32)
    return prompt, answer_ids, mask


def encode_messages(tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: list[dict[str, Any]] | None,
                    config: DataConfig, template_kwargs: Mapping[str, Any] | None = None,
                    where: str = "messages") -> tuple[np.ndarray, np.ndarray]:
    """int32 ids of a whole conversation and the bool mask of its assistant tokens, end tokens included.

    The turns are found by the template's {% generation %} blocks, or else as the text that each assistant message
    adds. Raises DataError, naming the template, when that is ambiguous or no token would be trained.
    """
    view = _Chat(tokenizer, config, tools, template_kwargs or {}, where)
    messages = _with_system(messages, config)
    segments = view.marked(messages) or view.segments(messages, 0, "")
    first, rest, mask = view.tokens(segments)
    return rest, mask


def describe_row(tokenizer: PreTrainedTokenizerBase, task: Task, config: DataConfig) -> str:
    """A row as the model sees it: every token with its id, its text, and a star where it is trained."""
    answers = {"chosen": task.chosen, "rejected": task.rejected, "completion": task.completion}
    answers = {name: answer for name, answer in answers.items() if answer is not None}
    lines = [f"task {task.id}" + ("" if task.label is None else f"  label {task.label}")]
    shown = False
    for name, answer in answers.items():
        prompt_ids, ids, mask = encode_answer(tokenizer, task, answer, config)
        if not shown:
            lines += _token_lines(tokenizer, "prompt", prompt_ids, np.zeros(len(prompt_ids), bool))
        lines += _token_lines(tokenizer, name, ids, mask)
        shown = True
    if not answers:
        prompt_ids = encode_prompt(tokenizer, task, config)
        lines += _token_lines(tokenizer, "prompt", prompt_ids, np.zeros(len(prompt_ids), bool))
    if task.columns:
        lines.append(f"columns {dict(task.columns)!r}")
    return "\n".join(lines)


def _token_lines(tokenizer, name: str, ids: np.ndarray, mask: np.ndarray) -> list[str]:
    head = f"{name}: {len(ids)} tokens, {int(mask.sum())} trained"
    return [head, *(f"{'*' if on else ' '} {i:>8}  {tokenizer.decode([i])!r}" for i, on in zip(ids.tolist(), mask))]


@dataclass(frozen=True, slots=True)
class _Chat:
    """One conversation's view of its template."""

    tokenizer: PreTrainedTokenizerBase
    config: DataConfig
    tools: list[dict[str, Any]] | None
    kwargs: Mapping[str, Any]
    where: str

    def template(self) -> str:
        """The template's text. Raises DataError when neither the tokenizer nor the config has one."""
        given = self.config.chat_template
        if given is not None:
            return _template_text(given)
        if not self.tokenizer.chat_template:
            raise DataError(f"{self.where}: the prompt is a chat, but tokenizer {self.tokenizer.name_or_path!r} has no "
                            "chat template; set data.chat_template to a Jinja file, or write prompts as strings")
        return self.tokenizer.get_chat_template(None, self.tools)

    @property
    def name(self) -> str:
        """What a message calls the template."""
        if self.config.chat_template is not None:
            return "data.chat_template"
        place = self.tokenizer.name_or_path
        return f"the chat template of {place!r}" if place else "the tokenizer's chat template"

    def render(self, messages: list[Message], **ending: bool) -> str:
        """The text of these messages, ending as add_generation_prompt or continue_final_message says."""
        kwargs = {**self.config.template_kwargs, **self.kwargs}
        template = self.template()
        try:
            text = self.tokenizer.apply_chat_template(messages, tools=self.tools, chat_template=template,
                                                      tokenize=False, **ending, **kwargs)
        except (TemplateError, TypeError, ValueError) as error:
            raise DataError(f"{self.where}: {self.name} cannot render roles "
                            f"{[m['role'] for m in messages]}: {error}") from error
        self._check_shown(messages, template, text)
        return text

    def _check_shown(self, messages: list[Message], template: str, text: str) -> None:
        """Templates pass over what they do not know without a word."""
        words = [m["content"].strip() for m in messages if m["content"].strip()]
        for what, given, seen in (("tools", self.tools, "tools" in template),
                                  ("tool_calls", any("tool_calls" in m for m in messages), "tool_calls" in template),
                                  ("message text", words, any(word in text for word in words))):
            if given and not seen:
                raise DataError(f"{self.where}: {self.name} leaves out {what}; set data.chat_template to one that "
                                "shows it, or remove it from the rows")

    def marked(self, messages: list[Message]) -> list[tuple[str, bool]] | None:
        """(text, trained) pieces by the template's generation blocks; None when it has none."""
        from transformers.utils.chat_template_utils import render_jinja_template
        template = self.template()
        if "endgeneration" not in template:
            return None
        kwargs = {**self.tokenizer.special_tokens_map, **self.config.template_kwargs, **self.kwargs}
        try:
            texts, spans = render_jinja_template([messages], tools=self.tools, chat_template=template,
                                                 return_assistant_tokens_mask=True, **kwargs)
        except (TemplateError, TypeError, ValueError) as error:
            raise DataError(f"{self.where}: {self.name} cannot render: {error}") from error
        pieces, done = [("", False)], 0
        for start, end in spans[0]:
            pieces += [(texts[0][done:start], False), (texts[0][start:end], True)]
            done = end
        return [*pieces, (texts[0][done:], False)]

    def segments(self, messages: list[Message], start: int, prompt_text: str) -> list[tuple[str, bool]]:
        """(text, trained) pieces: the prompt, then each assistant turn from message `start` on and what is between."""
        full = self.render(messages)
        pieces, done = [(prompt_text, False)], self._prefix(full, prompt_text)
        for index in range(start, len(messages)):
            if messages[index]["role"] != "assistant":
                continue
            if index == 0 and not prompt_text:
                raise DataError(f"{self.where}: the conversation begins with the assistant; start with a user message")
            begin = done
            if index > start or not prompt_text:
                begin = self._prefix(full, self.render(messages[:index], add_generation_prompt=True))
            end = self._prefix(full, self.render(messages[:index + 1]))
            pieces += [(full[done:begin], False), (full[begin:end], True)]
            done = end
        return [*pieces, (full[done:], False)]

    def _prefix(self, full: str, part: str) -> int:
        """The length of `part`, which `full` must begin with; an EOS that only ends whole conversations may lack."""
        if not full.startswith(part) and self.tokenizer.eos_token:
            part = part.removesuffix(self.tokenizer.eos_token)
        if not full.startswith(part):
            raise DataError(
                f"{self.where}: {self.name} renders the beginning of this conversation differently once it goes on, so "
                f"what is to be trained cannot be found (it wrote {part[-60:]!r}); set data.chat_template to one with "
                "{% generation %} blocks, data.template_kwargs to switch thinking off, or write rendered strings")
        return len(part)

    def tokens(self, segments: list[tuple[str, bool]]) -> tuple[list[list[int]], np.ndarray, np.ndarray]:
        """The pieces' ids, and ids and mask of all but the first. Raises DataError when nothing is trained."""
        pieces = _tokenize(self.tokenizer, [text for text, _ in segments])
        special = _special_ids(self.tokenizer) | {self.tokenizer.eos_token_id}
        ids: list[int] = []
        mask: list[bool] = []
        for piece, (_, trained) in zip(pieces[1:], segments[1:]):
            on = [trained] * len(piece)
            if trained:
                on = _until_end(self.tokenizer, piece, special)
            elif piece and mask and mask[-1] and ids[-1] not in special and piece[0] in special:
                on[0] = True  # the end token that a generation block left outside
            ids, mask = ids + piece, mask + on
        if not any(mask):
            raise DataError(f"{self.where}: {self.name} marks no token of {len(ids)} as the assistant's; "
                            "check the roles, or its {% generation %} blocks")
        answer_ids, answer_mask = _ended(self.tokenizer, ids, mask, special, self.where)
        return pieces, answer_ids, answer_mask


def _until_end(tokenizer, ids: list[int], special: frozenset[int]) -> list[bool]:
    """Mask of a turn: without the white space that a template writes after the end token."""
    last = max((i for i, token in enumerate(ids) if token in special), default=None)
    if last is None or tokenizer.decode(ids[last + 1:]).strip():
        last = len(ids) - 1
    return [i <= last for i in range(len(ids))]


def _ended(tokenizer, ids: list[int], mask: list[bool], ends: set[int] | frozenset[int],
           where: str) -> tuple[np.ndarray, np.ndarray]:
    """Cut after the last trained token, which is an end token: EOS is added when none is there."""
    stop = max((i for i, on in enumerate(mask) if on), default=-1) + 1
    ids, mask = ids[:stop], mask[:stop]
    if not ids or ids[-1] not in ends:
        if tokenizer.eos_token_id is None:
            raise DataError(f"{where}: tokenizer {tokenizer.name_or_path!r} has no EOS token to end an answer with; "
                            "set eos_token in its tokenizer_config.json")
        ids, mask = [*ids, tokenizer.eos_token_id], [*mask, True]
    return np.array(ids, np.int32), np.array(mask, bool)


def _prompt_text(tokenizer, task: Task, config: DataConfig) -> str:
    messages = _chat(task, config)
    if messages is None:
        return str(task.prompt)
    ending = {"continue_final_message" if _begun(messages) else "add_generation_prompt": True}
    return _Chat(tokenizer, config, task.tools, task.template_kwargs, f"task {task.id}").render(messages, **ending)


def _chat(task: Task, config: DataConfig) -> list[Message] | None:
    """The prompt as messages, or None when it is raw text."""
    if isinstance(task.prompt, str):
        if not config.wraps_strings or not task.prompt:
            return None
        return _with_system([{"role": "user", "content": task.prompt}], config)
    if config.template == "raw":
        raise DataError(f"task {task.id}: data.template is raw, but the prompt is chat messages; "
                        "set data.template: auto, or write prompts as strings")
    return _with_system(task.prompt, config)


def _with_system(messages: list[Message], config: DataConfig) -> list[Message]:
    if config.system_prompt is None or any(m["role"] in ("system", "developer") for m in messages):
        return messages
    return [{"role": "system", "content": config.system_prompt}, *messages]


def _begun(messages: list[Message]) -> bool:
    """True when the last message is one the assistant began, to be continued."""
    return messages[-1]["role"] == "assistant"


def _joined(messages: list[Message], answer: list[Message]) -> list[Message]:
    """Prompt and answer as one conversation; an answer to a begun message continues it."""
    if not _begun(messages) or answer[0]["role"] != "assistant":
        return [*messages, *answer]
    whole = messages[-1] | answer[0] | {"content": messages[-1]["content"] + answer[0]["content"]}
    return [*messages[:-1], whole, *answer[1:]]


def _tokenize(tokenizer, texts: list[str]) -> list[list[int]]:
    """Ids of consecutive pieces of one text. The first piece's ids never depend on the others."""
    def ids_of(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    full, pieces, done = ids_of("".join(texts)), [], 0
    for index in range(1, len(texts)):
        prefix = ids_of("".join(texts[:index]))
        if full[:len(prefix)] != prefix or len(prefix) < done:
            return [ids_of(text) for text in texts]
        pieces.append(prefix[done:])
        done = len(prefix)
    return [*pieces, full[done:]]


def _with_bos(tokenizer, task: Task, config: DataConfig, ids: list[int]) -> list[int]:
    """A raw string's ids behind the BOS that the tokenizer starts a text with; a chat's as the template wrote them."""
    if _chat(task, config) is not None or not _starts_with_bos(tokenizer) or ids[:1] == [tokenizer.bos_token_id]:
        return ids
    return [tokenizer.bos_token_id, *ids]


def _limited(ids: list[int], task: Task, config: DataConfig) -> np.ndarray:
    if not ids:
        raise DataError(f"task {task.id}: the prompt has no tokens; remove the row")
    limit = config.max_prompt_tokens
    if limit is not None and len(ids) > limit:
        if config.overlong != "truncate_left":
            raise DataError(f"task {task.id}: its prompt has {len(ids)} tokens, {len(ids)} > {limit} "
                            "(data.max_prompt_tokens); raise it, or set data.overlong to drop or truncate_left")
        ids = ids[-limit:]
    return np.array(ids, np.int32)


@lru_cache(maxsize=8)
def _starts_with_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    bos = tokenizer.bos_token_id
    return bos is not None and list(tokenizer("a")["input_ids"])[:1] == [bos]


@lru_cache(maxsize=8)
def _special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))


@lru_cache(maxsize=8)
def _template_text(given: str) -> str:
    if "{{" in given or "{%" in given:
        return given
    path = Path(given).expanduser()
    if not path.is_file():
        raise ConfigError(f"data.chat_template: {given!r} is neither a file (looked from {Path.cwd()}) nor Jinja text")
    return path.read_text(encoding="utf-8")
