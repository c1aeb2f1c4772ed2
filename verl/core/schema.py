"""What a schema says: its leaf settings with type, default and help; and a typed config written back as YAML."""

from __future__ import annotations

import copy
import dataclasses
import enum
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, field, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union

from verl.core.errors import ConfigError
from verl.core.tree import Node


def option(default: Any = MISSING, help: str = "", *, path: bool | Literal["file"] = False,
           schema_from: Callable[[dict[str, Any]], type] | None = None) -> Any:
    """A dataclass field with its help text.

    `path` marks a string that may be a file: made absolute where such a file exists or it is written as one (`./x`,
    `~/x`), else left alone (a hub name). With path "file" it is never anything else and always made absolute.
    `schema_from(section) -> dataclass` names the schema of this field from the plain values of the section around it,
    defaults included.
    """
    metadata = {"help": help, "path": path, "schema_from": schema_from}
    if isinstance(default, (list, dict)) or is_dataclass(default) and not isinstance(default, type):
        return field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


class Setting(NamedTuple):
    """One leaf of a schema; `default` is dataclasses.MISSING when the setting is required."""

    key: str
    type: str
    default: Any
    help: str


def settings(schema: type, chosen: Node | None = None, prefix: str = "") -> list[Setting]:
    """Every leaf setting of a schema, in order; list items are written `key[].field`, named maps `key.<name>.field`.

    `chosen` is the tree that picks dependent schemas (`schema_from`); without it the defaults pick.
    """
    chosen = chosen if chosen is not None and isinstance(chosen.value, dict) else Node({}, "default", Path())
    hints, rows = typing.get_type_hints(schema), []
    for f in (f for f in fields(schema) if f.init):
        key, child = join(prefix, f.name), chosen.value.get(f.name)
        inner = section_type(hints[f.name])
        if f.metadata.get("schema_from"):
            try:
                inner = f.metadata["schema_from"](plain_section(schema, chosen, {}))
            except ValueError:
                continue
        if inner is not None:
            rows += settings(inner, child, key)
            continue
        suffix, inner = _item_section(hints[f.name])
        if inner is not None:
            rows += settings(inner, None, key + suffix)
        else:
            rows.append(Setting(key, type_name(hints[f.name]), default_of(f), f.metadata.get("help", "")))
    return rows


def type_name(hint: Any) -> str:
    """How a type is written for a reader: `int`, `"auto" | float`, `list[str]`, `null`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is type(None):
        return "null"
    if origin is Literal:
        return " | ".join(str(a).lower() if isinstance(a, bool) else str(a) for a in args)
    if origin in (Union, types.UnionType):
        return " | ".join(type_name(a) for a in args)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return " | ".join(str(member.value) for member in hint)
    name = {Any: "any", Path: "path"}.get(hint) or getattr(origin or hint, "__name__", str(hint))
    inner = ", ".join("..." if a is Ellipsis else type_name(a) for a in args)
    return f"{name}[{inner}]" if args else name


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def default_of(f: dataclasses.Field) -> Any:
    """A field's default, made if it has a factory; MISSING when it is required."""
    return f.default_factory() if f.default_factory is not MISSING else f.default


def section_type(hint: Any) -> type | None:
    """The dataclass of a section field (`Section` or `Section | None`), else None."""
    members = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    members = [m for m in members if m is not type(None)]
    return members[0] if len(members) == 1 and is_dataclass(members[0]) else None


def _item_section(hint: Any) -> tuple[str, type | None]:
    """The dataclass that a list or map holds, with the suffix its settings are written with."""
    args = typing.get_args(hint)
    if typing.get_origin(hint) in (Union, types.UnionType):
        return next((found for found in map(_item_section, args) if found[1]), ("", None))
    inner = next((m for a in args for m in (a, *typing.get_args(a)) if is_dataclass(m)), None)
    return ".<name>" if typing.get_origin(hint) in (dict, Mapping) else "[]", inner


def plain_section(schema: type, node: Node, inherited: Mapping[str, Any]) -> dict[str, Any]:
    """The untyped values of a section with the defaults of its leaf settings: what `schema_from` decides on."""
    values = {f.name: inherited.get(f.name, default_of(f)) for f in fields(schema) if f.init}
    values = {name: value for name, value in values.items() if value is not MISSING and not is_dataclass(value)}
    return values | (node.plain() if isinstance(node.value, dict) else {})


def suggest(key: str, section: str, siblings: list[str], everywhere: list[str]) -> str | None:
    """The valid dotted key that `key` in `section` most likely meant, if any is near."""
    close = get_close_matches(key, siblings, n=1, cutoff=0.75)
    elsewhere = [k for k in everywhere if k.rpartition(".")[2] == key]
    short = [s for s in siblings if key == "".join(word[:1] for word in s.split("_")) or s.startswith(key + "_")]
    if close or not elsewhere:
        close = close or short or get_close_matches(key, siblings, n=1, cutoff=0.6)
    if close:
        return join(section, close[0])
    if elsewhere:
        return elsewhere[0]
    leaves = {k.rpartition(".")[2]: k for k in reversed(everywhere)}
    return next((leaves[n] for n in get_close_matches(key, leaves, n=1, cutoff=0.75)), None)


# ---------------------------------------------------------------------------------------------------- written as YAML
def dump(config: Any, origins: Mapping[str, str] | None = None) -> str:
    """The resolved config as YAML that `load` (and any YAML reader) reads back to the same values.

    With `origins` each leaf carries where it came from as a comment. Raises ConfigError for a value YAML cannot hold.
    """
    return "".join(_lines(config, origins, "", 0)) or "{}\n"


def _lines(config: Any, origins: Mapping[str, str] | None, path: str, depth: int):
    for f in (f for f in fields(config) if f.init):
        value, key = getattr(config, f.name), join(path, f.name)
        if is_dataclass(value):
            inner = list(_lines(value, origins, key, depth + 1))
            yield f"{'  ' * depth}{f.name}:{'' if inner else ' {}'}\n"
            yield from inner
        else:
            comment = f"  # {origins[key]}" if origins is not None and key in origins else ""
            yield f"{'  ' * depth}{f.name}: {_flow(value, key)}{comment}\n"


def _flow(value: Any, key: str) -> str:
    """One value in flow style. Floats always carry a point, so that YAML 1.1 readers see floats too."""
    if is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
    if isinstance(value, enum.Enum):
        value = value.value
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        if math.isinf(value):
            return ".inf" if value > 0 else "-.inf"
        return re.sub(r"^(-?\d+)e", r"\1.0e", repr(float(value)))
    if isinstance(value, (str, Path)):
        text = str(value)
        bare = re.fullmatch(r"[A-Za-z/][\w./+-]*", text, re.ASCII) and text.lower() not in (
            "null", "true", "false", "yes", "no", "on", "off", "y", "n", "inf", "nan", "infinity")
        return text if bare else json.dumps(text, ensure_ascii=not text.isprintable())
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_flow(k, key)}: {_flow(v, f'{key}.{k}')}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_flow(item, f"{key}.{i}") for i, item in enumerate(value)) + "]"
    raise ConfigError(f"{key}: a {type(value).__name__} cannot be written to a config file; "
                      "name it as 'module:object' instead")
