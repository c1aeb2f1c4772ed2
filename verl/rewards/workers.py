"""Worker processes that can be killed: a wall-clock limit holds whatever the work does, from any thread.

A worker is a child Python that answers one JSON line for each JSON line. It is started on first use, killed with its
process group when a call passes its limit, and replaced by the next call. JSON both ways: nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verl.core.errors import WorkerError

_MEMORY = 4 << 30


class TimedOut(Exception):
    """The call passed its wall-clock limit; its worker was killed."""


class WorkerPool:
    """At most `size` workers that import `target` ("module") and answer calls of its functions."""

    def __init__(self, target: str, size: int):
        self.target, self.size = target, max(1, min(size, os.cpu_count() or 1))
        self._free: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(self.size):
            self._free.put(None)
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def call(self, function: str, request: dict[str, Any], timeout_s: float) -> Any:
        """`target.function(request)` in a worker. Raises TimedOut, ValueError (raised inside) or WorkerError.

        The limit covers the work, not the wait for a free worker, nor a worker's start (under 60 s).
        """
        worker = self._free.get()
        try:
            if worker is None:
                worker = _Worker(self.target)
            return worker.call(function, request, timeout_s)
        finally:
            self._free.put(worker if worker is not None and worker.alive else None)

    def map(self, function: str, requests: Sequence[dict[str, Any]], timeout_s: float) -> list[Any]:
        """`call` for every request, side by side; an exception takes the place of a result."""
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self.size, thread_name_prefix="reward-workers")

        def one(request):
            try:
                return self.call(function, request, timeout_s)
            except Exception as error:
                return error

        return list(self._threads.map(one, requests))

    def close(self) -> None:
        """Kill every idle worker; a busy one ends with its call. The pool may be used again."""
        slots = []
        with contextlib.suppress(queue.Empty):
            while True:
                slots.append(self._free.get_nowait())
        for worker in slots:
            if worker is not None:
                worker.kill()
            self._free.put(None)


class _Worker:
    def __init__(self, target: str):
        reply, child_end = os.pipe()
        self._reply, self._buffer = reply, b""
        self.alive = True
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "verl.rewards.worker_main", target, str(child_end), str(_MEMORY)],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=(child_end,),
                start_new_session=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)})
        finally:
            os.close(child_end)
        try:
            started = self._line(60.0) is not None
        except EOFError:
            started = False
        if not started:
            self.kill()
            raise WorkerError(f"a worker for {target} did not start within 60 s (exit code {self._process.poll()})")

    def call(self, function: str, request: dict[str, Any], timeout_s: float) -> Any:
        try:
            self._process.stdin.write(json.dumps([function, request]).encode() + b"\n")
            self._process.stdin.flush()
            line = self._line(timeout_s)
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1)  # its own exit code says more than our SIGKILL
            self.kill()
            raise WorkerError(f"a worker died in {function} with exit code {self._process.poll()} "
                              f"(its memory limit is {_MEMORY >> 30} GiB)") from None
        except BaseException:
            self.kill()
            raise
        if line is None:
            self.kill()
            raise TimedOut(f"{function} took longer than {timeout_s:g} s; its worker was killed")
        kind, value = json.loads(line)
        if kind == "error":
            raise ValueError(value)
        return value

    def _line(self, timeout_s: float) -> bytes | None:
        """The next reply line, None at the deadline. Raises EOFError when the worker is gone."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._reply], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            chunk = os.read(self._reply, 65536)
            if not chunk:
                raise EOFError
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line

    def kill(self) -> None:
        if not self.alive:
            return
        self.alive = False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        os.close(self._reply)
