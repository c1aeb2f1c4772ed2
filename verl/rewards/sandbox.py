"""Untrusted code behind operating-system walls: what is isolated is checked by doing it, and said when it is not.

Each run has its own user, mount, network, process and IPC namespace (no network, a root that holds the interpreter
read-only and an empty /tmp, only its own processes), no capabilities, an empty environment, resource limits and a
wall-clock limit after which its whole process group is killed. Standard library only inside; no site-packages.
Not isolated: CPU caches and kernel bugs, and the total of memory over many processes (the limit is per process).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_CHILD = Path(__file__).with_name("sandbox_child.py")
_MEMORY = 1 << 30
_OUTPUT = 1 << 20
UNISOLATED = ("sandbox: off: generated code runs with this user's rights: it can read and write this user's files, use the "
              "network and outlive its test; only time, memory and output are limited")


class SandboxError(Exception):
    """The walls could not be built; the code was not run."""


@dataclass
class Child:
    """One sandboxed interpreter. `spec` is what sandbox_child.py reads; `stdin` is given to the code and then closed."""

    spec: dict[str, Any]
    timeout_s: float
    isolate: bool
    pass_fds: tuple[int, ...] = ()
    stdin: bytes | None = None
    output: bytes = b""
    overflow: bool = False
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> Child:
        root = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="verl-sandbox-", ignore_cleanup_errors=True))
        spec = {**self.spec, "root": root, "visible": _visible(), "isolate": self.isolate, "memory": _MEMORY,
                "timeout_s": self.timeout_s}
        self._ready, ready_child = os.pipe()
        spec_file = self._stack.enter_context(tempfile.TemporaryFile())
        spec_file.write(json.dumps(spec).encode())
        spec_file.flush()
        spec_file.seek(0)
        stdin_file = self._stack.enter_context(tempfile.TemporaryFile())
        stdin_file.write(self.stdin or b"")
        stdin_file.flush()
        stdin_file.seek(0)
        try:
            self.process = subprocess.Popen(
                [os.path.realpath(sys.executable), "-I", "-S", "-B", str(_CHILD), str(spec_file.fileno()), str(ready_child)],
                stdin=stdin_file, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True, cwd="/",
                env={"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
                pass_fds=(spec_file.fileno(), ready_child, *self.pass_fds))
        finally:
            os.close(ready_child)
        self._stack.callback(os.close, self._ready)
        self._stack.callback(self.process.stdout.close)
        self._stack.callback(self.kill)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def kill(self) -> None:
        """Kill the process group; the process namespace dies with its first process."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def ready(self, deadline: float) -> None:
        """Wait until the walls stand. Raises SandboxError with the reason when they do not."""
        said = b""
        while said != b"ready" and select.select([self._ready], [], [], max(0.0, deadline - time.monotonic()))[0]:
            chunk = os.read(self._ready, 512)
            if not chunk:
                break
            said += chunk
        if said != b"ready":
            raise SandboxError(said.decode(errors="replace") or "the sandboxed interpreter did not start")

    def finish(self, deadline: float) -> int | None:
        """Collect stdout until the end; the exit code, or None when the deadline or the output limit came first."""
        fd = self.process.stdout.fileno()
        while select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            chunk = os.read(fd, 65536)
            if not chunk:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return self.process.wait(max(0.01, deadline - time.monotonic()))
                return None
            self.output += chunk
            if len(self.output) > _OUTPUT:
                self.overflow = True
                return None
        return None


def _visible() -> list[str]:
    """Paths the inside sees read-only: the system's libraries and commands, and the interpreter without its packages."""
    paths = [p for p in ("/usr", "/bin", "/lib", "/lib64", "/etc/alternatives") if os.path.exists(p)]
    prefix = os.path.realpath(sys.base_prefix)
    return paths if prefix.startswith("/usr/") or prefix == "/usr" else [*paths, prefix]


@functools.cache
def why_not() -> str | None:
    """None when the walls can be built on this machine (tried once, for real), else what is missing."""
    if sys.platform != "linux":
        return f"needs Linux namespaces, this is {sys.platform}"
    with Child({"mode": "program", "code": "print('inside')"}, 20.0, True) as child:
        try:
            child.ready(time.monotonic() + 20.0)
            child.finish(time.monotonic() + 20.0)
        except SandboxError as error:
            return str(error)
    return None if child.output == b"inside\n" else "the interpreter does not run inside"


def run_program(code: str, stdin: str, timeout_s: float, isolate: bool) -> str | None:
    """What the program printed, or None when it failed, ran out of time, memory or output. Raises SandboxError."""
    with Child({"mode": "program", "code": code}, timeout_s, isolate, stdin=stdin.encode()) as child:
        child.ready(time.monotonic() + 30.0)
        return child.output.decode(errors="replace") if child.finish(time.monotonic() + timeout_s) == 0 else None


def run_tests(code: str, tests: list[list[Any]], timeout_s: float, isolate: bool) -> list[list[Any]]:
    """Run [source, entry point, nonce] tests against the code; what the tests' own process reported: [index, nonce] rows.

    The code and the tests live in two sandboxes that exchange data only, so that the code can neither see what is
    expected nor answer in the tests' place. Raises SandboxError.
    """
    to_code, to_tests = os.pipe(), os.pipe()
    results_read, results_write = os.pipe()
    served = {"mode": "serve", "code": code, "fds": [to_code[0], to_tests[1]]}
    tested = {"mode": "test", "tests": tests, "fds": [to_tests[0], to_code[1]], "results_fd": results_write}
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, results_read)
        try:
            server = stack.enter_context(Child(served, timeout_s, isolate, (to_code[0], to_tests[1])))
            tester = stack.enter_context(Child(tested, timeout_s, isolate, (to_tests[0], to_code[1], results_write)))
        finally:
            for fd in (*to_code, *to_tests, results_write):
                os.close(fd)
        for child in (server, tester):
            child.ready(time.monotonic() + 30.0)
        return _rows(results_read, time.monotonic() + timeout_s)


def _rows(fd: int, deadline: float) -> list[list[Any]]:
    data = b""
    while len(data) < _OUTPUT and select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
        chunk = os.read(fd, 65536)
        if not chunk:
            break
        data += chunk
    return [json.loads(line) for line in data.split(b"\n")[:-1]]
