"""Rule verifiers that need no model and no process: exact, format, gsm8k; and the table of all verifier names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from verl.core.errors import ConfigError
from verl.core.registry import Table
from verl.core.types import RewardResult, Scored
from verl.rewards.base import Item, Source, Verifier
from verl.rewards.config import RewardSource

VERIFIERS = Table("trainer.rewards verifier", {
    "exact": "verl.rewards.verifiers:Exact",
    "format": "verl.rewards.verifiers:Format",
    "gsm8k": "verl.rewards.verifiers:GSM8K",
    "math": "verl.rewards.math_verifier:Math",
    "code": "verl.rewards.code:Code",
})


class Exact(Verifier):
    """1 when the response equals the gold answer once surrounding white space is stripped, else 0."""

    def __init__(self, name: str, settings: RewardSource):
        super().__init__(name, settings.timeout, settings.gold)

    def parse_gold(self, value: Any) -> str:
        text = str(value).strip()
        if not text:
            raise ValueError("it is empty")
        return text

    def grade(self, text: str, value: Any) -> float:
        return float(text.strip() == str(value).strip())


class Format(Source):
    """1 when the whole response matches the source's `pattern` (Python `re`, dot matches newlines), else 0."""

    inline = True

    def __init__(self, name: str, settings: RewardSource):
        super().__init__(name, settings.timeout)
        if settings.pattern is None:
            raise ConfigError(f"trainer.rewards: verifier 'format' needs a `pattern`, e.g. "
                              f"pattern: '<think>.*</think>\\s*<answer>.*</answer>\\s*' (source {name!r})")
        try:
            self.pattern = re.compile(settings.pattern, re.DOTALL)
        except re.error as error:
            raise ConfigError(f"trainer.rewards: pattern {settings.pattern!r} of source {name!r} is not a regular "
                              f"expression: {error}") from error

    def score(self, items: Sequence[Item]) -> list[RewardResult]:
        return [Scored(float(self.pattern.fullmatch(item.sample.text) is not None)) for item in items]


_NUMBER = re.compile(r"(?<![\w./])([-+\u2212]?)\$?([-+\u2212]?)((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?!\d|,\d|/\d)")


def last_number(text: str) -> Decimal | None:
    """The last complete number of a text, exactly: signs, currency, thousands groups of three, decimals; else None."""
    found = list(_NUMBER.finditer(text))
    return _value(found[-1]) if found else None


def _value(match: re.Match) -> Decimal | None:
    sign = -1 if (match[1] + match[2]).replace("\u2212", "-") == "-" else 1
    try:
        return sign * Decimal(match[3].replace(",", ""))
    except InvalidOperation:
        return None


class GSM8K(Verifier):
    """1 when the response's final number equals the gold's, exactly as decimals (Cobbe et al., arXiv 2110.14168).

    strict (default): the number right after the last `####` of the whole response. flexible: that, or without a marker
    the last number of the response. The gold is a number, or a worked solution that ends in `#### number`.
    """

    def __init__(self, name: str, settings: RewardSource):
        super().__init__(name, settings.timeout, settings.gold)
        self.mode = settings.mode or "strict"
        if self.mode not in ("strict", "flexible"):
            raise ConfigError(f"trainer.rewards: mode {settings.mode!r} of source {name!r}; allowed: strict, flexible")

    def describe(self) -> str:
        return f"mode {self.mode}"

    def parse_gold(self, value: Any) -> Decimal:
        text = str(value)
        after = text.rpartition("####")[2].strip()
        match = _NUMBER.fullmatch(after.rstrip(".").strip())
        if match is None:
            raise ValueError("it is neither a number nor a solution that ends in `#### number`")
        return _value(match)

    def grade(self, text: str, value: Any) -> float:
        head, marker, after = text.rpartition("####")
        if marker:
            match = _NUMBER.match(after.lstrip().lstrip("*_$\\ "))
            answer = None if match is None else _value(match)
        else:
            answer = last_number(text) if self.mode == "flexible" else None
        return float(answer is not None and answer == self.parse_gold(value))
