"""Final answers of mathematics as text: found in a response or a gold, and spelled one way."""

from __future__ import annotations

import re
import unicodedata

# ------------------------------------------------------------------------------------------------ finding the answer
_BOX = re.compile(r"\\(?:boxed|fbox)\b\s*")
_MARKER = re.compile(r"(?:final\s+answer|answer)[*_]*\s*(?:is|:|=)(?!\s*not\b)|####", re.IGNORECASE)
# No alternative reads past its next opening, so that a search is linear.
_MATH = re.compile(r"(?<!\\)\$\$([^$]+)(?<!\\)\$\$|(?<!\\)\$((?:[^$\\]|\\.)+)\$"
                   r"|\\\(((?:(?!\\\().)+?)\\\)|\\\[((?:(?!\\\[).)+?)\\\]", re.DOTALL)
_LAST_NUMBER = re.compile(r"(?<![\w.,/])-?\$?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.?\d+)(?:\s*/\s*\d+)?(?:\s*\\?%)?")


FUNCTIONS = {"sin", "cos", "tan", "log", "ln", "exp", "sqrt", "pi", "abc", "xyz"}  # letters that are no words


def closing(text: str, start: int) -> int | None:
    """Index of the `}` that closes the `{` at `start`; escaped braces do not count. None when it never closes."""
    depth, i = 0, start
    while i < len(text):
        if text[i] == "\\":
            i += 1
        elif text[i] == "{":
            depth += 1
        elif text[i] == "}":
            depth -= 1
            if depth == 0:
                return i
        i += 1
    return None


def last_box(text: str) -> str | None:
    """Content of the last box, "" when it is empty or never closes, None when there is no box. A `%` after it counts."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    start = boxes[-1].end()
    if text[start:start + 1] != "{":
        token = re.match(r"-?\d+(?:\.\d+)?|\w", text[start:])
        return token.group() if token else ""
    end = closing(text, start)
    if end is None:
        return ""
    percent = re.match(r"\s*\\?%", text[end + 1:])
    return text[start + 1:end].strip() + ("%" if percent and text[start + 1:end].strip() else "")


def extract(response: str) -> str:
    """The final answer of a response, "" when there is none.

    The last box, even when it is unterminated (then there is no answer); without a box what follows the last marker
    ("final answer is", "Answer:", "####"); else the last formula or number.
    """
    box = last_box(response)
    if box is not None:
        return box
    markers = list(_MARKER.finditer(response))
    if markers:
        return _unmark(response[markers[-1].end():])
    formulas = list(_MATH.finditer(response))
    numbers = list(_LAST_NUMBER.finditer(response))
    if formulas and (not numbers or numbers[-1].start() < formulas[-1].end()):
        return next(g for g in formulas[-1].groups() if g is not None)
    whole = response.strip().rstrip(".").lstrip("= ")
    words = set(re.findall(r"[A-Za-z]{2,}", re.sub(r"\\[A-Za-z]+", "", whole))) - FUNCTIONS
    if "\n" not in whole and len(whole) <= 100 and not (words and numbers):
        return whole
    return numbers[-1].group() if numbers else ""


def _unmark(after: str) -> str:
    """The first statement after a marker, without markdown: `**58**.` -> `58`."""
    after = after.lstrip(" \t\r\n:*_")
    formula = _MATH.match(after)
    if formula:
        return next(g for g in formula.groups() if g is not None) + ("%" if re.match(r"\s*\\?%", after[formula.end():])
                                                                    else "")
    line = after.split("\n", 1)[0]
    line = re.split(r"\.(?=\s|$|[*_])|\bI hope\b", line)[0]
    line = re.split(r"(?<=\S)(?:,\s*|\s+\()(?!and\b|or\b)(?=[a-z]{2,}\b)|(?<=\S)\s+(?:since|because|as|which)\b", line)[0]
    return line.strip().strip("*_`").strip()


def gold_answer(value: object) -> str:
    """The answer inside a gold: a plain answer, `$...$`, a solution with a box, or one that ends in `#### x`.

    Raises ValueError for what is neither text nor a number.
    """
    if not isinstance(value, (str, int, float)):
        raise ValueError(f"it is a {type(value).__name__}; a gold is text or a number")
    text = str(value).strip()
    box = last_box(text)
    if box is not None:
        return box
    if "####" in text:
        return text.rpartition("####")[2].strip()
    whole = _MATH.fullmatch(text)
    return next(g for g in whole.groups() if g is not None) if whole else text


# ------------------------------------------------------------------------------------------------------- normalising
_UNICODE = {"\u2212": "-", "\u2013": "-", "\u00d7": r"\times ", "\u00f7": "/", "\u00b7": r"\cdot ", "\u03c0": r"\pi ",
            "\u221e": r"\infty ", "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2264": r"\le ", "\u2265": r"\ge ",
            "\u2260": r"\ne ", "\u00b0": r"^\circ ", "\u00b1": r"\pm ", "\u2208": r"\in ", "\u2205": r"\emptyset ",
            "\u00b2": "^2", "\u00b3": "^3", "\u00bd": r"\frac{1}{2}", "\u00bc": r"\frac{1}{4}",
            "\u00be": r"\frac{3}{4}", "\u2044": "/", "\u221a": r"\sqrt "}
_SIMPLE = [
    (r"\\(?:left|right|bigg?|Bigg?|displaystyle|textstyle)(?![A-Za-z])", ""), (r"\\[dtc]frac", r"\\frac"),
    (r"\\\$|\$|\\dollars?\b|[\u20ac\u00a3]", ""), (r"\\%", "%"), (r"\{,\}", ","),
    (r"\\!", ""), (r"(?<!\\)\\[,;: ]|\\quad|\\qquad|~", " "),
    (r"\\(?:mbox|textbf|textrm|textit|mathrm|mathbf|bf|rm)\b", r"\\text"),
    (r"\\(?:geq|geqslant)\b", r"\\ge"), (r"\\(?:leq|leqslant)\b", r"\\le"), (r"\\neq\b", r"\\ne"),
    (r"\\(?:varnothing|O)\b", r"\\emptyset"), (r"\\lbrace\b", r"\\{"), (r"\\rbrace\b", r"\\}"),
    (r"\\langle\b", "("), (r"\\rangle\b", ")"), (r"\\infin\b", r"\\infty"), (r"\\div\b", "/"),
    (r"\^\s*\{?\\circ\}?|\\degree\b|\b(?:degrees?)\b", ""),
    (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"), (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
    (r"(\\frac\{[^{}]*\})\s*(\w)", r"\1{\2}"), (r"\\sqrt\s*(\w)", r"\\sqrt{\1}"),
    (r"\s*\\text\s*\{\s*(?:percent|per cent|pct)\.?\s*\}|\s*\b(?:percent(?:age)?|per cent|pct)\b", "%"),
    (r"\\text\s*\{\s*(,?\s*(?:and|or)\s*)\}", r" \1 "), (r"^\\text\s*\{\s*(-?[\d.]+[^{}]*)\}$", r"\1"),
    *((rf"(?<=\d)\s*(?:\\text\s*\{{\s*)?{word}s?\b\s*\}}?", rf"\\times10^{{{power}}}")
      for word, power in (("thousand", 3), ("million", 6), ("billion", 9))),
    (r"(?<=\d)\s*\\text\s*\{[^{}]*\}(?:\^\{?\d\}?)?\s*$", ""),
    (r"(?<=\d)\s+(?!(?:and|or|sin|cos|tan|log|ln|exp|sqrt|pi)\b)(?:[a-z]{2,}|[mgsLh])(?:\s+[a-z]+)*(?:\^\{?\d\}?)?\s*$", ""),
]
_RULES = [(re.compile(pattern), replacement) for pattern, replacement in _SIMPLE]
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:(,| )\d{3})(?:\1\d{3})*(?![\d,])")


def normalise(text: str) -> str:
    """LaTeX and Unicode spelled one way: delimiters, spacing, fractions, percent, units and currency removed."""
    for char, latex in _UNICODE.items():
        text = text.replace(char, latex)
    text = unicodedata.normalize("NFKC", text).strip().strip("`").strip()
    outer = _MATH.fullmatch(text)
    text = next(g for g in outer.groups() if g is not None) if outer else text
    text = re.sub(r"\s+", " ", text)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    text = re.sub(r"\s+", " ", text).strip().rstrip(".;,").strip()
    if not re.search(r"[(\[{]", text):  # inside brackets a comma separates elements
        text = _THOUSANDS.sub(lambda m: m.group().replace(",", "").replace(" ", ""), text)
    return text
