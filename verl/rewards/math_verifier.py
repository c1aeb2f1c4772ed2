"""`verifier: math`: exact answers decided in place, expressions in worker processes with a wall-clock limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.core.types import Abstained, Failed, RewardResult, Scored, Task
from verl.rewards.base import Item, Verifier, failure, gold
from verl.rewards.config import RewardSource
from verl.rewards.math_answer import NeedsSymbolic, compare, leaves, number, parse, word
from verl.rewards.math_text import gold_answer, normalise
from verl.rewards.workers import WorkerPool


class Math(Verifier):
    """1 when the response's final answer equals the gold, else 0 (math-verify behind a typed comparison).

    Only what is not numbers, words and their pairs, sets, lists and intervals starts workers (about 1 s, once). A
    comparison that passes `timeout_s` is a failure, not a 0.
    """

    inline = False

    def __init__(self, name: str, settings: RewardSource):
        super().__init__(name, settings.timeout, settings.gold)
        self.pool = WorkerPool("verl.rewards.math_symbolic", settings.concurrency)

    def check(self, tasks: Sequence[Task]) -> None:
        who = f"reward {self.name!r}"
        hard = list(dict.fromkeys(str(value) for task in tasks if (value := gold(task, self.column, who)) is not None
                                  and not _plain(value)))
        reasons = dict(zip(hard, self.pool.map("check", [{"gold": value} for value in hard], self.timeout_s)))

        def parse_gold(value: Any) -> None:
            gold_answer(value)
            reason = reasons.get(str(value), "")
            if reason:
                raise ValueError(str(reason))

        self.check_rows(tasks, parse_gold)

    def score(self, items: Sequence[Item]) -> list[RewardResult]:
        out: list[RewardResult | None] = []
        requests: list[dict[str, Any]] = []
        for item in items:
            value, text = gold(item.task, self.column, f"reward {self.name!r}"), item.sample.text
            try:
                out.append(Abstained() if value is None else Scored(float(compare(value, text))))
            except NeedsSymbolic:
                out.append(None)
                requests.append({"gold": str(value), "response": text})
            except ValueError as error:
                out.append(failure(error))
        answers = iter(self.pool.map("grade", requests, self.timeout_s) if requests else ())
        return [_result(next(answers)) if result is None else result for result in out]

    def close(self) -> None:
        self.pool.close()


def _result(answer: float | Exception) -> RewardResult:
    return Failed(f"{type(answer).__name__}: {answer}") if isinstance(answer, Exception) else Scored(answer)


def _plain(value: Any) -> bool:
    """True when a gold can be compared without sympy."""
    try:
        parsed = parse(normalise(gold_answer(value)))
    except ValueError:
        return False
    return all(number(leaf) is not None or word(leaf) is not None for leaf in leaves(parsed))
