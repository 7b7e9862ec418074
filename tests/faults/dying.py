"""A client process that is to die, and what it says before."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

from dataplane import Server
from tests.faults.forks import forks
from tests.faults.victim import play
from tests.restarts import wait_until

WAIT_S = 60
SESSION_TIMEOUT_S = 600.0
"""Of services with victims: no victim is given up because it gets no processor for some seconds."""


class Dying:
    """A victim, and what it says. settings: see `tests.faults.victim`."""

    def __init__(self, address: str, settings: dict[str, Any]) -> None:
        self._pipe, theirs = forks.Pipe()
        self._process = forks.Process(target=play, args=(theirs, address, settings), daemon=True)
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def said(self) -> Any:
        """The next thing it says; None once it is dead."""
        assert self._pipe.poll(WAIT_S), "the victim is silent"
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionError):
            return None

    @property
    def alive(self) -> bool:
        """Whether it lives."""
        return self._process.is_alive()

    def ended(self) -> int | None:
        """Its exit code; waits for it."""
        self._process.join(WAIT_S)
        return self._process.exitcode

    def kill(self) -> None:
        """By SIGKILL; it is dead when this returns."""
        self._process.kill()
        self.ended()

    def close(self) -> None:
        """Kill it, if it lives, and let go of its pipe."""
        self.kill()
        self._pipe.close()


def give_up(server: Server) -> None:
    """Make the service end the session of its victim now, as if that had sent nothing for `SESSION_TIMEOUT_S`. The
    victim is dead or stopped, so sends nothing meanwhile. Returns once the session has ended."""
    shell = server._controller._ledger_thread
    assert shell is not None
    ledger: Any = shell._ledger
    found: SimpleQueue[bool] = SimpleQueue()

    def look() -> None:
        live = [each for each in ledger._state.sessions.values() if each.live and each.name == "victim"]
        for session in live:
            session.heard = ledger._state.now - SESSION_TIMEOUT_S
            ledger._liveness._schedule_check(ledger._state.now)
        found.put(not live)

    def is_given_up() -> bool:
        shell.run(look)
        return found.get(timeout=WAIT_S)

    wait_until(is_given_up, "the victim is given up")
