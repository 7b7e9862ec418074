"""The end that signals ask for."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

AT_EVERY_STEP = """
import os, signal, sys
from dataplane.stopping import Stop

def asked_at(step):
    # Whether the main thread takes so many steps before it waits. It is told to stop at that one, or else in a second.
    stop, left, waits = Stop(), step, False

    def tell(*_):
        nonlocal waits
        waits = True
        os.kill(os.getpid(), signal.SIGTERM)

    def trace(frame, event, argument):
        nonlocal left
        frame.f_trace_opcodes = True
        if event == "opcode" and not waits:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGTERM)
        return trace

    before = sys.gettrace()
    signal.signal(signal.SIGALRM, tell)
    signal.setitimer(signal.ITIMER_REAL, 1)
    sys.settrace(trace)
    stop.wait()
    sys.settrace(before)
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert stop.asked
    return not waits

step = 1
while asked_at(step):
    step += 1
print(step)
"""


def test_a_signal_that_comes_as_the_wait_begins_is_heard() -> None:
    done = subprocess.run([sys.executable, "-c", AT_EVERY_STEP], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
