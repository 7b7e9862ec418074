"""The processes of a storm from the outside: started, told what to do at which failpoint, killed, stopped, woken."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

import psutil

from tests.faults.acting import Order
from tests.faults.books import StormError
from tests.faults.forks import forks

START_S = 60.0
PROGRESS_S = 90.0
"""After a fault everybody has this long to get on."""
LOOK_S = 0.005


def stands_still(pid: int) -> bool:
    """Whether a signal stopped this process."""
    return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)


class Player:
    """A process with a role. says: whether it tells through its pipe when it is ready."""

    def __init__(self, name: str, folder: str, role: Any, *arguments: Any, says: bool = False) -> None:
        self.name = name
        self.arguments = arguments
        self.process: Any = None
        self.asleep_until = 0.0
        self._folder = folder
        self._role = role
        self._says = says
        self._pipe: Any = None
        self._said = False
        self._shared = forks.Array("q", 3, lock=False)

    def start(self, order: Order | None = None) -> None:
        """A new run; with an order, it may be dead before it is ready."""
        if self._pipe is not None:
            self._pipe.close()
        self._said = False
        self._pipe, theirs = forks.Pipe()
        orders = [] if order is None else [order]
        arguments = (theirs, self.name, self._folder, self._shared, orders, *self.arguments)
        self.process = forks.Process(target=self._role, args=arguments, daemon=True, name=self.name)
        self.process.start()
        theirs.close()

    def ready(self) -> Any:
        """What it says when it is; blocks until then. None if it says nothing, or has said it."""
        if not self._says or self._said:
            return None
        with contextlib.suppress(EOFError, ConnectionError):
            if self._pipe.poll(START_S):
                self._said = True
                return self._pipe.recv()
        self.process.join(1.0)
        raise StormError(f"{self.name} did not start (exit code {self.process.exitcode})")

    def tell(self, order: Order) -> None:
        """Have it carry out the order when it comes to the place."""
        with contextlib.suppress(BrokenPipeError):  # it ended: whoever waits for it will see
            self._pipe.send(order)

    @property
    def done(self) -> int:
        """How many operations it has completed, in all its runs."""
        return int(self._shared[0])

    @property
    def obeyed(self) -> int:
        """How many orders it has carried out, in all its runs."""
        return int(self._shared[1])

    def rest(self, rests: bool) -> None:
        """Have it rest after its next operation, or go on."""
        self._shared[2] = rests

    def kill(self) -> None:
        """By SIGKILL; dead when this returns."""
        self.process.kill()
        self.process.join(START_S)
        self.asleep_until = 0.0

    def end(self) -> None:
        """The same, of one that may never have lived."""
        if self.process is not None:
            self.kill()

    def stop(self) -> None:
        """By SIGSTOP."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def wake(self) -> None:
        """By SIGCONT."""
        self.asleep_until = 0.0
        os.kill(self.process.pid, signal.SIGCONT)

    def await_obeyed(self, before: int, limit_s: float = PROGRESS_S) -> bool:
        """Whether it has carried out more orders than `before`, in time."""
        end = time.monotonic() + limit_s
        while self.obeyed <= before:
            if time.monotonic() > end or self.process.exitcode not in (None, -signal.SIGKILL):
                return False
            time.sleep(LOOK_S)
        return True

    def await_stop(self) -> None:
        """Of the order that it carried out: it is counted just before, and a stop after `wake` would last for ever."""
        end = time.monotonic() + START_S
        while not stands_still(self.process.pid):
            if time.monotonic() > end:
                raise StormError(f"{self.name} did not stop (exit code {self.process.exitcode})")
            time.sleep(LOOK_S)

    def await_death(self) -> None:
        """Of the order that it carried out."""
        self.process.join(START_S)
        if self.process.exitcode != -signal.SIGKILL:
            raise StormError(f"{self.name} did not die (exit code {self.process.exitcode})")
