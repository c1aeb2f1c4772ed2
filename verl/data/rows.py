"""Rows to Tasks: which kind of dataset it is, and whether every row really is one.

    columns                                   kind         Task
    text | messages                           language     prompt empty, completion = text or messages
    prompt                                    prompt       prompt
    prompt, completion                        completion   prompt, completion
    [prompt,] chosen, rejected                preference   prompt (or the shared beginning), chosen, rejected
    prompt, completion, label                 unpaired     prompt, completion, label

Each is strings or lists of chat messages. `tools` and `chat_template_kwargs` go to their fields of the Task; every
other column, `margin` included, goes to Task.columns as it is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from verl.core.errors import DataError, nearest
from verl.core.types import Message, Task
from verl.data.config import DataConfig
from verl.data.read import Table

Text = str | list[Message]


def tasks_from(table: Table, config: DataConfig) -> list[Task]:
    """One Task a row, in row order. Raises DataError naming file, row (line), column and what to write instead."""
    rows = _renamed(table, config.columns)
    names = dict.fromkeys(name for row in rows for name in row)
    kind = _kind(table, names)
    return [_task(row, kind, f"{table.name}-{index}", table.where(index)) for index, row in enumerate(rows)]


def kind_of(task: Task) -> str:
    """The dataset kind a Task came from (see the table above)."""
    if task.chosen is not None:
        return "preference"
    if task.label is not None:
        return "unpaired"
    if task.completion is not None:
        return "completion" if task.prompt else "language"
    return "prompt"


def _renamed(table: Table, columns: Mapping[str, str]) -> list[dict[str, Any]]:
    if not columns:
        return table.rows
    seen = {name for row in table.rows for name in row}
    for new, old in columns.items():
        if old not in seen:
            raise DataError(f"{table.source}: data.columns reads {new!r} from column {old!r}, which does not exist; "
                            f"{nearest(old, seen)}")
    new_name = {old: new for new, old in columns.items()}
    # A column whose name is taken over by another one gives way.
    return [{new_name.get(name, name): value for name, value in row.items()
             if name in new_name or name not in columns} for row in table.rows]


def _kind(table: Table, names: Mapping[str, None]) -> str:
    has = names.keys()
    if {"completions", "labels"} <= has:
        raise DataError(f"{table.source}: stepwise rows (completions, labels) are not supported; "
                        "write one row per step with prompt, completion, label")
    if {"chosen", "rejected"} <= has:
        return "preference"
    if {"prompt", "completion", "label"} <= has:
        return "unpaired"
    if {"prompt", "completion"} <= has:
        return "completion"
    if "prompt" in has:
        return "prompt"
    if "messages" in has or "text" in has:
        return "language"
    raise DataError(f"{table.source}: no column says what the prompt is; columns seen: {', '.join(names) or 'none'}; "
                    "expected prompt, messages, text, or chosen and rejected. "
                    "Name yours with data.columns, e.g. {prompt: question}")


def _task(row: Mapping[str, Any], kind: str, name: str, where: str) -> Task:
    """One row, checked."""
    taken = {"tools": _tools(row.get("tools"), where),
             "template_kwargs": _kwargs(row.get("chat_template_kwargs"), where)}
    used = {"tools", "chat_template_kwargs", "prompt"}

    def text(column: str, **rules) -> Text:
        used.add(column)
        return _text(row.get(column), f"{where}, column {column}", **rules)

    if row.get("images"):
        raise DataError(f"{where}, column images: image inputs are not supported; remove the column")
    if kind == "language":
        completion = text("messages", parse=True) if row.get("messages") is not None else text("text")
        if completion and not isinstance(completion, str) and all(m["role"] != "assistant" for m in completion):
            raise DataError(f"{where}, column messages: no assistant message, so there is nothing to learn; "
                            "rename the column for prompts only: data.columns: {prompt: messages}")
        taken |= {"prompt": "" if isinstance(completion, str) else [], "completion": completion}
    elif kind == "preference":
        chosen, rejected = text("chosen", may_be_empty=True), text("rejected", may_be_empty=True)
        prompt = text("prompt") if row.get("prompt") is not None else None
        taken |= dict(zip(("prompt", "chosen", "rejected"), _preference(prompt, chosen, rejected, where)))
        for column in ("chosen", "rejected"):
            _by_assistant(taken[column], f"{where}, column {column}")
        _margin(row.get("margin"), where)
    else:
        taken["prompt"] = text("prompt")
        if kind != "prompt":
            taken["completion"] = text("completion", may_be_empty=True)
            _same_form(taken["prompt"], taken["completion"], f"{where}, columns prompt and completion")
            _by_assistant(taken["completion"], f"{where}, column completion")
        if kind == "unpaired":
            used.add("label")
            taken["label"] = _label(row.get("label"), where)
    return Task(id=name, columns={key: value for key, value in row.items() if key not in used}, **taken)


def _text(value: Any, where: str, may_be_empty: bool = False, parse: bool = False) -> Text:
    """A string, or checked messages; with `parse`, messages may also be written as JSON text."""
    if parse and isinstance(value, str):
        value = _parsed(value, where)
    if isinstance(value, str):
        if not value and not may_be_empty:
            raise DataError(f"{where}: is empty; remove the row")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{where}: character {error.start} is half of a surrogate pair (\\ud800 - \\udfff), "
                            "which no tokenizer can read; repair the text") from error
        return value
    if isinstance(value, list) and value:
        return messages(value, where)
    raise DataError(f"{where}: expected a string or a list of messages {{role, content}}, saw {_seen(value)}")


def _seen(value: Any) -> str:
    return "nothing (null or missing)" if value is None else f"{type(value).__name__} {value!r:.60}"


def _parsed(value: str, where: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON ({error}), saw {value[:60]!r}; "
                        "write a JSON value, or JSON text of one") from error


def messages(value: list[Any], where: str) -> list[Message]:
    """Chat messages as templates want them: plain dicts with a role and text content, tool calls with dict arguments.

    Fields that are null are left out (a missing or null content becomes ""), text parts are joined, tool calls and
    their arguments may be JSON text. Raises DataError for anything else.
    """
    made = []
    for index, message in enumerate(value):
        spot = f"{where}, message {index}"
        if isinstance(message, dict) and "from" in message and "value" in message:
            raise DataError(f"{spot}: has from / value; write role (system, user, assistant, tool) / content")
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"{spot}: expected {{role: ..., content: ...}}, saw {_seen(message)}")
        clean = {key: item for key, item in message.items() if item is not None}
        clean["content"] = _content(message.get("content"), spot)
        calls = clean.pop("tool_calls", None)
        calls = _parsed(calls, f"{spot}, tool_calls") if isinstance(calls, str) and calls else calls
        if calls:
            if not isinstance(calls, list):
                raise DataError(f"{spot}, tool_calls: expected a list of calls, saw {_seen(calls)}")
            clean["tool_calls"] = [_tool_call(call, f"{spot}, tool_calls") for call in calls]
        made.append(clean)
    return made


def _content(value: Any, where: str) -> str:
    if isinstance(value, list):
        for part in value:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                raise DataError(f"{where}, content: only text parts {{type: text, text: ...}} are supported, "
                                f"saw {_seen(part)}")
        value = "".join(part["text"] for part in value)
    return "" if value is None else _text(value, f"{where}, content", may_be_empty=True)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """{function: {name, arguments}} or {name, arguments}, arguments as a dict."""
    inner = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise DataError(f"{where}: expected {{type: function, function: {{name, arguments}}}}, saw {_seen(call)}")
    arguments = inner.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"{where}, arguments of {inner['name']}") if arguments.strip() else {}
    if not isinstance(arguments, dict | None):
        raise DataError(f"{where}, arguments of {inner['name']}: expected an object, saw {_seen(arguments)}")
    clean = {key: item for key, item in inner.items() if item is not None} | {"arguments": arguments or {}}
    if inner is call:
        return clean
    return {key: item for key, item in call.items() if item is not None} | {"function": clean}


def _tools(value: Any, where: str) -> list[dict[str, Any]] | None:
    """A list of tool schemas, or JSON text of one; null, "" and [] mean none."""
    if isinstance(value, str) and value.strip():
        value = _parsed(value, f"{where}, column tools")
    if value is None or value == [] or (isinstance(value, str) and not value.strip()):
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(f"{where}, column tools: expected a list of tool schemas, saw {_seen(value)}; "
                        "write [{...}] even for a single tool")
    return value


def _kwargs(value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, str) and value.strip():
        value = _parsed(value, f"{where}, column chat_template_kwargs")
    if not value:
        return {}
    if not isinstance(value, dict):
        raise DataError(f"{where}, column chat_template_kwargs: expected an object, saw {_seen(value)}")
    return value


def _label(value: Any, where: str) -> bool:
    """True or false, also as 1 / 0 or (CSV) as text."""
    known = {"true": True, "1": True, "false": False, "0": False}
    text = str(value).strip().lower()
    if not isinstance(value, bool | int | str) or text not in known:
        raise DataError(f"{where}, column label: expected true (desirable) or false, saw {_seen(value)}")
    return known[text]


def _margin(value: Any, where: str) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{where}, column margin: expected a finite number, saw {_seen(value)}")


def _same_form(prompt: Text, answer: Text, where: str) -> None:
    if isinstance(prompt, str) is not isinstance(answer, str):
        forms = ["a string" if isinstance(x, str) else "messages" for x in (prompt, answer)]
        raise DataError(f"{where}: {forms[0]} and {forms[1]}; write both as strings or both as messages")


def _by_assistant(answer: Text, where: str) -> None:
    if not isinstance(answer, str) and answer[0]["role"] != "assistant":
        raise DataError(f"{where}: an answer begins with an assistant message, saw role {answer[0]['role']!r}; "
                        "move what comes before it into the prompt")


def _preference(prompt: Text | None, chosen: Text, rejected: Text, where: str) -> tuple[Text, Text, Text]:
    """Prompt, chosen, rejected. Without a prompt (or with one in another form than the answers, whose conversations
    then hold it) the prompt is the beginning that both answers share."""
    _same_form(chosen, rejected, f"{where}, columns chosen and rejected")
    if prompt is not None and isinstance(prompt, str) is isinstance(chosen, str):
        return (prompt, *(_without(prompt, answer) for answer in (chosen, rejected)))
    if prompt is not None and isinstance(chosen, str):
        _same_form(prompt, chosen, f"{where}, columns prompt and chosen")
    shared = next((i for i, (a, b) in enumerate(zip(chosen, rejected)) if a != b), min(len(chosen), len(rejected)))
    if isinstance(chosen, str) and shared and chosen[shared - 1] == " ":
        shared -= 1  # a space belongs to the word after it
    if not shared or shared == min(len(chosen), len(rejected)):
        problem = "share no beginning" if not shared else "do not differ after the beginning they share"
        raise DataError(f"{where}: chosen and rejected {problem}, so no prompt can be found; add a prompt column")
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _without(prompt: Text, answer: Text) -> Text:
    """An answer that repeats the whole conversation, without its prompt."""
    repeats = not isinstance(answer, str) and len(answer) > len(prompt) and answer[:len(prompt)] == prompt
    return answer[len(prompt):] if repeats else answer


