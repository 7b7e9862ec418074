"""Health check of the service, used by the gRPC health service and `/healthz`."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from dataplane.errors import DataPlaneError, ServiceUnavailableError, SessionExpiredError
from dataplane.ledger import commands as c

if TYPE_CHECKING:
    from dataplane.controller.event_loop import LedgerThread

HEALTHY_S = 2.0
"""A healthy service answers within this time in seconds."""
FRESH_S = 0.5
"""A result is cached for this time in seconds, so that many health checks cost the ledger one command."""
NO_SESSION = 0
"""An id that no session has."""


class ServiceHealth:
    """Checks health by sending a command to the ledger, which exercises its thread, its journal and the disk.

    The command has no session, so the ledger rejects it, which also counts as an answer. Thread-safe."""

    def __init__(self, ledger_thread: LedgerThread) -> None:
        self._ledger_thread = ledger_thread
        self._turn = threading.Lock()  # held by the running check
        self._last_call_id = 0
        self._why = ""  # the last result, which is valid `_until` this time
        self._until = -math.inf

    def why_not(self) -> str:
        """Return why the service is unhealthy, or "" if it is healthy. Blocks for about `HEALTHY_S` at most."""
        with self._turn:
            if time.monotonic() >= self._until:
                self._why = self._check()
                self._until = time.monotonic() + FRESH_S
            return self._why

    def _check(self) -> str:
        """Send one command, which changes nothing, to the ledger. Return why it failed, or ""."""
        self._last_call_id += 1
        call = c.Call(session=NO_SESSION, call_id=self._last_call_id, watermark=self._last_call_id, command=c.Units())
        answers: queue.SimpleQueue[c.Output] = queue.SimpleQueue()
        reply: Callable[[c.Output], None] = answers.put
        try:
            self._ledger_thread.submit(call, reply)
            answer = answers.get(timeout=HEALTHY_S)
        except ServiceUnavailableError as error:
            return str(error)
        except queue.Empty:
            with contextlib.suppress(ServiceUnavailableError):
                self._ledger_thread.withdraw(call, reply)
            return f"the ledger did not answer within {HEALTHY_S:g} s"
        assert isinstance(answer, c.Answer)
        # SessionExpiredError is the expected answer, because the command has no session.
        failed = isinstance(answer.result, DataPlaneError) and not isinstance(answer.result, SessionExpiredError)
        return str(answer.result) if failed else ""
