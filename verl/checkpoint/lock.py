"""One run, one directory: a lock file that names its owner.

Two runs in one directory would rotate each other's checkpoints away. The owner is alive when its process exists on
this host and started when the lock says; an owner on another host is alive while the lock's heartbeat moves, which
needs no clock that two hosts agree on.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from verl.core.errors import LockError

_BEAT_S = 2.0
_WATCH_S = 10.0


class RunLock:
    """Holds `directory` from `acquire` (or `with`) to `release`. Takes over a dead owner's lock and `say`s so."""

    def __init__(self, directory: str | Path, say: Callable[[str], None] = print, *,
                 beat_s: float = _BEAT_S, watch_s: float = _WATCH_S):
        self.path = Path(directory) / "run.lock"
        self.say, self.beat_s, self.watch_s = say, beat_s, watch_s
        self.owner: dict[str, Any] | None = None
        self._stop = threading.Event()

    def acquire(self) -> RunLock:
        """Raise LockError, naming host and pid, when a live run owns the directory or is taking it this moment."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a+", encoding="utf-8") as file:
            self._guard(file)
            file.seek(0)
            holder = _parse(file.read())
            if holder is not None:
                self._judge(holder)
            self.owner = {"host": socket.gethostname(), "pid": os.getpid(),
                          "started": psutil.Process().create_time(), "token": os.urandom(8).hex()}
            file.seek(0)
            file.truncate()
            file.write(json.dumps(self.owner))
            file.flush()
            os.fsync(file.fileno())
        self._stop.clear()
        threading.Thread(target=self._beat, daemon=True, name="run-lock").start()
        return self

    def _guard(self, file: Any) -> None:
        """Exclude another process on this host that is in `acquire` too; file systems without flock go without."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockError(f"{self.path.parent}: another run is starting here at this moment; "
                            "choose another trainer.output_dir") from None
        except OSError:
            pass

    def _judge(self, holder: dict[str, Any]) -> None:
        who = f"host {holder.get('host')}, pid {holder.get('pid')}"
        if holder.get("host") == socket.gethostname():
            alive = _alive(holder)
        else:
            alive = self._moves()
        if alive:
            raise LockError(f"{self.path.parent} belongs to a run that is alive ({who}); wait for it, stop it, or choose "
                            "another trainer.output_dir")
        self.say(f"taking over {self.path.parent}: its last owner ({who}) ended without releasing it")

    def _moves(self) -> bool:
        """Whether the heartbeat of an owner on another host changes while we watch."""
        first, end = _mtime(self.path), time.monotonic() + self.watch_s
        while time.monotonic() < end:
            time.sleep(self.watch_s / 20)
            if _mtime(self.path) != first:
                return True
        return False

    def _beat(self) -> None:
        while not self._stop.wait(self.beat_s):
            try:
                os.utime(self.path)
            except OSError:  # the directory was removed or its server is away; nothing to repair here
                continue

    def release(self) -> None:
        """Give the directory back, if it is still ours. Idempotent. The empty file stays, so no two inodes can race."""
        self._stop.set()
        if self.owner is None:
            return
        owner, self.owner = self.owner, None
        try:
            with open(self.path, "r+", encoding="utf-8") as file:
                if _parse(file.read()) == owner:
                    file.truncate(0)
        except FileNotFoundError:
            pass

    def __enter__(self) -> RunLock:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()


def _parse(text: str) -> dict[str, Any] | None:
    """The owner a lock file names; None when it is free. A torn record is an owner nobody can find alive."""
    if not text.strip("\0 \n"):
        return None
    try:
        owner = json.loads(text)
    except ValueError:
        owner = None
    return owner if isinstance(owner, dict) else {"host": socket.gethostname(), "pid": None}


def _alive(holder: dict[str, Any]) -> bool:
    """Whether the process that took the lock still runs; a pid given to another process since does not count."""
    if type(holder.get("pid")) is not int:  # psutil takes None for this very process
        return False
    try:
        process = psutil.Process(holder["pid"])
        return (process.status() != psutil.STATUS_ZOMBIE
                and abs(process.create_time() - holder.get("started", process.create_time())) < 2)
    except psutil.AccessDenied:
        return True
    except (psutil.NoSuchProcess, ValueError, TypeError):
        return False


def _mtime(path: Path) -> int:
    """Read through `open`, which makes network file systems ask their server."""
    with open(path, "rb") as file:
        return os.fstat(file.fileno()).st_mtime_ns
