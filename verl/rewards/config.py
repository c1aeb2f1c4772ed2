"""The settings of reward sources: the list at `trainer.rewards`. One key says what a source is; the rest has defaults."""

from __future__ import annotations

from dataclasses import dataclass

from verl.core.errors import ConfigError
from verl.core.schema import option

KINDS = ("function", "verifier", "model", "judge", "human", "http")

# Seconds one sample may take, and the share of samples that may fail in one collection before the run stops.
_TIMEOUT_S = {"function": 600.0, "verifier": 10.0, "model": 600.0, "judge": 120.0, "human": 10.0, "http": 60.0}
_BUDGET = {"function": 0.0, "verifier": 0.1, "model": 0.0, "judge": 0.1, "human": 0.0, "http": 0.1}


@dataclass(frozen=True)
class JudgeSettings:
    """A language model that answers with a number, behind an OpenAI-compatible URL.

    `template` is the prompt: {prompt} and {completion} are filled in, and {name} for any dataset column. The number is
    the last complete one after `marker`; outside [minimum, maximum] it is invalid, which is a failure and never 0.
    """

    url: str = option("", "server address that ends in /v1")
    model: str = option("default", "model name the server knows")
    template: str = option("Rate the answer from 0 (useless) to 10 (perfect).\n\nQuestion:\n{prompt}\n\nAnswer:\n{completion}"
                           "\n\nEnd with a line `Score: <number>`.", "the judge's prompt")
    marker: str = option("Score:", "what stands before the number in the reply")
    minimum: float = option(0.0, "lowest valid number")
    maximum: float = option(10.0, "highest valid number")
    max_tokens: int = option(512, "longest reply, tokens")
    api_key_env: str | None = option(None, "name of the environment variable that holds the key")


@dataclass(frozen=True)
class RewardSource:
    """One entry of `trainer.rewards`. Exactly one of the six kind keys is set (docs/rewards.md).

    Raises ConfigError when none or several kinds are set, or a number is out of range.
    """

    function: str | None = option(None, "file.py:name or module:name, called with TRL's keywords", path=True)
    verifier: str | None = option(None, "exact | format | gsm8k | math | code, or module:Class")
    model: str | None = option(None, "reward model directory", path=True)
    judge: JudgeSettings | None = option(None, "a language model that answers with a number")
    human: str | None = option(None, "dataset column, or a .jsonl file that may grow")
    http: str | None = option(None, "URL of a scoring service")
    name: str | None = option(None, "name in metrics and logs; none: the function's, verifier's or directory's")
    weight: float = option(1.0, "factor in the sum; 0 only measures")
    arms: list[str] = option([], "A/B arms that use this source; empty: all")
    timeout_s: float | None = option(None, "seconds one sample may take; none: by kind")
    failure_budget: float | None = option(None, "share of samples that may fail in one step; none: by kind")
    concurrency: int = option(8, "requests in flight (judge, http); worker processes (math, code), never more than cores")
    gold: str = option("answer", "verifiers: column with the right answer (code: the tests); openrlhf: the labels")
    mode: str | None = option(None, "gsm8k: strict | flexible; function: trl | openrlhf")
    pattern: str | None = option(None, "format: regular expression the whole response must match")
    sandbox: str = option("required", "code: required | off (runs generated code without isolation)")
    device: str | None = option(None, "model: cpu, cuda:2, ...; none: where the trainer puts reward models")
    max_length: int | None = option(None, "model: tokens; longer texts lose their beginning and are counted")
    batch_size: int = option(16, "model: texts a forward pass")
    trust_remote_code: bool = option(False, "model: run Python code that lies in its directory")

    def __post_init__(self):
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        where = f"trainer.rewards: source {self.name or '?'!r}"
        if len(given) != 1:
            seen = f"sets {' and '.join(given)}" if given else "does not say what it is"
            raise ConfigError(f"{where} {seen}; set exactly one of {', '.join(KINDS)}, e.g. `- verifier: math`")
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise ConfigError(f"{where}: timeout_s is {self.timeout_s}, it must be above 0 seconds")
        if not 0 <= self.budget <= 1:
            raise ConfigError(f"{where}: failure_budget is {self.failure_budget}, it is a share from 0 to 1")
        if self.sandbox not in ("required", "off"):
            raise ConfigError(f"{where}: sandbox is {self.sandbox!r}, allowed: required, off")
        if self.concurrency < 1 or self.batch_size < 1:
            raise ConfigError(f"{where}: concurrency and batch_size must be at least 1")

    @property
    def kind(self) -> str:
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def timeout(self) -> float:
        """Seconds one sample may take."""
        return _TIMEOUT_S[self.kind] if self.timeout_s is None else self.timeout_s

    @property
    def budget(self) -> float:
        """Share of samples that may fail in one collection; all of them failing always stops the run."""
        return _BUDGET[self.kind] if self.failure_budget is None else self.failure_budget
