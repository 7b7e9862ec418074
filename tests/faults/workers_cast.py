"""The processes of a storm over workers from the outside: started on a host, killed, stopped, woken, given orders."""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path
from typing import Any

from tests.faults import board as places
from tests.faults.board import LANES, board
from tests.faults.books import StormError, bad
from tests.faults.cast import PROGRESS_S, START_S, stands_still
from tests.faults.launcher import Launcher
from tests.faults.workers_roles import LOOK_S


class Member:
    """A process of the scene. role, arguments: what it does, see `workers_roles`."""

    def __init__(self, name: str, folder: Path, launcher: Launcher, role: str, *arguments: Any) -> None:
        self.name = name
        self.pid = 0
        self.arguments = arguments
        self._folder = folder
        self._launcher = launcher
        self._role = role
        self._board = board(folder, name)
        self._pidfd = -1
        self._readies = 0

    def start(self) -> None:
        """A new run; blocks until it is ready."""
        self._board[places.ORDER] = 0
        arguments = [*self.arguments, self._launcher.lives_on]
        self._readies = self._board[places.READY]
        self.pid = self._launcher.ask({"start": [self.name, str(self._folder), self._role, arguments]})
        self._pidfd = os.pidfd_open(self.pid)
        self._until(lambda: self._board[places.READY] > self._readies, "get ready", START_S)

    def ended(self) -> bool:
        """Whether it is dead."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def lives(self) -> None:
        """StormError if it does not."""
        if self.ended():
            raise StormError(f"{self.name} ended: {bad(self._folder)[:3]}")

    def kill(self) -> None:
        """Dead when this returns."""
        self._signal(signal.SIGKILL)
        self._gone()

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        self._signal(signal.SIGCONT)

    def tell(self, order: int) -> None:
        """Blocks until it has obeyed."""
        before = self._board[1]
        self._board[places.ORDER] = order
        self._until(lambda: self._board[1] > before, f"obey order {order}", PROGRESS_S)

    def await_stop(self) -> None:
        """After an order to stop: that is counted just before, and a stop after `wake` would last for ever."""
        self._until(lambda: stands_still(self.pid), "stop", START_S)

    def has(self, what: int) -> int:
        """What it says now that it has: `BYTES` or `ITEMS`."""
        self.tell(places.TELL)
        return self._board[what]

    def rest(self) -> None:
        """Have it begin nothing new."""
        self._board[places.REST] = 1

    def ask_to_end(self) -> None:
        self._board[places.ORDER] = places.END

    def await_end(self) -> None:
        """After that. StormError if it does not end, or not well."""
        end = time.monotonic() + PROGRESS_S
        while not self.ended():
            if time.monotonic() > end:
                raise StormError(f"{self.name} does not end: {bad(self._folder)[:3]}")
            time.sleep(LOOK_S)
        code = self._gone()
        if code:
            raise StormError(f"{self.name} ended with code {code}: {bad(self._folder)[:3]}")

    def count(self, lane: int) -> int:
        """How often it did that, in all its runs."""
        return self._board[LANES + lane]

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def _until(self, come: Any, what: str, within_s: float) -> None:
        end = time.monotonic() + within_s
        while not come():
            self.lives()
            if time.monotonic() > end:
                raise StormError(f"{self.name} did not {what} within {within_s:.0f} s")
            time.sleep(LOOK_S)

    def _signal(self, number: int) -> None:
        signal.pidfd_send_signal(self._pidfd, number)

    def _gone(self) -> int:
        code = self._launcher.ask({"reap": self.pid})
        os.close(self._pidfd)
        self._pidfd, self.pid = -1, 0
        return code
