"""The part of the maths verifier that needs math-verify and sympy; runs in worker processes that can be killed."""

from __future__ import annotations

import logging
import re
from typing import Any

from verl.rewards.math_answer import compare, leaves, number, parse, word
from verl.rewards.math_text import gold_answer, normalise


def grade(request: dict[str, Any]) -> float:
    """{"gold", "response"} -> 1.0 or 0.0. Raises ValueError when the gold is malformed."""
    return float(compare(request["gold"], request["response"], symbolic))


def check(request: dict[str, Any]) -> str:
    """{"gold"} -> "" when every leaf of it can be compared, else the reason."""
    try:
        parsed = parse(normalise(gold_answer(request["gold"])))
    except ValueError as error:
        return str(error)
    for leaf in leaves(parsed):
        if number(leaf) is None and word(leaf) is None and not _parse(leaf):
            return f"{leaf!r} is not mathematics that can be read"
    return ""


def _parse(latex: str) -> list[Any]:
    """math-verify's reading of one expression: [expression] or []. Its own alarm-based limit is off (see workers.py)."""
    from math_verify import LatexExtractionConfig
    from math_verify import parse as read

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    found = read(f"${latex}$", [LatexExtractionConfig()], fallback_mode="no_fallback", extraction_mode="first_match",
                 parsing_timeout=None)
    return [expression for expression in found if not isinstance(expression, str)]


def symbolic(gold: str, answer: str) -> bool:
    """Equality of two expressions: constants by 30-digit evaluation, the rest by math-verify (gold first)."""
    import sympy
    from math_verify import verify

    sides = [_parse(gold), _parse(answer)]
    if not all(sides):
        return False
    a, b = sides[0][0], sides[1][0]
    if isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr):
        letters = a.free_symbols | b.free_symbols
        if {letter.name for letter in letters} == {"i"}:  # the only letter: the imaginary unit
            a, b = (side.subs({letter: sympy.I for letter in letters}) for side in (a, b))
        if not a.free_symbols and not b.free_symbols:
            return _equal_constants(a, b, answer)
    return bool(verify([a], [b], timeout_seconds=None, allow_set_relation_comp=True))


def _equal_constants(a: Any, b: Any, answer: str) -> bool:
    """Relative, so that small numbers differ; a decimal answer with six or more digits may approximate."""
    import sympy

    values = [complex(sympy.N(side, 30)) for side in (a, b)]
    if not all(abs(value) < float("inf") for value in values):
        return bool(a == b)
    scale = max(abs(value) for value in values)
    decimal = re.search(r"\d*\.\d+", answer)
    digits = len(decimal.group().strip("0.").replace(".", "")) if decimal else 15
    tolerance = 1e-12 if digits >= 15 else 10.0 ** (1 - digits) if digits >= 6 else 0.0
    if abs(values[0] - values[1]) > max(tolerance, 1e-12) * scale:
        return False
    return digits < 15 or sympy.simplify(a - b).equals(0) is not False
