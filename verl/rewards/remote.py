"""Rewards over HTTP: retries only what can heal, bounded attempts, concurrency and time, failures item by item."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verl.core.errors import ConfigError, RewardError
from verl.core.types import Failed, RewardResult
from verl.rewards.base import Item, Source, failure, number

ATTEMPTS = 4
_BODY = 4 << 20


class RemoteError(Exception):
    """The service did not give a usable answer; retrying was pointless or did not help."""


def post_json(url: str, body: Any, timeout_s: float, headers: Mapping[str, str] | None = None,
              sleep: Callable[[float], None] = time.sleep) -> Any:
    """POST JSON and return the JSON that comes back, within timeout_s seconds for all attempts together.

    Retried (at most 4 attempts, 0.25 s x 2^k apart or as Retry-After says): transport errors, 408, 429, 5xx. Anything
    else fails at once. Raises RemoteError with the last reason.
    """
    deadline, reason = time.monotonic() + timeout_s, "no attempt was made"
    data = json.dumps(body, default=str).encode()
    for attempt in range(ATTEMPTS):
        wait = 0.25 * 2**attempt
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            break
        request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})}, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=remaining) as response:
                return json.loads(_read(response, deadline))
        except urllib.error.HTTPError as error:
            with error:
                reason = f"HTTP {error.code} {error.reason}: {error.read(200).decode(errors='replace')}"
            if error.code not in (408, 429) and error.code < 500:
                raise RemoteError(f"{url}: {reason}") from error
            after = error.headers.get("Retry-After", "")
            wait = float(after) if after.isdigit() else wait
        except (OSError, http.client.HTTPException) as error:
            reason = f"{type(error).__name__}: {error}"
        except ValueError as error:
            raise RemoteError(f"{url}: the answer is not JSON ({error})") from error
        if attempt + 1 < ATTEMPTS:
            sleep(max(0.0, min(wait, deadline - time.monotonic())))
    raise RemoteError(f"{url}: {reason} (after {attempt + 1} attempt(s) within {timeout_s:g} s)")


def _read(response: Any, deadline: float) -> bytes:
    """The body, which neither drips past the deadline nor grows past 4 MiB."""
    parts: list[bytes] = []
    while chunk := response.read1(65536):
        parts.append(chunk)
        if time.monotonic() > deadline:
            raise TimeoutError("the answer did not end in time")
        if sum(map(len, parts)) > _BODY:
            raise ValueError(f"longer than {_BODY} bytes")
    return b"".join(parts)


def check_url(url: str, setting: str) -> str:
    """The URL; raises ConfigError unless it is http or https."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{setting}: {url!r} is not an http:// or https:// URL")
    return url


class HTTPSource(Source):
    """POSTs {"prompt", "completion", "columns"} for each sample and reads {"score": number, or null to abstain}."""

    def __init__(self, name: str, url: str, timeout_s: float, concurrency: int):
        super().__init__(name, timeout_s)
        self.url, self.concurrency = check_url(url, f"trainer.rewards http (source {name!r})"), concurrency
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix=f"reward-{name}")

    def score(self, items: Sequence[Item]) -> list[RewardResult]:
        return list(self._threads.map(self._one, items))

    def _one(self, item: Item) -> RewardResult:
        body = {"prompt": item.task.prompt, "completion": item.completion, "columns": dict(item.task.columns)}
        try:
            answer = post_json(self.url, body, self.timeout_s)
            if not isinstance(answer, dict) or "score" not in answer:
                raise RemoteError(f'{self.url}: the answer {answer!r:.80} is not {{"score": number or null}}')
            return number(answer["score"], self.url)
        except (RemoteError, RewardError) as error:
            return Failed(str(error))
        except Exception as error:
            return failure(error)

    def limit_s(self, n: int) -> float:
        return self.timeout_s * (n // self.concurrency + 1) + 30

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
