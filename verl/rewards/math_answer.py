"""Final answers of mathematics, taken apart and compared by type.

Numbers are exact fractions; a pair, an interval, a set and a list have their own equality; only what is left (symbols,
roots, matrices, relations) goes to a `symbolic(gold, answer)` callable, see math_symbolic.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from verl.rewards.math_text import FUNCTIONS, closing, extract, gold_answer, normalise

Symbolic = Callable[[str, str], bool]
_LONGEST, _MOST = 4000, 100  # characters and elements of an answer; nobody's answer, but an idle model's output


class NeedsSymbolic(Exception):
    """The comparison cannot be decided by structure and exact numbers."""


# ------------------------------------------------------------------------------------------------------ taking apart
@dataclass(frozen=True)
class Many:
    """Several answers. kind: "(", "[", ... + closing bracket (ordered), "set" (unordered, no doubles), "union"."""

    kind: str
    items: tuple[Many | str, ...]


def parse(text: str, depth: int = 0) -> Many | str:
    """A normalised answer as a structure of leaves. Raises ValueError for an empty or malformed answer."""
    text = text.strip()
    if not text or depth > 8 or len(text) > _LONGEST:
        raise ValueError("it is empty" if not text else "it is nested too deeply, or too long")
    member = re.match(r"[A-Za-z](?:_\w+)?\s*\\in(?![a-z])\s*", text)
    text = text[member.end():] if member else text
    parts = split(text, r"\\cup(?![a-z])")
    if len(parts) > 1:
        return Many("union", tuple(parse(p, depth + 1) for p in parts))
    parts = split(text, r",|;|\b(?:and|or)\b")
    if len(parts) > 1:
        parts = [p for i, p in enumerate(parts) if p.strip() or i == 0 or i == len(parts) - 1]  # "1, 2, and 3"
        return Many("set", _spread(parse(p, depth + 1) for p in parts))
    if text.startswith(r"\{") and text.endswith(r"\}") and _whole(text):
        inner = text[2:-2].strip()
        return Many("set", _spread(parse(p, depth + 1) for p in split(inner, ",|;")) if inner else ())
    if text[0] in "([" and text[-1] in ")]" and _whole(text):
        inner = split(text[1:-1], ",|;")
        if len(inner) > 1:
            return Many(text[0] + text[-1], tuple(parse(p, depth + 1) for p in inner))
        if text[0] + text[-1] == "()":
            return parse(text[1:-1], depth + 1)
    if text.count(r"\pm") == 1 and number(text) is None:
        return Many("set", (text.replace(r"\pm", "+").lstrip("+ "), text.replace(r"\pm", "-")))
    if text.count("(") + text.count("[") != text.count(")") + text.count("]"):
        raise ValueError("its brackets do not match")
    words = re.fullmatch(r"\\text\s*\{([^{}]*(?:\\[{}][^{}]*)*)\}", text)
    if words and not words[1].strip():
        raise ValueError("it is empty")
    return text


def _spread(items) -> tuple[Many | str, ...]:
    """Elements of a set, `\\pm` pairs taken as two."""
    out: list[Many | str] = []
    for item in items:
        out.extend(item.items if isinstance(item, Many) and item.kind == "set" else [item])
    return tuple(out)


def split(text: str, separator: str) -> list[str]:
    """Cut at a separator (a regular expression) that stands outside every bracket."""
    pattern, parts, depth, start, i = re.compile(separator), [], 0, 0, 0
    while i < len(text):
        two = text[i:i + 2]
        if two in (r"\{", r"\}"):
            depth += 1 if two == r"\{" else -1
            i += 2
            continue
        match = pattern.match(text, i) if depth == 0 else None
        if match:
            parts.append(text[start:i])
            if len(parts) >= _MOST:
                raise ValueError(f"it has {_MOST} or more elements")
            i = start = match.end()
            continue
        depth += (text[i] in "([{") - (text[i] in ")]}")
        i += 1
    return [*parts, text[start:]]


def _whole(text: str) -> bool:
    """True when the first bracket closes with the last one and not before."""
    depth = 0
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if depth == 0 and i < len(text) - 1 and i > 0:
            return False
    return depth == 0


# ----------------------------------------------------------------------------------------------------------- numbers
_DEC = r"(?:\d+\.?\d*|\.\d+)"
_FORMS = [(re.compile(pattern), read) for pattern, read in [
    (rf"({_DEC})", lambda m: Fraction(m[1])),
    (rf"({_DEC})\s*/\s*(-?{_DEC})", lambda m: Fraction(m[1]) / Fraction(m[2])),
    (rf"\\frac\s*\{{\s*(-?{_DEC})\s*\}}\s*\{{\s*(-?{_DEC})\s*\}}", lambda m: Fraction(m[1]) / Fraction(m[2])),
    (r"(\d+)\s*\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}", lambda m: _mixed(m)),
    (r"(\d+)\s+(\d+)\s*/\s*(\d+)", lambda m: _mixed(m)),
    (rf"({_DEC})\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*\{{?\s*([+-]?\d{{1,3}})\s*\}}?",
     lambda m: Fraction(m[1]) * Fraction(10) ** int(m[2])),
    (rf"({_DEC})[eE]([+-]?\d{{1,3}})", lambda m: Fraction(m[1]) * Fraction(10) ** int(m[2])),
    (r"(\d*)\.(\d*)\\overline\s*\{(\d+)\}", lambda m: Fraction(int((m[1] or "0") + m[2] + m[3])
                                                              - int((m[1] or "0") + m[2]),
                                                              10 ** len(m[2]) * (10 ** len(m[3]) - 1))),
]]


def _mixed(match: re.Match) -> Fraction | None:
    whole, top, bottom = (int(match[i]) for i in (1, 2, 3))
    return whole + Fraction(top, bottom) if top < bottom else None


def number(text: str) -> tuple[Fraction, bool] | None:
    """(exact value, is a percentage) of a leaf that is one number: integer, decimal, fraction, mixed, scientific."""
    text = text.strip()
    percent = text.endswith("%")
    body = text.rstrip("%").strip()
    sign = 1
    while body[:1] in ("-", "+"):
        sign, body = (-sign if body[0] == "-" else sign), body[1:].lstrip()
    if body.startswith("{") and closing(body, 0) == len(body) - 1:
        body = body[1:-1].strip()
    if len(body) > 400:  # the exact digits of a longer one are not an answer; Python would refuse to read them as well
        return None
    for pattern, read in _FORMS:
        match = pattern.fullmatch(body)
        if match:
            try:
                value = read(match)
            except ZeroDivisionError:
                return None
            return None if value is None else (sign * value, percent)
    return None


def _equal_numbers(gold: tuple[Fraction, bool], answer: tuple[Fraction, bool], texts: tuple[str, str]) -> bool:
    (a, a_percent), (b, b_percent) = gold, answer
    if a == b:  # 35% against a bare 35: the sign is read as a unit that one side left out
        return True
    if a_percent != b_percent:
        a, b = (a / 100, b) if a_percent else (a, b / 100)
        return a == b
    return rounded(a, texts[1], b) or rounded(b, texts[0], a)


def rounded(exact: Fraction, text: str, value: Fraction) -> bool:
    """True when `text` is a decimal of six or more significant digits that approximates a non-terminating fraction."""
    digits = re.fullmatch(r"-?\d*\.(\d+)", text.strip())
    if digits is None or len(text.strip("-0.").replace(".", "")) < 6 or _terminates(exact):
        return False
    return abs(exact - value) <= Fraction(1, 10 ** len(digits[1]))


def _terminates(value: Fraction) -> bool:
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


# --------------------------------------------------------------------------------------------------------- comparing
_ASSIGN = re.compile(r"([A-Za-z](?:_\{?\w+\}?)?(?:\s*\([a-z]\))?|\\[a-z]+)\s*=(?![=])\s*")


def equal(gold: Many | str, answer: Many | str, symbolic: Symbolic | None = None) -> bool:
    """Compare two parsed answers, the gold first (a gold `x=5` accepts `5`, a gold set accepts any order).

    Raises NeedsSymbolic when leaves have to be compared as expressions and `symbolic` is None.
    """
    if isinstance(gold, str) and isinstance(answer, str):
        return _equal_leaves(gold, answer, symbolic)
    if isinstance(gold, Many) and isinstance(answer, Many):
        if gold.kind != answer.kind:
            return False
        if gold.kind in ("set", "union"):
            return _covers(gold.items, answer.items, symbolic) and _covers(answer.items, gold.items, symbolic, True)
        return len(gold.items) == len(answer.items) and all(
            equal(g, a, symbolic) for g, a in zip(gold.items, answer.items))
    many, leaf = (gold, answer) if isinstance(gold, Many) else (answer, gold)
    if many.kind == "set" and len(many.items) == 1 and isinstance(many.items[0], str):
        return equal(many.items[0], leaf, symbolic) if many is gold else equal(leaf, many.items[0], symbolic)
    if re.search(r"[<>]|\\(?:le|ge|ne|setminus|cap|mathbb|emptyset)(?![a-z])", leaf):  # x > 2 against (2, \infty)
        return _ask(symbolic, render(gold), render(answer))
    return False


def _covers(a: tuple, b: tuple, symbolic: Symbolic | None, swapped: bool = False) -> bool:
    """Every element of a equals one of b; what exact comparison settles is never asked symbolically."""
    for x in a:
        pairs = [(y, x) if swapped else (x, y) for y in b]
        if any(_surely(*pair) for pair in pairs):
            continue
        if not any(equal(*pair, symbolic) for pair in pairs):
            return False
    return True


def _surely(gold: Many | str, answer: Many | str) -> bool:
    try:
        return equal(gold, answer)
    except NeedsSymbolic:
        return False


def _equal_leaves(gold: str, answer: str, symbolic: Symbolic | None) -> bool:
    if _squeeze(gold) == _squeeze(answer):
        return True
    g, a = _ASSIGN.match(gold), _ASSIGN.match(answer)
    if g and a and "=" not in gold[g.end():]:
        if _squeeze(g[1]) != _squeeze(a[1]):
            return False
        return equal(parse(gold[g.end():]), parse(answer.rpartition("=")[2]), symbolic)
    if bool(g) != bool(a) and "=" not in (answer if g else gold):
        return equal(*(parse(t.rpartition("=")[2]) for t in (gold, answer)), symbolic)
    if ("=" in gold) != ("=" in answer):
        return False  # an equation is not its right-hand side
    numbers = number(gold), number(answer)
    if numbers[0] and numbers[1]:
        return _equal_numbers(numbers[0], numbers[1], (gold, answer))
    letters = re.fullmatch(r"[A-Za-z]", gold), re.fullmatch(r"[A-Za-z]", answer)
    if all(letters):  # a choice may be answered in lower case, a variable is itself
        return gold in "ABCDEFGHIJ" and gold == answer.upper()
    bases = [re.fullmatch(r"\w+?_\{?(\d+)\}?", _squeeze(text)) for text in (gold, answer)]
    if all(bases) and bases[0][1] != bases[1][1]:  # 11_2 is not 11_3
        return False
    if word(gold) is not None or word(answer) is not None:
        return _plain_words(gold) == _plain_words(answer)
    return _ask(symbolic, gold, answer)


def _ask(symbolic: Symbolic | None, gold: str, answer: str) -> bool:
    if symbolic is None:
        raise NeedsSymbolic
    return symbolic(gold, answer)


def _squeeze(text: str) -> str:
    return re.sub(r"\s+", "", text)


_TEXT = re.compile(r"\\text\s*\{(.*)\}")


def _plain_words(text: str) -> str:
    inner = _TEXT.fullmatch(text.strip())
    return re.sub(r"\s+", " ", (inner[1] if inner else text).strip().strip("().").strip()).casefold()


def word(text: str) -> str | None:
    """A leaf that is words or a choice letter, casefolded (`\\text{Monday}`, `Monday`, `\\text{(B)}`); else None."""
    plain = _plain_words(text)
    words = re.fullmatch(r"[a-z]{3,}(?:[ -][a-z]+)*", plain) and plain not in FUNCTIONS
    return plain if words or _TEXT.fullmatch(text.strip()) else None


def render(value: Many | str) -> str:
    """A structure as LaTeX again, for the symbolic comparison."""
    if isinstance(value, str):
        return value
    inner = [render(item) for item in value.items]
    if value.kind == "union":
        return r" \cup ".join(inner)
    return rf"\{{{','.join(inner)}\}}" if value.kind == "set" else value.kind[0] + ",".join(inner) + value.kind[1]


def leaves(value: Many | str) -> list[str]:
    """All leaves of a structure, in order."""
    return [value] if isinstance(value, str) else [leaf for item in value.items for leaf in leaves(item)]


def compare(gold: object, response: str, symbolic: Symbolic | None = None) -> bool:
    """Does the response's final answer equal the gold? A response without a well-formed final answer does not.

    Raises NeedsSymbolic without `symbolic`, and ValueError when the gold itself is malformed.
    """
    want = parse(normalise(gold_answer(gold)))
    try:
        answer = extract(response)
        return len(answer) <= _LONGEST and equal(want, parse(normalise(answer)), symbolic)
    except ValueError:  # the gold was checked at load
        return False
