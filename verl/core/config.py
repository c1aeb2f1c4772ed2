"""Load a config into a given schema of nested dataclasses, remembering where every value came from.

A schema is a dataclass; its fields are settings (`option(...)` adds the help text) or sections (other dataclasses).
Every default stands in its dataclass and nowhere else; `__post_init__` holds the checks that need several fields.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from glob import has_magic
from pathlib import Path
from typing import Any, Literal, Union

from verl.core.errors import ConfigError
from verl.core.schema import (
    Setting,
    default_of,
    dump,
    join,
    option,
    plain_section,
    section_type,
    settings,
    suggest,
    type_name,
)
from verl.core.tree import Node, apply_aliases, from_data, from_overrides, from_yaml, merge, to_float, to_int

__all__ = ["Loaded", "Setting", "dump", "load", "option", "settings", "type_name"]

_BAD = object()  # stands for a value that already has its line in `problems`


@dataclass(frozen=True, slots=True)
class Loaded:
    """A typed config, the origin of each leaf (`default`, `run.yaml:12`, `override`, ...), the file's own text."""

    config: Any
    origins: dict[str, str]
    text: str


def load(schema: type, path: str | Path | None = None, overrides: Sequence[str] = (),
         data: Mapping[str, Any] | None = None, aliases: Mapping[str, str] | None = None) -> Loaded:
    """Read `path` (YAML), then `data` (a Python mapping), then `overrides` (`a.b=value`); the later wins.

    `aliases` maps another spelling (dotted) to the one canonical dotted key. Relative paths belong to the config file
    they stand in, else to the working directory. Raises ConfigError with one line for every problem found.
    """
    problems: list[str] = []
    here, text, sources = Path.cwd(), "", []
    if path is not None:
        file = Path(path).expanduser()
        try:
            text = file.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"config file {str(path)!r} cannot be read: "
                              f"{getattr(error, 'strerror', None) or error} (working directory {here})") from error
        sources.append(from_yaml(text, file.name, file.resolve().parent, problems))
    if data is not None:
        sources.append(from_data(data, here))
    sources.append(from_overrides(overrides, here, problems))
    root = Node({}, "default", here)
    for source in sources:
        apply_aliases(source, aliases or {}, problems)
        root = merge(root, source)
    builder = _Builder(problems, aliases or {})
    config = builder.section(schema, root, "", None)
    builder.explain_unknown(schema, root)
    if problems:
        count = f"{len(problems)} problems in the settings:\n  " if len(problems) > 1 else ""
        raise ConfigError(count + "\n  ".join(problems))
    return Loaded(config, builder.origins, text)


# ------------------------------------------------------------------------------------------------------ typed values
class _Builder:
    """One pass over schema and tree; problems are collected so that all are seen at once."""

    def __init__(self, problems: list[str], aliases: Mapping[str, str]):
        self.problems, self.aliases = problems, aliases
        self.origins: dict[str, str] = {}
        self.unknown: list[tuple[str, type, str, Node]] = []  # path, section, key, value

    def fail(self, key: str, node: Node, message: str) -> Any:
        self.problems.append(f"{key or 'config'} ({node.origin}): {message}")
        return _BAD

    def section(self, schema: type, node: Node, path: str, base: Any) -> Any:
        """An instance of `schema`; fields the tree leaves out come from `base` where it differs from the defaults."""
        if node.is_null:
            node = replace(node, value={})
        if not isinstance(node.value, dict):
            return self.fail(path, node, f"is a section with the keys {', '.join(_names(schema))}; got {_seen(node)}")
        hints = typing.get_type_hints(schema)
        self.unknown += [(path, schema, key, child) for key, child in node.value.items() if key not in _names(schema)]
        inherited, values = _differences(schema, base), {}
        for f in (f for f in fields(schema) if f.init):
            key, child = join(path, f.name), node.value.get(f.name)
            default = inherited.get(f.name, default_of(f))
            inner = self._section_of(f, hints[f.name], schema, node, path, inherited)
            if inner is _BAD:
                values[f.name] = _BAD
            elif inner and self._present(hints[f.name], child, default, f):
                start = default if type(default) is inner else None
                values[f.name] = self.section(inner, child or Node({}, "default", node.base), key, start)
            elif child is not None:
                values[f.name] = self.value(hints[f.name], child, key, f.metadata.get("path", False))
                self.origins[key] = child.origin
            elif default is MISSING:
                values[f.name] = self.fail(key, node, f"is required and has no default; set {key}=...")
            else:
                self.origins[key] = "default"
                if isinstance(default, Path):
                    values[f.name] = _absolute(default, Path.cwd())
                elif f.name in inherited:
                    values[f.name] = default
        return self._construct(schema, values, node, path)

    @staticmethod
    def _present(hint: Any, child: Node | None, default: Any, f: dataclasses.Field) -> bool:
        """Whether a section exists: written, or there by default; null switches an optional one off."""
        if child is None:
            return default is not None or f.metadata.get("schema_from") is not None
        return not (child.is_null and type(None) in typing.get_args(hint))

    def _section_of(self, f: dataclasses.Field, hint: Any, schema: type, node: Node, path: str,
                    inherited: Mapping) -> Any:
        """The dataclass behind a field (chosen by `schema_from` when it depends on its neighbours), or None."""
        if f.metadata.get("schema_from") is None:
            return section_type(hint)
        try:
            return f.metadata["schema_from"](plain_section(schema, node, inherited))
        except ValueError as error:
            return self._blame(schema, node, path, str(error))

    def _construct(self, schema: type, values: dict[str, Any], node: Node, path: str) -> Any:
        if any(value is _BAD for value in values.values()):
            return _BAD
        try:
            return schema(**values)
        except ValueError as error:
            return self._blame(schema, node, path, str(error))

    def _blame(self, schema: type, node: Node, path: str, message: str) -> Any:
        """A check's message as a problem of the field it begins with, else of the whole section."""
        message = message.removeprefix(path + ".")
        name = re.match(r"\w*", message).group()
        if name not in _names(schema):
            return self.fail(path, node, message)
        head, colon, rest = message.partition(":")
        named = colon and re.fullmatch(r"[\w.]+", head)
        origin, at = "default", node
        for part in (head if named else name).split("."):
            at = at.value.get(part) if isinstance(at.value, dict) else None
            if at is None:
                break
            origin = at.origin
        self.problems.append(f"{join(path, head)} ({origin}):{rest}" if named else f"{join(path, message)} ({origin})")
        return _BAD

    def value(self, hint: Any, node: Node, key: str, path: bool | str) -> Any:
        """`node` as `hint`, or _BAD with a line that names the key, what was seen and what is allowed."""
        before = len(self.problems)
        try:
            result = self._convert(hint, node, key, path)
            return result if len(self.problems) == before else _BAD
        except ValueError as error:
            return self.fail(key, node, str(error) or f"expected {type_name(hint)}, got {_seen(node)}")

    def _convert(self, hint: Any, node: Node, key: str, path: bool | str) -> Any:
        origin = typing.get_origin(hint)
        if hint is Any or hint is object:
            return node.plain()
        if origin in (Union, types.UnionType):
            return self._union(typing.get_args(hint), hint, node, key, path)
        if origin is Literal or isinstance(hint, type) and issubclass(hint, enum.Enum):
            return _choice(hint, node)
        if is_dataclass(hint):
            return self.section(hint, node, key, None)
        container = origin or hint
        if container in (list, tuple, Sequence):
            return self._list(hint, container, node, key, path)
        if container in (dict, Mapping):
            if not isinstance(node.value, dict):
                raise ValueError(f"expected a mapping ({type_name(hint)}), got {_seen(node)}")
            of_key, of_value = typing.get_args(hint) or (str, Any)
            return {self.value(of_key, Node(k, child.origin, child.base), key, path):
                    self.value(of_value, child, f"{key}.{k}", path) for k, child in node.value.items()}
        return _scalar(hint, node, path)

    def _list(self, hint: Any, container: Any, node: Node, key: str, path: bool | str) -> Any:
        if not isinstance(node.value, list):
            raise ValueError(f"expected a list ({type_name(hint)}), got {_seen(node)}; write [a, b]")
        args = typing.get_args(hint) or (Any,)
        if container is tuple and args[-1] is not Ellipsis and len(args) != len(node.value):
            raise ValueError(f"expected {len(args)} values ({type_name(hint)}), got {len(node.value)}")
        kinds = args if container is tuple and args[-1] is not Ellipsis else [args[0]] * len(node.value)
        items = [self.value(kind, child, f"{key}.{i}", path) for i, (kind, child) in enumerate(zip(kinds, node.value))]
        return tuple(items) if container is tuple else items

    def _union(self, members: tuple, hint: Any, node: Node, key: str, path: bool | str) -> Any:
        """The first member that takes the value, narrow kinds before wide ones; quoted texts are strings first."""
        if node.is_null and type(None) in members:
            return None
        members = [m for m in members if m is not type(None)]
        if isinstance(node.value, (dict, list)):
            shapes = (dict, Mapping) if isinstance(node.value, dict) else (list, tuple, Sequence)
            members = [m for m in members if (typing.get_origin(m) or m) in shapes
                       or is_dataclass(m) and isinstance(node.value, dict)]
        if len(members) == 1:
            return self._convert(members[0], node, key, path)
        for member in sorted(members, key=lambda m: _width(m, node)):
            mark = len(self.problems), len(self.unknown)
            if member is bool and str in members and str(node.value).lower() not in ("true", "false"):
                continue  # beside str, only the two plain words are booleans
            try:
                value = self._convert(member, node, key, path)
            except ValueError:
                continue
            if (len(self.problems), len(self.unknown)) == mark:
                return value
            del self.problems[mark[0]:], self.unknown[mark[1]:]
        raise ValueError(f"expected {type_name(hint)}, got {_seen(node)}")

    def explain_unknown(self, schema: type, root: Node) -> None:
        """One line for each unknown key, with the nearest valid one in its section, then anywhere."""
        everywhere = [s.key for s in settings(schema, root)] + list(self.aliases)
        for path, section, key, node in self.unknown:
            siblings = _names(section) + [a.rpartition(".")[2] for a in self.aliases if a.rpartition(".")[0] == path]
            guess = suggest(key, path, siblings, everywhere)
            hint = f"did you mean {guess!r}?" if guess else f"allowed here: {', '.join(_names(section)) or 'nothing'}"
            self.problems.append(f"{join(path, key)} ({node.origin}): is not a setting; {hint}")


def _names(schema: type) -> list[str]:
    return [f.name for f in fields(schema) if f.init]


def _differences(schema: type, base: Any) -> dict[str, Any]:
    """Where a section's default instance differs from what its class makes by itself."""
    if base is None:
        return {}
    try:
        plain = schema()
    except (TypeError, ValueError):
        return {name: getattr(base, name) for name in _names(schema)}
    return {name: getattr(base, name) for name in _names(schema) if getattr(base, name) != getattr(plain, name)}


def _seen(node: Node) -> str:
    """The value as written, short enough for one line."""
    if isinstance(node.value, dict):
        return f"a mapping ({', '.join(node.value) or 'empty'})"
    if isinstance(node.value, list):
        return f"a list of {len(node.value)}"
    return "nothing (null)" if node.is_null else f"{node.value!r:.80}"


def _width(member: Any, node: Node) -> int:
    """Order in which the members of a union are tried on a value."""
    kind = typing.get_origin(member) or member
    order = [Literal, Path, str, bool, int, float] if node.quoted else [Literal, bool, int, float, Path, str]
    return order.index(kind) if kind in order else 0


def _scalar(hint: Any, node: Node, path: bool | str) -> Any:
    value, text = node.value, isinstance(node.value, str)
    if node.is_null:
        raise ValueError(f"expected {type_name(hint)}, got nothing (null)")
    if hint is bool:
        words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
        if isinstance(value, bool):
            return value
        if text and value.lower() in words:
            return words[value.lower()]
        raise ValueError(f"expected true or false, got {_seen(node)}")
    if hint in (int, float):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not text and not number:
            raise ValueError(f"expected {type_name(hint)}, got {_seen(node)}")
        return (to_int if hint is int else to_float)(value.strip() if text else repr(value))
    if hint is str and text:
        return str(_absolute(value, node.base)) if path == "file" else _located(value, node) if path else value
    if hint is Path and (text or isinstance(value, Path)):
        return _absolute(value, node.base)
    if isinstance(hint, type) and hint not in (str, Path) and isinstance(value, hint):
        return value
    raise ValueError(f"expected {type_name(hint)}, got {_seen(node)}")


def _located(value: str, node: Node) -> str:
    """A string that may be a path (or `file.py:name`): absolute when written as one, a glob, or there; else as it is."""
    if "{" in value or "\n" in value:
        return value  # text that may also be given as a file, such as a template
    candidate, file = _absolute(value, node.base), _absolute(re.sub(r"(?<=\.py):\w+$", "", value), node.base)
    return str(candidate) if value.startswith((".", "~", "/")) or has_magic(value) or file.exists() else value


def _absolute(path: str | Path, base: Path) -> Path:
    return Path(os.path.abspath(base / Path(path).expanduser()))


def _choice(hint: Any, node: Node) -> Any:
    if isinstance(hint, type):
        if isinstance(node.value, hint):
            return node.value
        allowed = {str(member.value): member for member in hint}
    else:
        allowed = {str(v).lower() if isinstance(v, bool) else str(v): v for v in typing.get_args(hint)}
    text = str(node.value).lower() if isinstance(node.value, bool) else str(node.value)
    if isinstance(node.value, (dict, list)) or text not in allowed:
        near = get_close_matches(text, allowed, n=1)
        raise ValueError(f"{_seen(node)} is not allowed; use one of {', '.join(allowed)}"
                         + (f" (did you mean {near[0]!r}?)" if near else ""))
    return allowed[text]
