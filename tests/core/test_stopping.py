"""The end that signals ask for."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

AT_EVERY_STEP = """
import os, signal, sys
from queue import SimpleQueue
from dataplane.core.stopping import Stop

class Watched(SimpleQueue):
    def get(self):
        if self.empty():  # no signal has come: instead of blocking, end the last of the calls
            self.put(None)
        return super().get()

def is_asked_at(step):
    # Sends SIGTERM at one bytecode of `wait`. Returns False if `wait` has fewer.
    stop, done = Stop(), 0
    stop._queue = Watched()

    def trace(frame, event, argument):
        nonlocal done
        frame.f_trace_opcodes = True
        if event == "opcode":
            done += 1
            if done == step:
                os.kill(os.getpid(), signal.SIGTERM)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    stop.wait()
    sys.settrace(before)
    return stop.asked

step = 1
while is_asked_at(step):
    step += 1
print(step)
"""


def test_a_signal_that_comes_as_the_wait_begins_is_heard() -> None:
    done = subprocess.run([sys.executable, "-c", AT_EVERY_STEP], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10
