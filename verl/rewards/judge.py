"""Generative judges: a language model that reads prompt and response and answers with a number."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from verl.core.errors import ConfigError, DataError, nearest
from verl.core.types import Failed, Request, RewardResult, Sampling, Scored, Task
from verl.rewards.base import Item, Source
from verl.rewards.config import JudgeSettings
from verl.rewards.remote import RemoteError, check_url, post_json

_NUMBER = r"([-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)(?:\s*/\s*(\d+(?:\.\d+)?))?"
_ENDS = r"(?=[*_`\"]*(?:[\s;!)]|[.,](?!\d)|$))(?!\s*(?:-|\u2013|to|or)\s*\d)"
_SCORE = re.compile(r"[\s*_`:\"]*" + _NUMBER + _ENDS)


def parse_score(reply: str, marker: str, minimum: float, maximum: float) -> float:
    """The number right after the last marker, read whole ("10" is never 1), or "8/10" out of the maximum.

    Raises ValueError when there is none, it is a range or half a number, or it lies outside [minimum, maximum].
    """
    at = reply.casefold().rfind(marker.casefold())
    match = _SCORE.match(reply, at + len(marker)) if at >= 0 else None
    if match is None:
        raise ValueError(f"no complete number after {marker!r} in {reply[-120:]!r}")
    value = float(match[1])
    if match[2] is not None and float(match[2]) != maximum:
        raise ValueError(f"{match[0].strip()!r} is not out of {maximum:g}")
    if not minimum <= value <= maximum:
        raise ValueError(f"{value:g} lies outside {minimum:g} to {maximum:g}")
    return value


class JudgeClient(Protocol):
    """Anything that answers prompts: one text or exception each, in order."""

    def answer(self, prompts: Sequence[str]) -> list[str | Exception]: ...
    def close(self) -> None: ...


class OpenAIClient:
    """A server with OpenAI's chat completions at `url` (".../v1")."""

    def __init__(self, settings: JudgeSettings, timeout_s: float, concurrency: int):
        self.settings, self.timeout_s = settings, timeout_s
        self.url = check_url(settings.url, "trainer.rewards judge.url").rstrip("/") + "/chat/completions"
        self.headers: dict[str, str] = {}
        if settings.api_key_env is not None:
            if settings.api_key_env not in os.environ:
                raise ConfigError(f"trainer.rewards judge.api_key_env: no environment variable {settings.api_key_env!r} is set")
            self.headers = {"Authorization": f"Bearer {os.environ[settings.api_key_env]}"}
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="judge")

    def answer(self, prompts: Sequence[str]) -> list[str | Exception]:
        return list(self._threads.map(self._one, prompts))

    def _one(self, prompt: str) -> str | Exception:
        body = {"model": self.settings.model, "messages": [{"role": "user", "content": prompt}], "temperature": 0,
                "max_tokens": self.settings.max_tokens}
        try:
            answer = post_json(self.url, body, self.timeout_s, self.headers)
            return str(answer["choices"][0]["message"]["content"])
        except (KeyError, IndexError, TypeError):
            return RemoteError(f"{self.url}: the answer has no choices[0].message.content")
        except Exception as error:
            return error

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class EngineClient:
    """A verl rollout engine (anything with RolloutEngine.generate) and its tokenizer; greedy decoding."""

    def __init__(self, engine: Any, tokenizer: Any, max_tokens: int = 512, stop_ids: Sequence[int] = ()):
        self.engine, self.tokenizer = engine, tokenizer
        stop = tuple(stop_ids) or tuple(i for i in (tokenizer.eos_token_id,) if i is not None)
        self.sampling = Sampling(temperature=0.0, max_tokens=max_tokens, stop_ids=stop)

    def answer(self, prompts: Sequence[str]) -> list[str | Exception]:
        requests = [Request(str(i), np.asarray(self._ids(prompt), np.int32), (0,)) for i, prompt in enumerate(prompts)]
        return [self.tokenizer.decode(samples[0].ids_L, skip_special_tokens=True)
                for samples in self.engine.generate(requests, self.sampling)]

    def _ids(self, prompt: str) -> list[int]:
        if not self.tokenizer.chat_template:
            return self.tokenizer(prompt)["input_ids"]
        text = self.tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False,
                                                  add_generation_prompt=True)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def close(self) -> None:
        """The engine belongs to whoever made it."""


class Judge(Source):
    """Fills the template, asks the client, reads the number. A reply without a valid number is a failure, never 0."""

    def __init__(self, name: str, settings: JudgeSettings, client: JudgeClient, timeout_s: float = 120.0):
        super().__init__(name, timeout_s)
        self.settings, self.client = settings, client
        if "{completion}" not in settings.template:
            raise ConfigError(f"trainer.rewards judge.template of source {name!r} never shows {{completion}} to the judge")

    def check(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            for name in re.findall(r"\{(\w+)\}", self.settings.template):
                if name not in ("prompt", "completion") and name not in task.columns:
                    raise DataError(f"reward {self.name!r}: the judge's template asks for {{{name}}}, task {task.id!r} has no "
                                    f"such column; {nearest(name, ['prompt', 'completion', *task.columns])}")

    def fill(self, item: Item) -> str:
        """The judge's prompt, filled in one pass, so that braces inside a response stay text."""
        prompt = item.task.prompt
        if not isinstance(prompt, str):
            prompt = "\n".join(f"{m['role']}: {m.get('content') or ''}" for m in prompt)
        values = {**item.task.columns, "prompt": prompt, "completion": item.sample.text}
        return re.sub(r"\{(\w+)\}", lambda m: str(values[m[1]]) if m[1] in values else m[0], self.settings.template)

    def score(self, items: Sequence[Item]) -> list[RewardResult]:
        s, out = self.settings, []
        for reply in self.client.answer([self.fill(item) for item in items]):
            try:
                if isinstance(reply, Exception):
                    raise reply
                out.append(Scored(parse_score(reply, s.marker, s.minimum, s.maximum)))
            except Exception as error:
                out.append(Failed(f"{type(error).__name__}: {error}"))
        return out

    def close(self) -> None:
        self.client.close()
