"""Real child processes, forked so that they need not import everything again."""

import os
import signal
import sys
import traceback

import pytest
import torch


class Child:
    """A forked process running `function(say)`; `say(text)` writes a line to the parent."""

    def __init__(self, function):
        sys.stdout.flush()
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.close(read)
                torch.set_num_threads(1)  # the pool's threads do not exist in a fork
                function(lambda text: os.write(write, f"{text}\n".encode()))
                code = 0
            except BaseException as error:
                os.write(write, f"{type(error).__name__}: {error}\n".encode())
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(write)
        self.lines = os.fdopen(read)

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    def wait(self):
        """Exit status and the lines not read yet."""
        rest = self.lines.read().splitlines()
        self.lines.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), rest


@pytest.fixture
def child():
    return Child
