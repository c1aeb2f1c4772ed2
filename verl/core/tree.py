"""Untyped settings as a tree that remembers where each value was written: YAML files, Python dicts, overrides, aliases.

A scalar keeps its text until a schema says what it should be, so that `no` stays a string for a string field and
`1e-6` is a float for a float field. What no schema types is read by the YAML 1.2 core rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml

from verl.core.errors import ConfigError

_INT = re.compile(r"[-+]?(0x[0-9a-fA-F_]+|0o[0-7_]+|[0-9][0-9_]*)", re.ASCII)
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?", re.ASCII)
_INF = re.compile(r"([-+]?)\.?inf(inity)?", re.IGNORECASE)


@dataclass(slots=True)
class Node:
    """A value as written: `value` is a dict or list of nodes, a text, or a Python object that came without a text.

    `quoted` texts are strings whatever they look like; `whole` maps replace what they meet instead of merging with it.
    """

    value: Any
    origin: str
    base: Path
    quoted: bool = False
    whole: bool = False

    @property
    def is_null(self) -> bool:
        return self.value is None or (isinstance(self.value, str) and not self.quoted
                                      and self.value in ("", "~", "null", "Null", "NULL"))

    def plain(self) -> Any:
        """The value without a schema. Raises ValueError for a number that has two readings."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        if not isinstance(self.value, str) or self.quoted:
            return self.value
        if self.is_null:
            return None
        if self.value in ("true", "True", "TRUE", "false", "False", "FALSE"):
            return self.value.lower() == "true"
        if _INT.fullmatch(self.value):
            return to_int(self.value)
        if _FLOAT.fullmatch(self.value) or self.value.lower() in (".inf", "+.inf", "-.inf"):
            return to_float(self.value)
        return self.value


def to_int(text: str) -> int:
    """An exact integer: 12, 1_000, 0x1f, 0o17, 1e3, 12.0. Raises ValueError for anything else, and for 010."""
    digits = text.lstrip("+-")
    if re.match(r"0[0-9_]", digits) and "." not in digits:
        raise ValueError(f"{text} has a leading zero, which some readers take for octal; write "
                         f"{digits.lstrip('0_') or '0'} (or 0o{digits.lstrip('0_') or '0'} if octal was meant)")
    if _INT.fullmatch(text):
        return int(text.replace("_", ""), 0)
    if _FLOAT.fullmatch(text):
        exact = Decimal(text.replace("_", ""))
        if exact == exact.to_integral_value() and exact.adjusted() < 20:
            return int(exact)
    raise ValueError(f"{text!r} is not a whole number")


def to_float(text: str) -> float:
    """A float: 1e-6, 1E-2, 1_000.5, .5, inf, -.inf. Raises ValueError for anything else, NaN included."""
    infinite = _INF.fullmatch(text)
    if infinite:
        return float(infinite.group(1) + "inf")
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    raise ValueError(f"{text!r} is not a number")


# ---------------------------------------------------------------------------------------------------------- sources
class _Loader(yaml.SafeLoader):
    """Composes nodes only; scalars are never resolved, so no YAML 1.1 rule is applied."""


_Loader.yaml_implicit_resolvers = {}


def from_yaml(text: str, name: str, base: Path, problems: list[str]) -> Node:
    """The tree of one YAML document; duplicated keys go to `problems`. Raises ConfigError when it cannot be parsed."""
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        what = getattr(error, "problem", None) or getattr(error, "reason", None) or error
        raise ConfigError(f"{name}{line}: this is not YAML: {what}") from error
    if root is None:
        return Node({}, name, base)
    node = _convert(root, name, base, problems, ())
    if not isinstance(node.value, dict) and not node.is_null:
        raise ConfigError(f"{name}: a config is a mapping of `key: value` lines, this file holds {node.plain()!r:.60}")
    return node if isinstance(node.value, dict) else Node({}, name, base)


def _convert(node: yaml.Node, name: str, base: Path, problems: list[str], parents: tuple) -> Node:
    origin = f"{name}:{node.start_mark.line + 1}" if name != "override" else name
    if any(node is parent for parent in parents):
        raise ConfigError(f"{origin}: this anchor contains itself")
    if node.tag.startswith("!") or (isinstance(node, yaml.ScalarNode) and node.tag.rpartition(":")[2] != "str"):
        raise ConfigError(f"{origin}: tag {node.tag!r} is not allowed; write the plain value")
    parents = (*parents, node)
    if isinstance(node, yaml.ScalarNode):
        return Node(node.value, origin, base, quoted=node.style is not None)
    if isinstance(node, yaml.SequenceNode):
        return Node([_convert(child, name, base, problems, parents) for child in node.value], origin, base)
    result, merged = {}, Node({}, origin, base)
    for key_node, value_node in node.value:
        line = f"{name}:{key_node.start_mark.line + 1}" if name != "override" else name
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{line}: a key must be a plain word, not a list or a mapping")
        value = _convert(value_node, name, base, problems, parents)
        if key_node.value == "<<" and key_node.style is None:
            for part in value.value if isinstance(value.value, list) else [value]:
                merged = merge(part, merged)
        elif key_node.value in result:
            problems.append(f"{key_node.value} ({line}): this key is written twice, first at "
                            f"{result[key_node.value].origin}; keep one")
        else:
            result[key_node.value] = replace(value, origin=line)
    return Node({**merged.value, **result}, origin, base)


def from_data(value: Any, base: Path) -> Node:
    """The tree of a Python mapping; its strings are never read as numbers unless a schema asks for one."""
    if isinstance(value, Mapping):
        return Node({str(key): from_data(child, base) for key, child in value.items()}, "argument", base)
    if isinstance(value, (list, tuple)):
        return Node([from_data(child, base) for child in value], "argument", base)
    return Node(value, "argument", base, quoted=isinstance(value, str))


def from_overrides(overrides: Sequence[str], base: Path, problems: list[str]) -> Node:
    """The tree of `a.b=value`, `--a.b=value`, `--a.b value` and `--flag` (true) words; the last of one key wins."""
    root = Node({}, "override", base)
    words = list(overrides)
    while words:
        word = words.pop(0)
        key, equals, text = word.partition("=")
        if not equals and key.startswith("--"):
            text = words.pop(0) if words and not words[0].startswith("--") and "=" not in words[0] else "true"
        elif not equals:
            problems.append(f"{word!r} (override): expected key=value, for example trainer.learning_rate=1e-6")
            continue
        parts = key.removeprefix("--").split(".")
        if not all(parts):
            problems.append(f"{word!r} (override): {key!r} is not a dotted key")
            continue
        if not _put(root, parts, _override_value(text, base, problems)):
            problems.append(f"{word!r} (override): an earlier override gave a part of this key a plain value")
    return root


def _override_value(text: str, base: Path, problems: list[str]) -> Node:
    text = text.strip()
    if text[:1] not in tuple("[{\"'"):
        return Node(text, "override", base)
    try:
        return replace(_convert(yaml.compose(text, Loader=_Loader), "override", base, problems, ()), whole=True)
    except yaml.YAMLError:
        problems.append(f"{text!r:.80} (override): brackets or quotes do not close; quote the value for your shell")
        return Node("", "override", base)


# ----------------------------------------------------------------------------------------------- aliases and merging
def merge(low: Node, high: Node) -> Node:
    """`high` over `low`: maps key by key (unless `high` is whole), `0:`-like keys into a list, all else replaced."""
    if high.whole or not isinstance(high.value, dict):
        return high
    if isinstance(low.value, list) and high.value and all(
            key.isdecimal() and int(key) < len(low.value) for key in high.value):
        items = [merge(item, high.value[str(i)]) if str(i) in high.value else item for i, item in enumerate(low.value)]
        return replace(low, value=items)
    if not isinstance(low.value, dict):
        return high
    result = dict(low.value)
    for key, child in high.value.items():
        result[key] = merge(result[key], child) if key in result else child
    return replace(low, value=result)


def apply_aliases(root: Node, aliases: Mapping[str, str], problems: list[str]) -> None:
    """Move every alias (dotted) of one source to its canonical key, in place; two unlike values are a problem."""
    for alias, canonical in sorted(aliases.items(), key=lambda row: -row[0].count(".")):
        node = _take(root, alias.split("."))
        if node is None:
            continue
        node = _relabel(node, f"alias {alias} in ")
        present = _find(root, canonical.split("."))
        if present is not None and isinstance(present.value, dict) and isinstance(node.value, dict):
            clashes = sorted(key for key in present.value.keys() & node.value.keys()
                             if _shown(present.value[key]) != _shown(node.value[key]))
            problems += [_clash(f"{canonical}.{key}", present.value[key], f"{alias}.{key}", node.value[key])
                         for key in clashes]
            node = merge(present, node)
        elif present is not None and _shown(present) != _shown(node):
            problems.append(_clash(canonical, present, alias, node))
            continue
        elif present is not None:
            continue
        if not _put(root, canonical.split("."), node):
            problems.append(f"{alias} ({node.origin}): is another name of {canonical}, but a part of that key "
                            "holds a plain value here")


def _shown(node: Node) -> str:
    try:
        return repr(node.plain())
    except ValueError:
        return str(node.value)


def _clash(canonical: str, present: Node, alias: str, node: Node) -> str:
    return (f"{canonical} = {_shown(present)} ({present.origin}) and {alias} = {_shown(node)} "
            f"({node.origin.rpartition(' in ')[2]}) are one setting; keep one")


def _relabel(node: Node, prefix: str) -> Node:
    value = node.value
    if isinstance(value, dict):
        value = {key: _relabel(child, prefix) for key, child in value.items()}
    return replace(node, value=value, origin=prefix + node.origin)


def _find(node: Node, parts: Iterable[str]) -> Node | None:
    for part in parts:
        if not isinstance(node.value, dict) or part not in node.value:
            return None
        node = node.value[part]
    return node


def _take(node: Node, parts: Sequence[str]) -> Node | None:
    """Remove and return what stands at `parts`; maps that this empties go too."""
    if not isinstance(node.value, dict) or parts[0] not in node.value:
        return None
    if len(parts) == 1:
        return node.value.pop(parts[0])
    found = _take(node.value[parts[0]], parts[1:])
    if found is not None and not node.value[parts[0]].value:
        del node.value[parts[0]]
    return found


def _put(node: Node, parts: Sequence[str], value: Node) -> bool:
    for part in parts[:-1]:
        if not isinstance(node.value, dict):
            return False
        node = node.value.setdefault(part, Node({}, value.origin, value.base))
    if not isinstance(node.value, dict):
        return False
    node.value[parts[-1]] = value
    return True
