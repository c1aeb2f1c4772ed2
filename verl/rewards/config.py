"""The settings of reward sources: the list at `trainer.rewards`. One key says what a source is; the rest has defaults."""

from __future__ import annotations

from dataclasses import dataclass, field

from verl.core.errors import ConfigError

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

    url: str
    model: str = "default"
    template: str = ("Rate the answer from 0 (useless) to 10 (perfect).\n\nQuestion:\n{prompt}\n\nAnswer:\n{completion}"
                     "\n\nEnd with a line `Score: <number>`.")
    marker: str = "Score:"
    minimum: float = 0.0
    maximum: float = 10.0
    max_tokens: int = 512
    api_key_env: str | None = None  # name of the environment variable that holds the key


@dataclass(frozen=True)
class RewardSource:
    """One entry of `trainer.rewards`. Exactly one of the six kind keys is set.

    function: `file.py:name` (relative to the config file) or `module:name`, with TRL's signature.
    verifier: exact | format | gsm8k | math | code, or `module:Class`. model: a reward model directory.
    judge: see JudgeSettings. human: a dataset column, or a `.jsonl` file of {"id", "score"} lines that may grow.
    http: a URL that answers POST {"prompt", "completion", "columns"} with {"score": number or null}.
    Raises ConfigError when none or several kinds are set, or a number is out of range.
    """

    function: str | None = None
    verifier: str | None = None
    model: str | None = None
    judge: JudgeSettings | None = None
    human: str | None = None
    http: str | None = None
    name: str | None = None
    weight: float = 1.0
    arms: list[str] = field(default_factory=list)  # A/B arms that use it; empty: all of them
    timeout_s: float | None = None  # per sample; None: by kind
    failure_budget: float | None = None  # share of samples that may fail in one collection; None: by kind
    concurrency: int = 8  # requests in flight (judge, http); worker processes (math, code), never more than cores
    gold: str = "answer"  # verifiers: the column with the right answer (code: the tests)
    mode: str | None = None  # gsm8k: strict | flexible; function: trl | openrlhf
    pattern: str | None = None  # format: a regular expression the whole response must match
    sandbox: str = "required"  # code: required | off (runs generated code without isolation)
    device: str | None = None  # model: cpu, cuda:2, ...; None: where the trainer puts reward models
    max_length: int | None = None  # model: tokens; longer texts lose their beginning and are counted. None: the model's own
    batch_size: int = 16  # model: texts a forward pass
    trust_remote_code: bool = False  # model: run Python code that lies in its directory

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
