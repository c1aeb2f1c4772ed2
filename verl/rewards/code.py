"""`verifier: code`: generated programs against tests, in a sandbox; a test counts only by an answer it cannot forge."""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verl.core.errors import ConfigError
from verl.core.types import Abstained, Failed, RewardResult, Scored
from verl.rewards.base import Item, Verifier, failure, gold
from verl.rewards.config import RewardSource
from verl.rewards.sandbox import UNISOLATED, SandboxError, run_program, run_tests, why_not

_FENCE = re.compile(r"```(?:python|py)?[ \t]*\r?\n(.*?)```", re.DOTALL)


class Code(Verifier):
    """1 when the response's code passes every test, else 0; the part `passed` is the share of tests.

    The gold column holds (as data or JSON text) a list of test sources such as "assert add(1, 2) == 3", one such
    source, {"test", "entry_point"} (HumanEval's `check(candidate)`), or {"inputs", "outputs"} (stdin and stdout).
    The code is the last fenced block, or the whole response. `timeout_s` bounds all tests of a sample together.
    Raises ConfigError where the operating system cannot isolate and `sandbox: off` was not set.
    """

    inline = False

    def __init__(self, name: str, settings: RewardSource):
        super().__init__(name, settings.timeout, settings.gold)
        self.isolate = settings.sandbox == "required"
        reason = why_not() if self.isolate else None
        if reason is not None:
            raise ConfigError(f"trainer.rewards: source {name!r} runs generated code, and this machine cannot isolate it "
                              f"({reason}); allow user namespaces, run elsewhere, or accept the risk with `sandbox: off`")
        if not self.isolate:
            print(f"reward {name!r}: {UNISOLATED}", file=sys.stderr)
        workers = min(settings.concurrency, max(2, os.cpu_count() or 1))
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix=f"reward-{name}")

    def describe(self) -> str:
        return "isolated by namespaces" if self.isolate else UNISOLATED

    def parse_gold(self, value: Any) -> list[tuple[Any, ...]]:
        return parse_tests(value)

    def score(self, items: Sequence[Item]) -> list[RewardResult]:
        return list(self._threads.map(self._one, items))

    def _one(self, item: Item) -> RewardResult:
        value = gold(item.task, self.column, f"reward {self.name!r}")
        if value is None:
            return Abstained()
        try:
            tests, code = parse_tests(value), extract_code(item.sample.text)
            passed = (self._programs if tests[0][0] == "program" else self._tests)(code, tests)
        except SandboxError as error:
            return Failed(f"SandboxError: {error}")
        except Exception as error:
            return failure(error)
        return Scored(float(passed == len(tests)), {"passed": passed / len(tests)})

    def _programs(self, code: str, tests: list[tuple[Any, ...]]) -> int:
        share = self.timeout_s / len(tests)
        return sum((out := run_program(code, stdin, share, self.isolate)) is not None and _lines(out) == _lines(expected)
                   for _, stdin, expected in tests)

    def _tests(self, code: str, tests: list[tuple[Any, ...]]) -> int:
        nonces = [secrets.token_hex(16) for _ in tests]
        rows = run_tests(code, [[source, entry, nonce] for (_, source, entry), nonce in zip(tests, nonces)], self.timeout_s,
                         self.isolate)
        return sum([i, nonce] in rows for i, nonce in enumerate(nonces))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def extract_code(response: str) -> str:
    """The last fenced block of a response, or all of it when there is none."""
    blocks = _FENCE.findall(response)
    return blocks[-1] if blocks else response


def _lines(text: str) -> list[str]:
    """Output compared line by line without trailing white space."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def parse_tests(value: Any) -> list[tuple[Any, ...]]:
    """("program", stdin, stdout) or ("test", source, entry point or None) rows. Raises ValueError for anything else."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"it looks like JSON but is not: {error}") from error
    if isinstance(value, str):
        value = [value]
    if isinstance(value, dict) and {"inputs", "outputs"} <= set(value):
        if len(value["inputs"]) != len(value["outputs"]) or not value["inputs"]:
            raise ValueError("it has no inputs, or not one output for each")
        return [("program", str(i), str(o)) for i, o in zip(value["inputs"], value["outputs"])]
    if isinstance(value, dict) and "test" in value:
        return [("test", _source(value["test"]), value.get("entry_point"))]
    if isinstance(value, (list, tuple)) and value and all(isinstance(test, str) for test in value):
        return [("test", _source(test), None) for test in value]
    raise ValueError('it is neither a list of test sources, nor {"test", "entry_point"}, nor {"inputs", "outputs"}')


def _source(test: str) -> str:
    try:
        compile(test, "test.py", "exec")
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"test {test!r:.60} is not Python: {error}") from error
    if not test.strip():
        raise ValueError("a test is empty and would always pass")
    return test
