"""Real processes with a gloo group between them: forked from a server that has imported torch once."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["verl.flow.transfer", "pytest", "tests.flow.layouts"])


def _main(function, rank, ranks, store, connection, args):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    try:
        connection.send((function(rank, *args), None))
    except Exception as error:
        connection.send((None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    with contextlib.suppress(EOFError):
        connection.recv()  # stay until everybody is done: a rank that leaves early breaks the others' connections


def run_world(ranks, function, *args, limit_s=60):
    """`function(rank, *args)` in `ranks` processes: a list of (result, error text); (None, None) for one that died."""
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(ranks):
            mine, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_main, args=(function, rank, ranks, str(Path(folder) / "store"), theirs, args))
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        try:
            until, results = time.monotonic() + limit_s, []
            for rank, pipe in enumerate(pipes):
                try:
                    if not pipe.poll(max(0.0, until - time.monotonic())):
                        raise AssertionError(f"rank {rank} did not end within {limit_s} s")
                    results.append(pipe.recv())
                except (EOFError, ConnectionResetError):
                    results.append((None, None))
            return results
        finally:
            for pipe in pipes:
                pipe.close()
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()
