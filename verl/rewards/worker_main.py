"""The child side of workers.py: `python -m verl.rewards.worker_main module reply_fd memory_bytes`."""

import json
import os
import queue
import resource
import sys
import threading
from importlib import import_module


def main() -> None:
    target, fd, memory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    module = import_module(target)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)  # the parent is gone, even if the main thread computes

    threading.Thread(target=read, daemon=True).start()

    def reply(kind: str, value: object) -> None:
        os.write(fd, json.dumps([kind, value]).encode() + b"\n")

    reply("ready", None)
    while True:
        function, request = json.loads(lines.get())
        try:
            reply("value", getattr(module, function)(request))
        except Exception as error:
            reply("error", f"{type(error).__name__}: {error}"[:2000])


if __name__ == "__main__":
    main()
